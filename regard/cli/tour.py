"""`regard tour`: an introduction to attention in the terminal. Every number is computed when it runs."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from regard.cli.explain import blank, explanation_json, explanation_table
from regard.cli.expressions import parse_mask
from regard.cli.masks import examples, gallery, meaning, summary
from regard.cli.output import show, show_json

if TYPE_CHECKING:
    from torch import Tensor

    from regard.core.kernels import Explanation

INPUTS = [[1, -1, 0, 2], [0, -1, 2, 1], [-2, 2, -1, 0]]
W_Q = [[0, 1], [1, 0], [-1 / 2, 0], [1, 1]]
W_K = [[1, -1 / 2], [0, 1], [1 / 2, -1 / 2], [1, 1 / 2]]
W_V = [[1, 1 / 2], [-1 / 2, 0], [-1, 2], [1 / 2, -1]]
POSITIONS = 12

# one command a line; the tests run each of them
NEXT = """\
regard masks "causal() & window(before=3) | global_tokens(1)" --queries 24
regard masks "documents([0, 0, 0, 1, 1]) & causal()" --json
regard explain --shape 1,8,8192,64 --mask "causal() & window(before=255)"
regard explain --scores softcap:30 --mask "causal()"
regard --help"""


@dataclass(frozen=True)
class WorkedExample:
    """Attention on three tokens, step by step, in float64."""

    inputs: "Tensor"
    w_q: "Tensor"
    w_k: "Tensor"
    w_v: "Tensor"
    q: "Tensor"
    k: "Tensor"
    v: "Tensor"
    scores: "Tensor"
    scaled: "Tensor"
    weights: "Tensor"
    output: "Tensor"
    attended: "Tensor"  # regard.attend(q, k, v)

    @property
    def difference(self) -> float:
        return float((self.output - self.attended).abs().max())


def command(json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON")] = False) -> None:
    """Show attention by hand, the masks and the kernels. Start here."""
    worked = compute_example()
    names = examples(POSITIONS)
    shown = [parse_mask(text) for text in names.values()]
    summaries = [
        summary(mask, POSITIONS, POSITIONS, None, meaning(name)) for name, mask in zip(names, shown, strict=True)
    ]
    calls = explanations()
    if json:
        numbers = {field.name: getattr(worked, field.name).tolist() for field in fields(worked)}
        show_json(
            {
                "three_tokens": numbers | {"difference": worked.difference},
                "masks": [asdict(each) for each in summaries],
                "kernels": [{"code": code, **explanation_json(answer)} for code, _, answer in calls],
            }
        )
        return
    show(
        three_tokens(worked),
        *chapter("2. Masks: which keys a query sees", "Rows are queries, columns are keys, a filled cell is visible."),
        gallery(shown, summaries),
        *chapter(
            "3. Kernels: which code computes it", "A kernel computes the request exactly or refuses with its reasons."
        ),
        *kernels(calls),
        *chapter("4. Commands to try next", "Copy any of these lines."),
        Text(NEXT),
    )


def compute_example() -> WorkedExample:
    """Compute every step of attention, and regard.attend for comparison."""
    import torch

    import regard

    inputs, w_q, w_k, w_v = (torch.tensor(rows, dtype=torch.float64) for rows in (INPUTS, W_Q, W_K, W_V))
    q, k, v = inputs @ w_q, inputs @ w_k, inputs @ w_v
    scores = q @ k.T
    scaled = scores / q.shape[1] ** 0.5
    weights = scaled.exp() / scaled.exp().sum(1, keepdim=True)
    attended = regard.attend(q[None, None], k[None, None], v[None, None])[0, 0]
    return WorkedExample(inputs, w_q, w_k, w_v, q, k, v, scores, scaled, weights, weights @ v, attended)


def chapter(title: str, words: str) -> tuple[RenderableType, ...]:
    return "", Rule(title, align="left", characters="-"), Text(words), ""


def three_tokens(worked: WorkedExample) -> RenderableType:
    """The first chapter: seven steps, each with a sentence, its matrices and one entry computed by hand."""
    w = worked
    root = f"{w.q.shape[1]} ** 0.5"
    exps = [f"exp({number(x)})" for x in w.scaled[0].tolist()]
    steps = [
        (
            "Q = I W_Q",
            "Each row of I is a token. The query of a token is compared with all keys.",
            side_by_side(matrix("I", w.inputs), "x", matrix("W_Q", w.w_q), "=", matrix("Q", w.q)),
            product("Q", w.inputs[0], w.w_q[:, 0], w.q[0, 0]),
        ),
        (
            "K = I W_K",
            "The key of a token is what queries are compared with.",
            side_by_side(matrix("I", w.inputs), "x", matrix("W_K", w.w_k), "=", matrix("K", w.k)),
            product("K", w.inputs[0], w.w_k[:, 0], w.k[0, 0]),
        ),
        (
            "V = I W_V",
            "The value of a token is what it contributes to the output of others.",
            side_by_side(matrix("I", w.inputs), "x", matrix("W_V", w.w_v), "=", matrix("V", w.v)),
            product("V", w.inputs[0], w.w_v[:, 0], w.v[0, 0]),
        ),
        (
            "scores = Q K^T",
            "Row i, column j is the dot product of query i and key j. A larger score means a better match.",
            side_by_side(matrix("Q", w.q), "x", matrix("K^T", w.k.T), "=", matrix("scores", w.scores)),
            product("scores", w.q[0], w.k[0], w.scores[0, 0]),
        ),
        (
            f"scaled = scores / {root}",
            "Dot products grow with the width c of the vectors, so they are divided by its square root. "
            "In regard this factor is beta = c ** -0.5; here c = 2.",
            matrix("scaled", w.scaled),
            f"scaled[0, 0] = {number(w.scores[0, 0])} / {root} = {number(w.scaled[0, 0])}",
        ),
        (
            "weights = softargmax(scaled), row by row",
            "Each row becomes weights: none is negative, and they sum to 1. A larger score gives a larger weight.",
            matrix("weights", w.weights),
            f"weights[0, 0] = {exps[0]} / ({' + '.join(exps)}) = {number(w.weights[0, 0])}",
        ),
        (
            "output = weights V",
            "The output of a token is the mean of all values, weighted by its row of weights.",
            side_by_side(matrix("weights", w.weights), "x", matrix("V", w.v), "=", matrix("output", w.output)),
            product("output", w.weights[0], w.v[:, 0], w.output[0, 0]),
        ),
    ]
    parts: list[RenderableType] = [
        Rule("1. Attention on three tokens, by hand", align="left", characters="-"),
        Text("Three tokens with four numbers each attend to one another. All numbers are computed now."),
    ]
    for number_of_step, (title, sentence, picture, entry) in enumerate(steps):
        lines = Text("\n".join(picture), no_wrap=True)
        parts += ["", Text(f"({'abcdefg'[number_of_step]}) {title}", style="bold"), Text(sentence)]
        parts += [Padding(lines, (0, 0, 0, 4)), Padding(Text(entry, style="dim"), (0, 0, 0, 4))]
    parts += [
        "",
        Text("The same in one call: regard.attend(q, k, v)", style="bold"),
        Text(f"Largest difference from the steps above: {w.difference:.1e}."),
    ]
    return Group(*parts)


def number(value: "Tensor | float", digits: int | None = None) -> str:
    """Format a number with as few digits as are exact, at most four after the point."""
    value = float(value)
    return f"{value:.{_digits([value]) if digits is None else digits}f}"


def _digits(values: Iterable[float]) -> int:
    return max((next((d for d in range(4) if abs(x - round(x, d)) < 1e-9), 4) for x in values), default=0)


def matrix(name: str, values: "Tensor") -> list[str]:
    """Lines that show a matrix under its name."""
    digits = _digits(values.flatten().tolist())
    cells = [[number(x, digits) for x in row] for row in values.tolist()]
    width = max(len(cell) for row in cells for cell in row)
    rows = ["[ " + "  ".join(cell.rjust(width) for cell in row) + " ]" for row in cells]
    return [name.center(len(rows[0])), *rows]


def side_by_side(*pieces: list[str] | str) -> list[str]:
    """Place blocks of lines side by side; a sign between them is in the third line."""
    height = max(len(piece) for piece in pieces if not isinstance(piece, str))
    columns = [["", "", piece] if isinstance(piece, str) else piece for piece in pieces]
    widths = [max(len(line) for line in column) for column in columns]
    padded = [column + [""] * (height - len(column)) for column in columns]
    lines = zip(*padded, strict=True)
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def product(name: str, left: "Tensor", right: "Tensor", result: "Tensor") -> str:
    """The first entry of a matrix product, written out."""
    factors = zip(left.tolist(), right.tolist(), strict=True)
    terms = " + ".join(f"{_signed(a)}*{_signed(b)}" for a, b in factors)
    return f"{name}[0, 0] = {terms} = {number(result)}"


def _signed(value: float) -> str:
    return f"({number(value)})" if value < 0 else number(value)


def explanations() -> "list[tuple[str, str, Explanation]]":
    """Example calls for the chapter on kernels: the code, what it shows, and its explanation."""
    import regard
    from regard import causal, softcap, window

    x, long = blank((1, 8, 1024, 64)), blank((1, 8, 8192, 64))
    local = causal() & window(before=255)
    return [
        (
            "attend(q, k, v)",
            "Everything is visible: nothing can be skipped, and a fused kernel needs no matrix of scores.",
            regard.explain(x, x, x),
        ),
        (
            "attend(q, k, v, mask=causal() & window(before=255))",
            "A long sequence in which most pairs are hidden: whole blocks need not be computed.",
            regard.explain(long, long, long, mask=local),
        ),
        (
            "attend(q, k, v, mask=causal(), scores=softcap(30))",
            "A softcap applies tanh to the scores. torch's fused kernels can only add to them.",
            regard.explain(x, x, x, mask=causal(), scores=softcap(30)),
        ),
        (
            "attend(q, k, v, beta=inf)",
            "Hard attention: only the key with the largest score counts. This is not a softmax.",
            regard.explain(x, x, x, beta=float("inf")),
        ),
        (
            "attend(q, k, v, mask=causal(), dropout=0.1)",
            "In training, a tenth of the weights is set to zero at random.",
            regard.explain(x, x, x, mask=causal(), dropout=0.1),
        ),
    ]


def kernels(calls: "list[tuple[str, str, Explanation]]") -> list[RenderableType]:
    """The third chapter: each call with the explanation of all kernels."""
    parts: list[RenderableType] = []
    for code, why, answer in calls:
        parts += [Text(code, style="bold"), Text(why), Padding(explanation_table(answer), (0, 0, 1, 2))]
    return parts
