"""Byte pairs: a vocabulary learned by merging the commonest pair of neighbours, again and again."""

from itertools import pairwise


def count_pairs(words: dict[tuple[str, ...], int]) -> dict[tuple[str, str], int]:
    """How often each pair of neighbours occurs; a word counts as often as it is in the text."""
    counts: dict[tuple[str, str], int] = {}
    for symbols, times in words.items():
        for pair in pairwise(symbols):
            counts[pair] = counts.get(pair, 0) + times
    return counts


def merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """The symbols with every such pair made one, from left to right, no symbol used twice."""
    merged: list[str] = []
    at = 0
    while at < len(symbols):
        if symbols[at : at + 2] == pair:
            merged.append(symbols[at] + symbols[at + 1])
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return tuple(merged)


def learn_merges(words: dict[tuple[str, ...], int], merges: int) -> list[tuple[str, str]]:
    """The pairs that were merged, in order: always the commonest, of equals the first in the alphabet."""
    learned: list[tuple[str, str]] = []
    for _ in range(merges):
        counts = count_pairs(words)
        if not counts:
            break
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        learned.append(pair)
        joined: dict[tuple[str, ...], int] = {}
        for symbols, times in words.items():
            left = merge(symbols, pair)
            joined[left] = joined.get(left, 0) + times
        words = joined
    return learned


def tokenise(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """The tokens of a word: its letters, merged in the order in which merges were learned."""
    symbols = tuple(word)
    for pair in merges:
        symbols = merge(symbols, pair)
    return list(symbols)
