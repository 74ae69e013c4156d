"""The encoder-decoder: what it computes, in one pass and step by step, and what it learns."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.base.errors import CacheError, ConfigError, DtypeError, ShapeError
from regard.core.attend import attend
from regard.core.masks import causal, padding
from regard.core.positions import sinusoidal
from regard.models.presets import PRESETS, build, build_from_config
from regard.models.saving import load, save
from regard.models.transformer import RelativeBuckets, Transformer, TransformerConfig
from regard.nn.embeddings import SinusoidalPositions

SMALL = {"vocab": 13, "context": 19, "width": 24, "depth": 2, "decoder_depth": 3, "heads": 3, "ff_width": 40}
VARIANTS: dict[str, dict[str, Any]] = {
    "as in 2017": {},
    "norms first": {"order": "pre", "norm": "rms", "activation": "gated-silu"},
    "as BART": {"positions": "learned", "embedding_norm": True, "scale_embedding": False, "output_bias": True},
    "as Marian": {"positions": "sinusoidal-half", "output_bias": True, "activation": "silu"},
    "as T5": {
        "positions": RelativeBuckets(buckets=6, max_distance=4),
        "order": "pre",
        "norm": "rms",
        "bias": False,
        "beta": 1.0,
        "head_width": 5,
        "tied": False,
        "scale_embedding": False,
        "output_scale": 0.3,
    },
}


def small(**changes: Any) -> Transformer:
    """In float64 and eval mode, with every parameter drawn, so that none hides behind its initial value."""
    model = Transformer(TransformerConfig(**{**SMALL, **changes})).double().eval()
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=draws))
    return model


def texts(b: int = 3, m: int = 7, n: int = 5) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randint(13, (b, m), generator=draws), torch.randint(13, (b, n), generator=draws)


def near(left: Tensor, right: Tensor, within: float = 1e-12) -> bool:
    return left.shape == right.shape and bool((left - right).abs().max() <= within)


def test_other_vocabularies_give_the_counts_in_the_docs() -> None:
    assert round(build("transformer-base", device="meta", vocab=37000).parameter_count / 1e5) == 631
    assert round(build("transformer-big", device="meta", vocab=37000).parameter_count / 1e5) == 2142
    assert (PRESETS["transformer-base"].dropout, PRESETS["transformer-big"].dropout) == (0.1, 0.3)


def test_names_of_weights_stay() -> None:
    linear = [f"{layer}.{part}" for layer in ("query_key_value", "out") for part in ("weight", "bias")]
    own = [f"attention.{name}" for name in linear] + ["attention_norm.weight", "attention_norm.bias"]
    cross = [f"cross.{name}" for name in linear] + ["cross_norm.weight", "cross_norm.bias"]
    last = [f"{layer}.{part}" for layer in ("up", "down") for part in ("weight", "bias")]
    rest = [f"feedforward.{name}" for name in last] + ["feedforward_norm.weight", "feedforward_norm.bias"]
    expected = ["tokens.weight"]
    expected += [f"encoder.blocks.0.{name}" for name in own + rest]
    expected += [f"decoder.blocks.{n}.{name}" for n in range(2) for name in own + cross + rest]
    config = TransformerConfig(vocab=5, width=4, depth=1, decoder_depth=2, heads=2)
    assert list(build_from_config(config, device="meta").state_dict()) == expected
    more = TransformerConfig(
        vocab=5, width=4, depth=1, heads=2, order="pre", positions="learned", embedding_norm=True, output_bias=True
    )
    added = {"output_bias"}
    for stack in ("encoder", "decoder"):
        added |= {f"{stack}.positions.weight"}
        added |= {f"{stack}.{name}.{part}" for name in ("embedding_norm", "norm") for part in ("weight", "bias")}
    kept = {name for name in expected if "decoder.blocks.1" not in name}
    assert set(build_from_config(more, device="meta").state_dict()) == kept | added


@pytest.mark.parametrize("order", ["post", "pre"])
def test_it_is_the_network_that_torch_builds_of_its_own_parts(order: str) -> None:
    model, (source, target) = small(order=order), texts()
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": order == "pre", "dtype": torch.float64}
    encoder = nn.ModuleList(nn.TransformerEncoderLayer(24, 3, 40, **settings) for _ in range(2))
    decoder = nn.ModuleList(nn.TransformerDecoderLayer(24, 3, 40, **settings) for _ in range(3))
    for theirs, ours in zip([*encoder, *decoder], [*model.encoder.blocks, *model.decoder.blocks], strict=True):
        copied(theirs.self_attn, ours.attention)
        norms = [ours.attention_norm, ours.feedforward_norm]
        if ours.cross is not None:
            copied(theirs.multihead_attn, ours.cross)
            norms.insert(1, ours.cross_norm)
        theirs.linear1, theirs.linear2 = ours.feedforward.up, ours.feedforward.down
        for number, norm in enumerate(norms, 1):
            setattr(theirs, f"norm{number}", norm)
    memory, x = (model.tokens.weight[text] * 24**0.5 + sinusoidal(text.shape[1], 24) for text in (source, target))
    hidden = torch.tensor([6, 7, 2])[:, None] <= torch.arange(7)  # True hides, in torch
    for layer in encoder:
        memory = layer(memory, src_key_padding_mask=hidden)
    memory = memory if order == "post" else model.encoder.norm(memory)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for layer in decoder:
        x = layer(x, memory, tgt_mask=later, memory_key_padding_mask=hidden)
    x = x if order == "post" else model.decoder.norm(x)
    assert near(model(source, target, source_padding=padding([6, 7, 2])), x @ model.tokens.weight.T)


def copied(theirs: nn.MultiheadAttention, ours: Any) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.query_key_value.weight)
        theirs.in_proj_bias.copy_(ours.query_key_value.bias)
    theirs.out_proj.load_state_dict(ours.out.state_dict())


def splits(n: int) -> list[list[int]]:
    """All ways to cut n tokens into runs."""
    found = []
    for cuts in product([False, True], repeat=n - 1):
        ends = [place for place, cut in enumerate(cuts, 1) if cut]
        found.append([end - start for start, end in zip([0, *ends], [*ends, n], strict=True)])
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_every_split_of_the_target_gives_the_numbers_of_one_pass(variant: str) -> None:
    model, (source, target) = small(**VARIANTS[variant]), texts()
    lengths = padding([7, 4, 2])
    whole = model(source, target, source_padding=lengths)
    for number, sizes in enumerate(splits(5)):
        state = model.start(source, lengths, capacity=6 if number % 2 else None)
        parts = [model.step(part, state) for part in target.split(sizes, 1)]
        assert near(torch.cat(parts, 1), whole), sizes
        assert state.length == 5
    assert len(splits(5)) == 16


@torch.no_grad()
def test_decode_takes_any_memory_with_or_without_a_cache() -> None:
    model, (source, target) = small(), texts()
    whole, memory, cache = model(source, target), model.encode(source), model.cache()
    parts = [model.decode(part, memory, cache=cache) for part in target.split([2, 3], 1)]
    assert near(torch.cat(parts, 1), whole)
    assert near(model.decode(target, model.start(source).memory), whole)


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_sequences_branch_end_and_change_indices(side: str) -> None:
    model, (source, target) = small(), texts()
    lengths = [7, 4, 2]
    real = padding(lengths) if side == "right" else padding(lengths, side="left", width=7)
    whole, state = model(source, target, source_padding=real), model.start(source, real)
    first = torch.tensor([2, 2, 0, 1, 1])
    state.reorder(first)  # before the first step, as a beam search begins
    assert near(model.step(target[first, :2], state), whole[first, :2])
    second = torch.tensor([4, 0, 2])
    state.reorder(second)
    rows = first[second]
    assert near(model.step(target[rows, 2:], state), whole[rows, 2:])
    assert (state.length, state.source_padding.data.tolist()) == (5, [4, 2, 7])


def test_logits_at_some_indices_are_those_of_all() -> None:
    model = small()
    source, target = texts()
    indices = torch.tensor([4, 0, 13, 7])
    some, every = model(source, target, indices=indices), model(source, target)
    assert near(some, every.flatten(0, 1)[indices])
    weights = torch.randn_like(some)
    for one, other in zip(
        torch.autograd.grad((some * weights).sum(), list(model.parameters())),
        torch.autograd.grad((every.flatten(0, 1)[indices] * weights).sum(), list(model.parameters())),
        strict=True,
    ):
        assert near(one, other)
    for bad, why in (
        (indices[None], r"indices is \(1, 4\), but is read as \(t\)"),
        (indices > 3, r"indices must be a tensor of whole numbers read as \(t\), not torch.bool"),
        (torch.tensor([3, 15]), "indices holds 15, but the target has tokens 0 to 14"),
        (torch.tensor([3, -1]), "indices holds -1, but"),
    ):
        with pytest.raises((ShapeError, DtypeError), match=why):
            model(source, target, indices=bad)


@torch.no_grad()
def test_a_state_has_a_length_and_a_size() -> None:
    model, (source, target) = small(), texts()
    state = model.start(source)
    assert state.length == 0
    held = 8 * 2 * 3 * 24 * 3  # bytes, keys and values, sequences, width, blocks
    assert state.nbytes == held * 7
    model.step(target, state)
    assert state.nbytes == held * (7 + 5)


@torch.no_grad()
def test_no_token_sees_a_later_one_and_every_token_sees_the_source() -> None:
    model, (source, target) = small(), texts()
    whole, changed = model(source, target), target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 13
    moved = (model(source, changed) - whole).abs().amax((0, 2))
    assert (moved[:3] == 0).all()
    assert (moved[3:] > 1e-3).all()
    other = source.clone()
    other[:, 6] = (other[:, 6] + 1) % 13
    assert ((model(other, target) - whole).abs().amax(2) > 1e-6).all()


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(variant: str) -> None:
    model, (source, target) = small(**VARIANTS[variant]), texts(b=2)
    sources, targets = [source[0], source[1, :3]], [target[0, :2], target[1]]
    alone = [model(one[None], other[None])[0] for one, other in zip(sources, targets, strict=True)]
    for side in ("right", "left"):
        for extra in (0, 1, 4):
            filled_sources, real_sources = filled(sources, side, extra)
            filled_targets, real_targets = filled(targets, side, extra)
            out = model(filled_sources, filled_targets, source_padding=real_sources, target_padding=real_targets)
            for row, text, expected in zip(out, targets, alone, strict=True):
                kept = row[: len(text)] if side == "right" else row[len(row) - len(text) :]
                assert near(kept, expected), (side, extra)


def filled(texts: list[Tensor], side: str, extra: int) -> tuple[Tensor, Any]:
    lengths = [len(text) for text in texts]
    width = max(lengths) + extra
    out = torch.full((len(texts), width), 11)
    for row, text in zip(out, texts, strict=True):
        start = 0 if side == "right" else width - len(text)
        row[start : start + len(text)] = text
    return out, padding(lengths) if side == "right" else padding(lengths, side="left", width=width)


SOURCE, TARGET = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "a token too high": (SOURCE + 13, TARGET, ShapeError, "source holds 13, but the vocabulary has tokens 0 to 12"),
    "a token below 0": (SOURCE, TARGET - 1, ShapeError, "target holds -1, but the vocabulary has tokens 0 to 12"),
    "a long source": (SOURCE[:, :1].repeat(1, 20), TARGET, ShapeError, "the input has 20 positions, but .* has 19"),
    "a long target": (SOURCE, TARGET[:, :1].repeat(1, 20), ShapeError, "the input has 20 positions, but .* has 19"),
    "no sequences": (SOURCE[:0], TARGET[:0], ShapeError, r"source is \(0, 7\) read as \(b n\), but there must be at"),
    "no tokens": (SOURCE, TARGET[:, :0], ShapeError, r"target is \(2, 0\) read as \(b n\), but there must be at least"),
    "one text": (SOURCE[0], TARGET, ShapeError, r"source is \(7,\), .* for one text write source\[None\]"),
    "real numbers": (SOURCE, TARGET.float(), DtypeError, "target must be a tensor of whole numbers .* torch.float32"),
    "unpaired": (
        SOURCE,
        TARGET[:1],
        ShapeError,
        "target has 1 sequences, but the source has 2; give one target for each",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    source, target, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        small()(source, target)


@torch.no_grad()
def test_a_state_refuses_what_does_not_continue_it() -> None:
    model, (source, target) = small(), texts()
    with pytest.raises(ConfigError, match=r"source_padding takes padding\(lengths\), not causal\(\)"):
        model.start(source, causal())
    state = model.start(source)
    for _ in range(3):
        model.step(target, state)
    with pytest.raises(ShapeError, match="the input has 20 positions, but the context has 19"):
        model.step(target, state)
    with pytest.raises(ShapeError, match="target has 2 sequences, but the source has 3"):
        model.step(target[:2, :1], state)
    with pytest.raises(CacheError, match="made for 3 blocks, but the model has 2"):
        small(decoder_depth=2).decode(target, model.encode(source), cache=model.cache())
    with pytest.raises(CacheError, match="room for 4 positions"):
        model.step(target, model.start(source, capacity=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "width must be a multiple of heads: width=24, heads=5; try heads=4"),
        ({"order": "middle"}, "order is one of pre, post, not 'middle'"),
        ({"positions": "rotary"}, "positions is one of sinusoidal, sinusoidal-half, learned, not 'rotary'"),
        ({"decoder_depth": 0}, "decoder_depth is 0, but must be at least 1"),
        ({"ff_dropout": 1.0}, "ff_dropout is a share, at least 0 and less than 1"),
        ({"activation": "rule"}, r"unknown activation 'rule' \(there are: relu, gelu"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        small(**changes)


def test_sinusoids_are_interleaved_or_in_halves() -> None:
    indices = torch.tensor([[0, 3], [7, 1]])
    beside, halves = SinusoidalPositions(6)(indices), SinusoidalPositions(6, pairing="half")(indices)
    assert torch.equal(halves, beside[..., [0, 2, 4, 1, 3, 5]])
    with pytest.raises(ConfigError, match="pairing is 'interleaved' or 'half', not 'halves'"):
        SinusoidalPositions(6, pairing="halves")
    with pytest.raises(ConfigError, match="sinusoidal positions need an even width"):
        small(width=9)


def test_dropout_acts_in_training_only() -> None:
    model, (source, target) = small(dropout=0.3, attention_dropout=0.2, ff_dropout=0.1), texts()
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


def gradients(model: Transformer) -> dict[str, Tensor]:
    source, target = texts()
    model.zero_grad()
    logits = model(source, target, source_padding=padding([7, 4, 2]))
    cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputing_gives_the_same_gradients_and_every_parameter_has_one(variant: str) -> None:
    model = small(**VARIANTS[variant])
    plain = gradients(model)
    model.gradient_checkpointing = True
    again = gradients(model)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert not [name for name, gradient in plain.items() if not gradient.abs().max() > 1e-9]


class Padded(nn.Module):
    """The model as a function of tensors alone."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        return self.model(source, target, source_padding=padding(lengths))


@pytest.mark.parametrize("variant", ["as in 2017", "as BART"])
@torch.no_grad()
def test_compiled_and_exported_models_give_the_same_output(variant: str) -> None:
    model = Padded(small(**VARIANTS[variant], depth=1, decoder_depth=1))
    inputs = (*texts(), torch.tensor([7, 4, 2]))
    expected = model(*inputs)
    torch._dynamo.reset()
    assert near(torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs), expected)
    assert near(torch.export.export(model, inputs).module()(*inputs), expected)


@torch.no_grad()
def test_it_runs_in_halved_precision() -> None:
    model, (source, target) = small().float(), texts()
    exact = model(source, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(source, target)
    for rough in (mixed.float(), model.bfloat16()(source, target).float()):
        assert 0 < (rough - exact).abs().max() < 0.2


@torch.no_grad()
def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    model, (source, target) = small(**VARIANTS["as BART"]), texts()
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(source, target), model(source, target))


@pytest.mark.parametrize("order", ["post", pytest.param("pre", marks=pytest.mark.slow)])
def test_it_learns_to_reverse_and_attends_to_the_answer(order: str) -> None:
    model = Transformer(TransformerConfig(vocab=11, width=32, depth=1, heads=1, ff_width=64, dropout=0.0, order=order))
    draws = torch.Generator().manual_seed(0)

    def task(b: int) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.randint(1, 11, (b, 7), generator=draws)
        answer = source.flip(1)
        return source, torch.cat([torch.zeros_like(answer[:, :1]), answer[:, :-1]], 1), answer

    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, 240)
    for _ in range(240):
        source, target, answer = task(32)
        optimiser.zero_grad()
        cross_entropy(model(source, target).flatten(0, 1), answer.flatten()).backward()
        optimiser.step()
        schedule.step()

    model.eval()
    source, _, answer = task(100)
    seen: list[Any] = []
    cross = model.decoder.blocks[0].cross
    with torch.no_grad():
        state, written = model.start(source), torch.zeros(100, 1, dtype=torch.long)
        for _ in range(7):  # by itself, token by token
            written = torch.cat([written, model.step(written[:, -1:], state)[:, -1:].argmax(-1)], 1)
        handle = cross.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
        model(source, written[:, :-1])
        handle.remove()
        (x, memory), *_ = seen
        q, k = cross.queries(x), cross.keys_values(memory).k
        weights = attend(q, k, torch.eye(7).expand(100, 1, 7, 7)).mean((0, 1))
    assert (written[:, 1:] == answer).float().mean() > 0.99
    assert (weights.argmax(-1) == torch.arange(6, -1, -1)).all()
    assert weights.flip(1).diagonal().min() > 0.8  # the anti-diagonal holds nearly all of each row
