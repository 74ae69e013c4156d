"""What an attention map says, in a sentence: where each token looks, how much, and whether at itself."""

from collections.abc import Sequence

from regard.work.problem import Problem

TIE = 1e-9  # weights closer than this are equal: their difference is rounding
NOTICED = 0.5  # of an even share; a key with less is not looked at


def looks(row: Sequence[float], visible: Sequence[bool]) -> list[list[int]]:
    """The keys that a query looks at, the heaviest first, those of equal weight together."""
    least = NOTICED / max(sum(visible), 1)
    noticed = sorted((j for j, weight in enumerate(row) if visible[j] and weight >= least), key=lambda j: -row[j])
    groups: list[list[int]] = []
    for j in noticed:
        if groups and row[groups[-1][0]] - row[j] <= TIE:
            groups[-1].append(j)
        else:
            groups.append([j])
    return groups


def read_map(problem: Problem, weights: Sequence[Sequence[float]]) -> str:
    """A few sentences that read the map; rows of `weights` are queries."""
    offset = problem.keys - problem.queries  # queries are the last rows
    said: dict[str, list[str]] = {}
    itself = []
    for i, (row, visible) in enumerate(zip(weights, problem.visible, strict=True)):
        groups = looks(row, visible)
        own = i + offset if problem.queries <= problem.keys else None
        if any(own in group for group in groups):
            itself.append(problem.query_labels[i])
        said.setdefault(_gaze(problem, groups, visible), []).append(problem.query_labels[i])
    sentences = [_sentence(problem, who, gaze) for gaze, who in said.items()]
    if problem.queries == problem.keys:
        sentences.append(_about_themselves(itself, problem.query_labels))
    return " ".join(sentences)


def _gaze(problem: Problem, groups: list[list[int]], visible: Sequence[bool]) -> str:
    """What follows `token 1 looks`."""
    if not any(visible):
        return "at nothing, for all is hidden from it"
    if len(groups) == 1 and len(groups[0]) == sum(visible) > 1:
        whom = f"all {_noun(problem, 'key', 2)}" if all(visible) else "all that it sees"
        return f"equally at {whom}"
    parts = []
    for place, group in enumerate(groups):
        names = _listed([problem.labels[j] for j in group])
        word = _noun(problem, "key", len(group))
        alike = "equally " if len(group) > 1 else ""
        parts.append(f"{'less ' if place else ''}{alike}at {word} {names}")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sentence(problem: Problem, who: list[str], gaze: str) -> str:
    noun = _noun(problem, "query", len(who)).capitalize()
    return f"{noun} {_listed(who)} {'looks' if len(who) == 1 else 'look'} {gaze}."


def _noun(problem: Problem, role: str, count: int) -> str:
    """`token` where queries and keys are tokens of one sequence; query 1 and key 1 are not one token otherwise."""
    one_sequence = problem.queries == problem.keys or (problem.tokens is not None and problem.queries < problem.keys)
    word = "token" if one_sequence else role
    return word if count == 1 else {"query": "queries"}.get(word, f"{word}s")


def _about_themselves(itself: list[str], everyone: Sequence[str]) -> str:
    if not itself:
        return "No token looks at itself."
    if len(itself) == len(everyone):
        return "Every token looks at itself, among others or alone." if len(everyone) > 1 else "It looks at itself."
    return (
        f"Token {itself[0]} looks at itself." if len(itself) == 1 else f"Tokens {_listed(itself)} look at themselves."
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
