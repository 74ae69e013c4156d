"""Exercises: right solutions pass, wrong ones fail with the hint that fits, notebooks have the form they should."""

import inspect
import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regard.base.errors import ConfigError, UnknownNameError
from regard.core.attend import attend
from regard.models.sampling import Sample
from regard.nn.embeddings import PatchEmbedding as OurPatches
from regard.work import grade
from regard.work.exercises import SETS
from regard.work.exercises.exercise import Exercise, Exercises
from regard.work.exercises.solutions import byte_pairs, decoding, self_attention, two_heads, vit
from regard.work.grading import Grade, grade_file
from regard.work.notebook import code_of, export, key_path, of_exercises

EVERY = [(name, task.name) for name in SETS for task in SETS[name].tasks]


def written(exercises: str, source: str) -> dict[str, Any]:
    """What is defined after the given cell, the solutions of the set, and a student's own code over them."""
    space: dict[str, Any] = {"__name__": "student"}
    parts = [SETS[exercises].given, *(task.source for task in SETS[exercises].tasks), textwrap.dedent(source)]
    for part in parts:
        exec(compile(part, "student.py", "exec"), space)
    return space


def graded(exercises: str, task: str, source: str) -> Grade:
    return grade(exercises, task, written(exercises, source)[SETS[exercises][task].writes])


@pytest.mark.parametrize(("exercises", "task"), EVERY)
def test_the_solution_is_right_and_every_slip_is_found_under_its_name(exercises: str, task: str) -> None:
    exercise = SETS[exercises][task]
    assert exercise.find(exercise.solution) is None
    assert len(exercise.slips) >= 3
    for slip in exercise.slips:
        found = exercise.find(slip.wrong)
        assert found is not None, slip.name
        assert (found.slip, found.words) == (slip.name, slip.hint)


# code as students write it, apart from the slips in the package
WRONG = [
    (
        "self-attention",
        "softmax",
        "softmax over the wrong axis",
        """
        def softmax_columns(scores):
            e = np.exp(scores - np.max(scores))
            return e / e.sum(axis=-1)[:, None]
        """,
    ),
    (
        "self-attention",
        "softmax",
        "overflow",
        """
        def softmax_columns(scores):
            out = np.zeros_like(scores)
            for column in range(scores.shape[1]):
                e = np.exp(scores[:, column])
                out[:, column] = e / sum(e)
            return out
        """,
    ),
    (
        "self-attention",
        "attention",
        "transposed product",
        """
        def self_attention(X, oq, ok, ov, bq, bk, bv):
            q, k, v = oq @ X + bq, ok @ X + bk, ov @ X + bv
            return v @ softmax_columns(q.T @ k)
        """,
    ),
    (
        "self-attention",
        "attention",
        "forgotten bias",
        """
        def self_attention(X, oq, ok, ov, *biases):
            return ov @ X @ softmax_columns(np.einsum("cm,cn->mn", ok @ X, oq @ X))
        """,
    ),
    (
        "self-attention",
        "attention",
        "softmax over the wrong axis",
        """
        def softmax_columns(scores):
            e = np.exp(scores)
            return e / e.sum(1, keepdims=True)
        """,
    ),
    (
        "self-attention",
        "scaled",
        "missing scale",
        """
        def scaled_self_attention(*inputs):
            return self_attention(*inputs)
        """,
    ),
    (
        "self-attention",
        "scaled",
        "scale from another width",
        """
        def scaled_self_attention(X, oq, ok, ov, bq, bk, bv):
            D = X.shape[0]
            q, k, v = oq @ X + bq, ok @ X + bk, ov @ X + bv
            return v @ softmax_columns(k.T @ q / D ** 0.5)
        """,
    ),
    (
        "two-heads",
        "head",
        "scale from the model's width",
        """
        def attend_head(X, head):
            oq, ok, ov, bq, bk, bv = head
            return (ov @ X + bv) @ softmax_columns((ok @ X + bk).T @ (oq @ X + bq) / np.sqrt(len(X)))
        """,
    ),
    (
        "two-heads",
        "stacked",
        "heads interleaved",
        """
        def two_heads(X, first, second):
            a, b = attend_head(X, first), attend_head(X, second)
            rows = []
            for one, other in zip(a, b):
                rows += [one, other]
            return np.array(rows)
        """,
    ),
    (
        "two-heads",
        "stacked",
        "heads beside each other",
        """
        def two_heads(X, first, second):
            return np.hstack([attend_head(X, first), attend_head(X, second)])
        """,
    ),
    (
        "two-heads",
        "projected",
        "forgotten output projection",
        """
        def multi_head(X, first, second, omega_c):
            return np.vstack([attend_head(X, first), attend_head(X, second)])
        """,
    ),
    (
        "two-heads",
        "projected",
        "transposed output projection",
        """
        def multi_head(X, first, second, omega_c):
            return (two_heads(X, first, second).T @ omega_c).T
        """,
    ),
    (
        "two-heads",
        "split",
        "reshape without transpose",
        """
        def split_heads(Q, heads):
            d, n = Q.shape
            return np.swapaxes(Q.reshape(heads, n, d // heads), 1, 2)
        """,
    ),
    (
        "byte-pairs",
        "count",
        "frequency of words forgotten",
        """
        def count_pairs(words):
            return Counter(pair for word in words for pair in pairwise(word))
        """,
    ),
    (
        "byte-pairs",
        "merge",
        "merges that overlap",
        """
        def merge(symbols, pair):
            out, i = [], 0
            while i < len(symbols):
                if tuple(symbols[i : i + 2]) == pair:
                    out.append(pair[0] + pair[1])
                    i += 1
                    if tuple(symbols[i : i + 2]) != pair:
                        i += 1
                else:
                    out.append(symbols[i])
                    i += 1
            return tuple(out)
        """,
    ),
    (
        "byte-pairs",
        "merge",
        "only the first pair",
        """
        def merge(symbols, pair):
            for i in range(len(symbols)):
                if symbols[i : i + 2] == pair:
                    return symbols[:i] + (symbols[i] + symbols[i + 1],) + symbols[i + 2 :]
            return symbols
        """,
    ),
    (
        "byte-pairs",
        "learn",
        "pairs not counted anew",
        """
        def learn_merges(words, merges):
            counts = count_pairs(words)
            return sorted(counts, key=lambda pair: (-counts[pair], pair))[:merges]
        """,
    ),
    (
        "byte-pairs",
        "learn",
        "ties to the first found",
        """
        def learn_merges(words, merges):
            learned = []
            for _ in range(merges):
                counts = count_pairs(words)
                if not counts:
                    break
                pair = max(counts, key=counts.get)
                learned.append(pair)
                words = {merge(word, pair): times for word, times in words.items()}
            return learned
        """,
    ),
    (
        "byte-pairs",
        "tokenise",
        "merges in the wrong order",
        """
        def tokenise(word, merges):
            symbols = tuple(word)
            while merges:
                symbols = merge(symbols, merges[-1])
                merges = merges[:-1]
            return list(symbols)
        """,
    ),
    (
        "decoding",
        "sample",
        "always the likeliest",
        """
        def sample(probabilities, draw):
            return np.argmax(probabilities)
        """,
    ),
    (
        "decoding",
        "kth",
        "ranks from zero",
        """
        def kth_likeliest(probabilities, k):
            return np.argsort(probabilities)[::-1][k]
        """,
    ),
    (
        "decoding",
        "top-k",
        "top-k without renormalising",
        """
        def top_k(probabilities, k):
            cut = np.sort(probabilities)[-k]
            return np.where(probabilities >= cut, probabilities, 0)
        """,
    ),
    (
        "decoding",
        "nucleus",
        "crossing token dropped",
        """
        def nucleus(probabilities, mass):
            order = np.argsort(probabilities)[::-1]
            keep = order[np.cumsum(probabilities[order]) <= mass]
            out = np.zeros(len(probabilities))
            out[keep] = probabilities[keep]
            return out / np.sum(out)
        """,
    ),
    (
        "decoding",
        "beam",
        "beam that forgets log",
        """
        def beam_search(step, start, beams, length):
            kept = [([start], 0.0)]
            for _ in range(length):
                new = []
                for tokens, score in kept:
                    p = step(tokens)
                    for token in range(len(p)):
                        if p[token]:
                            new.append((tokens + [token], score + p[token]))
                kept = sorted(new, key=lambda each: each[1], reverse=True)[:beams]
            return kept[0]
        """,
    ),
    (
        "decoding",
        "beam",
        "beam of one",
        """
        def beam_search(step, start, beams, length):
            tokens, score = [start], 0.0
            for _ in range(length):
                p = step(tokens)
                tokens.append(int(p.argmax()))
                score += np.log(p.max())
            return tokens, score
        """,
    ),
    (
        "decoding",
        "beam",
        "last token alone",
        """
        def beam_search(step, start, beams, length):
            kept = [([start], 0.0)]
            for _ in range(length):
                new = [
                    (tokens + [token], score + np.log(p))
                    for tokens, score in kept
                    for token, p in enumerate(step(tokens[-1:]))
                    if p
                ]
                kept = sorted(new, key=lambda each: each[1], reverse=True)[:beams]
            return kept[0]
        """,
    ),
    (
        "vit",
        "patches",
        "reshape without permute",
        """
        class PatchEmbedding(PatchEmbedding):
            def forward(self, images):
                b, c, h, w = images.shape
                n = (h // self.patch) * (w // self.patch)
                return self.project(images.reshape(b, n, c * self.patch * self.patch))
        """,
    ),
    (
        "vit",
        "attention",
        "reshape without transpose",
        """
        class SelfAttention(SelfAttention):
            def forward(self, x):
                b, n, d = x.shape
                c = d // self.heads
                q = self.query(x).view(b, self.heads, n, c)
                k = self.key(x).view(b, self.heads, n, c)
                v = self.value(x).view(b, self.heads, n, c)
                a = torch.softmax(q @ k.mT / c**0.5, dim=-1) @ v
                return self.out(a.transpose(1, 2).reshape(b, n, d))
        """,
    ),
    (
        "vit",
        "attention",
        "missing scale",
        """
        class SelfAttention(SelfAttention):
            def forward(self, x):
                q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
                a = torch.einsum("bihc,bjhc->bhij", q, k).softmax(dim=3)
                return self.out(torch.einsum("bhij,bjhc->bihc", a, v).flatten(2))
        """,
    ),
    (
        "vit",
        "attention",
        "softmax over the wrong axis",
        """
        class SelfAttention(SelfAttention):
            def forward(self, x):
                q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
                a = (torch.einsum("bihc,bjhc->bhij", q, k) / q.shape[-1] ** 0.5).softmax(dim=2)
                return self.out(torch.einsum("bhij,bjhc->bihc", a, v).flatten(2))
        """,
    ),
    (
        "vit",
        "attention",
        "forgotten output projection",
        """
        class SelfAttention(nn.Module):
            def __init__(self, width, heads):
                super().__init__()
                self.heads = heads
                self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        """,
    ),
    (
        "vit",
        "block",
        "post-norm instead of pre-norm",
        """
        class Block(Block):
            def forward(self, x):
                x = self.attention_norm(self.attention(x) + x)
                return self.feedforward_norm(self.down(nn.GELU()(self.up(x))) + x)
        """,
    ),
    (
        "vit",
        "block",
        "missing residual",
        """
        class Block(Block):
            def forward(self, x):
                x = x + self.attention(self.attention_norm(x))
                return self.down(nn.GELU()(self.up(self.feedforward_norm(x))))
        """,
    ),
    (
        "vit",
        "vit",
        "no class token",
        """
        class ViT(nn.Module):
            def __init__(self, patches, blocks, tokens, width, classes):
                super().__init__()
                self.patches, self.blocks = patches, blocks
                self.positions = nn.Parameter(torch.zeros(1, tokens, width))
                self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        """,
    ),
    (
        "vit",
        "vit",
        "positions not added",
        """
        class ViT(ViT):
            def forward(self, images):
                x = self.patches(images)
                x = torch.cat([self.class_token.repeat(len(x), 1, 1), x], dim=1)
                return self.head(self.norm(self.blocks(x)[:, 0]))
        """,
    ),
]

WRONG += [
    (
        "byte-pairs",
        "merge",
        "parts of symbols merged",
        """
        def merge(symbols, pair):
            return tuple(" ".join(symbols).replace(" ".join(pair), "".join(pair)).split(" "))
        """,
    ),
    (
        "byte-pairs",
        "learn",
        "pairs that occur once left out",
        """
        def learn_merges(words, merges):
            learned = []
            while len(learned) < merges:
                counts = count_pairs(words)
                if not counts or max(counts.values()) == 1:
                    return learned
                learned.append(min(counts, key=lambda pair: (-counts[pair], pair)))
                joined = {}
                for symbols, times in words.items():
                    left = merge(symbols, learned[-1])
                    joined[left] = joined.get(left, 0) + times
                words = joined
            return learned
        """,
    ),
    (
        "decoding",
        "sample",
        "sum that only meets the draw",
        """
        def sample(probabilities, draw):
            return int((np.cumsum(probabilities) >= draw).argmax())
        """,
    ),
    (
        "decoding",
        "top-k",
        "more than k where some are equal",
        """
        def top_k(probabilities, k):
            kept = np.where(probabilities >= np.sort(probabilities)[-k], probabilities, 0)
            return kept / kept.sum()
        """,
    ),
    (
        "decoding",
        "nucleus",
        "one more where the mass is met",
        """
        def nucleus(probabilities, mass):
            order = np.argsort(-probabilities)
            best = order[: (np.cumsum(probabilities[order]) <= mass).sum() + 1]
            kept = np.zeros_like(probabilities)
            kept[best] = probabilities[best]
            return kept / kept.sum()
        """,
    ),
    (
        "two-heads",
        "head",
        "queries and keys exchanged",
        """
        def attend_head(X, head):
            omega_q, omega_k, omega_v, beta_q, beta_k, beta_v = head
            Q, K, V = omega_q @ X + beta_q, omega_k @ X + beta_k, omega_v @ X + beta_v
            return V @ softmax_columns(Q.T @ K / np.sqrt(len(Q)))
        """,
    ),
]


@pytest.mark.parametrize(("exercises", "task", "slip", "source"), WRONG, ids=lambda each: str(each)[:30].strip())
def test_a_typical_mistake_gets_the_hint_that_fits(exercises: str, task: str, slip: str, source: str) -> None:
    found = graded(exercises, task, source)
    assert (found.right, found.slip) == (False, slip)
    assert found.words in [each.hint for each in SETS[exercises][task].slips if each.name == slip]


def test_every_set_is_tried_with_three_mistakes_at_least() -> None:
    tried = [exercises for exercises, *_ in WRONG]
    assert {name: tried.count(name) >= 3 for name in SETS} == dict.fromkeys(SETS, True)


def test_a_list_where_a_tuple_is_asked_for_is_told() -> None:
    source = """
    def merge(symbols, pair):
        out, i = [], 0
        while i < len(symbols):
            met = tuple(symbols[i : i + 2]) == pair
            out.append("".join(symbols[i : i + 1 + met]))
            i += 1 + met
        return out
    """
    found = graded("byte-pairs", "merge", source)
    assert (found.right, found.slip) == (False, "list instead of tuple")
    assert found.words == "the answer has the right items, but is a list; a tuple is asked for."
    assert graded("byte-pairs", "merge", source.replace("return out", "return tuple(out)")).right


def test_whichever_of_equal_tokens_are_kept_is_right() -> None:
    last = """
    def top_k(probabilities, k):
        best = np.argsort(probabilities, kind="stable")[-k:]
        kept = np.zeros_like(probabilities)
        kept[best] = probabilities[best]
        return kept / kept.sum()
    """
    assert graded("decoding", "top-k", last).right


@pytest.mark.parametrize(
    "frozen",
    [
        'position = self.positions.data; del self.positions; self.register_buffer("positions", position)',
        "self.positions.requires_grad_(False)",
    ],
    ids=["buffer", "frozen"],
)
def test_what_would_never_be_learned_is_not_right(frozen: str) -> None:
    source = f"class ViT(ViT):\n    def __init__(self, *a):\n        super().__init__(*a)\n        {frozen}"
    found = graded("vit", "vit", source)
    assert (found.right, found.slip) == (False, "not a parameter")
    assert found.words == "positions would never be learned: it is no parameter; use nn.Parameter, not a buffer."


def test_a_parameter_that_no_gradient_reaches_is_not_right() -> None:
    source = """
    class ViT(ViT):
        def forward(self, images):
            patches = self.patches(images)
            token = self.class_token.data.expand(len(patches), -1, -1)
            x = torch.cat([token, patches], 1) + self.positions.data
            return self.head(self.norm(self.blocks(x))[:, 0])
    """
    found = graded("vit", "vit", source)
    assert (found.right, found.slip) == (False, "no gradient")
    assert found.words == (
        "class_token, positions would never be learned: no gradient reaches them; "
        "use the parameter itself, without .data or detach()."
    )
    assert graded("vit", "vit", source.replace(".data", "")).right


# other ways to be right
RIGHT = [
    (
        "self-attention",
        "softmax",
        """
        def softmax_columns(scores):
            from scipy.special import softmax
            return softmax(scores, axis=0)
        """,
    ),
    (
        "two-heads",
        "split",
        """
        def split_heads(Q, heads):
            return np.stack(np.split(Q, heads))
        """,
    ),
    (
        "byte-pairs",
        "count",
        """
        def count_pairs(words):
            found = Counter()
            for word in words:
                for i in range(len(word) - 1):
                    found[word[i], word[i + 1]] += words[word]
            return found
        """,
    ),
    (
        "byte-pairs",
        "merge",
        """
        def merge(symbols, pair):
            out = []
            for symbol in symbols:
                if out and out[-1] == (pair[0], False) and symbol == pair[1]:
                    out[-1] = (pair[0] + pair[1], True)
                else:
                    out.append((symbol, False))
            return tuple(symbol for symbol, _ in out)
        """,
    ),
    (
        "decoding",
        "sample",
        """
        def sample(probabilities, draw):
            total = 0
            for token, p in enumerate(probabilities):
                total += p
                if total > draw:
                    return token
        """,
    ),
    (
        "decoding",
        "nucleus",
        """
        def nucleus(probabilities, mass):
            out, total = np.zeros(len(probabilities)), 0.0
            for token in sorted(range(len(out)), key=lambda token: -probabilities[token]):
                if total < mass:
                    out[token] = probabilities[token]
                total += probabilities[token]
            return out / out.sum()
        """,
    ),
    (
        "vit",
        "patches",
        """
        class PatchEmbedding(PatchEmbedding):
            def forward(self, images):
                kernel = self.project.weight.reshape(-1, images.shape[1], self.patch, self.patch)
                out = nn.functional.conv2d(images, kernel, self.project.bias, stride=self.patch)
                return out.flatten(2).transpose(1, 2)
        """,
    ),
    (
        "vit",
        "attention",
        """
        class SelfAttention(SelfAttention):
            def forward(self, x):
                layers = self.query, self.key, self.value
                q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
                mixed = nn.functional.scaled_dot_product_attention(q, k, v)
                return self.out(mixed.transpose(1, 2).flatten(2))
        """,
    ),
    (
        "vit",
        "block",
        """
        class Block(Block):
            def forward(self, x):
                y = self.attention(self.attention_norm(x)) + x
                return self.down(nn.GELU()(self.up(self.feedforward_norm(y)))) + y
        """,
    ),
]


@pytest.mark.parametrize(("exercises", "task", "source"), RIGHT, ids=lambda each: str(each)[:30].strip())
def test_another_right_way_is_right(exercises: str, task: str, source: str) -> None:
    found = graded(exercises, task, source)
    assert found.right, str(found)
    assert str(found) == f"{exercises}, {task}: right."


@pytest.mark.parametrize(
    ("exercises", "task", "source", "words"),
    [
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores): pass",
            "not yet. It gives None: is there a return?",
        ),
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores): return scores.sum(0)",
            "The answer should be of shape (5, 3), but is of shape (3,). No slip is known that gives this.",
        ),
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores): return np.ones_like(scores)",
            r"The answer should be [\d.e-]+ at \[\d, \d\], but is 1. No slip",
        ),
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores):\n    x = 1\n    return scores / (x - x) + nothing",
            "Error: it fails with NameError in line 3: name 'nothing' is not defined",
        ),
        ("self-attention", "softmax", "def softmax_columns(scores): exit(3)", "it fails with SystemExit"),
        ("self-attention", "softmax", "softmax_columns = 3", "Softmax_columns is 3, which cannot be called"),
        (
            "byte-pairs",
            "tokenise",
            "def tokenise(word, merges): return word",
            "The answer should be ['b', 'an', 'an', 'ana'], but is 'bananana'",
        ),
        ("vit", "block", "Block = 3", "Block is 3; write a class that is an nn.Module"),
        (
            "vit",
            "vit",
            "class ViT(ViT):\n    def __init__(self, *a):\n        super().__init__(*a)\n"
            "        self.more = nn.Linear(2, 2)",
            "The module has more.weight, more.bias, which is not asked for",
        ),
        (
            "vit",
            "block",
            "class Block(Block):\n    def __init__(self, *a):\n        super().__init__(*a)\n        self.u = self.up\n"
            "        del self.up",
            "The module has no up.weight, up.bias (it has u.weight, u.bias instead); keep the names",
        ),
        (
            "vit",
            "block",
            "class Block(Block):\n    def __init__(self, width, hidden, attention):\n"
            "        super().__init__(width, 2 * hidden, attention)",
            "Up.weight should be of shape (14, 6), but is (28, 6)",
        ),
        (
            "vit",
            "block",
            "class Block(Block):\n    def forward(self, x):\n        return self.missing(x)",
            "it fails with AttributeError in line 3: 'Block' object has no attribute 'missing'",
        ),
        (
            "vit",
            "block",
            "class Block(Block):\n    def __init__(self, width):\n        super().__init__()",
            "it fails with TypeError",
        ),
    ],
)
def test_what_no_slip_explains_is_told_as_it_is(exercises: str, task: str, source: str, words: str) -> None:
    found = graded(exercises, task, source)
    assert not found.right
    assert words in str(found) or re.search(words, str(found)), str(found)


@pytest.mark.parametrize(("exercises", "task"), EVERY)
def test_a_starter_runs_and_is_still_to_do(exercises: str, task: str) -> None:
    exercise = SETS[exercises][task]
    assert "TODO" in exercise.starter
    found = graded(exercises, task, exercise.starter)
    assert (found.right, found.slip) == (False, "still to do")
    kept = [name for name in re.findall(r"(?:def|class) (\w+)", exercise.starter) if not name.startswith("_")]
    assert kept[0] == exercise.writes == exercise.solution.__name__


def test_starters_and_solutions_take_the_same_arguments() -> None:
    for name, task in EVERY:
        exercise = SETS[name][task]
        started = written(name, exercise.starter)[exercise.writes]
        assert str(inspect.signature(started)) == str(inspect.signature(written(name, "")[exercise.writes]))


def test_a_student_cannot_change_the_inputs_of_others() -> None:
    source = """
    def softmax_columns(scores):
        scores -= scores.max(0)
        np.exp(scores, out=scores)
        scores /= scores.sum(0)
        return scores
    """
    assert graded("self-attention", "softmax", source).right


def test_the_numbers_of_the_texts_come_out() -> None:
    space = written("self-attention", "")
    inputs = [space[name] for name in ("X", "omega_q", "omega_k", "omega_v", "beta_q", "beta_k", "beta_v")]
    first = self_attention.self_attention(*inputs)[:, 0]
    scaled = self_attention.scaled_self_attention(*inputs)
    assert first == pytest.approx([0.94744244, -0.24348429, -0.91310441, -0.44522983], abs=5e-9)
    assert scaled[0] == pytest.approx([0.97411966, 1.59622051, 1.32638014], abs=5e-9)
    assert scaled[3] == pytest.approx([-0.34413007, 2.01339538, 1.69024190], abs=5e-9)
    for numbers, task in ((first, "attention"), (scaled[0], "scaled")):
        prompt = SETS["self-attention"][task].prompt
        assert [f"{number:.8f}" in prompt for number in numbers] == [True] * len(numbers)


def test_the_two_heads_are_those_of_the_worked_solution() -> None:
    from regard.work.builtin_problems import BUILTIN_PROBLEMS
    from regard.work.exact_numbers import floats
    from regard.work.problem import build
    from regard.work.solution import solve

    space = written("two-heads", "")
    out = two_heads.multi_head(*(space[name] for name in ("X", "first", "second", "omega_c")))
    matrices, biases, own = BUILTIN_PROBLEMS["udl-12-2"]()
    worked = solve(build(matrices=matrices, biases=biases, **own))
    np.testing.assert_allclose(out, np.array(floats(worked.step("result").values)), rtol=1e-12)


def test_the_solutions_attend_as_the_package_does() -> None:
    draws = np.random.default_rng(0)
    shapes = ((5, 3), (2, 5), (2, 5), (7, 5), (2, 1), (2, 1), (7, 1))
    X, oq, ok, ov, bq, bk, bv = inputs = [draws.normal(size=shape) for shape in shapes]
    q, k, v = (torch.from_numpy((omega @ X + beta).T)[None, None] for omega, beta in ((oq, bq), (ok, bk), (ov, bv)))
    np.testing.assert_allclose(self_attention.scaled_self_attention(*inputs), attend(q, k, v)[0, 0].T, rtol=1e-12)
    np.testing.assert_allclose(self_attention.self_attention(*inputs), attend(q, k, v, beta=1.0)[0, 0].T, rtol=1e-12)
    layer = vit.SelfAttention(15, 3).double().requires_grad_(False)
    x = torch.randn(2, 7, 15, dtype=torch.float64)
    heads = [part(x).unflatten(-1, (3, 5)).transpose(1, 2) for part in (layer.query, layer.key, layer.value)]
    torch.testing.assert_close(layer(x), layer.out(attend(*heads).transpose(1, 2).flatten(2)))


def test_the_patches_are_those_of_the_package() -> None:
    ours, theirs = OurPatches(11, 3, 2).double(), vit.PatchEmbedding(2, 3, 11).double()
    theirs.project.load_state_dict({"weight": ours.projection.weight.flatten(1), "bias": ours.projection.bias})
    image = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    torch.testing.assert_close(theirs(image), ours(image).flatten(1, 2))


def test_probabilities_are_cut_as_the_package_cuts_them() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(13, 0.7))
    logits = torch.from_numpy(np.log(p))[None]
    np.testing.assert_allclose(decoding.top_k(p, 4), Sample(top_k=4).probabilities(logits)[0], atol=1e-12)
    np.testing.assert_allclose(decoding.nucleus(p, 0.7), Sample(top_p=0.7).probabilities(logits)[0], atol=1e-12)


def test_a_draw_beyond_the_rounded_sum_gives_the_last_token() -> None:
    even = np.array([0.1] * 10)
    draw = 0.9999999999999999
    assert np.cumsum(even)[-1] <= draw
    assert decoding.sample(even, draw) == 9


def test_a_wide_beam_finds_the_likeliest_text_of_all() -> None:
    table = np.random.default_rng(3).dirichlet(np.full(3, 0.5), size=3)
    found, score = decoding.beam_search(lambda tokens: table[tokens[-1]], 1, 27, 3)
    texts = itertools.product(range(3), repeat=3)
    best = max(texts, key=lambda text: np.prod([table[a, b] for a, b in itertools.pairwise((1, *text))]))
    assert found == [1, *best]
    assert np.exp(score) == pytest.approx(np.prod([table[a, b] for a, b in itertools.pairwise(found)]))


def test_byte_pairs_learn_a_common_word_whole() -> None:
    words = {tuple("for"): 8, tuple("fore"): 1, tuple("gold"): 1}
    merges = byte_pairs.learn_merges(words, 2)
    assert merges == [("f", "o"), ("fo", "r")]
    assert byte_pairs.tokenise("before", merges) == ["b", "e", "for", "e"]


def test_a_set_and_a_task_are_asked_for_by_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown set of exercises 'two-head'; did you mean 'two-heads'"):
        grade("two-head", "head", None)
    with pytest.raises(UnknownNameError, match="unknown exercise of two-heads 'heads'; did you mean 'head'"):
        grade("two-heads", "heads", None)


CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_form(notebook: dict[str, Any]) -> None:
    """The rules of notebook format 4.5."""
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert {"name", "display_name"} <= set(notebook["metadata"]["kernelspec"])
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    for cell in notebook["cells"]:
        needed = {"cell_type", "id", "metadata", "source"}
        assert set(cell) == needed | ({"outputs", "execution_count"} if cell["cell_type"] == "code" else set())
        assert cell["cell_type"] in ("code", "markdown")
        assert CELL_ID.fullmatch(cell["id"])
        assert isinstance(cell["metadata"], dict)
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert all(line.count("\n") <= 1 and line for line in cell["source"])
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.parametrize("name", list(SETS))
def test_a_notebook_has_the_form_and_its_key_is_right(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "work.ipynb"
    files = export(of_exercises(SETS[name]), of_exercises(SETS[name], key=True), path)
    assert files == (path, tmp_path / "work.key.ipynb") == (path, key_path(path))
    answers = []
    for file in files:
        made = json.loads(file.read_text(encoding="utf-8"))
        check_form(made)
        space: dict[str, Any] = {"__name__": "student"}
        for cell in made["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), space)
        answers.append(capsys.readouterr().out.splitlines())
    tasks = SETS[name].tasks
    assert answers[0] == [f"{name}, {task.name}: not yet. Still to do: it is still to be written" for task in tasks]
    assert answers[1] == [f"{name}, {task.name}: right." for task in tasks]


@pytest.mark.parametrize("name", list(SETS))
def test_a_students_notebook_gives_no_answer_away(name: str) -> None:
    text = json.dumps(of_exercises(SETS[name]))
    for task in SETS[name].tasks:
        assert "NotImplementedError" in task.starter
        body = task.source.split('"""')[2]
        secret = [line.strip() for line in body.splitlines() if line.strip() and line not in task.starter]
        assert secret
        assert json.dumps(secret[-1])[1:-1] not in text
        assert not any(slip.hint in text for slip in task.slips)


def test_a_notebook_is_never_overwritten(tmp_path: Path) -> None:
    made = of_exercises(SETS["decoding"])
    (tmp_path / "a.key.ipynb").write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.key\.ipynb is there already, and is not overwritten; remove it"):
        export(made, made, tmp_path / "a.ipynb")
    assert not (tmp_path / "a.ipynb").exists()
    with pytest.raises(ConfigError, match=r"a notebook ends in \.ipynb"):
        export(made, made, tmp_path / "a.json")
    with pytest.raises(ConfigError, match="cannot write"):
        export(made, made, tmp_path / "missing" / "a.ipynb")


def test_cells_are_read_without_tests_and_magic(tmp_path: Path) -> None:
    made = of_exercises(SETS["decoding"])
    made["cells"].append({"cell_type": "code", "metadata": {}, "source": "%pip install x\n  !ls\nx = 5 % 3"})
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(made))
    found = code_of(path)
    assert [number for number, _ in found] == [2, 3, 5, 8, 11, 14, 17, 19]
    assert found[-1][1] == "\n\nx = 5 % 3"
    path.write_text('{"cells": 3}')
    with pytest.raises(ConfigError, match="is no notebook of Jupyter, format 4"):
        code_of(path)


STUDENT = """
import os
import sys

{given}

print("this is not shown")

def sample(probabilities, draw):
    while True:
        pass

def kth_likeliest(probabilities, k):
    return int(np.argsort(-probabilities, kind="stable")[k - 1])

def top_k(probabilities, k):
    os._exit(7)

def nucleus(probabilities, mass):
    return probabilities[undefined]

if __name__ == "__main__":
    sys.exit("run as a script")
"""


def test_a_file_runs_in_a_process_of_its_own_with_a_time_limit(tmp_path: Path) -> None:
    path = tmp_path / "student.py"
    path.write_text(STUDENT.format(given=SETS["decoding"].given))
    found = grade_file("decoding", path, seconds=2)
    assert not found.ok
    told = {each.task: (each.right, each.words) for each in found.grades}
    assert list(told) == [task.name for task in SETS["decoding"].tasks]
    assert told["sample"] == (False, "it took longer than 2 seconds")
    assert told["kth"] == (True, "")
    assert told["top-k"] == (False, "it ended the process with exit code 7")
    line = STUDENT.format(given=SETS["decoding"].given).splitlines().index("    return probabilities[undefined]") + 1
    assert told["nucleus"] == (False, f"it fails with NameError in line {line}: name 'undefined' is not defined")
    assert told["beam"] == (False, "there is no beam_search in the file")
    assert str(found).endswith("1 of 5 right.")


def test_a_notebook_is_graded_cell_by_cell(tmp_path: Path) -> None:
    made = of_exercises(SETS["byte-pairs"], key=True)
    made["cells"][4]["source"] = ["def count_pairs(words):\n", "    return wrong\n", "1 / 0"]
    made["cells"][7]["source"] = ["def merge(symbols, pair)"]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(made))
    found = {each.task: each for each in grade_file("byte-pairs", path).grades}
    assert found["count"].words == "it fails with NameError in line 2 of cell 5: name 'wrong' is not defined"
    assert "there is no merge, and the file fails with ZeroDivisionError in line 3 of cell 5" in found["merge"].words
    assert "NameError" in found["learn"].words


def test_a_file_that_never_ends_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import time\ntime.sleep(99)")
    found = grade_file("self-attention", path, seconds=1)
    assert {each.words for each in found.grades} == {
        "the file, before any exercise was reached, took longer than 1 seconds"
    }


def test_what_is_no_file_of_code_is_refused(tmp_path: Path) -> None:
    for name, words in (("a.txt", "is neither a .py nor an .ipynb file"), ("a.py", "cannot read .*: No such file")):
        with pytest.raises(ConfigError, match=words):
            grade_file("vit", tmp_path / name)
    (tmp_path / "b.py").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        grade_file("vit", tmp_path / "b.py")
    (tmp_path / "c.py").write_text("")
    with pytest.raises(ConfigError, match="the code needs time to run: seconds=0"):
        grade_file("vit", tmp_path / "c.py", seconds=0)


def test_a_set_is_a_frozen_value() -> None:
    exercises = SETS["vit"]
    assert isinstance(exercises, Exercises)
    assert all(isinstance(task, Exercise) for task in exercises.tasks)
    assert issubclass(exercises["block"].solution, nn.Module)
    assert exercises["block"].source.startswith("class Block(nn.Module):")
