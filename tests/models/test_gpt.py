"""GPT: causality, KV caches, padding, and what it learns."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from regard import causal, padding
from regard.base.errors import CacheError, ConfigError, DtypeError, ShapeError
from regard.core.positions import Rotary
from regard.models.gpt import GPT, DotProductAttention, GPTConfig, Sinusoidal, SyntheticAttention
from tests.models.weights import weights_of

TINY = GPTConfig(vocab=29, context=15, width=24, depth=2, heads=4, dropout=0.0, attention_dropout=0.0)
VARIANTS = {
    "learned": TINY,
    "rotary": replace(TINY, positions=Rotary()),
    "interleaved": replace(TINY, positions=Rotary(pairing="interleaved")),
    "sinusoidal": replace(TINY, positions=Sinusoidal()),
    "no positions": replace(TINY, positions=None),
    "window": replace(TINY, positions=Rotary(), window=4),
    "attention only": replace(TINY, ff_width=0),
    "grouped": replace(TINY, mixer=DotProductAttention(kv_heads=2)),
    "wide heads": replace(TINY, mixer=DotProductAttention(head_width=10)),
    "llama": replace(
        TINY,
        positions=Rotary(),
        norm="rms",
        activation="gated-silu",
        bias=False,
        tied=False,
        mixer=DotProductAttention(kv_heads=1, qk_norm="rms"),
    ),
    "dense synthesizer": replace(TINY, mixer=SyntheticAttention()),
    "random synthesizer": replace(TINY, mixer=SyntheticAttention(parts=("random",))),
    "mixed synthesizer": replace(TINY, mixer=SyntheticAttention(parts=("dense", "random", "dot"))),
}


TRACED = ["learned", "window", "llama", "mixed synthesizer"]


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> GPT:
    return lively(GPT(VARIANTS[request.param]))


def lively(model: GPT) -> GPT:
    """Weights large enough that every part changes the logits."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=draws)
    return model.eval()


def tokens(b: int = 2, n: int = 11, vocab: int = 29) -> Tensor:
    return torch.randint(0, vocab, (b, n), generator=torch.Generator().manual_seed(b + n))


def test_every_part_matters(model: GPT) -> None:
    before = model(tokens())
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            kept = parameter.clone()
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
            changed = not torch.allclose(model(tokens()), before, atol=1e-4)
            parameter.copy_(kept)
        assert changed or name.endswith(("key_value.bias", "key.bias")), (
            name
        )  # a key's bias alone shifts all scores of a row alike


def test_no_token_sees_a_later_one(model: GPT) -> None:
    before, changed = tokens(), tokens()
    changed[:, 6] = (changed[:, 6] + 1) % 29
    a, b = model(before), model(changed)
    assert torch.equal(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_a_window_forgets() -> None:
    model = lively(GPT(replace(VARIANTS["window"], depth=1)))
    before, changed = tokens(), tokens()
    changed[:, 2] = (changed[:, 2] + 1) % 29
    a, b = model(before), model(changed)
    assert not torch.allclose(a[:, 6], b[:, 6])
    assert torch.allclose(a[:, 7:], b[:, 7:], atol=1e-6)


def test_every_split_through_the_cache_gives_one_pass(model: GPT) -> None:
    text = tokens(n=6)
    with torch.no_grad():
        whole = model(text)
        for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 6), size) for size in range(6)):
            cache = model.cache()
            edges = (0, *cuts, 6)
            parts = [model(text[:, a:b], cache=cache) for a, b in itertools.pairwise(edges)]
            assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-5), cuts


def test_a_static_cache_gives_the_numbers_of_one_pass() -> None:
    model, text = lively(GPT(TINY)), tokens()
    with torch.no_grad():
        cache = model.cache(capacity=11)
        parts = [model(text[:, n : n + 1], cache=cache) for n in range(11)]
        assert torch.allclose(torch.cat(parts, 1), model(text), atol=2e-5)
        with pytest.raises(CacheError, match="room for 11 positions"):
            model(text[:, :1], cache=cache)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "synthesizer" not in name])
@pytest.mark.parametrize("extra", [1, 4])
def test_padding_changes_nothing(name: str, extra: int) -> None:
    model, text = lively(GPT(VARIANTS[name])), tokens(n=7)
    lengths = torch.tensor([7, 4])
    right = functional.pad(text, (0, extra), value=13)
    out = model(right, padding=padding(lengths))
    alone = model(text[1:, :4])
    assert torch.allclose(out[:1, :7], model(text[:1]), atol=2e-5)
    assert torch.allclose(out[1:, :4], alone, atol=2e-5)
    width = 7 + extra
    left = torch.stack(
        [functional.pad(row[:size], (width - size, 0), value=13) for row, size in zip(text, lengths, strict=True)]
    )
    where = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)
    filled = padding(lengths, side="left", width=width)
    for out in (model(left, padding=filled, positions=where), model(left, padding=filled)):
        assert torch.allclose(out[1:, -4:], alone, atol=2e-5)


def test_it_learns_to_repeat_and_attends_to_the_answer() -> None:
    """A text of nine tokens twice: from the tenth on, the next token stands eight places back."""
    torch.manual_seed(0)
    period = 9
    model = GPT(replace(TINY, vocab=17, context=2 * period, width=32, depth=1, heads=1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(250):
        text = torch.randint(0, 17, (32, period)).repeat(1, 2)
        loss = functional.cross_entropy(model(text)[:, period:-1].flatten(0, 1), text[:, period + 1 :].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()
    text = torch.randint(0, 17, (16, period)).repeat(1, 2)
    right = model(text)[:, period:-1].argmax(-1) == text[:, period + 1 :]
    assert right.float().mean() > 0.99
    weights = weights_of(lambda: model(text))[0]
    rows = torch.arange(period, 2 * period - 1)
    assert weights[:, :, rows, rows - period + 1].mean() > 0.9


def test_gradients_do_not_depend_on_recomputing(model: GPT) -> None:
    grads = []
    for recompute in (False, True):
        model.gradient_checkpointing = recompute
        model.zero_grad()
        model(tokens()).square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("model", TRACED, indirect=True)
def test_it_compiles_into_one_graph(model: GPT) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(tokens()), model(tokens()), atol=1e-5)


@pytest.mark.parametrize("model", TRACED, indirect=True)
def test_it_exports(model: GPT) -> None:
    program = torch.export.export(model, (tokens(),))
    with torch.no_grad():
        assert torch.allclose(program.module()(tokens()), model(tokens()), atol=1e-5)


def test_under_autocast_it_is_near(model: GPT) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(tokens())
    assert low.dtype == torch.bfloat16
    assert torch.allclose(low.float(), model(tokens()), atol=0.1 * model(tokens()).std().item(), rtol=0.1) or (
        (low.float() - model(tokens())).std() < 0.05 * model(tokens()).std()
    )


def test_dropout_acts_in_training_alone() -> None:
    model = lively(GPT(replace(TINY, dropout=0.4, attention_dropout=0.4)))
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    assert not torch.allclose(model(tokens()), model(tokens()))


def test_an_attention_only_model_has_no_feed_forward_parameters(tmp_path: Path) -> None:
    model = GPT(replace(TINY, ff_width=0)).eval()
    assert not [name for name, _ in model.named_parameters() if "feedforward" in name]
    with pytest.raises(ConfigError, match="ff_width=0, blocks without a feed-forward network"):
        model.export(tmp_path)
    with pytest.raises(ConfigError, match="ff_width is -1, but must be at least 0"):
        replace(TINY, ff_width=-1)


def test_names_are_stable() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in GPT(replace(TINY, depth=1)).state_dict().items()}
    assert shapes == {
        "tokens.weight": (29, 24),
        "positions.weight": (15, 24),
        "blocks.0.attention.query_key_value.weight": (72, 24),
        "blocks.0.attention.query_key_value.bias": (72,),
        "blocks.0.attention.out.weight": (24, 24),
        "blocks.0.attention.out.bias": (24,),
        "blocks.0.attention_norm.weight": (24,),
        "blocks.0.attention_norm.bias": (24,),
        "blocks.0.feedforward.up.weight": (96, 24),
        "blocks.0.feedforward.up.bias": (96,),
        "blocks.0.feedforward.down.weight": (24, 96),
        "blocks.0.feedforward.down.bias": (24,),
        "blocks.0.feedforward_norm.weight": (24,),
        "blocks.0.feedforward_norm.bias": (24,),
        "norm.weight": (24,),
        "norm.bias": (24,),
    }
    dense = GPT(replace(TINY, depth=1, mixer=SyntheticAttention(context=13), tied=False)).state_dict()
    mixer = {
        name: tuple(tensor.shape) for name, tensor in dense.items() if "attention." in name and "weight" not in name
    }
    assert mixer == {
        "blocks.0.attention.dense_keys": (13, 6),
        "blocks.0.attention.dense_bias": (13,),
        "blocks.0.attention.value.bias": (24,),
        "blocks.0.attention.out.bias": (24,),
        "blocks.0.attention.proposal.bias": (24,),
    }
    assert "head.weight" in dense


WRONG_SETTINGS = {
    "width must be a multiple of heads: width=24, heads=5; try heads=4": {"heads": 5},
    "heads must be a multiple of kv_heads: heads=4, kv_heads=3": {"mixer": DotProductAttention(kv_heads=3)},
    "depth is 0, but must be at least 1": {"depth": 0},
    "dropout is a share, at least 0 and less than 1: dropout=1.0": {"dropout": 1.0},
    "GPTConfig.positions takes Learned or Sinusoidal or Rotary or None, not 'absolute'": {"positions": "absolute"},
}


@pytest.mark.parametrize("text", WRONG_SETTINGS)
def test_a_wrong_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replace(TINY, **WRONG_SETTINGS[text])


def test_an_unknown_part_is_refused() -> None:
    for change, text in (
        ({"norm": "batch"}, "unknown norm 'batch'"),
        ({"activation": "gleu"}, "unknown activation 'gleu'; did you mean 'gelu'"),
        ({"mixer": SyntheticAttention(parts=("dance",))}, "parts takes one or more of dense, random, dot"),
    ):
        with pytest.raises(ValueError, match=text):
            replace(TINY, **change)


def test_wrong_input_is_refused() -> None:
    model = GPT(TINY).eval()
    wrong = {
        "tokens holds 29, but the vocabulary has tokens 0 to 28": (ShapeError, torch.tensor([[3, 29]])),
        "tokens holds -1": (ShapeError, torch.tensor([[3, -1]])),
        "tokens is .3,., but is read as": (ShapeError, torch.tensor([3, 1, 2])),
        "must be a tensor of whole numbers": (DtypeError, torch.zeros(1, 3)),
        "not list": (DtypeError, [[1, 2]]),
        "at least one token": (ShapeError, torch.zeros(0, 3, dtype=torch.long)),
        "the input has 16 positions, but the context has 15": (ShapeError, torch.zeros(1, 16, dtype=torch.long)),
    }
    for text, (error, given) in wrong.items():
        with pytest.raises(error, match=text):
            model(given)
    cache = model.cache()
    model(tokens(n=11), cache=cache)
    with pytest.raises(ShapeError, match="the input has 16 positions"):
        model(tokens(n=5), cache=cache)
    assert cache.length == 11
    with pytest.raises(CacheError, match=r"cache takes the result of model.cache\(\), not list"):
        model(tokens(n=3), cache=[])
    for where, text in (([0, 1, 15], "positions holds 15, but the context has"), ([-1, 0, 1], "holds -1")):
        with pytest.raises(ShapeError, match=text):
            model(tokens(n=3), positions=torch.tensor(where))
    with pytest.raises(DtypeError, match="positions must be a tensor of whole numbers"):
        model(tokens(n=3), positions=torch.zeros(3))
    synthesizer = GPT(VARIANTS["dense synthesizer"]).eval()
    with pytest.raises(ConfigError, match="by absolute position; pad sequences on the right"):
        synthesizer(tokens(n=3), padding=padding([3, 2], side="left", width=3))
    with pytest.raises(CacheError, match="made for 2 blocks, but the model has 1"):
        GPT(replace(TINY, depth=1)).eval()(tokens(n=3), cache=model.cache())


def test_the_mask_is_part_of_the_model() -> None:
    assert GPT(TINY).mask == causal()
    assert repr(GPT(VARIANTS["window"]).mask) == "window(before=4)"


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    model, text = lively(GPT(TINY)), tokens(b=1, n=3)
    cache = model.cache()
    with torch.no_grad():
        with pytest.raises(ShapeError, match="give one length per sequence"):
            model(text, cache=cache, padding=padding([3, 3]))
        assert [layer.length for layer in cache.layers] == [0, 0]
        assert torch.allclose(model(text, cache=cache), model(text), atol=2e-5)
    cache.layers[0].length += 1
    with pytest.raises(CacheError, match="a call failed half-way"):
        model(text, cache=cache)


def test_settings_that_contradict_each_other_are_refused() -> None:
    dense = VARIANTS["dense synthesizer"]
    wrong = {
        "Rotary rotates queries and keys, and SyntheticAttention has none": (dense, {"positions": Rotary()}),
        "mixer.context is 0, but must be at least 1": (TINY, {"mixer": SyntheticAttention(context=0)}),
        "one position each: axes=2; use axes=1": (TINY, {"positions": Rotary(axes=2)}),
        "rotates a multiple of 2 coordinates": (VARIANTS["rotary"], {"mixer": DotProductAttention(head_width=5)}),
        "eps is between 0 and 1": (TINY, {"eps": -3.0}),
        "GPTConfig.tied takes True or False, not 'no'": (TINY, {"tied": "no"}),
        "GPTConfig.activation takes a word, not 3": (TINY, {"activation": 3}),
        "unknown norm 'zz'": (TINY, {"mixer": DotProductAttention(qk_norm="zz")}),
    }
    for text, (config, change) in wrong.items():
        with pytest.raises(ValueError, match=text):
            replace(config, **change)


def test_a_window_compiles_with_a_static_cache() -> None:
    torch._dynamo.reset()
    model, text = lively(GPT(VARIANTS["window"])), tokens(b=1, n=9)
    step = torch.compile(lambda piece, cache: model(piece, cache=cache), fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = model.cache(capacity=9)
        parts = [step(text[:, n : n + 1], cache) for n in range(9)]
        assert torch.allclose(torch.cat(parts, 1), model(text), atol=2e-5)
        with pytest.raises(Exception, match="compile with DynamicCache or StaticCache"):
            step(text[:, :1], model.cache())


@pytest.mark.parametrize("variant", ["learned", "grouped", "window"])
def test_weights_of_nan_give_a_loss_of_nan(variant):
    """In the projections of q and k alone too: attention must not take their NaN for hidden keys."""
    for part in ("", "attention"):
        model = GPT(VARIANTS[variant]).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if part in name:
                    parameter.fill_(torch.nan)
        logits = model(tokens())
        assert functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).isnan()


def test_gradients_of_each_sequence_by_vmap() -> None:
    model = GPT(TINY)
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    tokens = torch.randint(0, TINY.vocab, (5, 7), generator=torch.Generator().manual_seed(1))

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row[None],)).square().mean()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, tokens)
    for number, row in enumerate(tokens):
        for name, gradient in torch.func.grad(loss)(parameters, row).items():
            torch.testing.assert_close(each[name][number], gradient)
    with pytest.raises(ShapeError, match=f"tokens holds {TINY.vocab}, but the vocabulary has"):
        torch.func.vmap(loss, (None, 0))(parameters, tokens + TINY.vocab - tokens.max())
