"""`regard count`: parameters, multiply-adds and memory of a model, without running it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from regard.cli.output import JsonOption, show, show_json
from regard.cli.pretrained import is_untrained

if TYPE_CHECKING:
    from regard.models.count import Count


def command(
    name: Annotated[str, typer.Argument(metavar="model", help="A pretrained model, a folder or a preset")],
    length: Annotated[
        int | None, typer.Option(help="Positions, frames or pixels a side [default: the model's own]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences or images in the batch")] = 1,
    json: JsonOption = False,
) -> None:
    """Count the parameters, multiply-adds and memory of a model.

    Example: regard count gpt2 --length 512
    """
    from regard.models.count import count
    from regard.models.presets import PRESETS
    from regard.models.saving import load_config

    config = PRESETS[name] if is_untrained(name) else load_config(name)
    costs = count(config, batch=batch, length=length)
    if json:
        show_json({"model": name, **asdict(costs), "total_parameters": costs.total})
    else:
        show(make_table(name, costs))


def make_table(name: str, costs: "Count") -> Table:
    """Return a table with the parameter counts of each module, multiply-adds and memory, one on each line."""
    size = f"batch {costs.batch}" + (f", length {costs.length:,}" if costs.length is not None else "")
    table = Table("", "", title=f"{name}, {size}", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.columns[1].justify = "right"
    for module, parameters in costs.parameters.items():
        table.add_row(module, f"{parameters:,}")
    table.add_row("parameters", f"{costs.total:,}", style="bold", end_section=True)
    table.add_row("multiply-adds of a forward pass", f"{costs.multiply_adds:,}")
    table.add_row("attention entries", f"{costs.attention_entries:,}")
    table.add_row("bytes of the KV cache", f"{costs.cache_bytes:,}")
    table.add_row("bytes saved for the backward pass", f"{costs.activation_bytes:,}")
    return table
