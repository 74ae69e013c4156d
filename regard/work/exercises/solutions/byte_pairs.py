"""Reference solutions: byte-pair encoding, a vocabulary learned by merging the most frequent pair of neighbours."""

from itertools import pairwise


def count_pairs(words: dict[tuple[str, ...], int]) -> dict[tuple[str, str], int]:
    """Return how often each pair of neighbours occurs; a word counts as often as it is in the text."""
    counts: dict[tuple[str, str], int] = {}
    # TODO: go through the pairs of neighbours of each word
    for symbols, times in words.items():
        for pair in pairwise(symbols):
            counts[pair] = counts.get(pair, 0) + times
    return counts


def merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """Return the symbols with every such pair merged into one, from left to right, no symbol used twice."""
    merged: list[str] = []
    at = 0
    # TODO: go along; step over two symbols where the pair is found, else over one
    while at < len(symbols):
        if symbols[at : at + 2] == pair:
            merged.append(symbols[at] + symbols[at + 1])
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return tuple(merged)


def learn_merges(words: dict[tuple[str, ...], int], merges: int) -> list[tuple[str, str]]:
    """Return the merged pairs in order: always the most frequent, on a tie the alphabetically first."""
    learned: list[tuple[str, str]] = []
    # TODO: count_pairs, choose a pair, merge it in every word, count again
    for _ in range(merges):
        counts = count_pairs(words)
        if not counts:
            break
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        learned.append(pair)
        merged_words: dict[tuple[str, ...], int] = {}
        for symbols, times in words.items():
            merged = merge(symbols, pair)
            merged_words[merged] = merged_words.get(merged, 0) + times
        words = merged_words
    return learned


def tokenise(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Return the tokens of a word: its letters, merged in the order in which the merges were learned."""
    symbols = tuple(word)
    # TODO: apply every merge in turn
    for pair in merges:
        symbols = merge(symbols, pair)
    return list(symbols)
