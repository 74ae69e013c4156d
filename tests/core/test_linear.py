"""Kernelised attention: every form, split and feature map against a loop in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.base.errors import ConfigError, DeviceError, DtypeError, ShapeError
from regard.core.linear import (
    FeatureMap,
    LinearResult,
    LinearState,
    Performer,
    elu_plus_one,
    linear_attend,
    performer,
    relu,
    squared_relu,
)
from regard.core.masks import causal, full, padding, window
from regard.core.masks.algebra import Mask
from tests.properties import NoNaN
from tests.tolerance import GRADIENT, OUTPUT, too_far

B, H, G, N, C, E, R = 2, 6, 3, 11, 5, 7, 13
FORMS = ["parallel", "chunked", "recurrent"]
FEATURES = {
    "elu_plus_one": elu_plus_one(),
    "relu": relu(),
    "squared_relu": squared_relu(),
    "performer": performer(C, R),
}
RESULTS = ["out", "gradient of q", "gradient of k", "gradient of v"]
FACTORS = [OUTPUT, GRADIENT, GRADIENT, GRADIENT]
LENGTHS = [4, 9]
MASKS: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": causal,
    "padding": lambda: padding(LENGTHS),
    "causal and padding": lambda: causal() & padding(LENGTHS) & full(),
}
each_map = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)


def draw(i: int = N, j: int = N, *, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(7)
    shapes = (B, H, i, C), (B, G, j, C), (B, G, j, E)
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
    return (q * scale).to(dtype), (k * scale).to(dtype), v.to(dtype)


def sees(mask: str, i: int, j: int) -> Tensor:
    """The masks of MASKS a second time: (b, 1, i, j)."""
    visible = torch.ones(B, 1, i, j, dtype=torch.bool)
    if "causal" in mask:
        visible = visible & torch.ones(i, j, dtype=torch.bool).tril()
    if "padding" in mask:
        visible = visible & (torch.arange(j) < torch.tensor(LENGTHS)[:, None])[:, None, None]
    return visible


def naive(q: Tensor, k: Tensor, v: Tensor, features: FeatureMap, visible: Tensor) -> Tensor:
    """The quadratic definition, in the precision of its inputs."""
    own = [head // (q.shape[1] // k.shape[1]) for head in range(q.shape[1])]
    weights = torch.einsum("bhir,bhjr->bhij", features(q), features(k[:, own])) * visible
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass == 0, 0, weights @ v[:, own] / torch.where(mass == 0, 1, mass))


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v, for one fixed upstream gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def content(state: LinearState) -> tuple[Tensor, Tensor, int]:
    """What a state holds, whatever the peak it is kept below."""
    level = state.peak.double().exp()
    return state.weighted.double() * level[..., None], state.total.double() * level, state.length


def assert_same_content(one: LinearState, other: LinearState, rtol: float = 1e-12) -> None:
    assert one.length == other.length
    torch.testing.assert_close(content(one)[:2], content(other)[:2], rtol=rtol, atol=1e-12)


@each_map
@pytest.mark.parametrize("mask", ["none", "causal and padding"])
def test_the_quadratic_definition_is_the_triple_loop(features: FeatureMap, mask: str) -> None:
    q, k, v = draw()
    out, phi_q, phi_k, visible = torch.zeros(B, H, N, E), features(q), features(k), sees(mask, N, N)
    for b in range(B):
        for h in range(H):
            for i in range(N):
                weights = [
                    float(phi_q[b, h, i] @ phi_k[b, h // 2, j]) if visible[b, 0, i, j] else 0.0 for j in range(N)
                ]
                if sum(weights):
                    out[b, h, i] = sum(w * v[b, h // 2, j] for j, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(naive(q, k, v, features, visible).float(), out)


@each_map
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_as_near_the_truth_as_the_definition_in_its_precision(
    features: FeatureMap, mask: str, form: str
) -> None:
    i, visible = (N, sees(mask, N, N)) if "causal" in mask else (9, sees(mask, 9, N))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        inputs = draw(i, dtype=dtype)
        run = lambda *x: linear_attend(*x, features=features, mask=MASKS[mask](), form=form, chunk=4).out  # noqa: E731
        actual = with_gradients(run, *inputs)
        same = with_gradients(lambda *x: naive(*x, features, visible), *inputs)
        truth = with_gradients(lambda *x: naive(*x, features, visible), *(x.double() for x in inputs))
        for name, factor, *results in zip(RESULTS, FACTORS, actual, same, truth, strict=True):
            assert results[0].dtype == dtype
            wrong = too_far(*results, factor)
            assert not wrong, f"{name}: {wrong}"


@each_map
def test_gradcheck_passes_also_through_the_state(features: FeatureMap) -> None:
    q, k, v = (x[:1, :1, :4].clone().requires_grad_() for x in draw())
    assert torch.autograd.gradcheck(
        lambda *x: linear_attend(*x, features=features, mask=causal(), chunk=3).out, (q, k, v)
    )

    def in_two_calls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = linear_attend(q[:, :, :2], k[:, :, :2], v[:, :, :2], features=features, mask=causal()).state
        return linear_attend(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], features=features, mask=causal(), state=past).out

    assert torch.autograd.gradcheck(in_two_calls, (q, k, v))


@each_map
@pytest.mark.parametrize("mask", ["causal", "causal and padding"])
def test_every_split_through_the_state_gives_one_pass(features: FeatureMap, mask: str) -> None:
    q, k, v = draw()
    whole = linear_attend(q, k, v, features=features, mask=MASKS[mask](), form="parallel")
    for split in range(N + 1):
        past = None
        parts = []
        for some in (slice(0, split), slice(split, N)):
            call = linear_attend(
                q[:, :, some], k[:, :, some], v[:, :, some], features=features, mask=MASKS[mask](), state=past, chunk=3
            )
            past = call.state
            parts.append(call.out)
        torch.testing.assert_close(torch.cat(parts, 2), whole.out, rtol=1e-12, atol=1e-12)
        assert past is not None
        assert_same_content(past, whole.state)


@each_map
def test_the_state_after_s_tokens_is_the_same_however_it_was_reached(features: FeatureMap) -> None:
    q, k, v = draw()
    own = [head // (H // G) for head in range(H)]
    for s in range(N + 1):
        some = q[:, :, :s], k[:, :, :s], v[:, :, :s]
        states = [
            linear_attend(*some, features=features, mask=mask, form=form, chunk=4).state
            for form in FORMS
            for mask in (causal(), full())
        ]
        phi = features(k[:, own, :s]) * (math.sqrt(R) if isinstance(features, Performer) else 1)
        weighted, total, length = content(states[0])
        torch.testing.assert_close(weighted, torch.einsum("bhjr,bhje->bhre", phi, v[:, own, :s]))
        torch.testing.assert_close(total, phi.sum(2))
        assert length == s
        for state in states[1:]:
            assert_same_content(state, states[0])


@given(
    cuts=st.lists(st.integers(0, 17), max_size=4).map(sorted),
    forms=st.lists(st.sampled_from(FORMS), min_size=5, max_size=5),
    chunk=st.integers(1, 20),
    lengths=st.tuples(st.integers(0, 17), st.integers(0, 17)),
    name=st.sampled_from(sorted(FEATURES)),
    is_causal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_cuts_forms_chunks_and_paddings_agree(
    cuts: list[int], forms: list[str], chunk: int, lengths: tuple[int, int], name: str, is_causal: bool
) -> None:
    q, k, v = draw(17, 17)
    mask = padding(list(lengths)) & (causal() if is_causal else full())
    whole = linear_attend(q, k, v, features=FEATURES[name], mask=mask)
    state, outs = None, []
    for form, start, stop in zip(forms, [0, *cuts], [*cuts, 17], strict=False):
        rows = slice(start, stop) if is_causal else slice(None)
        out, state = linear_attend(
            q[:, :, rows],
            k[:, :, start:stop],
            v[:, :, start:stop],
            features=FEATURES[name],
            mask=mask,
            form=form,
            chunk=chunk,
            state=state,
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2) if is_causal else outs[-1], whole.out, rtol=1e-10, atol=1e-12)
    assert state is not None
    assert_same_content(state, whole.state)


def test_a_causal_mask_is_chunked_and_a_full_one_parallel_unless_told() -> None:
    q, k, v = draw(131, 131, dtype=torch.float32)
    for mask, form in ((causal(), "chunked"), (full(), "parallel")):
        chosen = linear_attend(q, k, v, mask=mask)
        assert torch.equal(chosen.out, linear_attend(q, k, v, mask=mask, form=form, chunk=64).out)
        others = [linear_attend(q, k, v, mask=mask, form=f, chunk=64).out for f in FORMS if f != form]
        assert not any(torch.equal(chosen.out, other) for other in others)
        one_by_one = linear_attend(q, k, v, mask=mask, form="chunked", chunk=1)
        assert torch.equal(linear_attend(q, k, v, mask=mask, form="recurrent").out, one_by_one.out)


class CountOperations(TorchDispatchMode):
    """Counts the operations on tensors, forward and backward."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("features", [elu_plus_one(), relu(), squared_relu()], ids=["elu_plus_one", "relu", "squared"])
def test_chunks_are_computed_as_one_batch(features: FeatureMap) -> None:
    counts = []
    for n in (67, 677):
        with CountOperations() as operations:
            with_gradients(lambda *x: linear_attend(*x, features=features, mask=causal(), chunk=8).out, *draw(n, n))
        counts.append(operations.count)
    assert counts[0] == counts[1], "the number of operations grows with the number of chunks"


def test_memory_for_the_states_of_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(67, 67)
    whole = linear_attend(q, k, v, mask=causal(), chunk=4)
    monkeypatch.setattr("regard.core.linear._AT_ONCE_ON_CPU", 3 * B * H * C * E)  # three chunks of 4 at once
    parts = linear_attend(q, k, v, mask=causal(), chunk=4)
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-12, atol=1e-12)
    assert_same_content(parts.state, whole.state)


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_the_backward_pass_fills_no_tensor_of_the_whole_sequence_for_each_chunk(form: str) -> None:
    made = []

    class CountNumbers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            made[-1] += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and not x._is_view())
            return out

    for features in (elu_plus_one(), performer(C, R)):
        for n in (64, 256):
            made.append(0)
            run = lambda *x, f=features: linear_attend(*x, features=f, mask=causal(), form=form, chunk=4).out  # noqa: E731
            with CountNumbers():
                with_gradients(run, *draw(n, n))
        assert made[-1] < 6 * made[-2], "the numbers that are made grow faster than the sequence"


@each_map
@pytest.mark.parametrize("form", FORMS)
def test_later_keys_and_values_change_no_earlier_row_by_a_bit(features: FeatureMap, form: str) -> None:
    q, k, v = draw(dtype=torch.float32)
    later_k, later_v = (torch.cat((x[:, :, :6], 30 * x[:, :, 6:].flip(2)), 2) for x in (k, v))
    before, after = (
        linear_attend(q, *pair, features=features, mask=causal(), form=form, chunk=4).out
        for pair in ((k, v), (later_k, later_v))
    )
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.equal(before[:, :, 6:], after[:, :, 6:])


@each_map
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_in_padded_keys_and_values_reaches_nothing(features: FeatureMap, form: str, poison: float) -> None:
    q, k, v = draw(dtype=torch.float32)
    hidden = (torch.arange(N) >= torch.tensor(LENGTHS)[:, None])[:, None, :, None]
    for mask in (padding(LENGTHS), causal() & padding(LENGTHS)):
        run = lambda *x, m=mask: linear_attend(*x, features=features, mask=m, form=form, chunk=4).out  # noqa: E731
        clean = with_gradients(run, q, k, v)
        dirty = with_gradients(run, q, k.masked_fill(hidden, poison), v.masked_fill(hidden, poison))
        for expected, actual in zip(clean, dirty, strict=True):
            assert torch.equal(actual, expected)
        assert not dirty[2].masked_fill(~hidden, 0).any()
        assert not dirty[3].masked_fill(~hidden, 0).any()


@each_map
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_nothing_give_zeros_and_zero_gradients_without_any_nan(features: FeatureMap, form: str) -> None:
    q, k, v = draw(dtype=torch.float32)
    blind = (torch.arange(N) < torch.tensor([N, 3])[:, None])[:, None, :, None]
    for mask in (causal() & padding([0, 8], side="left", width=N), padding([0, N])):
        run = lambda *x, m=mask: linear_attend(*x, features=features, mask=m, form=form, chunk=4).out  # noqa: E731
        with NoNaN():
            out, grad_q, grad_k, grad_v = with_gradients(run, q, k, v)
        for x in (out, grad_q):
            assert not x[:1].any()
            assert x[1].any()
        if mask != padding([0, N]):
            assert not out.masked_fill(~blind, 0).any()
            assert not grad_q.masked_fill(~blind, 0).any()
        assert not grad_k[0].any()
        assert not grad_v[0].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", [relu(), squared_relu()], ids=["relu", "squared_relu"])
def test_a_query_that_shares_no_feature_gives_zeros_and_zero_gradients(features: FeatureMap, form: str) -> None:
    q, k, v = draw(dtype=torch.float32)
    q[:, 1], k[:, 2] = -q[:, 1].abs(), -k[:, 2].abs()  # a head of blind queries, and one of featureless keys
    for mask in (full(), causal()):
        run = lambda *x, m=mask: linear_attend(*x, features=features, mask=m, form=form, chunk=4).out  # noqa: E731
        with NoNaN():
            out, grad_q, grad_k, grad_v = with_gradients(run, q, k, v)
        for x in (out, grad_q):
            assert not x[:, [1, 4, 5]].any()
            assert x[:, [0, 2, 3]].any()
        assert not grad_k[:, 2].any()
        assert not grad_v[:, 2].any()


def test_elu_plus_one_stays_exact_where_elu_would_round_to_zero() -> None:
    x = torch.tensor([-60.0, -20.0, -1.0, 0.0, 2.0, 90.0])[None, None, :, None]
    expected = torch.tensor([math.exp(-60), math.exp(-20), math.exp(-1), 1.0, 3.0, 91.0])
    torch.testing.assert_close(elu_plus_one()(x).flatten(), expected, rtol=3e-7, atol=0)
    (slope,) = torch.autograd.grad(elu_plus_one()(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(slope.flatten(), expected.clamp(max=1), rtol=3e-7, atol=0)


def test_relu_and_its_square_are_what_they_say() -> None:
    x = torch.tensor([-2.0, 0.0, 0.5, 3.0])[None, None, :, None]
    assert relu()(x).flatten().tolist() == [0, 0, 0.5, 3]
    assert squared_relu()(x).flatten().tolist() == [0, 0, 0.25, 9]


class Clamped(FeatureMap):
    """A map of one's own, with slope 1 where it is zero: its numerator has a gradient even where all weights vanish."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


def test_a_row_without_weight_passes_no_gradient_whatever_the_slope_of_its_features() -> None:
    q, k, v = draw()
    q, k, v = (x.requires_grad_() for x in (q, torch.zeros_like(k), v))
    out = linear_attend(q, k, v, features=Clamped()).out
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient.any()


def softargmax_attention(q: Tensor, k: Tensor, v: Tensor, beta: float) -> Tensor:
    own = [head // (H // G) for head in range(H)]
    return (torch.einsum("bhic,bhjc->bhij", q, k[:, own]) * beta).softmax(-1) @ v[:, own]


@pytest.mark.parametrize("beta", [None, 1.5])
def test_performer_comes_to_softargmax_attention_as_features_grow(beta: float | None) -> None:
    q, k, v = draw(scale=0.25)  # small norms: the variance grows as exp(beta |q + k|^2)
    truth = softargmax_attention(q, k, v, C**-0.5 if beta is None else beta)
    errors = []
    for count in (16, 128, 1024):
        outs = [linear_attend(q, k, v, features=performer(C, count, seed, beta)).out for seed in range(16)]
        errors.append(torch.stack([(out - truth).square().mean().sqrt() for out in outs]).mean().item())
    # eight times the features leave 8 ** -0.5 = 0.35 of the error
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1]
    assert errors[2] < 0.013


@pytest.mark.parametrize("orthogonal", [True, False])
def test_performer_estimates_the_exponential_without_bias(orthogonal: bool) -> None:
    q, k = (x[:1, :1, :1] for x in draw()[:2])
    values = []
    for seed in range(400):
        phi = performer(C, C, seed, 0.3, orthogonal)
        values.append((phi(q) * phi(k)).sum().item())
    estimates, truth = torch.tensor(values), math.exp(0.3 * float((q * k).sum()))
    assert abs(estimates.mean().item() - truth) < 4 * estimates.std().item() / 20
    assert estimates.std().item() < truth


def directions(count: int, seed: int, orthogonal: bool) -> Tensor:
    features = performer(C, count, seed, 1.0, orthogonal)
    assert isinstance(features, Performer)
    return features.directions


def test_performer_directions_are_normal_and_orthogonal_in_groups() -> None:
    for orthogonal in (True, False):
        many = torch.stack([directions(C, seed, orthogonal) for seed in range(500)])
        # every coordinate of every direction is symmetric around zero with variance one: 5 sigma of 500 draws
        assert many.mean(0).abs().max() < 5 / 500**0.5
        assert (many.square().mean(0) - 1).abs().max() < 5 * (2 / 500) ** 0.5
    rows = directions(R, 0, True)
    for start in range(0, R, C):
        group = rows[start : start + C]
        product = group @ group.T
        assert (product - product.diagonal().diag()).abs().max() < 1e-12
    assert (rows[:C] @ rows[C : 2 * C].T).abs().max() > 0.1
    assert not torch.allclose(directions(R, 0, True), directions(R, 1, True))


def test_performer_with_beta_zero_is_the_mean() -> None:
    q, k, v = draw()
    out = linear_attend(q, k, v, features=performer(C, R, beta=0.0), mask=causal()).out
    mean = v.cumsum(2) / torch.arange(1, N + 1)[:, None]
    torch.testing.assert_close(out, mean.repeat_interleave(H // G, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [10.0, 100.0, 3000.0])
def test_performer_neither_overflows_nor_vanishes_at_large_norms(scale: float, form: str) -> None:
    features = performer(C, R)
    # few digits, so that q . w - |k|^2 / 2 up to 1e8 is known to float32 well enough to compare
    q, k, v = ((x * 4).round() / 4 for x in draw(scale=scale))
    own = [head // (H // G) for head in range(H)]
    logs = features.query_features(q)[:, :, :, None] + features.key_features(k[:, own])[:, :, None]
    for mask, visible in ((full(), sees("none", N, N)), (causal(), sees("causal", N, N))):
        truth = torch.logsumexp(logs, -1).masked_fill(~visible, -math.inf).softmax(-1) @ v[:, own]
        run = lambda *x, m=mask: linear_attend(*x, features=features, mask=m, form=form, chunk=4).out  # noqa: E731
        torch.testing.assert_close(run(q, k, v), truth, rtol=1e-9, atol=1e-9)
        with NoNaN():
            out, *grads = with_gradients(run, q.float(), k.float(), v.float())
        assert all(x.isfinite().all() for x in (out, *grads))
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_with_one_visible_key_gets_its_value_however_far_apart_they_point(form: str) -> None:
    q, k, v = draw(dtype=torch.float32, scale=60.0)
    q[:, :, 0] = -k[:, [head // 2 for head in range(H)], 0]  # features of one vanish where those of the other peak
    out = linear_attend(q, k, v, features=performer(C, R), mask=causal(), form=form, chunk=4).out
    torch.testing.assert_close(out[:, :, 0], v.repeat_interleave(2, 1)[:, :, 0])


def test_the_peak_of_a_state_only_rises_and_starts_below_everything() -> None:
    q, k, v = draw(scale=5.0)
    features, state = performer(C, R), None
    peaks = [linear_attend(q[:, :, :0], k[:, :, :0], v[:, :, :0], features=features).state.peak]
    assert (peaks[0] == -math.inf).all()
    for t in range(N):
        some = slice(t, t + 1)
        state = linear_attend(q[:, :, some], k[:, :, some], v[:, :, some], features=features, state=state).state
        assert (state.peak >= peaks[-1]).all()
        assert (state.total <= t + 1).all()
        peaks.append(state.peak)
    assert (peaks[-1] > peaks[1]).any()


@each_map
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_float32_at_least(features: FeatureMap, dtype: torch.dtype) -> None:
    state = linear_attend(*draw(dtype=dtype), features=features, mask=causal()).state
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert [state.weighted.dtype, state.total.dtype, state.peak.dtype] == [wanted] * 3
    assert state.weighted.shape == (B, H, R if isinstance(features, Performer) else C, E)
    assert state.total.shape == state.peak.shape == state.weighted.shape[:3]


@each_map
def test_autocast_rounds_the_inputs_and_keeps_the_sums(features: FeatureMap) -> None:
    inputs = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_attend(*inputs, features=features, mask=causal())
    outside = linear_attend(*(x.bfloat16() for x in inputs), features=features, mask=causal())
    assert inside.out.dtype == torch.bfloat16
    assert inside.state.weighted.dtype == torch.float32
    assert torch.equal(inside.out, outside.out)
    assert torch.equal(inside.state.weighted, outside.state.weighted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_attend(*draw(), features=features).out.dtype == torch.float64


@pytest.mark.parametrize("features", [elu_plus_one(), performer(C, R)], ids=["elu_plus_one", "performer"])
def test_it_compiles_without_a_break_with_a_state_in_and_out(features: FeatureMap) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Mask, state: LinearState | None) -> tuple[Tensor, LinearState]:
        return linear_attend(q, k, v, features=features, mask=mask, state=state, chunk=8)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs, mask = draw(dtype=torch.float32), causal() & padding([7, 15])
    first, state = compiled(*inputs, mask, None)
    second, after = compiled(*inputs, mask, state)
    expected = step(*inputs, mask, None)
    torch.testing.assert_close(first, expected[0])
    torch.testing.assert_close(second, step(*inputs, mask, expected[1])[0])
    assert after.length == 2 * N


@each_map
def test_vmap_and_functional_gradients_agree_with_a_loop(features: FeatureMap) -> None:
    stacks = [torch.stack((x, x + 0.3, -x)) for x in draw()]
    run = lambda q, k, v: linear_attend(q, k, v, features=features, mask=causal() & padding(LENGTHS)).out  # noqa: E731
    expected = torch.stack([run(*x) for x in zip(*stacks, strict=True)])
    torch.testing.assert_close(torch.vmap(run)(*stacks), expected, rtol=1e-10, atol=1e-12)
    slope = torch.vmap(torch.func.grad(lambda *x: run(*x).square().sum()))(*stacks)
    leaves = [x.clone().requires_grad_() for x in stacks]
    loss = sum((run(*x).square().sum() for x in zip(*leaves, strict=True)), torch.zeros(()))
    torch.testing.assert_close(slope, torch.autograd.grad(loss, leaves)[0], rtol=1e-9, atol=1e-12)


@each_map
@pytest.mark.parametrize("form", FORMS)
def test_lengths_zero_and_one_and_strided_heads_are_fine(features: FeatureMap, form: str) -> None:
    q, k, v = draw()

    def run(i: int, j: int, mask: Mask) -> LinearResult:
        return linear_attend(q[:, :, :i], k[:, :, :j], v[:, :, :j], features=features, mask=mask, form=form)

    assert run(0, 0, causal()).out.shape == (B, H, 0, E)
    assert run(0, 0, causal()).state.length == 0
    assert run(0, 5, full()).out.shape == (B, H, 0, E)
    assert torch.equal(run(3, 0, full()).out, torch.zeros(B, H, 3, E, dtype=q.dtype))
    torch.testing.assert_close(run(1, 1, causal()).out, run(1, 1, full()).out)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    whole, other = (linear_attend(*x, features=features, mask=causal(), form=form) for x in ((q, k, v), strided))
    torch.testing.assert_close(other.out, whole.out, rtol=1e-12, atol=1e-12)


def test_the_full_mask_reads_the_state_and_all_new_keys() -> None:
    q, k, v = draw(4, N)
    past = linear_attend(q[:, :, :0], k[:, :, :6], v[:, :, :6]).state
    torch.testing.assert_close(linear_attend(q, k[:, :, 6:], v[:, :, 6:], state=past).out, linear_attend(q, k, v).out)


def test_several_paddings_hide_what_any_of_them_hides() -> None:
    q, k, v = draw()
    both = linear_attend(q, k, v, mask=padding([4, 9]) & padding([6, 2]))
    torch.testing.assert_close(both.out, linear_attend(q, k, v, mask=padding([4, 2])).out)


def test_shapes_can_be_inferred_on_the_meta_device() -> None:
    q, k, v = (x.to("meta") for x in draw())
    out = linear_attend(q, k, v, features=performer(C, R), mask=causal() & padding(LENGTHS)).out
    assert out.shape == (B, H, N, E)


def test_feature_maps_are_frozen_values() -> None:
    assert len({elu_plus_one(), elu_plus_one(), relu(), squared_relu()}) == 3
    assert performer(C, R) == performer(C, R)
    assert hash(performer(C, R)) == hash(performer(C, R))
    assert performer(C, R) != performer(C, R, seed=1)
    assert repr(performer(C, R)) == "Performer(width=5, count=13, seed=0, beta=None, orthogonal=True)"
    assert repr(relu()) == "Elementwise(name='relu')"


def call(**rest: object) -> object:
    return linear_attend(*draw(dtype=torch.float32), **rest)  # type: ignore[arg-type]


def reshaped(**changes: Tensor) -> object:
    q, k, v = draw(dtype=torch.float32)
    return linear_attend(**({"q": q, "k": k, "v": v} | changes))  # type: ignore[arg-type]


def stale(dtype: torch.dtype, features: FeatureMap) -> LinearState:
    return linear_attend(*draw(dtype=dtype), features=features).state


REFUSALS: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    r"unknown form 'chunk'; did you mean 'chunked'\? \(there are: parallel, chunked, recurrent\)": (
        ConfigError,
        lambda: call(form="chunk"),
    ),
    r"unknown form '' \(there are": (ConfigError, lambda: call(form="")),
    r"^unknown form 3 \(there are: parallel, chunked, recurrent\)$": (ConfigError, lambda: call(form=3)),
    r"^chunk is 0, but must be at least 1: it counts keys taken at once$": (ConfigError, lambda: call(chunk=0)),
    r"^chunk takes a whole number, not 2\.5$": (ConfigError, lambda: call(chunk=2.5)),
    r"^chunk takes a whole number, not 3\.0$": (ConfigError, lambda: call(chunk=3.0, form="parallel")),
    r"^chunk takes a whole number, not True$": (ConfigError, lambda: call(chunk=True)),
    r"^features takes a feature map such as relu\(\), with its parentheses, not <function relu at 0x\w+>$": (
        ConfigError,
        lambda: call(features=relu),
    ),
    r"^features takes a feature map such as relu\(\), .*, not <built-in method relu": (
        ConfigError,
        lambda: call(features=torch.relu),
    ),
    r"^features takes a feature map such as relu\(\), .*, not 'relu'$": (ConfigError, lambda: call(features="relu")),
    r"cannot apply window\(before=3\).*use full\(\), causal\(\), padding\(lengths\)": (
        ConfigError,
        lambda: call(mask=causal() & window(before=3)),
    ),
    r"cannot apply causal\(\) \| padding\(\[4, 9\]\)": (ConfigError, lambda: call(mask=causal() | padding(LENGTHS))),
    r"cannot apply ~causal\(\)": (ConfigError, lambda: call(mask=~causal())),
    r"cannot apply matrix": (ConfigError, lambda: call(mask=torch.ones(N, N, dtype=torch.bool))),
    r"3 lengths, but q has b=2 \(batch\)": (ShapeError, lambda: call(mask=causal() & padding([1, 2, 3]))),
    r"q has i=9 \(query positions\), but k has j=11 \(key positions\).*state=": (
        ShapeError,
        lambda: linear_attend(*draw(9, N), mask=causal()),
    ),
    r"k has 3 axes, \(6, 11, 5\), but is read as \(b g j c\): batch, key/value heads, key positions, .*k\[None\]$": (
        ShapeError,
        lambda: reshaped(k=torch.ones(6, 11, 5)),
    ),
    r"k has c=4 \(width per head of q and k\), but q has c=5; k is \(2, 3, 11, 4\) read as \(b g j c\); project": (
        ShapeError,
        lambda: reshaped(k=torch.ones(B, G, N, 4)),
    ),
    r"k has b=1 \(batch\), but q has b=2": (ShapeError, lambda: reshaped(k=torch.ones(1, G, N, C))),
    r"v has g=6 \(key/value heads\), but k has g=3.*pairs": (ShapeError, lambda: reshaped(v=torch.ones(B, H, N, E))),
    r"v has j=10 \(key positions\), but k has j=11": (ShapeError, lambda: reshaped(v=torch.ones(B, G, 10, E))),
    r"q has h=6 \(query heads\), which is not a multiple of k's g=4 \(key/value heads\);.*among the divisors of 6$": (
        ShapeError,
        lambda: reshaped(k=torch.ones(B, 4, N, C), v=torch.ones(B, 4, N, E)),
    ),
    r"^q has h=0 \(query heads\), but there must be at least one; q is \(2, 0, 11, 5\) read as \(b h i c\)$": (
        ShapeError,
        lambda: reshaped(q=torch.ones(B, 0, N, C)),
    ),
    r"^k has g=0 \(key/value heads\), but there must be at least one; k is \(2, 0, 11, 5\) read as \(b g j c\)$": (
        ShapeError,
        lambda: reshaped(k=torch.ones(B, 0, N, C), v=torch.ones(B, 0, N, E)),
    ),
    r"^q has c=0 \(width per head of q and k\), but there must be at least one; q is \(2, 6, 11, 0\) read as": (
        ShapeError,
        lambda: reshaped(q=torch.ones(B, H, N, 0), k=torch.ones(B, G, N, 0)),
    ),
    r"^q is torch.int64, but attention needs floating numbers; call q.float\(\) first$": (
        DtypeError,
        lambda: reshaped(q=torch.ones(B, H, N, C, dtype=torch.int64)),
    ),
    r"^q is torch.complex64, but attention needs real numbers; take q.real or q.abs\(\)$": (
        DtypeError,
        lambda: reshaped(q=torch.ones(B, H, N, C, dtype=torch.complex64)),
    ),
    r"^v is torch.float16, but q is torch.float32; convert one of them, for instance v.to\(q.dtype\)$": (
        DtypeError,
        lambda: reshaped(v=torch.ones(B, G, N, E, dtype=torch.float16)),
    ),
    r"k is on meta, but q is on cpu": (DeviceError, lambda: reshaped(k=torch.ones(B, G, N, C, device="meta"))),
    r"q has c=5 .*performer was made with width=6; use width=5": (
        ShapeError,
        lambda: call(features=performer(6, R)),
    ),
    r"performer\(count\) is 0, but must be at least 1": (ConfigError, lambda: performer(5, 0)),
    r"finite beta that is not negative: beta=-1": (ConfigError, lambda: performer(5, R, beta=-1.0)),
    r"state.weighted is \(2, 6, 13, 7\) read as \(b h r e\), but this call needs \(2, 6, 5, 7\)": (
        ShapeError,
        lambda: call(state=stale(torch.float32, performer(C, R))),
    ),
    r"state is torch.float64, but this call sums in torch.float32": (
        DtypeError,
        lambda: call(state=stale(torch.float64, relu())),
    ),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_says_what_came_and_what_to_do(text: str) -> None:
    error, attempt = REFUSALS[text]
    with pytest.raises(error, match=text):
        attempt()


@pytest.mark.parametrize("features", [elu_plus_one, squared_relu])
def test_small_features_do_not_vanish(features):
    """The product of two small features may leave the range of floats where their share of the sum does not."""
    x = torch.full((1, 1, 5, 4), -80.0 if features is elu_plus_one else 1e-12)
    v = torch.randn(1, 1, 5, 3, generator=torch.Generator().manual_seed(0))
    out = linear_attend(x, x, v, features=features(), mask=causal()).out
    expected = v.cumsum(2) / torch.arange(1, 6)[:, None]
    assert torch.allclose(out, expected, atol=1e-5)
