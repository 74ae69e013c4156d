"""`regard look`: the attention of a model in the terminal, as an HTML report and as a picture."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError
from regard.cli.generate import read_prompt
from regard.cli.help_panels import panel_option
from regard.cli.looking.inputs import ModelInput, build_input
from regard.cli.looking.models import LoadedModel, load_model
from regard.cli.looking.relevance import compute_relevance
from regard.cli.looking.terminal import show_report
from regard.cli.output import (
    JsonOption,
    PictureOption,
    check_folder,
    check_picture,
    print_message,
    save_picture,
    show_json,
    write_file,
)

if TYPE_CHECKING:
    from regard.see.heads import HeadTable
    from regard.see.report import AttentionReport

recording_option = panel_option("Input, recording, printing")


def command(
    model: Annotated[str, typer.Argument(help="A pretrained model, a folder or a preset")] = "induction-gpt",
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="input",
            help="A text (- is stdin) or an image [default: the model's example]",
        ),
    ] = None,
    target: Annotated[str | None, recording_option(help="The target text of an encoder-decoder")] = None,
    sort: Annotated[
        str, typer.Option(help="Sort heads by entropy, spread, distance, previous, first, induction or layer")
    ] = "spread",
    most: Annotated[int, recording_option(help="Maximum number of heads to print", min=1)] = 12,
    layer: Annotated[str | None, typer.Option(help="Layer to draw, by name or number [default: least spread]")] = None,
    head: Annotated[int | None, typer.Option(help="Head to draw [default: least spread]")] = None,
    layers: Annotated[
        list[str] | None, recording_option(help="Record only these modules, such as 'blocks.3*'; may be repeated")
    ] = None,
    rows: Annotated[
        str | None, recording_option(help="Record only these queries: indices and ranges, such as 0,5,8:12,-1")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page that works offline")] = None,
    picture: PictureOption = None,
    tokenizer: Annotated[
        Path | None, recording_option(help="A tokenizer.json [default: the folder's own, else bytes]")
    ] = None,
    device: Annotated[str, recording_option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    json: JsonOption = False,
) -> None:
    """Show the attention heads, maps and relevance of a model.

    Example: regard look text-gpt 'The for statement' --html page.html
    """
    check_folder(html)
    check_picture(picture)
    row_indices = parse_rows(rows)
    from regard.see.heads import check_column

    check_column(sort)  # report a wrong column before the model runs
    prompt = read_prompt(prompt, model, "text or image")
    loaded = load_model(model, device)
    inputs = build_input(loaded, prompt, target, tokenizer, device)
    if loaded.weights.startswith("random"):
        print_message(f"{model} is a preset with random weights, so its attention is random too")
    print_message(f"running {model} on {inputs.size}")
    report = build_report(loaded, inputs, sort=sort, layer=layer, head=head, layers=layers, rows=row_indices)
    # files first, because the reader of stdout, such as `head`, can close it early
    if html is not None:
        from regard.see.report_html import render_report

        write_file(html, lambda file: file.write_bytes(render_report(report).encode("utf-8", "replace")))
    if picture is not None:
        from regard.see.report_figure import draw_report

        save_picture(draw_report(report), picture)
    if json:
        show_json(replace_nonfinite(report_as_json(report)))
    else:
        show_report(report, most)


def parse_rows(text: str | None) -> list[int] | None:
    """Parse the value of `--rows`: indices and ranges such as 0,5,8:12,-1. None stays None."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        start, colon, stop = part.partition(":")
        try:
            found += range(int(start), int(stop)) if colon else [int(start)]
        except ValueError:
            raise ConfigError(f"--rows takes indices and ranges such as 0,5,8:12,-1, not {part!r}") from None
    if not found:
        raise ConfigError(f"--rows {text} selects no row; give indices and ranges such as 0,5,8:12,-1")
    return found


def build_report(
    loaded: LoadedModel,
    inputs: ModelInput,
    *,
    sort: str,
    layer: str | None,
    head: int | None,
    layers: list[str] | None,
    rows: list[int] | None,
) -> "AttentionReport":
    """Run the model once, record its attention with `watch`, and return the report.

    sort    column of the head table to sort by
    layer   layer to draw; None chooses the layer that has the head with the least spread
    head    head to draw; None chooses the head with the least spread
    layers  patterns of module names; only matching modules are recorded, or all if None
    rows    indices of queries; only these are recorded, or all if None
    """
    import torch

    from regard.see.report import AttentionReport, build_labelled_table, choose_head, rank_code, rank_heads, table_code
    from regard.see.watch import watch

    limits = {name: value for name, value in (("layers", layers), ("rows", rows)) if value}
    with torch.no_grad(), watch(loaded.model, layers=layers or None, rows=rows) as seen:
        loaded.run(inputs.inputs)
    if not seen:
        raise ConfigError(explain_empty(loaded.name, layers, seen.left_out))
    sides = {name: inputs.sides(record) for name, record in seen.items()}
    table = build_labelled_table(seen, sides)
    chosen = choose_head(seen, table, layer, head)
    relevance = compute_relevance(loaded, seen, sides, table, chosen, complete=not limits)
    options = "".join(f", {name}={value!r}" for name, value in limits.items())
    setup = [
        "import torch",
        loaded.imports,
        *inputs.imports,
        "from regard.see.watch import watch\n",
        loaded.code,
        inputs.code,
        f"with torch.no_grad(), watch(model{options}) as seen:",
        f"    {inputs.call}",
    ]
    left_out = tuple(f"Left out {count}: {reason}." for reason, count in seen.left_out.items())
    return AttentionReport(
        title=loaded.name,
        facts={
            "model": f"{type(loaded.model).__name__}, {sum(x.numel() for x in loaded.model.parameters()):,} parameters",
            "weights": loaded.weights,
            "input": inputs.size,
        },
        prompt=inputs.prompt,
        setup="\n".join(setup),
        seen=seen,
        sides=sides,
        table=rank_heads(table, sort),
        table_code=f"{table_code(seen, sides)}\nprint({rank_code(sort)})",
        layer=chosen.layer,
        head=chosen.head,
        relevance=relevance.relevance,
        overlays=relevance.overlays,
        image=inputs.pixels,
        notes=(*nan_notes(table), *inputs.notes, *relevance.notes, *left_out),
    )


def explain_empty(name: str, layers: list[str] | None, left_out: dict[str, int]) -> str:
    """Return an error message that says why no attention was recorded.

    layers    patterns of the modules to record, as given by the user
    left_out  number of attention calls that could not be recorded, by reason
    """
    if left_out:
        reasons = "; ".join(f"{reason} ({count} calls)" for reason, count in left_out.items())
        return f"{name} ran, but none of its attention calls could be recorded: {reasons}"
    if layers:
        return f"no attention was recorded in --layers {' '.join(layers)}; omit it to list the attention layers"
    return f"{name} ran, but no attention was recorded: it mixes positions without attention weights"


def nan_notes(table: "HeadTable") -> tuple[str, ...]:
    """Return a note for the report about heads with NaN or infinite scores; an empty tuple if there are none."""
    if not table.nonfinite:
        return ()
    first, count = table.nonfinite[0], len(table.nonfinite)
    return (
        f"NaN: {count} of {len(table)} heads have scores that are NaN or inf, first {first.layer}, head {first.head}; "
        "their statistics are NaN.",
    )


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON has neither."""
    if isinstance(value, dict):
        return {name: replace_nonfinite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_as_json(report: "AttentionReport") -> dict[str, Any]:
    """Convert an attention report to a JSON object."""
    sides = report.sides[report.layer]
    return {
        "model": report.title,
        **{name: value for name, value in report.facts.items() if name != "model"},
        "prompt": report.prompt,
        "heads": [asdict(head) for head in report.table],
        "chosen": {
            "layer": report.layer,
            "head": report.head,
            "queries": list(sides.queries.labels),
            "keys": list(sides.keys.labels),
            "map": report.chosen_map().values.tolist(),
        },
        "relevance": [
            {"title": each.title, "labels": list(each.words.labels), "values": each.values.tolist()}
            for each in report.relevance
        ],
        "overlays": [{"title": each.title, "values": each.values.tolist()} for each in report.overlays],
        "notes": list(report.notes),
        "code": report.setup,
    }
