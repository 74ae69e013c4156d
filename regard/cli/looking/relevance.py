"""What the answer of a model owes to what it was given: rollout along a text, or over an image."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regard.cli.looking.inputs import Opened
    from regard.see.heads import Head, HeadTable
    from regard.see.record import Seen
    from regard.see.report import Overlay, Sides, TokenRelevance

ROLLOUT = "from regard.see.relevance import rollout\n\n"


@dataclass(frozen=True)
class Owed:
    """Relevance along texts, numbers over the image, and why something is missing."""

    relevance: "tuple[TokenRelevance, ...]" = ()
    overlays: "tuple[Overlay, ...]" = ()
    notes: tuple[str, ...] = ()


def owed(
    opened: "Opened", seen: "Seen", sides: "Mapping[str, Sides]", table: "HeadTable", head: "Head", whole: bool
) -> Owed:
    """All that can be told of this model.

    whole  whether all layers and rows were kept, which relevance needs
    """
    if table.broken:
        return Owed(notes=("There is no relevance here: some weights are NaN.",))
    kind = type(opened.model).__name__
    if kind == "DaViT":
        return windows(opened, seen, table, head)
    if not whole:
        return Owed(notes=("There is no relevance here: it needs every layer and every row.",))
    if opened.theirs is not None:
        return of_theirs(opened, seen, sides)
    if kind == "RNN":
        return Owed(notes=("There is no relevance here: it goes along layers of attention, and this is a single one.",))
    if kind == "ViT":
        return patches(opened, seen, head)
    if kind == "Transformer":
        return pair(seen, sides)
    return text(kind, seen, sides)


def text(kind: str, seen: "Seen", sides: "Mapping[str, Sides]") -> Owed:
    """Rollout to the token that the answer is read from: the last of a GPT, the first of a BERT."""
    from regard.see.relevance import rollout
    from regard.see.report import TokenRelevance

    row, where = (0, "first") if kind == "BERT" else (-1, "last")
    words = next(iter(sides.values())).keys
    values = rollout(seen, rows=[row])[0, 0].cpu()
    code = f"{ROLLOUT}rollout(seen, rows=[{row}])[0, 0]"
    return Owed(
        (TokenRelevance(f"What the output of the {where} token owes to each token (rollout)", words, values, code),)
    )


def of_theirs(opened: "Opened", seen: "Seen", sides: "Mapping[str, Sides]") -> Owed:
    """Rollout where the layers of a model of transformers are a stack of positions, else the reason."""
    from regard.base.errors import RegardError
    from regard.see.heads import visible_keys

    first = seen.records[0]
    causal = bool((visible_keys(first)[:, :, 0] < first.k.shape[2]).all())
    try:
        return pair(seen, sides) if opened.kind == "pair" else text("GPT" if causal else "BERT", seen, sides)
    except RegardError as error:
        return Owed(notes=(f"There is no relevance here: {error}.",))


def pair(seen: "Seen", sides: "Mapping[str, Sides]") -> Owed:
    """Rollout to the last target token, along the source and along the target."""
    from regard.see.relevance import attention_role, encoder_decoder_rollout
    from regard.see.report import TokenRelevance

    both = encoder_decoder_rollout(seen)
    crossing = next(each for name, each in sides.items() if attention_role(name) == "cross")
    code = "from regard.see.relevance import encoder_decoder_rollout\n\nencoder_decoder_rollout(seen)"
    return Owed(
        tuple(
            TokenRelevance(
                f"What the output of the last target token owes to each {name} token (rollout)",
                words,
                values[0, -1].cpu(),
                f"{code}.{name}[0, -1]",
            )
            for name, words, values in (
                ("source", crossing.keys, both.source),
                ("target", crossing.queries, both.target),
            )
        )
    )


def patches(opened: "Opened", seen: "Seen", head: "Head") -> Owed:
    """Rollout over the patches, and the map of the chosen head in the same row."""
    from regard.see.relevance import patch_map, rollout
    from regard.see.report import Overlay

    model: Any = opened.model
    first: int = model.prefix_tokens
    imports = "from regard.see.relevance import patch_map, rollout\n\n"
    if first:
        values = patch_map(rollout(seen, rows=[0]), prefix=first)[0].cpu()
        code = f"{imports}patch_map(rollout(seen, rows=[0]), prefix={first})[0]"
        row = seen[head.layer].rows([0])[:, head.head]
        own = f"patch_map(seen[{head.layer!r}].rows([0])[:, {head.head}], prefix={first})[0]"
        whose = "the class token"
        single = patch_map(row, prefix=first)[0].cpu()
    else:
        values = patch_map(rollout(seen), prefix=0, pool="mean")[0].cpu()
        code = f"{imports}patch_map(rollout(seen), prefix=0, pool='mean')[0]"
        single = patch_map(seen[head.layer].weights()[:, head.head], prefix=0, pool="mean")[0].cpu()
        own = f"patch_map(seen[{head.layer!r}].weights()[:, {head.head}], prefix=0, pool='mean')[0]"
        whose = "the mean of the patches"
    return Owed(
        overlays=(
            Overlay(f"What {whose} owes to each patch (rollout)", values, code),
            Overlay(f"What {whose} looks at in {head.layer}, head {head.head}", single, f"{imports}{own}"),
        )
    )


def windows(opened: "Opened", seen: "Seen", table: "HeadTable", head: "Head") -> Owed:
    """What each position is given by the others of its window, in the chosen head or the sharpest over windows."""
    from regard.nn.windows import merge
    from regard.see.report import Overlay

    note = "There is no rollout here: windows and channels of several resolutions are no single stack of positions."
    over = [each for each in table if each.layer.endswith("window.attention")]
    if not over or any(seen[each.layer].rows_kept is not None for each in over):
        return Owed(notes=(note,))
    if head.layer not in {each.layer for each in over}:
        head = min(over, key=lambda each: each.spread)
    model: Any = opened.model
    size: int = model.config.window
    side = grid_side(model.example_inputs()[0].shape[2], int(head.layer.split(".")[1]))
    received = seen[head.layer].received
    values = merge(received[:, head.head, :, None], size, side, side)[0, :, :, 0].cpu()
    code = (
        "from regard.nn.windows import merge\n\n"
        f"merge(seen[{head.layer!r}].received[:, {head.head}, :, None], {size}, {side}, {side})[0, :, :, 0]"
    )
    title = f"What each position is given by its window in {head.layer}, head {head.head}"
    return Owed(overlays=(Overlay(title, values, code),), notes=(note,))


def grid_side(image: int, stage: int) -> int:
    """Positions a side: a quarter of the pixels, halved before every further stage, rounded up."""
    side = (image - 1) // 4 + 1
    for _ in range(stage):
        side = -(-side // 2)
    return side
