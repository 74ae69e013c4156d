"""The relevance part of `regard look`: rollout over the tokens of a text or the patches of an image."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.base.errors import RegardError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regard.cli.looking.models import LoadedModel
    from regard.see.heads import HeadSummary, HeadTable
    from regard.see.record import Seen
    from regard.see.report import Overlay, Sides, TokenRelevance

ROLLOUT = "from regard.see.relevance import rollout\n\n"
PATCHES = "from regard.see.relevance import patch_map, rollout\n\n"


@dataclass(frozen=True)
class RelevanceResult:
    """The relevance of input tokens or image patches for the output, with notes on what could not be computed.

    relevance  relevance of each token, for models of text
    overlays   maps over the image, for models of images
    notes      sentences on what could not be computed
    """

    relevance: "tuple[TokenRelevance, ...]" = ()
    overlays: "tuple[Overlay, ...]" = ()
    notes: tuple[str, ...] = ()


def compute_relevance(
    loaded: "LoadedModel",
    seen: "Seen",
    sides: "Mapping[str, Sides]",
    table: "HeadTable",
    head: "HeadSummary",
    complete: bool,
) -> RelevanceResult:
    """Compute the relevance of each input token or patch for the output, with the methods that apply to this model.

    seen      the recorded attention
    sides     labels of the queries and keys of each layer
    table     statistics of all heads
    head      the head whose attention weights are drawn
    complete  whether all layers and rows were recorded, which attention rollout needs
    """
    if table.nonfinite:
        return no_relevance("some weights are NaN")
    kind = type(loaded.model).__name__
    if kind == "DaViT":
        return window_relevance(loaded, seen, table, head)
    if not complete:
        return no_relevance("rollout needs every layer and every row")
    if kind == "ViT":
        return patch_relevance(loaded, seen, head)
    try:
        return pair_relevance(seen, sides) if loaded.kind == "pair" else text_relevance(seen, sides)
    except RegardError as error:  # the layers are not a stack
        return no_relevance(error)


def no_relevance(reason: object) -> RelevanceResult:
    """Return an empty result with a note on the reason."""
    return RelevanceResult(notes=(f"No relevance: {reason}.",))


def text_relevance(seen: "Seen", sides: "Mapping[str, Sides]") -> RelevanceResult:
    """Compute the relevance of each input token for the output of one token, by attention rollout.

    This token is the last one in a causal model such as GPT, else the first one, as in BERT.
    """
    from regard.see.heads import count_visible_keys
    from regard.see.relevance import rollout
    from regard.see.report import TokenRelevance

    record = seen.records[0]
    is_causal = bool((count_visible_keys(record)[:, :, 0] < record.k.shape[2]).all())
    row, where = (-1, "last") if is_causal else (0, "first")
    words = next(iter(sides.values())).keys
    values = rollout(seen, rows=[row])[0, 0].cpu()
    title = f"Relevance of each token for the output of the {where} token (rollout)"
    return RelevanceResult((TokenRelevance(title, words, values, f"{ROLLOUT}rollout(seen, rows=[{row}])[0, 0]"),))


def pair_relevance(seen: "Seen", sides: "Mapping[str, Sides]") -> RelevanceResult:
    """Compute attention rollout in an encoder-decoder.

    The result is the relevance of the source and target tokens for the output of the last target token.
    """
    from regard.see.record import attention_role
    from regard.see.relevance import encoder_decoder_rollout
    from regard.see.report import TokenRelevance

    both = encoder_decoder_rollout(seen)
    cross = next(each for name, each in sides.items() if attention_role(name) == "cross")
    code = "from regard.see.relevance import encoder_decoder_rollout\n\nencoder_decoder_rollout(seen)"
    return RelevanceResult(
        tuple(
            TokenRelevance(
                f"Relevance of each {name} token for the output of the last target token (rollout)",
                words,
                values[0, -1].cpu(),
                f"{code}.{name}[0, -1]",
            )
            for name, words, values in (("source", cross.keys, both.source), ("target", cross.queries, both.target))
        )
    )


def patch_relevance(loaded: "LoadedModel", seen: "Seen", head: "HeadSummary") -> RelevanceResult:
    """Compute two maps over the patches of a ViT: attention rollout, and the weights of the chosen head.

    Each map shows the values for the class token as the query or, in a model without a class token, the mean over all
    patches as queries.
    """
    from regard.see.relevance import patch_map, rollout
    from regard.see.report import Overlay

    prefix: int = loaded.model.prefix_tokens
    record, name = seen[head.layer], f"seen[{head.layer!r}]"
    if prefix:
        whose, options = "the class token", f"prefix={prefix}"
        all_layers, one_head = rollout(seen, rows=[0]), record.rows([0])[:, head.head]
        codes = "rollout(seen, rows=[0])", f"{name}.rows([0])[:, {head.head}]"
    else:
        whose, options = "the mean of the patches", "prefix=0, pool='mean'"
        all_layers, one_head = rollout(seen), record.weights()[:, head.head]
        codes = "rollout(seen)", f"{name}.weights()[:, {head.head}]"
    titles = (
        f"Relevance of each patch for {whose} (rollout)",
        f"Attention of {whose} to each patch in {head.layer}, head {head.head}",
    )
    return RelevanceResult(
        overlays=tuple(
            Overlay(
                title,
                patch_map(values, prefix=prefix, pool="class" if prefix else "mean")[0].cpu(),
                f"{PATCHES}patch_map({code}, {options})[0]",
            )
            for title, values, code in zip(titles, (all_layers, one_head), codes, strict=True)
        )
    )


def window_relevance(loaded: "LoadedModel", seen: "Seen", table: "HeadTable", head: "HeadSummary") -> RelevanceResult:
    """Compute a map over the image for DaViT: the attention weight that each position receives in its window.

    The head is `head` if it is in a layer with window attention, else the head with the least spread in such a layer.
    Attention rollout cannot be computed for attention in windows and over channels.
    """
    from regard.nn.windows import merge
    from regard.see.report import Overlay

    notes = no_relevance("windows and channels at several resolutions do not form a stack of positions").notes
    over = [each for each in table if each.layer.endswith("window.attention")]
    if not over or any(seen[each.layer].rows_kept is not None for each in over):
        return RelevanceResult(notes=notes)
    if head.layer not in {each.layer for each in over}:
        head = min(over, key=lambda each: each.spread)
    size: int = loaded.model.config.window
    side = grid_side(loaded.model.example_inputs()[0].shape[2], int(head.layer.split(".")[1]))
    values = merge(seen[head.layer].received[:, head.head, :, None], size, side, side)[0, :, :, 0].cpu()
    code = (
        "from regard.nn.windows import merge\n\n"
        f"merge(seen[{head.layer!r}].received[:, {head.head}, :, None], {size}, {side}, {side})[0, :, :, 0]"
    )
    title = f"Weight that each position receives in its window in {head.layer}, head {head.head}"
    return RelevanceResult(overlays=(Overlay(title, values, code),), notes=notes)


def grid_side(image: int, stage: int) -> int:
    """Return the number of positions along a side of the image in a stage of a DaViT.

    In stage 0 each position covers 4 pixels along a side. Each further stage has half as many positions along a side,
    rounded up.

    image  number of pixels along a side
    stage  number of the stage, from 0
    """
    side = (image - 1) // 4 + 1
    for _ in range(stage):
        side = -(-side // 2)
    return side
