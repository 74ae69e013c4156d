"""`regard look`: where a model looks, in the terminal, on a page and as a picture."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError
from regard.cli.generate import read_prompt
from regard.cli.looking.inputs import ModelQuestion, Opened, asked_of, opened
from regard.cli.looking.relevance import owed
from regard.cli.looking.terminal import show_report
from regard.cli.output import PictureOption, check_folder, check_picture, save_picture, show_json, tell, write_file

if TYPE_CHECKING:
    from regard.see.heads import HeadTable
    from regard.see.report import AttentionReport


def command(
    model: Annotated[str, typer.Argument(help="A preset such as gpt2 or vit-ti/16, or the folder of a saved model")],
    given: Annotated[
        str, typer.Argument(metavar="TEXT|IMAGE", help="The text to read (- is stdin), or the image file to look at")
    ],
    target: Annotated[str | None, typer.Option(help="What an encoder-decoder has written so far")] = None,
    sort: Annotated[
        str, typer.Option(help="Order the heads by entropy, spread, distance, previous, first, induction or layer")
    ] = "spread",
    most: Annotated[int, typer.Option(help="Maximum number of heads to print", min=1)] = 12,
    layer: Annotated[str | None, typer.Option(help="Draw this layer, by name or number; else the sharpest")] = None,
    head: Annotated[int | None, typer.Option(help="Draw this head; else the sharpest")] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="Keep only these modules, such as 'blocks.3*'; may be given again")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="Keep only these queries: numbers and ranges, as 0,5,8:12,-1")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML report that needs no network")] = None,
    picture: PictureOption = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; the folder's own unless given, else bytes")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run, such as cuda")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="The heads and what was chosen as JSON")] = False,
) -> None:
    """See where a model looks: its heads, maps and relevance."""
    check_folder(html)
    check_picture(picture)
    kept = numbers(rows)
    from regard.see.heads import check_column

    check_column(sort)  # before the model runs, which may take long
    subject = opened(model, device)
    question = asked_of(subject, read_prompt(given), target, tokenizer, device)
    if subject.random:
        tell(f"{model} is a preset: its weights are random, and so is where it looks; a saved folder has learned ones")
    tell(f"running {model} on {question.size}")
    report = told(subject, question, sort=sort, layer=layer, head=head, layers=layers, rows=kept)
    # files first: whoever reads the terminal's part may stop reading
    if html is not None:
        from regard.see.report_html import render_report

        write_file(html, lambda: html.write_bytes(render_report(report).encode("utf-8", "replace")))
    if picture is not None:
        from regard.see.report_figure import draw_report

        save_picture(draw_report(report), picture)
    if json:
        show_json(finite(as_json(report)))
    else:
        show_report(report, most)


def numbers(text: str | None) -> list[int] | None:
    """The numbers that a list such as 0,5,8:12,-1 names."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        start, colon, stop = part.partition(":")
        try:
            found += range(int(start), int(stop)) if colon else [int(start)]
        except ValueError:
            raise ConfigError(f"--rows takes numbers and ranges such as 0,5,8:12,-1, not {part!r}") from None
    if not found:
        raise ConfigError(f"--rows {text} names no row; give numbers and ranges such as 0,5,8:12,-1")
    return found


def told(
    subject: Opened,
    question: ModelQuestion,
    *,
    sort: str,
    layer: str | None,
    head: int | None,
    layers: list[str] | None,
    rows: list[int] | None,
) -> "AttentionReport":
    """One pass under watch, and all that is told of it."""
    import torch

    from regard.see.report import AttentionReport, build_labelled_table, choose_head, rank_code, rank_heads, table_code
    from regard.see.watch import watch

    limits = {name: value for name, value in (("layers", layers), ("rows", rows)) if value}
    with torch.no_grad(), watch(subject.model, layers=layers or None, rows=rows) as seen:
        subject.run(question.inputs)
    if not seen:
        raise ConfigError(
            f"{subject.name} ran, but no attention was seen: what mixes its positions has no weights to look at"
            if not layers
            else f"no attention was seen in --layers {' '.join(layers)}; leave it out to see which layers attend"
        )
    sides = {name: question.sides(record) for name, record in seen.items()}
    table = build_labelled_table(seen, sides)
    ordered = rank_heads(table, sort)
    picked = choose_head(seen, table, layer, head)
    due = owed(subject, seen, sides, table, picked, whole=not limits)
    broken = not_numbers(table)
    kept = "".join(f", {name}={value!r}" for name, value in limits.items())
    setup = [
        "import torch",
        subject.imports,
        *question.imports,
        "from regard.see.watch import watch\n",
        subject.code,
        question.code,
        f"with torch.no_grad(), watch(model{kept}) as seen:",
        f"    {question.call}",
    ]
    left_out = tuple(f"Left out {count}: {reason}." for reason, count in seen.left_out.items())
    return AttentionReport(
        title=subject.name,
        facts={
            "model": f"{type(subject.model).__name__}, {subject.size:,} parameters",
            "weights": subject.weights,
            "given": question.size,
        },
        asked=question.asked,
        setup="\n".join(setup),
        seen=seen,
        sides=sides,
        table=ordered,
        table_code=f"{table_code(seen, sides)}\nprint({rank_code(sort)})",
        layer=picked.layer,
        head=picked.head,
        relevance=due.relevance,
        overlays=due.overlays,
        image=question.pixels,
        notes=(*broken, *question.notes, *due.notes, *left_out),
    )


def not_numbers(table: "HeadTable") -> tuple[str, ...]:
    """What to say of heads whose scores are NaN or inf."""
    if not table.broken:
        return ()
    first, count = table.broken[0], len(table.broken)
    return (
        f"NaN: {count} of {len(table)} heads have scores that are NaN or inf, first {first.layer}, head {first.head}; "
        "their numbers tell nothing.",
    )


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON has neither."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(report: "AttentionReport") -> dict[str, Any]:
    """The report as plain values."""
    sides = report.sides[report.layer]
    return {
        "model": report.title,
        **{name: value for name, value in report.facts.items() if name != "model"},
        "asked": report.asked,
        "heads": [asdict(head) for head in report.table],
        "chosen": {
            "layer": report.layer,
            "head": report.head,
            "queries": list(sides.queries.labels),
            "keys": list(sides.keys.labels),
            "map": report.chosen_map().tolist(),
        },
        "relevance": [
            {"title": each.title, "labels": list(each.words.labels), "values": each.values.tolist()}
            for each in report.relevance
        ],
        "overlays": [{"title": each.title, "values": each.values.tolist()} for each in report.overlays],
        "notes": list(report.notes),
        "code": report.setup,
    }
