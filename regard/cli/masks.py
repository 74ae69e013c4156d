"""`regard masks`: the gallery of masks, or one expression drawn and counted."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.columns import Columns
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.base.errors import ConfigError
from regard.cli.output import JsonOption, PictureOption, check_picture, save_picture, show, show_json

if TYPE_CHECKING:
    from regard.core.masks.algebra import Mask

LARGEST_DRAWN = 4096  # positions; a drawing looks at every pair
_MOST_BLOCKS = 1 << 22  # pairs of blocks in one table


@dataclass(frozen=True)
class BlockCounts:
    """Counts of the blocks of a mask, whose (query, key) matrix is divided into square blocks.

    size  number of positions along a side of a block
    none  number of blocks without a visible pair
    some  number of partly visible blocks
    all   number of blocks in which every pair is visible
    """

    size: int
    none: int
    some: int
    all: int


@dataclass(frozen=True)
class Summary:
    """The counts of a mask that `regard masks` prints.

    mask       the mask as an expression
    meaning    a sentence on what the mask means; None if there is none
    queries    number of queries
    keys       number of keys
    sequences  number of sequences in the batch; 1 if the mask is the same for every sequence
    visible    number of visible query-key pairs, over all sequences
    pairs      number of query-key pairs, over all sequences
    share      fraction of pairs that are visible
    blocks     counts of the blocks
    """

    mask: str
    meaning: str | None
    queries: int
    keys: int
    sequences: int
    visible: int
    pairs: int
    share: float
    blocks: BlockCounts


def command(
    expression: Annotated[
        str | None, typer.Argument(help="A mask expression, such as 'causal() & window(before=3)' [default: all forms]")
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Number of query positions [default: 16, or 12 in the gallery]")
    ] = None,
    keys: Annotated[
        int | None, typer.Option(min=1, help="Number of key positions [default: the number of queries]")
    ] = None,
    json: JsonOption = False,
    picture: PictureOption = None,
) -> None:
    """Draw and count masks: all mask forms, or one expression.

    Example: regard masks 'causal() & window(before=2)' --queries 8
    """
    from regard.core.masks.expression import parse_mask

    check_picture(picture)
    if expression is None:
        if keys is not None:
            raise ConfigError("--keys goes with an expression; the gallery has as many keys as queries")
        queries = keys = queries or 12
        shown, summaries = summarize_forms(queries)
    else:
        mask = parse_mask(expression)
        queries = queries or mask.length() or 16
        keys = keys or queries
        shown, summaries = [mask], [summary(mask, queries, keys)]
    if json:
        values = [asdict(each) for each in summaries]
        show_json(values if expression is None else values[0])
    elif expression is None:
        show(gallery(shown, summaries))
    else:
        show(Text(summaries[0].mask, style="bold"), "", drawing_or_reason(mask, queries, keys), "", facts(summaries[0]))
    if picture:
        save_masks(picture, shown, queries, keys)


def summarize_forms(size: int) -> "tuple[list[Mask], list[Summary]]":
    """Return an example of each form of mask, such as `causal()`, and the counts of each example.

    size  number of queries and of keys
    """
    from regard.core.masks import forms
    from regard.core.masks.expression import makers, parse_mask

    shown = {name: parse_mask(forms.examples(name, size)[0]) for name in forms.FORMS}
    meanings = {name: (makers()[name].__doc__ or "").splitlines()[0] for name in shown}
    return [*shown.values()], [summary(mask, size, size, meanings[name]) for name, mask in shown.items()]


def summary(mask: "Mask", queries: int, keys: int, meant: str | None = None) -> Summary:
    """Count the visible pairs and blocks of a mask without building its (query, key) matrix.

    meant  a sentence on what the mask means
    """
    sequences = 1 if mask.batch() is None else mask.batch() or 0
    size = _block_size(max(queries, keys), max(sequences, 1))
    state = mask.block_table(queries, keys, size).state
    none, some, every = ((state == value).sum().item() for value in (0, 1, 2))
    visible, pairs = mask.count(queries, keys), queries * keys * sequences
    return Summary(
        mask=repr(mask),
        meaning=meant,
        queries=queries,
        keys=keys,
        sequences=sequences,
        visible=visible,
        pairs=pairs,
        share=visible / max(pairs, 1),
        blocks=BlockCounts(size, int(none), int(some), int(every)),
    )


def _block_size(positions: int, sequences: int) -> int:
    """Return the number of positions along a side of a block.

    The size is chosen so that a small mask has a few blocks along a side, and a large mask at most 1,024. For a batch
    of many sequences the blocks are larger, because the blocks of every sequence are stored.
    """
    size = 4 if positions <= 64 else 64
    while positions > size * 1024 or (-(-positions // size)) ** 2 * sequences > _MOST_BLOCKS:
        size *= 2
    return size


def drawing(mask: "Mask", queries: int, keys: int, width: int = 80) -> Text:
    """Draw a mask as text: two characters for each query-key pair, or one if two do not fit into `width`."""
    lines = mask.draw(queries, keys).splitlines()
    if lines and len(lines[0]) > width:
        lines = [line[1::2] for line in lines]
    return Text("\n".join(lines), no_wrap=True)


def drawing_or_reason(mask: "Mask", queries: int, keys: int) -> Text:
    """Draw a mask as text, or return a sentence that says why it is too large to be drawn."""
    if max(queries, keys) > LARGEST_DRAWN:
        return Text(f"not drawn, only counted: {max(queries, keys):,} positions are more than {LARGEST_DRAWN:,}")
    picture = drawing(mask, queries, keys)
    if (sequences := mask.batch() or 1) > 1:
        picture.append(f"\n(the first of {sequences} sequences)")
    return picture


def facts(numbers: Summary) -> Table:
    """Return a table of the counts of one mask: visible pairs and blocks."""
    table = Table.grid(padding=(0, 2))
    blocks = numbers.blocks
    apart = f" in each of {numbers.sequences} sequences" if numbers.sequences > 1 else ""
    table.add_row("positions", f"{numbers.queries:,} queries (rows) x {numbers.keys:,} keys (columns){apart}")
    table.add_row("visible", f"{numbers.visible:,} of {numbers.pairs:,} pairs, {100 * numbers.share:.3g}%")
    total = blocks.none + blocks.some + blocks.all
    table.add_row(
        f"blocks of {blocks.size}",
        f"{total:,}: {blocks.none:,} empty, {blocks.some:,} partly visible, {blocks.all:,} full; "
        f"{100 * (blocks.some + blocks.all) / max(total, 1):.3g}% have to be computed",
    )
    return table


def gallery(shown: "list[Mask]", summaries: list[Summary]) -> RenderableType:
    """Return drawings of masks side by side, each with its expression, meaning and number of visible pairs."""
    cards = []
    for mask, numbers in zip(shown, summaries, strict=True):
        picture = drawing(mask, numbers.queries, numbers.keys)
        width = max(24, *(len(line) for line in picture.plain.splitlines()))
        card = Table.grid()
        card.add_column(width=width)
        card.add_row(Text(numbers.mask, style="bold"))
        card.add_row(picture)
        card.add_row(Text(f"{numbers.visible:,} of {numbers.pairs:,} visible"))
        if numbers.meaning:
            card.add_row(Text(numbers.meaning, style="dim"))
        cards.append(Padding(card, (0, 0, 1, 0)))
    return Columns(cards, padding=(0, 2))


def save_masks(path: Path, shown: "list[Mask]", queries: int, keys: int) -> None:
    """Draw all masks into one image file."""
    from matplotlib.figure import Figure

    if max(queries, keys) > LARGEST_DRAWN:
        raise ConfigError(f"--picture draws every pair, so at most {LARGEST_DRAWN} positions, not {max(queries, keys)}")
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for mask in shown:
        mask.draw(queries, keys, ax=next(axes))
    for unused in axes:
        unused.axis("off")
    save_picture(figure, path)
