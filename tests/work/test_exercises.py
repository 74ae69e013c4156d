"""Exercises: correct answers pass, wrong ones get the hint that fits, notebooks are valid and hide the solutions."""

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

from regard.base.errors import ConfigError, UnknownNameError
from regard.core.attend import attend
from regard.models.sampling import Sample
from regard.nn.embeddings import PatchEmbedding
from regard.work import grade
from regard.work.exercises import EXERCISE_SETS
from regard.work.exercises.exercise import PlantedMistake
from regard.work.exercises.solutions import byte_pairs, decoding, self_attention, two_heads, vit
from regard.work.grading import Grade, grade_file
from regard.work.notebook import exercise_notebook, read_code_cells, to_text, write_new_file

EVERY = [(name, exercise.name) for name in EXERCISE_SETS for exercise in EXERCISE_SETS[name].exercises]


def run_code(set_name: str, source: str) -> dict[str, Any]:
    """Names defined by the setup code, then the solutions of the set, then a student's own code."""
    exercise_set = EXERCISE_SETS[set_name]
    namespace: dict[str, Any] = {"__name__": "student"}
    parts = [exercise_set.setup_code, *(each.source for each in exercise_set.exercises), textwrap.dedent(source)]
    for part in parts:
        exec(compile(part, "student.py", "exec"), namespace)
    return namespace


def grade_source(set_name: str, name: str, source: str) -> Grade:
    return grade(set_name, name, run_code(set_name, source)[EXERCISE_SETS[set_name][name].function_name])


@pytest.mark.parametrize(("set_name", "name"), EVERY)
def test_the_solution_is_correct_and_every_planted_mistake_gets_its_own_hint(set_name: str, name: str) -> None:
    exercise = EXERCISE_SETS[set_name][name]
    assert exercise.find_mistake(exercise.solution) is None
    assert len(exercise.mistakes) >= 3
    for mistake in exercise.mistakes:
        found = exercise.find_mistake(exercise.wrong_solution(mistake))
        assert found is not None, mistake.name
        assert (found.mistake, found.feedback) == (mistake.name, mistake.hint)


def test_a_planted_mistake_must_replace_text_of_the_solution() -> None:
    stale = PlantedMistake("stale", "no hint", (("not in the solution", ""),))
    with pytest.raises(ValueError, match="variant replaces 'not in the solution', which is not in regard"):
        EXERCISE_SETS["vit"]["block"].wrong_solution(stale)


# code as students write it, independent of the planted mistakes
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
        "word frequency ignored",
        """
        def count_pairs(words):
            return Counter(pair for word in words for pair in pairwise(word))
        """,
    ),
    (
        "byte-pairs",
        "merge",
        "overlapping merges",
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
        "pairs not counted again",
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
        "top-k without rescaling",
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
        "beam search without log",
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
        class ImagePatches(ImagePatches):
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
        class TransformerBlock(TransformerBlock):
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
        class TransformerBlock(TransformerBlock):
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
        class VisionTransformer(nn.Module):
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
        class VisionTransformer(VisionTransformer):
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
        "sum equal to the draw",
        """
        def sample(probabilities, draw):
            return int((np.cumsum(probabilities) >= draw).argmax())
        """,
    ),
    (
        "decoding",
        "top-k",
        "more than k on a tie",
        """
        def top_k(probabilities, k):
            kept = np.where(probabilities >= np.sort(probabilities)[-k], probabilities, 0)
            return kept / kept.sum()
        """,
    ),
    (
        "decoding",
        "nucleus",
        "one more on equality",
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


@pytest.mark.parametrize(("set_name", "name", "mistake", "source"), WRONG, ids=lambda each: str(each)[:30].strip())
def test_a_typical_mistake_gets_the_hint_that_fits(set_name: str, name: str, mistake: str, source: str) -> None:
    found = grade_source(set_name, name, source)
    assert (found.correct, found.mistake) == (False, mistake)
    assert found.feedback in [each.hint for each in EXERCISE_SETS[set_name][name].mistakes if each.name == mistake]


def test_every_set_is_tried_with_at_least_three_mistakes() -> None:
    tried = [set_name for set_name, *_ in WRONG]
    assert {name: tried.count(name) >= 3 for name in EXERCISE_SETS} == dict.fromkeys(EXERCISE_SETS, True)


def test_a_list_instead_of_a_tuple_is_reported() -> None:
    source = """
    def merge(symbols, pair):
        out, i = [], 0
        while i < len(symbols):
            met = tuple(symbols[i : i + 2]) == pair
            out.append("".join(symbols[i : i + 1 + met]))
            i += 1 + met
        return out
    """
    found = grade_source("byte-pairs", "merge", source)
    assert (found.correct, found.mistake) == (False, "list instead of tuple")
    assert found.feedback == "the items are right, but the result is a list; return a tuple."
    assert grade_source("byte-pairs", "merge", source.replace("return out", "return tuple(out)")).correct


def test_any_of_equally_likely_tokens_may_be_kept() -> None:
    last = """
    def top_k(probabilities, k):
        best = np.argsort(probabilities, kind="stable")[-k:]
        kept = np.zeros_like(probabilities)
        kept[best] = probabilities[best]
        return kept / kept.sum()
    """
    assert grade_source("decoding", "top-k", last).correct


@pytest.mark.parametrize(
    "frozen",
    [
        'position = self.positions.data; del self.positions; self.register_buffer("positions", position)',
        "self.positions.requires_grad_(False)",
    ],
    ids=["buffer", "frozen"],
)
def test_a_frozen_parameter_is_reported(frozen: str) -> None:
    start = "class VisionTransformer(VisionTransformer):\n    def __init__(self, *a):\n        super().__init__(*a)\n"
    source = f"{start}        {frozen}"
    found = grade_source("vit", "vit", source)
    assert (found.correct, found.mistake) == (False, "not a parameter")
    assert found.feedback == "positions would never be trained: it is not trainable; use nn.Parameter."


def test_a_parameter_without_gradient_is_reported() -> None:
    source = """
    class VisionTransformer(VisionTransformer):
        def forward(self, images):
            patches = self.patches(images)
            token = self.class_token.data.expand(len(patches), -1, -1)
            x = torch.cat([token, patches], 1) + self.positions.data
            return self.head(self.norm(self.blocks(x))[:, 0])
    """
    found = grade_source("vit", "vit", source)
    assert (found.correct, found.mistake) == (False, "no gradient")
    assert found.feedback == (
        "class_token, positions would never be trained: no gradient reaches them; "
        "use the parameter itself, without .data or detach()."
    )
    assert grade_source("vit", "vit", source.replace(".data", "")).correct


# other correct answers
CORRECT = [
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
        class ImagePatches(ImagePatches):
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
        class TransformerBlock(TransformerBlock):
            def forward(self, x):
                y = self.attention(self.attention_norm(x)) + x
                return self.down(nn.GELU()(self.up(self.feedforward_norm(y)))) + y
        """,
    ),
]


CORRECT += [
    (
        "vit",
        "patches",
        """
        class ImagePatches(nn.Module):
            def __init__(self, channels, patch, width):
                super().__init__()
                self.project = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

            def forward(self, images):
                return self.project(images).flatten(2).transpose(1, 2)
        """,
    ),
    (
        "vit",
        "attention",
        """
        class SelfAttention(nn.Module):
            def __init__(self, width, heads):
                super().__init__()
                self.heads = heads
                self.qkv = nn.Linear(width, 3 * width)
                self.out = nn.Linear(width, width)

            def forward(self, x):
                q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
                weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
                return self.out((weights @ v).transpose(1, 2).flatten(2))
        """,
    ),
    (
        "vit",
        "vit",
        """
        class VisionTransformer(VisionTransformer):
            def __init__(self, patches, blocks, tokens, width, classes):
                super().__init__(patches, blocks, tokens, width, classes)
                self.positions = nn.Parameter(torch.zeros(tokens + 1, width))
        """,
    ),
]


@pytest.mark.parametrize(("set_name", "name", "source"), CORRECT, ids=lambda each: str(each)[:30].strip())
def test_another_correct_answer_is_correct(set_name: str, name: str, source: str) -> None:
    found = grade_source(set_name, name, source)
    assert found.correct, str(found)
    assert str(found) == f"{set_name}, {name}: correct."


@pytest.mark.parametrize(
    ("set_name", "name", "source", "feedback"),
    [
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores): pass",
            "not yet. It returns None: is there a return statement?",
        ),
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores): return scores.sum(0)",
            "The result should have shape (5, 3), but has shape (3,). No known mistake gives this.",
        ),
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores): return np.ones_like(scores)",
            r"The result should be [\d.e-]+ at \[\d, \d\], but is 1. No known mistake",
        ),
        (
            "self-attention",
            "softmax",
            "def softmax_columns(scores):\n    x = 1\n    return scores / (x - x) + nothing",
            "Error: it fails with NameError in line 3: name 'nothing' is not defined",
        ),
        ("self-attention", "softmax", "def softmax_columns(scores): exit(3)", "it fails with SystemExit"),
        ("self-attention", "softmax", "softmax_columns = 3", "Softmax_columns is 3, which is not callable"),
        (
            "byte-pairs",
            "tokenise",
            "def tokenise(word, merges): return word",
            "The result should be ['b', 'an', 'an', 'ana'], but is 'bananana'",
        ),
        ("vit", "block", "TransformerBlock = 3", "TransformerBlock is 3; write a class that subclasses nn.Module"),
        (
            "vit",
            "vit",
            "class VisionTransformer(VisionTransformer):\n    def __init__(self, *a):\n        super().__init__(*a)\n"
            "        self.more = nn.Linear(2, 2)",
            "The module has more.weight, more.bias, which the exercise does not need",
        ),
        (
            "vit",
            "block",
            "class TransformerBlock(TransformerBlock):\n    def __init__(self, *a):\n        super().__init__(*a)\n"
            "        self.u = self.up\n"
            "        del self.up",
            "The module has no up.weight, up.bias (it has u.weight, u.bias instead); use the names",
        ),
        (
            "vit",
            "block",
            "class TransformerBlock(TransformerBlock):\n    def __init__(self, width, hidden, attention):\n"
            "        super().__init__(width, 2 * hidden, attention)",
            "Up.weight should have shape (14, 6), but has shape (28, 6)",
        ),
        (
            "vit",
            "block",
            "class TransformerBlock(TransformerBlock):\n    def forward(self, x):\n        return self.missing(x)",
            "it fails with AttributeError in line 3: 'TransformerBlock' object has no attribute 'missing'",
        ),
        (
            "vit",
            "block",
            "class TransformerBlock(TransformerBlock):\n    def __init__(self, width):\n        super().__init__()",
            "it fails with TypeError",
        ),
    ],
)
def test_an_unknown_mistake_is_described(set_name: str, name: str, source: str, feedback: str) -> None:
    found = grade_source(set_name, name, source)
    assert not found.correct
    assert feedback in str(found) or re.search(feedback, str(found)), str(found)


@pytest.mark.parametrize(("set_name", "name"), EVERY)
def test_a_starter_runs_and_is_still_to_do(set_name: str, name: str) -> None:
    exercise = EXERCISE_SETS[set_name][name]
    assert "TODO" in exercise.starter
    assert "TODO" not in exercise.source
    found = grade_source(set_name, name, exercise.starter)
    assert (found.correct, found.mistake) == (False, "to do")
    started = run_code(set_name, exercise.starter)[exercise.function_name]
    assert str(inspect.signature(started)) == str(inspect.signature(run_code(set_name, "")[exercise.function_name]))


def test_an_answer_may_change_its_inputs() -> None:
    source = """
    def softmax_columns(scores):
        scores -= scores.max(0)
        np.exp(scores, out=scores)
        scores /= scores.sum(0)
        return scores
    """
    assert grade_source("self-attention", "softmax", source).correct


def test_the_numbers_in_the_prompts_are_correct() -> None:
    space = run_code("self-attention", "")
    inputs = [space[name] for name in ("X", "omega_q", "omega_k", "omega_v", "beta_q", "beta_k", "beta_v")]
    first = self_attention.self_attention(*inputs)[:, 0]
    scaled = self_attention.scaled_self_attention(*inputs)
    assert first == pytest.approx([0.94744244, -0.24348429, -0.91310441, -0.44522983], abs=5e-9)
    assert scaled[0] == pytest.approx([0.97411966, 1.59622051, 1.32638014], abs=5e-9)
    assert scaled[3] == pytest.approx([-0.34413007, 2.01339538, 1.69024190], abs=5e-9)
    for numbers, name in ((first, "attention"), (scaled[0], "scaled")):
        prompt = EXERCISE_SETS["self-attention"][name].prompt
        assert [f"{number:.8f}" in prompt for number in numbers] == [True] * len(numbers)


def test_the_two_heads_equal_the_worked_solution() -> None:
    from regard.work.builtin_problems import BUILTIN_PROBLEMS
    from regard.work.exact_numbers import to_floats
    from regard.work.problem import build_problem
    from regard.work.solution import solve

    space = run_code("two-heads", "")
    out = two_heads.multi_head(*(space[name] for name in ("X", "first", "second", "omega_c")))
    matrices, biases, own = BUILTIN_PROBLEMS["udl-12-2"]()
    worked = solve(build_problem(matrices=matrices, biases=biases, **own))
    np.testing.assert_allclose(out, np.array(to_floats(worked.step("result").values)), rtol=1e-12)


def test_the_solutions_equal_attend() -> None:
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


def test_the_patch_embedding_equals_that_of_the_package() -> None:
    ours, theirs = PatchEmbedding(11, 3, 2).double(), vit.ImagePatches(2, 3, 11).double()
    theirs.project.load_state_dict({"weight": ours.projection.weight.flatten(1), "bias": ours.projection.bias})
    image = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    torch.testing.assert_close(theirs(image), ours(image).flatten(1, 2))


def test_top_k_and_nucleus_equal_those_of_the_package() -> None:
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


def test_a_frequent_word_becomes_one_token() -> None:
    words = {tuple("for"): 8, tuple("fore"): 1, tuple("gold"): 1}
    merges = byte_pairs.learn_merges(words, 2)
    assert merges == [("f", "o"), ("fo", "r")]
    assert byte_pairs.tokenise("before", merges) == ["b", "e", "for", "e"]


def test_an_unknown_set_or_exercise_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown exercise set 'two-head'; did you mean 'two-heads'"):
        grade("two-head", "head", None)
    with pytest.raises(UnknownNameError, match="unknown exercise of two-heads 'heads'; did you mean 'head'"):
        grade("two-heads", "heads", None)


CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_notebook_format(notebook: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("name", list(EXERCISE_SETS))
def test_a_notebook_is_valid_and_its_answer_key_is_correct(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    exercise_set = EXERCISE_SETS[name]
    answers = []
    for notebook in (exercise_notebook(exercise_set), exercise_notebook(exercise_set, answer_key=True)):
        made = json.loads(to_text(notebook))
        check_notebook_format(made)
        space: dict[str, Any] = {"__name__": "student"}
        for cell in made["cells"]:
            if cell["cell_type"] == "code" and cell["id"] != "training":
                exec("".join(cell["source"]), space)
        answers.append(capsys.readouterr().out.splitlines())
    names = [exercise.name for exercise in exercise_set.exercises]
    assert answers[0] == [f"{name}, {each}: not yet. To do: it is not written yet" for each in names]
    assert answers[1] == [f"{name}, {each}: correct." for each in names]


def test_the_last_cell_trains_the_vision_transformer_and_prints_its_accuracy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exercise_set = EXERCISE_SETS["vit"]
    cells = exercise_notebook(exercise_set, answer_key=True)["cells"]
    assert cells[-1]["id"] == "training"
    space = run_code("vit", "")
    exec(exercise_set.closing_code.replace("range(1, 21)", "range(1, 5)"), space)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    assert float(lines[-1].split()[-1]) > 0.3


@pytest.mark.parametrize("name", list(EXERCISE_SETS))
def test_a_students_notebook_does_not_contain_the_solution(name: str) -> None:
    cells = exercise_notebook(EXERCISE_SETS[name])["cells"]
    text = "".join(line for cell in cells for line in cell["source"])
    for exercise in EXERCISE_SETS[name].exercises:
        assert "NotImplementedError" in exercise.starter
        hidden = [line for line in exercise.source.splitlines() if line.strip() and line not in exercise.starter]
        assert hidden
        # short lines such as `return out` occur in other code too
        assert not [line for line in hidden if len(line.strip()) > 20 and line in text]
        assert not any(mistake.hint in text for mistake in exercise.mistakes)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.ipynb already exists and is not overwritten; remove it"):
        write_new_file(tmp_path / "a.ipynb", "other")
    assert (tmp_path / "a.ipynb").read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        write_new_file(tmp_path / "missing" / "a.ipynb", "")


@pytest.mark.parametrize("style", ["nbgrader", "otter"])
def test_the_source_for_a_grading_tool_has_the_solutions_between_marks(style: str) -> None:
    exercise_set = EXERCISE_SETS["two-heads"]
    cells = exercise_notebook(exercise_set, style=style)["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert (
        source.count("# BEGIN SOLUTION")
        == source.count("# END SOLUTION")
        == len(exercise_set.exercises) * (2 if style == "otter" else 1)
    )
    # outside the marks nothing of the solution is left
    public = re.sub(r"(?ms)^ +#+ BEGIN SOLUTION.*?END SOLUTION$", "", source)
    assert "omega_c @ two_heads" in source
    assert "omega_c @ two_heads" not in public
    space: dict[str, Any] = {"__name__": "student"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), space)  # the tests pass on the solutions
    if style == "nbgrader":
        metadata = [cell["metadata"]["nbgrader"] for cell in cells if "nbgrader" in cell["metadata"]]
        assert sum(each.get("points", 0) for each in metadata) == len(exercise_set.exercises)
        assert {each["grade_id"] for each in metadata if each["solution"]} == {
            f"{exercise.name}-code" for exercise in exercise_set.exercises
        }
    else:
        assert [cell["source"][0] for cell in cells if cell["cell_type"] == "raw"][:2] == [
            "# ASSIGNMENT CONFIG\n",
            "# BEGIN QUESTION\n",
        ]


VARIANTS = [
    (name, number, option)
    for name in EXERCISE_SETS
    for number, options in enumerate(EXERCISE_SETS[name].variants)
    for option in range(1, len(options) + 1)
]


@pytest.mark.parametrize(("name", "number", "option"), VARIANTS)
def test_a_variant_has_its_own_solution_and_text(name: str, number: int, option: int) -> None:
    plain = EXERCISE_SETS[name]
    digits = ["0"] * len(plain.variants)
    digits[number] = str(option)
    varied = plain.with_variant("".join(digits))
    chosen = plain.variants[number][option - 1]
    for before, after in zip(plain.exercises, varied.exercises, strict=True):
        assert after.find_mistake(after.solution) is None
        if after.name in chosen.exercises:
            assert chosen.text in after.prompt
            assert after.find_mistake(before.solution) is not None, "the plain solution is wrong in the variant"
    assert all(any(old in each.prompt for each in plain.exercises) for old, _ in chosen.prompt_edits)
    cells = exercise_notebook(varied)["cells"]
    assert any(f'variant="{varied.variant}"' in "".join(cell["source"]) for cell in cells)


def test_every_exercise_has_variants_and_students_get_different_ones() -> None:
    for name in EXERCISE_SETS:
        exercise_set = EXERCISE_SETS[name]
        varied = {each for options in exercise_set.variants for option in options for each in option.exercises}
        assert varied == {exercise.name for exercise in exercise_set.exercises}
        drawn = {exercise_set.for_student(f"student {number}", "secret").variant for number in range(30)}
        assert len(drawn) > 5
        again = exercise_set.for_student("ann", "secret").variant
        assert again == exercise_set.for_student("ann", "secret").variant
    others = {EXERCISE_SETS["vit"].for_student("ann", f"seed {number}").variant for number in range(20)}
    assert len(others) > 5
    with pytest.raises(ConfigError, match="vit has no variant '99'; use the one in the notebook"):
        grade("vit", "vit", None, variant="99")


def test_code_cells_are_read_without_tests_and_magic_lines(tmp_path: Path) -> None:
    made = exercise_notebook(EXERCISE_SETS["decoding"])
    made["cells"].append({"cell_type": "code", "metadata": {}, "source": "%pip install x\n  !ls\nx = 5 % 3"})
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(made))
    found = read_code_cells(path)
    assert [number for number, _ in found] == [2, 5, 8, 11, 14, 17, 19]
    assert found[-1][1] == "\n\nx = 5 % 3"
    path.write_text('{"cells": 3}')
    with pytest.raises(ConfigError, match="is not a Jupyter notebook of format 4"):
        read_code_cells(path)


STUDENT = """
import os
import sys

{setup_code}

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


def test_a_file_runs_in_a_separate_process_with_a_time_limit(tmp_path: Path) -> None:
    path = tmp_path / "student.py"
    source = STUDENT.format(setup_code=EXERCISE_SETS["decoding"].setup_code)
    path.write_text(source)
    found = grade_file(EXERCISE_SETS["decoding"], path, seconds=2)
    assert not found.ok
    grades = {each.exercise: (each.correct, each.feedback) for each in found.grades}
    assert list(grades) == [exercise.name for exercise in EXERCISE_SETS["decoding"].exercises]
    assert grades["sample"] == (False, "it took longer than 2 seconds")
    assert grades["kth"] == (True, "")
    assert grades["top-k"] == (False, "it ended the process with exit code 7")
    line = source.splitlines().index("    return probabilities[undefined]") + 1
    assert grades["nucleus"] == (False, f"it fails with NameError in line {line}: name 'undefined' is not defined")
    assert grades["beam"] == (False, "beam_search is not defined in the file")
    assert str(found).endswith("1 of 5 correct.")


def test_a_notebook_is_graded_cell_by_cell(tmp_path: Path) -> None:
    made = exercise_notebook(EXERCISE_SETS["byte-pairs"], answer_key=True)
    made["cells"][4]["source"] = ["def count_pairs(words):\n", "    return wrong\n", "1 / 0"]
    made["cells"][7]["source"] = ["def merge(symbols, pair)"]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(made))
    found = {each.exercise: each for each in grade_file(EXERCISE_SETS["byte-pairs"], path).grades}
    assert found["count"].feedback == "it fails with NameError in line 2 of cell 5: name 'wrong' is not defined"
    assert (
        "merge is not defined, and the file fails with ZeroDivisionError in line 3 of cell 5" in found["merge"].feedback
    )
    assert "NameError" in found["learn"].feedback


def test_a_file_that_never_ends_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import time\ntime.sleep(99)")
    found = grade_file(EXERCISE_SETS["self-attention"], path, seconds=1)
    assert {each.feedback for each in found.grades} == {
        "the file, before any exercise was reached, took longer than 1 seconds"
    }


def test_a_file_that_is_not_code_is_refused(tmp_path: Path) -> None:
    for name, words in (
        ("a.txt", "is neither a .py nor an .ipynb file"),
        ("a.py", "a.py cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            grade_file(EXERCISE_SETS["vit"], tmp_path / name)
    (tmp_path / "b.py").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        grade_file(EXERCISE_SETS["vit"], tmp_path / "b.py")
    (tmp_path / "c.py").write_text("")
    with pytest.raises(ConfigError, match="seconds and megabytes must be positive, not 0 and 2048"):
        grade_file(EXERCISE_SETS["vit"], tmp_path / "c.py", seconds=0)
