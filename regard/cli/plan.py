"""`regard plan`: what a recipe's run will take, in memory and in time, before it runs."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from regard.base.errors import ConfigError
from regard.cli.output import show, show_json
from regard.cli.train import Changes, Data, Form, Json, Parallel, completed

if TYPE_CHECKING:
    from regard.train.cost_model import Prediction
    from regard.train.machine_rates import Rates


def command(
    name: Annotated[str, typer.Argument(help="A recipe")],
    data: Data = None,
    form: Form = None,
    settings: Changes = None,
    devices: Annotated[int, typer.Option(help="How many share the run")] = 1,
    memory: Annotated[
        float | None, typer.Option(help="GiB of one device; that of the machine, where it is known")
    ] = None,
    parallel: Annotated[Parallel, typer.Option(help="Every device has all weights, or a piece")] = Parallel.data,
    machine: Annotated[str, typer.Option(help="Its rates: h200, h100, a100, cpu, or those measured here")] = "measured",
    json: Json = False,
) -> None:
    """Predict memory and time of a recipe's run. Exit code 1 if it does not fit.

    One step is run on a few records, on the CPU, and counted; rates of the machine turn counts into seconds.
    """
    from regard.recipes.recipe import RunLocation, get_recipe
    from regard.train.cost_model import predict_memory
    from regard.train.machine_rates import GIB, machine as rates_of
    from regard.train.step_cost import count_step

    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--memory is a number of GiB above 0, not {memory:g}")
    chosen = get_recipe(name)
    complete = completed(chosen, data, form, settings or [])
    rates = rates_of(machine)
    limit = None if memory is None else round(memory * GIB)
    start = chosen.module.start(complete, RunLocation(data=data))
    found = {
        phase.name: predict_memory(
            count_step(start.model, phase.task, phase.plan, gpu=rates.gpu), phase.plan, rates,
            devices=devices, parallel=parallel.value, limit=limit,
        )
        for phase in start.phases
    }  # fmt: skip
    if json:
        phases = {phase: as_json(each) for phase, each in found.items()}
        show_json({"recipe": name, "rates": asdict(rates), "phases": phases})
    else:
        for phase, each in found.items():
            show(table(f"{name}, {phase}", each, rates))
    if not all(each.fits for each in found.values()):
        raise typer.Exit(1)


def as_json(told: "Prediction") -> dict[str, Any]:
    more = {"total_bytes": told.memory.total, "fits": told.fits, "run_seconds": told.run_seconds}
    return {**asdict(told), **more}


def table(title: str, told: "Prediction", rates: "Rates") -> Table:
    """The prediction, one number a line."""
    from regard.core.kernels import format_bytes

    lines = Table("", "", "", title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    lines.columns[1].justify = "right"
    shared = {"data": "all weights on each", "sharded": "a piece of each weight on each"}[told.parallel]
    lines.add_row("devices", f"{told.devices} x {told.machine}", shared if told.devices > 1 else "")
    lines.add_row("batch", f"{told.batch:,}", f"{told.at_once:,} records at once on each device")
    lines.add_row("precision", told.precision, "compiled" if told.compiled else "", end_section=True)
    memory = told.memory
    lines.add_row("parameters", format_bytes(memory.parameters), f"{told.parameters:,} of them")
    for part in ("optimizer", "averaging", "data"):
        lines.add_row(part, format_bytes(getattr(memory, part)), "")
    lines.add_row("a step at its peak", format_bytes(memory.passing), "where these meet:")
    lines.add_row("  activations", format_bytes(memory.activations), "")
    lines.add_row("  gradients", format_bytes(memory.gradients), "")
    verdict = "" if told.limit is None else f"of {format_bytes(told.limit)}: {'fits' if told.fits else 'does not fit'}"
    lines.add_row("memory of a device", format_bytes(memory.total), verdict, style="bold")
    if told.largest is not None:
        lines.add_row("largest batch", f"{told.largest * told.devices * told.accumulate:,}", "that fits")
    for advice in told.advice:
        lines.add_row("", "", f"would fit: {advice}")
    lines.add_section()
    seconds = told.seconds
    for part, about in (
        ("arithmetic", f"{told.flops:.3g} operations"),
        ("traffic", "to memory and back"),
        ("launches", ""),
        ("communication", "some of it in the background" if told.devices > 1 else ""),
    ):
        lines.add_row(part, in_seconds(getattr(seconds, part)), about)
    lines.add_row("a step", in_seconds(seconds.step), "of each operation the longest", style="bold")
    lines.add_row(f"{told.steps:,} steps", in_seconds(told.run_seconds), "without evaluations")
    lines.caption = f"rates: {rates.source}"
    lines.caption_justify = "left"
    return lines


def in_seconds(value: float) -> str:
    """Seconds as people read them."""
    for unit, size, most in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if value < most:
            return f"{value / size:.3g} {unit}"
    return f"{value / 3600:.3g} h"
