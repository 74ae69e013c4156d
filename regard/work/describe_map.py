"""Describe an attention map in sentences: which keys each token attends to, and whether it attends to itself."""

from collections.abc import Sequence

from regard.work.problem import Problem

TIE = 1e-9  # weights closer than this are equal: their difference is rounding
MIN_SHARE = 0.5  # share of a uniform weight; keys with less are not mentioned


def attended_keys(row: Sequence[float], visible: Sequence[bool]) -> list[list[int]]:
    """Return the keys that a query attends to, in groups of equal weight, largest weight first.

    Keys with less than half of the uniform weight (1 / number of visible keys) are left out.

    row      attention weights of the query
    visible  which keys the query sees
    """
    least = MIN_SHARE / max(sum(visible), 1)
    kept = sorted((j for j, weight in enumerate(row) if visible[j] and weight >= least), key=lambda j: -row[j])
    groups: list[list[int]] = []
    for j in kept:
        if groups and row[groups[-1][0]] - row[j] <= TIE:
            groups[-1].append(j)
        else:
            groups.append([j])
    return groups


def describe_map(problem: Problem, weights: Sequence[Sequence[float]]) -> str:
    """Describe an attention map in a few sentences; rows of `weights` are queries."""
    offset = problem.keys - problem.queries  # queries are the last rows
    queries_by_text: dict[str, list[str]] = {}
    itself = []
    for i, (row, visible) in enumerate(zip(weights, problem.visible, strict=True)):
        groups = attended_keys(row, visible)
        own = i + offset if problem.queries <= problem.keys else None
        if any(own in group for group in groups):
            itself.append(problem.query_labels[i])
        queries_by_text.setdefault(_describe_keys(problem, groups, visible), []).append(problem.query_labels[i])
    sentences = []
    for text, queries in queries_by_text.items():
        noun = _noun(problem, "query", len(queries)).capitalize()
        sentences.append(f"{noun} {_join_words(queries)} attend{'s' * (len(queries) == 1)} {text}.")
    if problem.queries == problem.keys:
        sentences.append(_describe_self_attention(itself, problem.query_labels))
    return " ".join(sentences)


def _describe_keys(problem: Problem, groups: list[list[int]], visible: Sequence[bool]) -> str:
    """Return the end of the sentence "token 1 attends ...", with the names of the attended keys.

    groups  the attended keys, from `attended_keys`
    """
    if not any(visible):
        return "to nothing, because every key is hidden"
    if len(groups) == 1 and len(groups[0]) == sum(visible) > 1:
        return f"equally to all {'visible ' * (not all(visible))}{_noun(problem, 'key', 2)}"
    parts = []
    for rank, group in enumerate(groups):
        names = _join_words([problem.labels[j] for j in group])
        how = "less " * (rank > 0) + "equally " * (len(group) > 1)
        parts.append(f"{how}to {_noun(problem, 'key', len(group))} {names}")
    return _join_words(parts)


def _noun(problem: Problem, role: str, count: int) -> str:
    """Return the noun for queries or keys: "token" if both are of one sequence, else `role`.

    role   "query" or "key"
    count  number of tokens; the noun is plural unless it is 1
    """
    one_sequence = problem.queries == problem.keys or (problem.tokens is not None and problem.queries < problem.keys)
    word = "token" if one_sequence else role
    return word if count == 1 else {"query": "queries"}.get(word, f"{word}s")


def _describe_self_attention(itself: list[str], everyone: Sequence[str]) -> str:
    if not itself:
        return "No token attends to itself."
    if len(itself) == len(everyone):
        return "Every token attends to itself." if len(everyone) > 1 else "It attends to itself."
    if len(itself) == 1:
        return f"Token {itself[0]} attends to itself."
    return f"Tokens {_join_words(itself)} attend to themselves."


def _join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
