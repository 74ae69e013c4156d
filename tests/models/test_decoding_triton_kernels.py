"""The Triton kernels of a decoding step, run by Triton's interpreter on a CPU, against the modules in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.core.masks import causal, window
from regard.core.positions import Rotary
from regard.models import decoding_ops
from regard.models.captured_decoding import StepLoop
from regard.models.decoding_ops import (
    StepState,
    choose_and_append,
    cross_attention,
    embed,
    normalise,
    project,
    rotation_table,
    self_attention,
)
from regard.models.device_strategies import make_device_strategy
from regard.models.sampling import Greedy, Sample
from regard.models.transformer import RelativeBuckets, Transformer, TransformerConfig
from regard.nn.attention import Attention, KeysValues
from regard.nn.embeddings import TokenEmbedding
from regard.nn.feedforward import ACTIVATIONS
from regard.nn.int8 import Int8Linear
from regard.nn.norms import RMSNorm

pytest.importorskip("triton", reason="triton is not installed; it has wheels for Linux only")
# the interpreter computes with NumPy, which warns about infinity and NaN
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter has no bfloat16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def make_state(rows: int, capacity: int, layer: Attention | None = None, triton: bool = True) -> StepState:
    """A state whose caches hold random keys and values."""
    shape = (2, rows, 1, capacity, 2) if layer is None else (2, rows, layer.kv_heads, capacity, layer.head_width)
    return StepState(
        torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64), drawn(*shape, seed=1), triton=triton
    )


def moved(state: StepState, dtype: torch.dtype, device: str, triton: bool) -> StepState:
    state = copy.deepcopy(state)
    state.caches = state.caches.to(device, dtype)
    state.memory = [KeysValues(*(x.to(device, dtype) for x in pair)) for pair in state.memory]
    state.tokens, state.positions = state.tokens.to(device), state.positions.to(device)
    state.lengths = None if state.lengths is None else state.lengths.to(device)
    state.biases = {term: bias.to(device) for term, bias in state.biases.items()}
    state.rotations = {rotary: tuple(x.to(device) for x in pair) for rotary, pair in state.rotations.items()}  # type: ignore[misc]
    state.triton = triton
    return state


def state_of(dtype: torch.dtype) -> StepState:
    """A state without kernels, on the CPU."""
    return moved(make_state(3, 4), dtype, "cpu", False)


def plain_layer(layer: Int8Linear, dtype: torch.dtype) -> nn.Linear:
    """A layer with the rounded weights of an int8 layer."""
    plain = nn.Linear(layer.in_features, layer.out_features, dtype=dtype)
    plain.weight.copy_(layer.weight.dequantize(torch.float64))
    plain.bias.copy_(layer.bias)
    return plain


def assert_as_exact(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """At most twice the error of the modules in the same dtype, and one unit in the last place."""
    scale = exact.abs().max()
    room = 2 * (plain.double() - exact).abs().max() + torch.finfo(plain.dtype).eps * scale
    assert found.isfinite().all()
    assert (found.double().cpu() - exact).abs().max() <= room


NORMS = {
    "none": None, "layer": nn.LayerNorm(24, eps=1e-3), "layer-no-bias": nn.LayerNorm(24, bias=False),
    "rms": RMSNorm(24), "rms-eps": RMSNorm(24, eps=0.1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_product_with_norm_activation_gate_and_residual(
    dtype: torch.dtype, norm: str, activation: str | None, bias: bool
) -> None:
    state = make_state(3, 4)
    layer = copy.deepcopy(NORMS[norm])
    if layer is not None:
        for parameter in layer.parameters():
            parameter.add_(drawn(24, seed=4), alpha=0.3)
    x, w, residual = drawn(2, 24, scale=3.0), drawn(13, 24, seed=2), drawn(2, 13, seed=3)
    gate = nn.Linear(24, 13, bias=bias)
    b = drawn(13, seed=5) if bias else None
    for gated in (False, True) if activation else (False,):
        for given in (None, residual):
            results = []
            for kind, triton in ((torch.float64, False), (dtype, False), (dtype, True)):
                state = moved(state, kind, DEVICE if triton else "cpu", triton)
                place: Any = {"device": state.caches.device, "dtype": kind}
                rounded = [None if t is None else t.to(dtype).to(**place) for t in (x, w, b, given)]
                results.append(
                    project(
                        state, *rounded[:3], norm=None if layer is None else copy.deepcopy(layer).to(dtype).to(**place),
                        gate=copy.deepcopy(gate).to(dtype).to(**place) if gated else None,
                        activation=None if activation is None else copy.deepcopy(ACTIVATIONS[activation]),
                        residual=rounded[3],
                    )  # type: ignore[arg-type, misc]
                )  # fmt: skip
            exact, plain, found = results
            assert_as_exact(found, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_a_product_with_int8_weights(dtype: torch.dtype, gated: bool) -> None:
    up, gate = (Int8Linear(nn.Linear(24, 13, dtype=torch.float64)).to(DEVICE) for _ in range(2))
    norm, x = NORMS["layer"], drawn(2, 24, scale=3.0).to(dtype)
    assert norm is not None
    options: Any = {"activation": ACTIVATIONS["silu"], "residual": drawn(2, 13, seed=3).to(DEVICE, dtype)}
    state = moved(make_state(3, 4), dtype, DEVICE, True)
    up.bias, gate.bias = (nn.Parameter(part.bias.to(dtype), requires_grad=False) for part in (up, gate))
    found = project(
        state, x.to(DEVICE), up.weight, up.bias, norm=copy.deepcopy(norm).to(DEVICE, dtype),
        gate=gate if gated else None, **options,
    )  # fmt: skip
    exact, plain = (
        project(
            state_of(kind), x.to(kind), up.weight.dequantize(torch.float64).cpu().to(kind), up.bias.cpu().to(kind),
            norm=copy.deepcopy(norm).to(kind), gate=plain_layer(gate, kind) if gated else None,
            activation=options["activation"], residual=options["residual"].cpu().to(kind),
        )
        for kind in (torch.float64, dtype)
    )  # fmt: skip
    assert_as_exact(found, plain, exact)


@torch.no_grad()
def test_nan_and_infinity_pass_through_a_product() -> None:
    for bad in (torch.nan, torch.inf):
        for name in ACTIVATIONS:
            x = torch.tensor([[1.0, bad, 2.0]], device=DEVICE)
            w = torch.eye(3, device=DEVICE)
            y = project(make_state(1, 4), x, w, activation=ACTIVATIONS[name])
            assert y[0, 1].isnan() if bad != bad else not y[0, 1].isfinite() or name == "tanh"


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"heads": 3},
    "grouped": {"heads": 4, "kv_heads": 2, "head_width": 10, "rotary": Rotary(), "qk_norm": "rms"},
    "interleaved": {"heads": 3, "rotary": Rotary(pairing="interleaved", width=6), "qk_norm": "layer", "beta": 0.7},
    "part": {"heads": 2, "kv_heads": 1, "rotary": Rotary(width=4)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [None, 0, 5, 40])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("processors", [1, 40])
@torch.no_grad()
def test_attention_to_the_cache_of_one_new_token(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, before: int | None, name: str, processors: int
) -> None:
    monkeypatch.setattr(decoding_ops, "_multiprocessors", lambda: processors)  # decides how keys are divided
    monkeypatch.setattr(decoding_ops, "KEYS_PER_TILE", 16)
    layer = Attention(24, **LAYERS[name]).double()
    for parameter in layer.parameters():
        parameter.add_(drawn(*parameter.shape, seed=4), alpha=0.3)
    capacity = 131
    state = make_state(4, capacity, layer)
    state.positions = torch.tensor([0, 1, 97, 140])  # the last is a text that has ended
    if layer.rotary is not None:
        state.rotations[layer.rotary] = rotation_table(layer.rotary, layer.head_width, capacity, torch.zeros(1))
    x = drawn(4, (layer.heads + 2 * layer.kv_heads) * layer.head_width, seed=2, scale=2.0)
    mask = causal() if before is None else window(before=before)
    results = []
    for kind, triton in ((torch.float64, False), (dtype, False), (dtype, True)):
        each = moved(state, dtype, DEVICE if triton else "cpu", triton)
        each = moved(each, kind, DEVICE if triton else "cpu", triton)
        module = copy.deepcopy(layer).to(dtype).to(each.caches.device, kind)
        out = self_attention(each, x.to(dtype).to(each.caches), module, 0, mask, before)
        results.append((out, each.caches))
    for found, plain, exact in zip(*reversed(results), strict=True):
        assert_as_exact(found, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("processors", [1, 40])
@torch.no_grad()
def test_attention_to_sources_of_different_lengths(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, processors: int
) -> None:
    monkeypatch.setattr(decoding_ops, "_multiprocessors", lambda: processors)
    monkeypatch.setattr(decoding_ops, "KEYS_PER_TILE", 16)
    layer = Attention(24, 3).double()
    state = make_state(4, 4, layer)
    state.memory = [KeysValues(drawn(4, 3, 77, 8, seed=5), drawn(4, 3, 77, 8, seed=6))]
    state.lengths = torch.tensor([77, 1, 0, 50])
    x = drawn(4, 24, seed=2, scale=2.0)
    results = []
    for kind, triton in ((torch.float64, False), (dtype, False), (dtype, True)):
        each = moved(moved(state, dtype, "cpu", False), kind, DEVICE if triton else "cpu", triton)
        results.append(cross_attention(each, x.to(dtype).to(each.caches), layer, 0))
    assert_as_exact(results[2], results[1], results[0])
    assert (results[2][2] == 0).all()  # a source without tokens


@torch.no_grad()
def test_a_bias_by_distance_is_that_of_the_score_term() -> None:
    config = TransformerConfig(
        vocab=19, context=41, width=24, depth=1, heads=3, order="pre", norm="rms",
        positions=RelativeBuckets(buckets=8, max_distance=13),
    )  # fmt: skip
    model: Any = Transformer(config).eval()
    for parameter in model.parameters():
        parameter.add_(drawn(*parameter.shape).float(), alpha=0.3)
    loop = StepLoop(model, make_device_strategy(Greedy(), (), 2, 41, torch.device("cpu")), 2, 41, 7, False)
    loop.state.positions.copy_(torch.tensor([0, 33]))
    x, layer = drawn(2, 72).float(), model.decoder.blocks[0].attention
    caches = drawn(*loop.state.caches.shape).float()
    loop.state.caches.copy_(caches)
    plain = self_attention(loop.state, x, layer, 0, causal(), None)
    loop.state.caches.copy_(caches)
    state = moved(loop.state, torch.float32, DEVICE, True)
    (bias,) = loop.state.biases.values()
    state.biases = {layer.scores: bias.to(DEVICE)}
    found = self_attention(state, x.to(DEVICE), layer.to(DEVICE), 0, causal(), None)
    assert (found.cpu() - plain).abs().max() < 1e-5


def make_records(rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    kinds = (torch.int64, torch.float64)
    step = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return step, tuple(torch.zeros(2, rows, dtype=kind, device=DEVICE) for kind in kinds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_the_most_likely_token_is_the_first_of_equal_ones(dtype: torch.dtype, vocab: int) -> None:
    logits = drawn(5, vocab, scale=9.0).to(dtype)
    logits[1] = 3.0
    logits[2, :: max(vocab // 3, 1)] = 50.0
    logits[3] = -torch.inf
    logits[3, vocab - 1] = -2.0
    state = moved(make_state(5, 4), torch.float32, DEVICE, True)
    step, records = make_records(5)
    for number in range(2):  # the counts of programs that have arrived are set back
        choose_and_append(state, logits.to(DEVICE), step, records)
        assert records[0][number].tolist() == state.tokens.tolist() == logits.argmax(-1).tolist()
        truth = logits.double().log_softmax(-1).amax(-1)
        torch.testing.assert_close(records[1][number].cpu(), truth, rtol=0, atol=1e-12)
        assert step.tolist() == [number + 1]
        assert state.positions.tolist() == [number + 1] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.01, 0.8, 3.0])
@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_a_drawn_token_is_that_of_the_strategy(dtype: torch.dtype, temperature: float, vocab: int) -> None:
    rows = 6
    logits = drawn(rows, vocab, scale=4.0).to(dtype)
    logits[1, : vocab // 2] = -torch.inf
    logits[2, 1:] = -torch.inf
    uniform = torch.rand(7, rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2.0**-53
    heat = torch.tensor([temperature], dtype=torch.float64, device=DEVICE)
    state = moved(make_state(rows, 4), torch.float32, DEVICE, True)
    step, records = make_records(rows)
    for each in uniform:
        step.zero_()
        choose_and_append(state, logits.to(DEVICE), step, records, each[None].to(DEVICE), heat)
        tokens = Sample(temperature=temperature).choose(logits, each)
        assert records[0][0].tolist() == tokens.tolist()
        values = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(records[1][0].cpu(), values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_log_probability_of_a_bad_row_is_nan_and_its_token_in_the_vocabulary(bad: float) -> None:
    logits = drawn(2, 2500).float()
    logits[0, 7 if bad > -torch.inf else slice(None)] = bad
    if bad != bad:
        logits[0, 1200] = torch.nan
    state = moved(make_state(2, 4), torch.float32, DEVICE, True)
    step, records = make_records(2)
    heat = torch.ones(1, dtype=torch.float64, device=DEVICE)
    for drawn_by in ((), (torch.full((2, 2), 0.3, dtype=torch.float64, device=DEVICE), heat)):
        step.zero_()
        choose_and_append(state, logits.to(DEVICE), step, records, *drawn_by)
        assert records[1][0].isnan().tolist() == [True, False]
        assert 0 <= int(state.tokens[0]) < 2500


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 24**0.5])
@torch.no_grad()
def test_embeddings_and_norms_are_those_of_the_modules(dtype: torch.dtype, scale: float) -> None:
    state = make_state(3, 4)
    state.tokens, state.positions = torch.tensor([5, 0, 18]), torch.tensor([2, 0, 9])
    embedding = TokenEmbedding(19, 24, scale=scale)
    embedding.weight.copy_(drawn(19, 24))
    for table in (None, drawn(7, 24, seed=2).to(dtype), drawn(7, 24, seed=2).float()):
        results = [
            embed(
                moved(state, dtype, device, triton), copy.deepcopy(embedding).to(device, dtype),
                None if table is None else table.to(device),
            )
            for device, triton in (("cpu", False), (DEVICE, True))
        ]  # fmt: skip
        torch.testing.assert_close(results[1].cpu(), results[0], rtol=0, atol=0)
    x = drawn(3, 24, scale=3.0).to(dtype)
    for norm in NORMS.values():
        if norm is not None:
            plain, exact = copy.deepcopy(norm).to(dtype), copy.deepcopy(norm).double()
            found = normalise(moved(state, dtype, DEVICE, True), x.to(DEVICE), copy.deepcopy(plain).to(DEVICE))
            assert_as_exact(found, plain(x), exact(x.double()))
