"""`regard tour`: attention in a terminal, for someone who meets it first. Every number is computed there."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from regard.cli.explain import account, as_plain, blank
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
class Worked:
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
    attended: "Tensor"  # what regard.attend makes of q, k and v

    @property
    def difference(self) -> float:
        return float((self.output - self.attended).abs().max())


def command(json: Annotated[bool, typer.Option("--json", help="The numbers of the tour")] = False) -> None:
    """Attention by hand, the masks, the kernels: begin here."""
    worked = work()
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
                "kernels": [{"asked": asked, **as_plain(answer)} for asked, _, answer in calls],
            }
        )
        return
    show(
        three_tokens(worked),
        *chapter("2. Who may look at whom: masks", "Rows are queries, columns are keys, a filled cell is visible."),
        gallery(shown, summaries),
        *chapter("3. Who does the work: kernels", "A kernel computes exactly what was asked or refuses and says why."),
        *kernels(calls),
        *chapter("4. What to try next", "Each line is a command to copy."),
        Text(NEXT),
    )


def work() -> Worked:
    """Every step of attention written as what it is, and regard.attend beside it."""
    import torch

    import regard

    inputs, w_q, w_k, w_v = (torch.tensor(rows, dtype=torch.float64) for rows in (INPUTS, W_Q, W_K, W_V))
    q, k, v = inputs @ w_q, inputs @ w_k, inputs @ w_v
    scores = q @ k.T
    scaled = scores / q.shape[1] ** 0.5
    weights = scaled.exp() / scaled.exp().sum(1, keepdim=True)
    attended = regard.attend(q[None, None], k[None, None], v[None, None])[0, 0]
    return Worked(inputs, w_q, w_k, w_v, q, k, v, scores, scaled, weights, weights @ v, attended)


def chapter(title: str, words: str) -> tuple[RenderableType, ...]:
    return "", Rule(title, align="left", characters="-"), Text(words), ""


def three_tokens(worked: Worked) -> RenderableType:
    """The first chapter: seven steps, each with its sentence, its matrices and one entry worked out."""
    w = worked
    root = f"{w.q.shape[1]} ** 0.5"
    exps = [f"exp({number(x)})" for x in w.scaled[0].tolist()]
    steps = [
        (
            "Q = I W_Q",
            "Each row of I is a token. Its query says what the token is looking for.",
            beside(matrix("I", w.inputs), "x", matrix("W_Q", w.w_q), "=", matrix("Q", w.q)),
            product("Q", w.inputs[0], w.w_q[:, 0], w.q[0, 0]),
        ),
        (
            "K = I W_K",
            "Its key says what the token can be found by.",
            beside(matrix("I", w.inputs), "x", matrix("W_K", w.w_k), "=", matrix("K", w.k)),
            product("K", w.inputs[0], w.w_k[:, 0], w.k[0, 0]),
        ),
        (
            "V = I W_V",
            "Its value is what the token hands over to whoever looks at it.",
            beside(matrix("I", w.inputs), "x", matrix("W_V", w.w_v), "=", matrix("V", w.v)),
            product("V", w.inputs[0], w.w_v[:, 0], w.v[0, 0]),
        ),
        (
            "scores = Q K^T",
            "Row i, column j: how well query i fits key j, one dot product for every pair.",
            beside(matrix("Q", w.q), "x", matrix("K^T", w.k.T), "=", matrix("scores", w.scores)),
            product("scores", w.q[0], w.k[0], w.scores[0, 0]),
        ),
        (
            f"scaled = scores / {root}",
            "Dot products grow with the width of the vectors, so they are divided by its root. "
            "In regard that is beta = c ** -0.5, here c = 2.",
            matrix("scaled", w.scaled),
            f"scaled[0, 0] = {number(w.scores[0, 0])} / {root} = {number(w.scaled[0, 0])}",
        ),
        (
            "weights = softargmax(scaled), row by row",
            "Each row becomes shares: none is negative, and together they are 1. A better fit takes a larger share.",
            matrix("weights", w.weights),
            f"weights[0, 0] = {exps[0]} / ({' + '.join(exps)}) = {number(w.weights[0, 0])}",
        ),
        (
            "output = weights V",
            "Each token takes that share of every value: a weighted mean of what it looked at.",
            beside(matrix("weights", w.weights), "x", matrix("V", w.v), "=", matrix("output", w.output)),
            product("output", w.weights[0], w.v[:, 0], w.output[0, 0]),
        ),
    ]
    parts: list[RenderableType] = [
        Rule("1. Attention on three tokens, by hand", align="left", characters="-"),
        Text("Three tokens of four numbers each look at one another. Everything was computed just now."),
    ]
    for place, (title, sentence, picture, entry) in enumerate(steps):
        lines = Text("\n".join(picture), no_wrap=True)
        parts += ["", Text(f"({'abcdefg'[place]}) {title}", style="bold"), Text(sentence)]
        parts += [Padding(lines, (0, 0, 0, 4)), Padding(Text(entry, style="dim"), (0, 0, 0, 4))]
    parts += [
        "",
        Text("The same in one call: regard.attend(q, k, v)", style="bold"),
        Text(f"Largest difference from the steps above: {w.difference:.1e}."),
    ]
    return Group(*parts)


def number(value: "Tensor | float", digits: int | None = None) -> str:
    """A number as short as it is exact, with four digits after the point at most."""
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


def beside(*pieces: list[str] | str) -> list[str]:
    """Pictures and the signs between them, side by side; a sign stands at the second row."""
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
    """Calls that each tell something about the kernels: how it is written, why it is asked, the answer."""
    import regard
    from regard import causal, softcap, window

    x, long = blank((1, 8, 1024, 64)), blank((1, 8, 8192, 64))
    local = causal() & window(before=255)
    return [
        (
            "attend(q, k, v)",
            "Everything is visible: nothing can be skipped, and a fused kernel needs no matrix.",
            regard.explain(x, x, x),
        ),
        (
            "attend(q, k, v, mask=causal() & window(before=255))",
            "Long, and most pairs are hidden: whole blocks of them need not be computed.",
            regard.explain(long, long, long, mask=local),
        ),
        (
            "attend(q, k, v, mask=causal(), scores=softcap(30))",
            "The scores are bent by a tanh, which is more than adding something to them.",
            regard.explain(x, x, x, mask=causal(), scores=softcap(30)),
        ),
        (
            "attend(q, k, v, beta=inf)",
            "Hard attention: only the best key counts, which is no softmax any more.",
            regard.explain(x, x, x, beta=float("inf")),
        ),
        (
            "attend(q, k, v, mask=causal(), dropout=0.1)",
            "A tenth of the weights is dropped at random, in training.",
            regard.explain(x, x, x, mask=causal(), dropout=0.1),
        ),
    ]


def kernels(calls: "list[tuple[str, str, Explanation]]") -> list[RenderableType]:
    """The third chapter: each call with the answers of all kernels."""
    parts: list[RenderableType] = []
    for asked, why, answer in calls:
        parts += [Text(asked, style="bold"), Text(why), Padding(account(answer), (0, 0, 1, 2))]
    return parts
