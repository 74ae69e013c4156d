"""BERT: outputs of its heads, padding, segments, and what it learns."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, layer_norm

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.core.attend import attend
from regard.core.masks import padding
from regard.models.bert import BERT, HEADS, BERTConfig, BERTOutput
from regard.models.presets import build_from_config
from regard.models.saving import load, save

SMALL = {"vocab": 29, "context": 17, "width": 24, "depth": 2, "heads": 3, "ff_width": 40, "segments": 3, "classes": 5}


def small(**changes: Any) -> BERT:
    """In float64 and eval mode, with every parameter drawn, so that none hides behind its initial value."""
    model = BERT(BERTConfig(**{**SMALL, **changes})).double().eval()
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=draws))
    return model


def text(b: int = 2, n: int = 11) -> tuple[Tensor, Tensor]:
    """Tokens, and the segment of each."""
    draws = torch.Generator().manual_seed(1)
    return torch.randint(29, (b, n), generator=draws), torch.randint(3, (b, n), generator=draws)


def near(left: Tensor, right: Tensor, within: float = 1e-12) -> bool:
    return left.shape == right.shape and bool((left - right).abs().max() <= within)


def shapes(out: BERTOutput) -> list[tuple[int, ...] | None]:
    return [None if part is None else tuple(part.shape) for part in out]


def test_each_head_has_its_outputs() -> None:
    tokens, _ = text()
    hidden, pooled = (2, 11, 24), (2, 24)
    assert shapes(small()(tokens)) == [(2, 11, 29), (2, 2), hidden, pooled]
    assert shapes(small(head="masked")(tokens)) == [(2, 11, 29), None, hidden, None]
    assert shapes(small(head="classes")(tokens)) == [(2, 5), None, hidden, pooled]
    assert shapes(small(head="none")(tokens)) == [None, None, hidden, pooled]


def test_names_of_weights_stay() -> None:
    both = ("weight", "bias")
    layers = ("attention.query_key_value", "attention.out", "attention_norm")
    layers += ("feedforward.up", "feedforward.down", "feedforward_norm")
    body = ["tokens.weight", "positions.weight", "segments.weight"]
    body += [f"embedding_norm.{part}" for part in both]
    body += [f"blocks.{n}.{layer}.{part}" for n in range(2) for layer in layers for part in both]
    words = ["words.bias", *(f"words.{layer}.{part}" for layer in ("dense", "norm") for part in both)]
    pooler, pair, classifier = ([f"{layer}.{part}" for part in both] for layer in ("pooler", "pair", "classifier"))
    heads = {
        "pretraining": [*words, *pooler, *pair],
        "masked": words,
        "classes": [*pooler, *classifier],
        "none": pooler,
    }
    for head, names in heads.items():
        model = build_from_config(BERTConfig(**{**SMALL, "head": head}), device="meta")
        assert list(model.state_dict()) == body + names


def test_it_is_the_formula() -> None:
    model, (tokens, segments) = small(depth=1), text()
    weights = model.state_dict()

    def normed(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (24,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = weights["tokens.weight"][tokens] + weights["positions.weight"][:11] + weights["segments.weight"][segments]
    x = normed(x, "embedding_norm")
    into = linear(x, "blocks.0.attention.query_key_value").chunk(3, -1)
    q, k, v = (part.unflatten(-1, (3, 8)) for part in into)
    shares = (torch.einsum("bihc,bjhc->bhij", q, k) / 8**0.5).exp()
    mixed = torch.einsum("bhij,bjhc->bihc", shares / shares.sum(-1, keepdim=True), v).flatten(2)
    x = normed(x + linear(mixed, "blocks.0.attention.out"), "blocks.0.attention_norm")
    inner = gelu(linear(x, "blocks.0.feedforward.up"))
    x = normed(x + linear(inner, "blocks.0.feedforward.down"), "blocks.0.feedforward_norm")
    guess = normed(gelu(linear(x, "words.dense")), "words.norm")
    pooled = linear(x[:, 0], "pooler").tanh()
    out = model(tokens, segments=segments)
    assert near(out.logits, guess @ weights["tokens.weight"].T + weights["words.bias"])
    assert near(out.pair_logits, linear(pooled, "pair"))
    assert near(out.hidden, x)
    assert near(out.pooled, pooled)


@torch.no_grad()
def test_without_segments_all_tokens_are_of_the_first_sentence() -> None:
    model, (tokens, segments) = small(), text()
    plain = model(tokens).logits
    assert near(model(tokens, segments=torch.zeros_like(tokens)).logits, plain)
    assert not near(model(tokens, segments=segments).logits, plain, 1e-3)


@torch.no_grad()
def test_every_word_sees_both_sides() -> None:
    model, (tokens, _) = small(), text()
    plain = model(tokens).logits
    for place in (0, 10):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 29
        assert ((model(changed).logits - plain).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(head: str) -> None:
    model, (tokens, segments) = small(head=head), text()
    lengths = [11, 4]
    alone = [model(tokens[row, :n][None], segments=segments[row, :n][None]) for row, n in enumerate(lengths)]
    for side in ("right", "left"):
        for width in (11, 12, 17):
            filled, kinds = torch.full((2, width), 23), torch.full((2, width), 2)
            for row, n in enumerate(lengths):
                here = slice(0, n) if side == "right" else slice(width - n, width)
                filled[row, here], kinds[row, here] = tokens[row, :n], segments[row, :n]
            real = padding(lengths) if side == "right" else padding(lengths, side="left", width=width)
            out = model(filled, segments=kinds, padding=real)
            for row, n in enumerate(lengths):
                for given, expected in zip(out, alone[row], strict=True):
                    if given is None:
                        continue
                    if given.ndim == 3:
                        given = given[:, :n] if side == "right" else given[:, width - n :]
                    assert near(given[row], expected[0]), (side, width)


def test_an_empty_left_padded_sequence_changes_no_other() -> None:
    model, (tokens, _) = small(), text()
    out = model(tokens, padding=padding([11, 0], side="left", width=11))
    assert all(part.isfinite().all() for part in out)
    assert near(out.pair_logits[0], model(tokens[:1]).pair_logits[0])


TOKENS = torch.zeros(2, 7, dtype=torch.long)
BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "a token too high": (TOKENS + 29, None, ShapeError, "tokens holds 29, but the vocabulary has tokens 0 to 28"),
    "a token below 0": (TOKENS - 2, None, ShapeError, "tokens holds -2, but the vocabulary has tokens 0 to 28"),
    "too long": (TOKENS.repeat(1, 3), None, ShapeError, "the input has 21 positions, but the context has 17; shorten"),
    "no texts": (TOKENS[:0], None, ShapeError, r"tokens is \(0, 7\) read as \(b n\), but there must be at least one"),
    "no tokens": (TOKENS[:, :0], None, ShapeError, r"tokens is \(2, 0\) read as \(b n\), but there must be at least"),
    "one text": (TOKENS[0], None, ShapeError, r"tokens is \(7,\), but is read as \(b n\); for one text write tokens"),
    "no numbers": ([[1, 2]], None, DtypeError, "tokens must be a tensor of whole numbers read as .* not list"),
    "a third segment": (TOKENS, TOKENS + 3, ShapeError, "segments holds 3, but there are segments 0 to 2"),
    "a segment below 0": (TOKENS, TOKENS - 1, ShapeError, "segments holds -1, but there are segments 0 to 2"),
    "few segments": (
        TOKENS,
        TOKENS[:, :5],
        ShapeError,
        r"segments is \(2, 5\), but tokens is \(2, 7\)",
    ),
    "real segments": (
        TOKENS,
        TOKENS.float(),
        DtypeError,
        "segments must be a tensor of whole numbers .* torch.float32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    tokens, segments, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        small()(tokens, segments=segments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 7}, "width must be a multiple of heads: width=24, heads=7; try heads=6"),
        ({"head": "both"}, "head is one of pretraining, masked, classes, none, not 'both'"),
        ({"segments": 0}, "segments is 0, but must be at least 1"),
        ({"dropout": -0.1}, "dropout is a share, at least 0 and less than 1"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**changes)


@pytest.mark.parametrize("head", ["pretraining", "classes"])
def test_dropout_acts_in_training_only(head: str) -> None:
    model, (tokens, _) = small(head=head, dropout=0.2, attention_dropout=0.1), text()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


def gradients(model: BERT) -> dict[str, Tensor]:
    tokens, segments = text()
    model.zero_grad()
    out = model(tokens, segments=segments, padding=padding([11, 6]))
    loss = cross_entropy(out.logits.flatten(0, 1), tokens.flatten())
    (loss + cross_entropy(out.pair_logits, torch.tensor([1, 0]))).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_recomputing_gives_the_same_gradients_and_every_parameter_has_one() -> None:
    model = small()
    plain = gradients(model)
    model.gradient_checkpointing = True
    again = gradients(model)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert not [name for name, gradient in plain.items() if not gradient.abs().max() > 1e-9]


class Padded(nn.Module):
    """The model as a function of tensors alone."""

    def __init__(self, model: BERT, side: str) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, tokens: Tensor, segments: Tensor, lengths: Tensor) -> list[Tensor]:
        real = padding(lengths) if self.side == "right" else padding(lengths, side="left", width=11)
        return [part for part in self.model(tokens, segments=segments, padding=real) if part is not None]


@pytest.mark.parametrize(("head", "side"), [("pretraining", "right"), ("classes", "left")])
@torch.no_grad()
def test_compiled_and_exported_models_give_the_same_output(head: str, side: str) -> None:
    model = Padded(small(head=head, depth=1), side)
    inputs = (*text(), torch.tensor([11, 6]))
    expected = model(*inputs)
    torch._dynamo.reset()
    for again in (
        torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs),
        torch.export.export(model, inputs).module()(*inputs),
    ):
        assert all(near(left, right) for left, right in zip(again, expected, strict=True))


@torch.no_grad()
def test_it_runs_in_halved_precision() -> None:
    model, (tokens, _) = small().float(), text()
    exact = model(tokens).hidden
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(tokens).hidden
    for rough in (mixed.float(), model.bfloat16()(tokens).hidden.float()):
        assert 0 < (rough - exact).abs().max() < 0.2


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_it_is_saved_and_loaded(head: str, tmp_path: Any) -> None:
    model, (tokens, _) = small(head=head), text()
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens).hidden, model(tokens).hidden)


def test_it_learns_to_copy_a_masked_word() -> None:
    half, hidden_word = 4, 11
    settings = {"vocab": 12, "context": 2 * half, "width": 64, "depth": 1, "heads": 1, "ff_width": 128}
    model = BERT(BERTConfig(**settings, head="masked", dropout=0.0, attention_dropout=0.0))
    draws = torch.Generator().manual_seed(0)

    def task(b: int) -> tuple[Tensor, Tensor, Tensor]:
        """Four words said twice; of some pairs one is hidden."""
        words = torch.randint(11, (b, half), generator=draws)
        second, hide = (torch.rand(b, half, generator=draws) < share for share in (0.5, 0.6))
        hidden = torch.cat([hide & ~second, hide & second], 1)
        full = torch.cat([words, words], 1)
        return full.masked_fill(hidden, hidden_word), hidden, full

    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, 200)
    losses = []
    for _ in range(200):
        tokens, hidden, full = task(48)
        optimiser.zero_grad()
        loss = cross_entropy(model(tokens).logits[hidden], full[hidden])
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())

    model.eval()
    tokens, hidden, full = task(200)
    seen: list[Tensor] = []
    attention = model.blocks[0].attention
    with torch.no_grad():
        handle = attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        guessed = model(tokens).logits.argmax(-1)
        handle.remove()
        q, k = attention.queries(seen[0]), attention.keys_values(seen[0]).k
        weights = attend(q, k, torch.eye(2 * half).expand(200, 1, 2 * half, 2 * half))[:, 0]
    twins = (torch.arange(2 * half) + half) % (2 * half)
    assert (guessed[hidden] == full[hidden]).float().mean() > 0.99
    assert (weights.argmax(-1) == twins)[hidden].float().mean() > 0.99
    assert weights[:, torch.arange(2 * half), twins][hidden].mean() > 0.8
    quarters = [sum(losses[start:end]) for start, end in pairwise(range(0, 201, 50))]
    assert quarters == sorted(quarters, reverse=True)
    assert 2.0 < losses[0] < 3.0  # at first a guess among eleven, log 11 = 2.4
