"""`regard plan`: predict the memory of a recipe's run before it runs."""

import math
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from regard.base.errors import ConfigError
from regard.cli.output import JsonOption, show, show_json
from regard.cli.train import Changes, Data, Parallel, Variant, build_settings

if TYPE_CHECKING:
    from regard.train.memory import MemoryPrediction

GIB = 1 << 30


DeviceType = StrEnum("DeviceType", ["cpu", "cuda"])


def command(
    name: Annotated[str, typer.Argument(metavar="recipe", help="Name of a recipe")],
    data: Data = None,
    variant: Variant = None,
    settings: Changes = None,
    devices: Annotated[int, typer.Option(help="Number of devices")] = 1,
    parallel: Annotated[Parallel, typer.Option(help="ddp: model copies; fsdp: shards")] = Parallel.ddp,
    device: Annotated[
        DeviceType | None, typer.Option(help="Type of the devices [default: a GPU if there is one]")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of one device [default: the GPU of this machine]")] = None,
    json: JsonOption = False,
) -> None:
    """Predict the memory of a run on each device. A few small steps run on the CPU. Exit code 1: the run does not fit.

    Example: regard plan language --devices 2 --memory 24
    """
    import torch

    from regard.recipes.recipe import RunLocation, get_recipe
    from regard.train.memory import measure_step_memory, predict_memory

    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--memory must be a number of GiB above 0, not {memory:g}")
    recipe = get_recipe(name)
    complete = build_settings(recipe, data, variant, settings or [])
    has_gpu = torch.cuda.is_available()
    gpu = has_gpu if device is None else device is DeviceType.cuda
    limit = None if memory is None else round(memory * GIB)
    if limit is None and gpu and has_gpu:
        limit = torch.cuda.get_device_properties(0).total_memory
    start = recipe.module.prepare(complete, RunLocation(data=data))
    predictions = {
        phase.name: predict_memory(
            measure_step_memory(start.model, phase.task, phase.plan, gpu=gpu), phase.plan,
            devices=devices, parallel=parallel.value, limit=limit,
        )
        for phase in start.phases
    }  # fmt: skip
    if json:
        show_json({"recipe": name, "phases": {phase: as_json(each) for phase, each in predictions.items()}})
    else:
        for phase, each in predictions.items():
            show(as_table(f"{name}, {phase}", each, "GPU" if gpu else "CPU"))
    if not all(each.fits for each in predictions.values()):
        raise typer.Exit(1)


def as_json(prediction: "MemoryPrediction") -> dict[str, Any]:
    more = {"total_bytes": prediction.memory.total, "max_batch_size": prediction.max_batch_size}
    return {**asdict(prediction), **more, "fits": prediction.fits}


def as_table(title: str, prediction: "MemoryPrediction", device: str) -> Table:
    """Format a memory prediction as a table with one number per row."""
    from regard.core.kernels import format_bytes

    table = Table("", "", "", title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.columns[1].justify = "right"
    several = {"ddp": "DDP: the whole model on each", "fsdp": "FSDP: a shard of each parameter on each"}
    table.add_row(
        "devices", f"{prediction.devices} x {device}", several[prediction.parallel] if prediction.devices > 1 else ""
    )
    at_once = f"{prediction.micro_batch:,} samples at once on each device"
    table.add_row("batch size", f"{prediction.batch_size:,}", at_once)
    table.add_row("precision", prediction.precision, "", end_section=True)
    memory, limit = prediction.memory, prediction.limit
    table.add_row("parameters", format_bytes(memory.parameters), f"{prediction.parameters:,} of them")
    for part in ("optimizer", "averaging", "data"):
        table.add_row(part, format_bytes(getattr(memory, part)), "")
    table.add_row("peak of a step", format_bytes(memory.step_peak), "includes:")
    table.add_row("  activations", format_bytes(memory.activations), "")
    table.add_row("  gradients", format_bytes(memory.gradients), "")
    verdict = "" if limit is None else f"of {format_bytes(limit)}: {'fits' if prediction.fits else 'does not fit'}"
    table.add_row("memory of a device", format_bytes(memory.total), verdict, style="bold")
    if prediction.max_batch_size is not None:
        table.add_row("largest batch size", f"{prediction.max_batch_size:,}", "that fits")
    for advice in prediction.advice:
        table.add_row("", "", f"would fit: {advice}")
    return table
