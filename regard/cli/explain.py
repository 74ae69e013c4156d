"""`regard explain`: which kernel runs a call, why others refuse, and the cost of each."""

from dataclasses import asdict
from enum import StrEnum
from inspect import signature
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regard.base.axes import LEGEND
from regard.base.errors import ConfigError
from regard.cli.output import JsonOption, show, show_json

if TYPE_CHECKING:
    from torch import Tensor

    from regard.core.kernels import Explanation
    from regard.core.scores import ScoreTerm

Dtype = StrEnum("Dtype", ["float32", "float64", "float16", "bfloat16"])  # the dtypes that a call can have


def command(
    shape: Annotated[str, typer.Option(help="Sizes of q: b,h,i,c")] = "1,8,1024,64",
    kv: Annotated[str | None, typer.Option(help="Sizes of k and v: g,j,e [default: as q]")] = None,
    mask: Annotated[str, typer.Option(help="A mask expression, such as 'causal()'")] = "full()",
    scores: Annotated[
        list[str] | None,
        typer.Option(help="alibi, softcap:30, sink, shaw:8, t5_buckets:32 or additive; may be repeated"),
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Inverse temperature, inf for hard attention [default: c ** -0.5]")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="dtype of q, k and v")] = Dtype.float32,
    dropout: Annotated[float, typer.Option(help="Dropout probability")] = 0.0,
    json: JsonOption = False,
) -> None:
    """Show which attention kernel runs a call, and why.

    Example: regard explain --mask 'causal() & window(before=255)'
    """
    import regard
    from regard.core.masks.expression import parse_mask

    b, h, i, c = sizes("--shape", shape, "b h i c")
    g, j, e = (h, i, c) if kv is None else sizes("--kv", kv, "g j e")
    explanation = regard.explain(
        blank((b, h, i, c), dtype.value),
        blank((b, g, j, c), dtype.value),
        blank((b, g, j, e), dtype.value),
        mask=parse_mask(mask),
        scores=[term(text, h, i, j, c) for text in scores or ()],
        beta=beta,
        dropout=dropout,
    )
    if json:
        show_json(explanation_json(explanation))
    else:
        show(explanation_table(explanation))


def sizes(option: str, text: str, letters: str) -> tuple[int, ...]:
    """Parse sizes such as `1,8,1024,64`, one for each axis; raise ConfigError if the text has another form.

    option   name of the command-line option, for error messages
    letters  letters of the axes, separated by blanks, such as "b h i c"
    """
    names = letters.split()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != len(names) or min(found) < 0:
        spelled = ", ".join(f"{name} {LEGEND[name]}" for name in names)
        raise ConfigError(f"{option} takes {len(names)} whole numbers {','.join(names)} ({spelled}), not {text!r}")
    return found


def blank(shape: tuple[int, ...], dtype: str = "float32") -> "Tensor":
    """Return a tensor of zeros that takes no memory, because an explanation depends on shapes and dtypes only."""
    import torch

    return torch.zeros((), dtype=getattr(torch, dtype)).expand(shape)


def term(text: str, h: int, i: int, j: int, c: int) -> "ScoreTerm":
    """Build the score term that a text such as `alibi` or `softcap:30` describes.

    text  the name of the term, or the name, a colon and a number
    h     number of heads
    i, j  numbers of queries and keys
    c     width of a head
    """
    from regard.core.scores import EXAMPLES, Sizes

    name, _, setting = text.partition(":")
    make, given = EXAMPLES[name], Sizes(h, i, j, c, lambda *shape: blank(shape))
    if "number" not in signature(make).parameters:
        if setting:
            raise ConfigError(f"{name} takes no number: write {name}, not {name}:{setting}")
        return make(given)
    default = signature(make).parameters["number"].default
    try:
        number = float(setting) if setting else default
    except ValueError:
        number = -1
    if not 0 < number < 1 << 20:
        raise ConfigError(
            f"{name} takes a number above zero after its colon, for instance {name}:{default:g}, not {setting!r}"
        )
    return make(given, number)


def explanation_json(explanation: "Explanation") -> dict[str, object]:
    """Convert an explanation of the kernel choice to a JSON object.

    The work and memory of a kernel that refuses the call are None.
    """
    refused: dict[str, object] = {"work": None, "memory": None}
    answers = [asdict(answer) | ({} if answer.able else refused) for answer in explanation.answers]
    return asdict(explanation) | {"share": share(explanation), "answers": answers}


def share(explanation: "Explanation") -> float:
    """Return the fraction of query-key pairs that are visible under the mask."""
    return explanation.visible / explanation.pairs if explanation.pairs else 0.0


def explanation_table(explanation: "Explanation") -> RenderableType:
    """Format an explanation of the kernel choice as a table with one row per kernel."""
    from regard.core.kernels import format_bytes

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("kernel", no_wrap=True)
    table.add_column("answer", ratio=1)
    table.add_column("work", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for answer in explanation.answers:
        chosen = answer.kernel == explanation.chosen
        row = ["->" if chosen else "", answer.kernel]
        if answer.able:
            row += ["runs" if chosen else "could run", f"{answer.work:.3g}", format_bytes(answer.memory)]
        else:
            row += [f"refuses: {'; '.join(answer.reasons)}", "", ""]
        table.add_row(*(Text(cell) for cell in row), style="bold" if chosen else None)
    pairs = f"{explanation.visible:,} of {explanation.pairs:,} pairs visible ({100 * share(explanation):.3g}%)"
    return Group(Text(explanation.call), Text(f"mask {explanation.mask}: {pairs}"), table)
