"""`regard count`: what a model costs, by torch's own counters and without running it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from regard.cli.output import show, show_json

if TYPE_CHECKING:
    from regard.models.count import Count


def command(
    name: Annotated[str, typer.Argument(help="A preset such as gpt2, or the folder of a saved model")],
    length: Annotated[
        int | None, typer.Option(help="Positions, frames or pixels a side; the model's own unless given")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences or images at once")] = 1,
    json: Annotated[bool, typer.Option("--json", help="The counts as JSON")] = False,
) -> None:
    """Count what a model costs: parameters, work and memory."""
    from regard.models.count import count
    from regard.models.presets import PRESETS
    from regard.models.saving import load_config

    config = load_config(name) if Path(name).exists() else PRESETS[name]
    counted = count(config, batch=batch, length=length)
    if json:
        show_json({"model": name, **asdict(counted), "total_parameters": counted.total})
    else:
        show(table(name, counted))


def table(name: str, counted: "Count") -> Table:
    """The counts, one a line."""
    of = f"batch {counted.batch}" + (f", length {counted.length:,}" if counted.length is not None else "")
    lines = Table("", "", title=f"{name}, {of}", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    lines.columns[1].justify = "right"
    for part, size in counted.parameters.items():
        lines.add_row(part, f"{size:,}")
    lines.add_row("parameters", f"{counted.total:,}", style="bold", end_section=True)
    lines.add_row("multiply-adds of a forward pass", f"{counted.multiply_adds:,}")
    lines.add_row("attention entries", f"{counted.attention_entries:,}")
    lines.add_row("bytes in the cache afterwards", f"{counted.cache_bytes:,}")
    lines.add_row("bytes kept for the backward pass", f"{counted.activation_bytes:,}")
    return lines
