"""Hints: wrong solutions as students write them, which were not used to write the planted mistakes."""

import inspect
import textwrap
from typing import Any

import pytest

from regard.work import grade
from regard.work.exercises import EXERCISE_SETS

# the exercise set, the exercise, the name of the mistake, and the code
WRONG = [
    ("self-attention", "softmax", "powers of another base", "return 2**scores / (2**scores).sum(0)"),
    ("self-attention", "softmax", "powers of another base", "e = 10 ** (scores - scores.max(0)); return e / e.sum(0)"),
    ("self-attention", "softmax", "sign", "e = np.exp(-scores); return e / np.sum(e, 0)"),
    ("self-attention", "softmax", "sum without keepdims", "e = np.exp(scores); return e / np.sum(e, axis=1)"),
    (
        "self-attention",
        "softmax",
        "softmax taken twice",
        "e = np.exp(scores); w = e / e.sum(0); return np.exp(w) / np.exp(w).sum(0)",
    ),
    ("self-attention", "softmax", "no normalisation", "return np.exp(scores)"),
    (
        "self-attention",
        "attention",
        "row form instead of column form",
        "q, k, v = X @ oq + bq.T, X @ ok + bk.T, X @ ov + bv.T; return softmax_columns(k @ q.T).T @ v",
    ),
    (
        "self-attention",
        "attention",
        "row form instead of column form",
        "q, k, v = X.T @ oq.T + bq.T, X.T @ ok.T + bk.T, X.T @ ov.T + bv.T; return softmax_columns(k @ q.T).T @ v",
    ),
    (
        "self-attention",
        "attention",
        "keys instead of values",
        "q, k = oq @ X + bq, ok @ X + bk; return k @ softmax_columns(k.T @ q)",
    ),
    (
        "self-attention",
        "attention",
        "missing bias of the values",
        "q, k, v = oq @ X + bq, ok @ X + bk, ov @ X; return v @ softmax_columns(k.T @ q)",
    ),
    (
        "self-attention",
        "attention",
        "missing bias of the queries",
        "return (ov @ X + bv) @ softmax_columns((ok @ X).T @ (oq @ X))",
    ),
    (
        "self-attention",
        "attention",
        "scores between channels",
        "q, k, v = oq @ X + bq, ok @ X + bk, ov @ X + bv; return v @ softmax_columns(q @ k.T)",
    ),
    ("self-attention", "attention", "no projections", "return (ov @ X + bv) @ softmax_columns(X.T @ X)"),
    (
        "self-attention",
        "scaled",
        "scale after the softmax",
        "q, k, v = oq @ X + bq, ok @ X + bk, ov @ X + bv; return v @ softmax_columns(k.T @ q) / len(q) ** 0.5",
    ),
    (
        "self-attention",
        "scaled",
        "scale by the width itself",
        "c = len(oq) ** 0.5; q, k = (oq @ X + bq) / c, (ok @ X + bk) / c; "
        "return (ov @ X + bv) @ softmax_columns(k.T @ q)",
    ),
    (
        "self-attention",
        "scaled",
        "keys instead of values",
        "q, k = oq @ X + bq, ok @ X + bk; return k @ softmax_columns(k.T @ q / len(q) ** 0.5)",
    ),
    (
        "two-heads",
        "stacked",
        "heads averaged",
        "return np.mean([attend_head(X, first), attend_head(X, second)], axis=0)",
    ),
    (
        "two-heads",
        "stacked",
        "row form instead of column form",
        "return np.hstack([attend_head(X, first).T, attend_head(X, second).T])",
    ),
    (
        "two-heads",
        "projected",
        "output projection on the wrong side",
        "return two_heads(X, first, second) @ omega_c",
    ),
    ("two-heads", "split", "axes in another order", "return Q.reshape(-1, heads, Q.shape[1])"),
    (
        "byte-pairs",
        "count",
        "order of the pair ignored",
        "c = {}\nfor w, n in words.items():\n    for p in zip(w, w[1:]):\n        p = tuple(sorted(p))\n"
        "        c[p] = c.get(p, 0) + n\nreturn c",
    ),
    (
        "byte-pairs",
        "tokenise",
        "text instead of tokens",
        "s = tuple(word)\nfor m in merges:\n    s = merge(s, m)\nreturn ' '.join(s)",
    ),
    ("decoding", "sample", "nearest sum", "return int(np.argmin(abs(np.cumsum(probabilities) - draw)))"),
    (
        "decoding",
        "top-k",
        "likeliest removed",
        "p = probabilities.copy(); p[np.argsort(p)[::-1][:k]] = 0; return p / p.sum()",
    ),
    (
        "decoding",
        "beam",
        "unlikeliest kept",
        "kept = [([start], 0.0)]\nfor _ in range(length):\n"
        "    kept = sorted([(t + [i], s + np.log(p)) for t, s in kept for i, p in enumerate(step(t)) if p],\n"
        "                  key=lambda x: x[1])[:beams]\nreturn kept[0]",
    ),
    (
        "vit",
        "attention",
        "softmax over the heads",
        "q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))\n"
        "a = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=1)\nreturn self.out((a @ v).transpose(1, 2).flatten(2))",
    ),
    (
        "vit",
        "attention",
        "keys instead of values",
        "q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))\n"
        "a = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)\nreturn self.out((a @ k).transpose(1, 2).flatten(2))",
    ),
    (
        "vit",
        "attention",
        "one head",
        "q, k, v = self.query(x), self.key(x), self.value(x)\n"
        "return self.out(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v)",
    ),
    (
        "vit",
        "block",
        "parallel parts",
        "a = self.attention(self.attention_norm(x))\n"
        "return x + a + self.down(nn.functional.gelu(self.up(self.feedforward_norm(x))))",
    ),
    (
        "vit",
        "vit",
        "head on every token",
        "p = self.patches(images)\nx = torch.cat([self.class_token.repeat(len(p), 1, 1), p], 1) + self.positions\n"
        "return self.head(self.norm(self.blocks(x)))",
    ),
    (
        "self-attention",
        "softmax",
        "divided by the length",
        "e = np.exp(scores)\nreturn e / (e**2).sum(0) ** 0.5",
    ),
    ("self-attention", "softmax", "logarithm of the weights", "return scores - np.log(np.exp(scores).sum(0))"),
    (
        "self-attention",
        "softmax",
        "all weight on the largest score",
        "w = np.zeros_like(scores)\nw[scores.argmax(0), range(scores.shape[1])] = 1\nreturn w",
    ),
    ("self-attention", "softmax", "sigmoid instead of softmax", "return np.exp(scores) / (np.exp(scores) + 1)"),
    (
        "self-attention",
        "attention",
        "queries instead of keys",
        "q = oq @ X + bq\nreturn (ov @ X + bv) @ softmax_columns(q.T @ q)",
    ),
    (
        "byte-pairs",
        "count",
        "text instead of pairs",
        "c = {}\nfor w, n in words.items():\n    for a, b in zip(w, w[1:]):\n"
        "        c[a + b] = c.get(a + b, 0) + n\nreturn c",
    ),
    (
        "byte-pairs",
        "merge",
        "last symbol lost",
        "out, i = (), 0\nwhile i + 1 < len(symbols):\n    found = (symbols[i], symbols[i + 1]) == pair\n"
        "    out += (''.join(pair) if found else symbols[i],)\n    i += 1 + found\nreturn out",
    ),
    ("byte-pairs", "tokenise", "no merge applied", "return [*word]"),
    (
        "decoding",
        "nucleus",
        "mass used as a threshold",
        "p = np.where(probabilities < mass, 0, probabilities)\nreturn p / p.sum()",
    ),
    (
        "vit",
        "attention",
        "causal mask",
        "q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))\n"
        "a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "return self.out(a.transpose(1, 2).flatten(2))",
    ),
    (
        "vit",
        "vit",
        "softmax of the logits",
        "p = self.patches(images)\nx = torch.cat([self.class_token.repeat(len(p), 1, 1), p], 1) + self.positions\n"
        "return torch.softmax(self.head(self.norm(self.blocks(x))[:, 0]), 1)",
    ),
]
ARGUMENTS = {"attention": "X, oq, ok, ov, bq, bk, bv", "scaled": "X, oq, ok, ov, bq, bk, bv"}


def find_name(set_name: str, name: str, body: str) -> str | None:
    """The mistake that is named for an answer with this body."""
    exercise_set = EXERCISE_SETS[set_name]
    exercise = exercise_set[name]
    space: dict[str, Any] = {"__name__": "student"}
    for part in (exercise_set.setup_code, *(each.source for each in exercise_set.exercises)):
        exec(part, space)
    if set_name == "vit":
        (_, argument) = inspect.signature(exercise.solution.forward).parameters
        start = f"class Answer({exercise.function_name}):\n    def forward(self, {argument}):\n"
        exec(start + textwrap.indent(body, "        "), space)
    else:
        arguments = ARGUMENTS.get(name) or ", ".join(inspect.signature(exercise.solution).parameters)
        exec(f"def Answer({arguments}):\n" + textwrap.indent(body, "    "), space)
    found = grade(set_name, name, space["Answer"])
    assert not found.correct
    return found.mistake


@pytest.mark.parametrize(("set_name", "name", "mistake", "body"), WRONG, ids=lambda each: str(each)[:25])
def test_a_wrong_solution_is_named(set_name: str, name: str, mistake: str, body: str) -> None:
    assert find_name(set_name, name, body) == mistake


def test_there_are_forty_one_wrong_solutions() -> None:
    assert len({body for *_, body in WRONG}) == 41


def test_an_unknown_mistake_is_not_named() -> None:
    assert find_name("self-attention", "softmax", "return scores * 3 + 1") is None
    assert find_name("self-attention", "attention", "return X @ missing") == "error"
