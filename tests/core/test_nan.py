"""What NaN and infinity do, in every kernel: the table of docs/notation.md, row by row."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard import Mask, additive, alibi, attend, causal, full, linear_attend, padding, softcap, t5_buckets, window
from regard.base.errors import KernelRefusedError
from regard.core.attend import attend_with_weights
from regard.core.linear import elu_plus_one, performer
from regard.core.masks import as_mask
from regard.core.scores import Additive
from tests.kernels import CPU_KERNELS

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
H, G, C, E = 4, 2, 32, 16
LENGTHS = (9, 41, 150)  # shorter than a vector of the CPU, and several blocks
KERNELS = [*CPU_KERNELS, pytest.param("flex", marks=pytest.mark.cuda)]
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "negative beta": {"beta": -0.7},
    "beta=0": {"beta": 0.0},
    "large beta": {"beta": 1e7},
    "beta=inf": {"beta": INF},
    "softcap": {"scores": [softcap(5.0)]},
    "alibi": {"scores": [alibi(heads=H)]},
}
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: full(),
    "causal": lambda n: causal(),
    "window": lambda n: window(before=3, after=1),
    "matrix": lambda n: as_mask(torch.ones(n, n, dtype=torch.bool).tril(2)),
}


def draw(n: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(n)
    shapes = (2, H, n, C), (2, G, n, C), (2, G, n, E)
    q, k, v = (torch.randn(shape, generator=source).requires_grad_() for shape in shapes)
    return q, k, v


def with_(x: Tensor, index: tuple[int, ...], number: float) -> Tensor:
    changed = x.detach().clone()
    changed[index] = number
    return changed.requires_grad_()


def seen(mask: Mask, n: int) -> Tensor:
    visible = mask.dense(n)
    return visible.reshape(-1, n, n)[0]


def calls(kernel: str) -> Iterator[tuple[int, str, Mask, dict[str, object]]]:
    for n in LENGTHS[-1:] if kernel == "flex" else LENGTHS:  # flex compiles for seconds
        for name, mask in MASKS.items():
            for setting, rest in SETTINGS.items() if n != 41 else [("plain", SETTINGS["plain"])]:
                yield n, f"{kernel}, {n} keys, {name}, {setting}", mask(n), {"kernel": kernel, **rest}


def served(*inputs: Tensor, **rest: object) -> Tensor | None:
    """The output, on the CPU; None where the kernel refuses the call."""
    device = "cuda" if rest["kernel"] == "flex" else "cpu"
    terms = [additive(x.values.to(device)) if isinstance(x, Additive) else x for x in rest.get("scores", [])]
    try:
        return attend(*(x.to(device) for x in inputs), **rest | {"scores": terms or None}).cpu()
    except KernelRefusedError:
        return None


def added(rest: dict[str, object], values: Tensor) -> dict[str, object]:
    return {**rest, "scores": [additive(values), *rest.get("scores", [])]}


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_a_query_gives_nan_to_that_query(kernel):
    for n, name, mask, rest in calls(kernel):
        q, k, v = draw(n)
        out = served(with_(q, (1, 2, n - 2, 3), NAN), k, v, mask=mask, **rest)
        if out is not None:
            bad = out.isnan()
            assert bad[1, 2, n - 2].all(), name
            bad[1, 2, n - 2] = False
            assert not bad.any(), f"{name}: other queries get NaN"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", ["k", "v"])
def test_nan_in_a_visible_key_gives_nan_to_the_queries_that_see_it(kernel, part):
    for n, name, mask, rest in calls(kernel):
        if part == "v" and rest.get("beta") in (INF, 1e7, -0.7):
            continue  # of weights that are zero the next test speaks
        q, k, v = draw(n)
        k, v = (with_(x, (1, 1, 5, 2), NAN) if part == own else x for own, x in (("k", k), ("v", v)))
        out = served(q, k, v, mask=mask, **rest)
        if out is not None:
            rows = seen(mask, n)[:, 5]
            bad = out[1, 2:, rows]
            assert (bad[..., 2] if part == "v" else bad).isnan().all(), name
            assert out[0].isfinite().all(), f"{name}: another sequence gets NaN"
            assert out[1, :2].isfinite().all(), f"{name}: heads of another key head get NaN"
            if kernel != "flex":
                assert out[1, :, ~rows].isfinite().all(), f"{name}: queries get NaN that do not see it"


@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("number", [NAN, INF])
def test_nan_reaches_no_gradient_of_queries_and_keys_that_do_not_see_it(kernel, part, number):
    """Query or key 5 is NaN; the loss is a sum over all queries that do not see it."""
    for n, name, mask, rest in calls(kernel):
        visible = seen(mask, n)
        clear = torch.arange(n) != 5 if part == "q" else ~visible[:, 5]
        if n == 41 or rest.get("beta") is not None or not clear.any():
            continue
        apart = ~visible[~clear].any(0)  # keys that no query sees whose output is NaN
        q, k, v = draw(n)
        dirty = [
            with_(x, (1, slice(None), 5, 2), number) if part == own else x
            for own, x in zip("qkv", (q, k, v), strict=True)
        ]
        clean, out = served(q, k, v, mask=mask, **rest), served(*dirty, mask=mask, **rest)
        if clean is None or out is None:
            continue
        assert torch.allclose(out[:, :, clear], clean[:, :, clear], atol=1e-5), name
        expected = torch.autograd.grad(clean[:, :, clear].square().sum(), (q, k, v))
        found = torch.autograd.grad(out[:, :, clear].square().sum(), dirty)
        for letter, own, other in zip("qkv", found, expected, strict=True):
            rows = clear if letter == "q" else apart
            assert torch.allclose(own[:, :, rows], other[:, :, rows], atol=5e-5), f"{name}: gradient of {letter}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("setting", ["eager", "func", "aot_eager"])
def test_a_query_that_sees_nothing_reaches_no_gradient(kernel, number, setting):
    for n, name, mask, rest in calls(kernel) if setting == "eager" else [(41, setting, causal(), {"kernel": kernel})]:
        mask = mask & Mask.of("rest", lambda i, j: i != 6)
        q, k, v = draw(n)
        dirty = with_(q, (slice(None), slice(None), 6), number), k, v
        if served(*dirty, mask=mask, **rest) is None:
            continue

        def loss(*x: Tensor, mask: Mask = mask, rest: dict[str, object] = rest) -> Tensor:
            return served(*x, mask=mask, **rest).square().sum()

        if setting == "func":
            if kernel == "flex":
                continue  # has no rule for torch.func
            found = torch.func.grad(loss, (0, 1, 2))(*(x.detach() for x in dirty))
        else:
            if setting != "eager" and kernel in ("blocked", "flex"):
                continue  # cannot be compiled
            torch._dynamo.reset()
            run = torch.compile(loss, backend=setting, fullgraph=True) if setting != "eager" else loss
            found = torch.autograd.grad(run(*dirty), dirty)
        for own, other in zip(found, torch.autograd.grad(loss(q, k, v), (q, k, v)), strict=True):
            assert torch.allclose(own, other, atol=2e-5), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_keys_nan_give_nan_and_not_zeros(kernel):
    for n, name, mask, rest in calls(kernel):
        q, k, v = draw(n)
        out = served(q, torch.full_like(k, NAN), v, mask=mask, **rest)
        assert out is None or out.isnan().all(), name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_what_a_mask_hides_reaches_no_output_and_no_gradient(kernel, number):
    for n, name, mask, rest in calls(kernel):
        mask = mask & padding([n, n - 4])
        q, k, v = draw(n)
        clean = served(q, k, v, mask=mask, **rest)
        if clean is None:
            continue
        expected = torch.autograd.grad(clean.sum(), (q, k, v))
        dirty_k, dirty_v = (x.detach().clone() for x in (k, v))
        dirty_k[1, :, -4:], dirty_v[1, :, -4:] = number, number
        inputs = q, dirty_k.requires_grad_(), dirty_v.requires_grad_()
        out = served(*inputs, mask=mask, **rest)
        assert out is not None
        assert torch.equal(out, clean), name
        for own, other in zip(torch.autograd.grad(out.sum(), inputs), expected, strict=True):
            assert torch.equal(own, other), f"{name}: gradients"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_hidden_score_reaches_no_output_and_no_gradient(kernel, number):
    for n, name, mask, rest in calls(kernel):
        mask = mask & causal()
        q, k, v = draw(n)
        values = torch.zeros(n, n)
        clean = served(q, k, v, mask=mask, **added(rest, values))
        if clean is None:
            continue
        expected = torch.autograd.grad(clean.sum(), (q, k, v))
        out = served(q, k, v, mask=mask, **added(rest, values.masked_fill(~seen(mask, n), number)))
        assert out is not None
        assert torch.equal(out, clean), name
        for own, other in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
            assert torch.equal(own, other), f"{name}: gradients"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [1.0, NAN, INF])
def test_a_score_of_minus_infinity_hides_its_key_like_a_mask(kernel, number):
    for n, name, mask, rest in calls(kernel):
        q, k, v = draw(n)
        hidden = torch.zeros(n, n, dtype=torch.bool)
        hidden[:, 4], hidden[6] = True, True
        clean = served(q, k, v, mask=mask & Mask.of("rest", lambda i, j: (j != 4) & (i != 6)), **rest)
        dirty_k, dirty_v = (x.detach().clone() for x in (k, v))
        dirty_k[:, :, 4], dirty_v[:, :, 4] = number, number
        values = torch.zeros(n, n).masked_fill(hidden, -INF)
        inputs = q, dirty_k.requires_grad_(), dirty_v.requires_grad_()
        out = served(*inputs, mask=mask, **added(rest, values))
        if out is None or clean is None:
            continue
        assert torch.allclose(out, clean, atol=1e-6), name
        assert not out[:, :, 6].any(), f"{name}: a row that sees nothing"
        gradients = torch.autograd.grad(out.sum(), inputs)
        for own, other in zip(gradients, torch.autograd.grad(clean.sum(), (q, k, v)), strict=True):
            assert torch.allclose(own, other, atol=2e-5), f"{name}: gradients"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [NAN, INF])
def test_a_visible_score_of_nan_or_plus_infinity_makes_its_row_nan(kernel, number):
    for n, name, mask, rest in calls(kernel):
        q, k, v = draw(n)
        values = torch.zeros(n, n)
        values[6, 5] = number
        out = served(q, k, v, mask=mask, **added(rest, values))
        if out is not None:
            assert out[:, :, 6].isnan().all(), name
            others = torch.arange(n) != 6
            assert out[:, :, others].isfinite().all(), f"{name}: other rows"


@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("setting", ["eager", "func", "aot_eager"])
def test_a_visible_score_of_nan_or_plus_infinity_reaches_no_gradient_of_keys_its_row_does_not_see(
    kernel, number, setting
):
    for n, name, mask, rest in calls(kernel):
        if setting != "eager" and (n != 41 or rest.keys() > {"kernel"}):
            continue  # each compiles for a second
        mask = mask & Mask.of("rest", lambda i, j: (i != 6) | (j > 3)) if setting == "eager" else mask & causal()
        visible = seen(mask, n)
        # one pair of row 6, and all of them
        for where in (5, slice(None)) if setting == "eager" else (slice(None),):
            values = torch.zeros(n, n)
            values[6, where] = number
            values[:, 2] = -INF  # a key that nobody sees
            visible[:, 2] = False
            q, k, v = draw(n)

            def loss(*x: Tensor, values: Tensor = values, mask: Mask = mask, rest: dict = rest) -> Tensor:
                return served(*x, mask=mask, **added(rest, values)).square().sum(0).sum()

            if served(q, k, v, mask=mask, **added(rest, values)) is None:
                continue
            torch._dynamo.reset()
            if setting == "func":
                found = torch.func.grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in (q, k, v)))
            else:
                run = loss if setting == "eager" else torch.compile(loss, backend=setting, fullgraph=True)
                found = torch.autograd.grad(run(q, k, v), (q, k, v))
            others = torch.arange(n) != 6
            assert found[0][:, :, others].isfinite().all(), f"{name}: gradients of other queries"
            assert not rest.get("beta", 1.0) or found[0][:, :, 6].isnan().all(), f"{name}: gradient of its query"
            for letter, own in zip("kv", found[1:], strict=True):
                assert own[:, :, ~visible[6]].isfinite().all(), f"{name}: gradients of {letter} that row 6 does not see"
                if letter == "v" or rest.get("beta") != 0:
                    assert own[:, :, visible[6]].isnan().all(), f"{name}: gradients of {letter} that row 6 sees"


@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_nan_reaches_no_gradient_through_queries_that_see_nothing(kernel, part):
    """Queries 3 and 4 see nothing, but may meet a key of NaN inside the kernel."""
    for n in (9, 150):
        mask = causal() & window(before=3) & Mask.of("rest", lambda i, j: (i < 3) | (i > 4))
        visible = seen(mask, n)
        q, k, v = draw(n)
        where = (1, slice(None), n - 1, 2)
        dirty = [with_(x, where, NAN) if part == own else x for own, x in zip("qkv", (q, k, v), strict=True)]
        out = served(*dirty, mask=mask, kernel=kernel)
        rows = visible[:, n - 1] if part != "q" else torch.arange(n) == n - 1
        assert out[:, :, ~rows].isfinite().all()
        found = torch.autograd.grad(out.sum(), dirty)
        assert found[0][:, :, ~rows].isfinite().all()
        for own in found[1:]:
            assert own[:, :, ~visible[rows].any(0)].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_a_key_whose_scores_are_minus_infinity_reaches_no_gradient_through_rows_that_fill_a_block(kernel):
    for n in (9, 150):
        q, k, v = draw(n)
        q = q.detach().abs().requires_grad_()
        k = with_(k, (1, slice(None), n - 1, 3), -INF)
        out = served(q, k, v, mask=causal() & window(before=3), kernel=kernel)
        assert out.isfinite().all()
        assert all(own.isfinite().all() for own in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("transform", ["vjp", "vmap", "jvp", "vmap of grad"])
def test_nan_inside_torch_func_reaches_only_queries_that_see_it(kernel, part, transform):
    n, mask = 12, causal() & window(before=2)
    visible = seen(mask, n)
    rows = visible[:, 5]
    apart = ~visible[rows].any(0)
    inputs = [
        with_(x, (1, 1, 5, 2), NAN).detach() if part == own else x.detach()
        for own, x in zip("qkv", draw(n), strict=True)
    ]

    def run(*x: Tensor) -> Tensor:
        return attend(*x, mask=mask, kernel=kernel)

    def loss(*x: Tensor) -> Tensor:
        return run(*(each[None] for each in x))[0, :, ~rows].square().sum()

    try:
        if transform == "vjp":
            out, pull = torch.func.vjp(run, *inputs)
            grads = pull(torch.zeros_like(out).masked_fill(~rows[:, None], 1))
        elif transform == "vmap":
            out, grads = torch.func.vmap(lambda *x: run(*(each[None] for each in x))[0])(*inputs), None
        elif transform == "jvp":
            out, tangent = torch.func.jvp(run, tuple(inputs), tuple(torch.ones_like(x) for x in inputs))
            assert tangent[:, :, ~rows].isfinite().all()
            grads = None
        else:
            out, grads = None, torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*inputs)
    except KernelRefusedError:
        return
    if out is not None:
        assert out[:, :, ~rows].isfinite().all()
        assert out[1, 2:, rows].isnan().any(-1).all()
    if grads is not None:
        assert grads[0][:, :, ~rows].isfinite().all()
        assert all(own[:, :, apart].isfinite().all() for own in grads[1:])


@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize("setting", ["eager", "aot_eager"])
@pytest.mark.parametrize("learning", [False, True])
def test_a_dot_product_of_plus_infinity_makes_its_row_nan(kernel, setting, learning):
    """In half precision torch's kernel for the CPU gives zeros to such a row."""
    mask = causal() & window(before=40) if kernel == "blocked" else causal()
    for dtype in DTYPES if setting == "eager" else (torch.bfloat16,):
        for n in (9, 33, 70, 150) if setting == "eager" else (70,):
            if kernel in ("blocked", "reference") and setting != "eager":
                continue
            for part in "qk":
                q, k, v = (x.detach().to(dtype) for x in draw(n))
                (q if part == "q" else k)[1, :, n // 2, 3] = INF
                q.requires_grad_(learning)
                run = lambda *x: attend(*x, mask=mask, kernel=kernel)  # noqa: E731
                torch._dynamo.reset()
                own = torch.compile(run, backend=setting, fullgraph=True) if setting != "eager" else run
                out = own(q, k, v)
                scores = q.detach().double() @ k.double().repeat_interleave(H // G, 1).mT
                visible = seen(mask, n)
                lost = ((scores == INF) & visible).any(-1)
                assert lost.any(), (dtype, n, part)
                assert torch.equal(out.isnan().any(-1), lost), (dtype, n, part)


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
@pytest.mark.parametrize("features", [elu_plus_one(), performer(C, 24)], ids=["elu", "performer"])
def test_linear_attention_keeps_the_same_rules(form, features):
    n = 23
    q, k, v = draw(n)
    out = linear_attend(with_(q, (1, 2, 8, 3), NAN), k, v, features=features, form=form).out
    assert out[1, 2, 8].isnan().all()
    assert out[1, 2, :8].isfinite().all()
    for part in ("k", "v"):
        changed = [with_(x, (1, 1, 5, 2), NAN) if part == own else x for own, x in (("k", k), ("v", v))]
        out = linear_attend(q, *changed, features=features, form=form, mask=causal()).out
        assert out[1, 2:, 5:, 2].isnan().all(), f"NaN in {part}"
        assert out[1, 2:, :5].isfinite().all(), f"NaN in {part} reaches earlier queries"
        assert out[0].isfinite().all()
        assert out[1, :2].isfinite().all()
    for number in (NAN, INF, -INF):
        clean = linear_attend(q, k, v, features=features, form=form, mask=padding([n, n - 4])).out
        dirty_k, dirty_v = (x.detach().clone() for x in (k, v))
        dirty_k[1, :, -4:], dirty_v[1, :, -4:] = number, number
        inputs = q, dirty_k.requires_grad_(), dirty_v.requires_grad_()
        out = linear_attend(*inputs, features=features, form=form, mask=padding([n, n - 4])).out
        assert torch.equal(out, clean)
        for own in torch.autograd.grad(out.sum(), inputs):
            assert own.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [1.0, NAN, INF])
def test_a_t5_table_of_minus_infinity_hides_keys_like_a_mask(kernel, number):
    table = torch.linspace(-1, 1, 8 * H).view(8, H)
    table[1] = -INF  # the bucket of distance one back, so no key but the last is seen by its neighbour
    plain = table.clone()
    plain[1] = 0
    for n in LENGTHS[-1:] if kernel == "flex" else LENGTHS:
        q, k, v = draw(n)
        only = Mask.of("only", lambda i, j: j == 3)  # key 3 is then hidden from query 4
        outs = []
        for own, mask in (
            (table, only | causal()),
            (plain, (only | causal()) & Mask.of("far", lambda i, j: i - j != 1)),
        ):
            term = t5_buckets(own.to("cuda" if kernel == "flex" else "cpu"), max_distance=9)
            outs.append(served(q, k, v, mask=mask, scores=[term], kernel=kernel))
        if outs[0] is None:
            continue
        assert torch.allclose(*outs, atol=1e-6), (kernel, n)
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
        for own, other in zip(*grads, strict=True):
            assert torch.allclose(own, other, atol=2e-5), (kernel, n)
        mask, term = (
            causal() & window(before=1) & Mask.of("past", lambda i, j: i != j),
            t5_buckets(table, max_distance=9),
        )
        dirty = [x.detach().clone().fill_(number).requires_grad_() for x in (k, v)]
        if kernel != "flex":
            out = served(q, *dirty, mask=mask, scores=[term], kernel=kernel)  # all that the mask shows is hidden
            assert not out.any()
            assert not any(x.any() for x in torch.autograd.grad(out.sum(), (q, *dirty)))


@pytest.mark.parametrize("setting", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("part", ["query", "first key"])
@pytest.mark.parametrize("number", [NAN, INF])
def test_nan_in_a_short_row_is_not_taken_for_a_hidden_one(setting, part, number):
    """torch's kernel for the CPU gives zeros where fewer scores than fit a vector are NaN throughout."""
    torch._dynamo.reset()
    run = attend if setting == "eager" else torch.compile(attend, fullgraph=True, backend=setting)
    for dtype in DTYPES if setting == "eager" else (torch.float32, torch.bfloat16):
        for n in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33) if setting == "eager" else (9, 33):
            q, k, v = (x.detach().to(dtype) for x in draw(n))
            q[1, :, 0, :2] = torch.tensor([1.0, -1.0])  # infinity times these is infinity minus infinity
            k[1, :, 0, :2] = torch.tensor([1.0, -1.0])
            row = n - 1 if part == "query" else 0
            (q if part == "query" else k)[1, :, row, :2] = number
            out = run(q, k, v, mask=causal())
            assert out[1, :, row].isnan().all(), (dtype, n)
            assert out[0].isfinite().all()
            assert part != "query" or out[1, :, :row].isfinite().all(), (dtype, n)


def test_a_model_of_nan_weights_has_no_loss():
    model = torch.nn.ModuleList([regard.nn.Attention(width=24, heads=4)])
    for parameter in model.parameters():
        parameter.data.fill_(NAN)
    assert model[0](torch.randn(2, 7, 24)).isnan().all()


def test_the_table_is_in_the_docs(root: Path):
    table = (root / "docs/notation.md").read_text().partition("## NaN and infinity")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "NaN in q",
        "NaN in k or v that some query sees",
        "NaN or infinity that is hidden: in a key that no query of its sequence sees, or in a query that sees nothing",
        "a score of NaN",
        "a score of +inf",
        "a score of -inf",
        "any score that the mask hides",
    ]


def test_dropped_weights_give_no_hidden_nan() -> None:
    q, k, v = torch.randn(3, 2, 4, 12, 7)
    v[:, :, 10:] = math.nan
    out, weights = attend_with_weights(q, k, v, mask=padding(torch.tensor([10, 10])), dropout=0.1)
    assert out.isfinite().all()
    torch.testing.assert_close(out, weights[..., :10] @ v[:, :, :10])


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("setting", ["eager", "func", "aot_eager"])
def test_a_query_of_infinity_whose_scores_are_all_minus_infinity_gives_zeros_beside_a_sink(kernel, setting):
    for n in (9, 70) if setting == "eager" else (70,):
        q, k, v = draw(n)
        q, k = with_(q, (1, slice(None), 5, 3), INF), k.detach().abs().neg().requires_grad_()
        logits, mask = torch.linspace(-1, 1, H), causal() & window(before=9)
        run = lambda *x, mask=mask: attend(*x, mask=mask, scores=regard.sink(logits), kernel=kernel)  # noqa: B023, E731
        if setting == "aot_eager":
            if kernel in ("eager", "reference"):
                continue  # they read no values inside compiled code
            torch._dynamo.reset()
            run = torch.compile(run, backend=setting, fullgraph=True)
        if setting == "func":
            out, pull = torch.func.vjp(run, *(x.detach() for x in (q, k, v)))
            found = pull(torch.ones_like(out))
        else:
            out = run(q, k, v)
            found = torch.autograd.grad(out.sum(), (q, k, v))
        assert not out[1, :, 5].any(), (kernel, n)
        assert out.isfinite().all(), (kernel, n)
        assert all(own.isfinite().all() for own in found), (kernel, n)


@pytest.mark.parametrize("kernel", ["eager", "reference"])
def test_the_sign_of_a_very_large_beta_decides_which_infinity_hides(kernel):
    q, k, v = (x.detach() for x in draw(9))
    q, k[1, :, 5] = q.abs(), INF
    for beta in (-1e9, -1e20):
        out = attend(q, k, v, beta=beta, kernel=kernel)
        assert torch.equal(
            out[1], attend(q, k, v, beta=beta, kernel=kernel, mask=Mask.of("rest", lambda i, j: j != 5))[1]
        )
        assert attend(q, -k, v, beta=beta, kernel=kernel)[1].isnan().all()


@pytest.mark.parametrize("kernel", ["eager", "reference"])
def test_a_row_of_nan_has_gradients_of_nan_in_hard_attention_too(kernel):
    q, k, v = draw(9)
    q = with_(q, (1, 2, 5, 3), NAN)
    found = torch.autograd.grad(attend(q, k, v, mask=causal(), beta=INF, kernel=kernel).sum(), (q, k, v))
    assert found[0][1, 2, 5].isnan().all()
    for own in found[1:]:
        assert own[1, 1, :6].isnan().all()
        assert own[1, 1, 6:].isfinite().all()
    found[0][1, 2, 5] = 0
    assert not found[0].any()


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("number", [NAN, INF])
def test_a_query_of_nan_reaches_only_the_shaw_keys_that_it_uses(kernel, number):
    n, keys = 70, torch.randn(9, C, requires_grad=True)
    for mask, used in (
        (causal() & window(before=2), [2, 3, 4]),  # distances -2 to 0
        (causal() & window(before=2) & Mask.of("rest", lambda i, j: i != 40), []),
    ):
        q, k, v = draw(n)
        q = with_(q, (1, 2, 40, 3), number)
        out = served(q, k, v, mask=mask, scores=[regard.shaw(keys)], kernel=kernel)
        if out is not None:
            bad = torch.autograd.grad(out.sum(), keys)[0].isnan().any(-1)
            assert set(bad.nonzero()[:, 0].tolist()) <= set(used), kernel


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_a_term_of_minus_infinity_hides_a_key_whose_score_is_plus_infinity(kernel):
    """Relative keys of -1 turn a query of infinity into terms of -inf, and keys of 1 into scores of +inf."""
    for term in (regard.shaw(-torch.ones(5, C)), additive(torch.full((70, 70), -INF))):
        q, k, v = (x.detach() for x in draw(70))
        q, k[1] = q.abs(), 1.0
        q[1, :, 40] = INF
        out = served(q, k, v, mask=causal() & window(before=5), scores=[term], kernel=kernel)
        assert out is None or not out[1, :, 40].any(), kernel


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_a_key_that_one_term_hides_is_hidden_whatever_another_adds(kernel):
    hidden, values = torch.zeros(70, 70), torch.zeros(70, 70)
    hidden[40, 38], values[40, 38] = -INF, NAN
    q, k, v = draw(70)
    mask = causal() & window(before=5)
    out = attend(q, k, v, mask=mask, scores=[hidden, values], kernel=kernel)
    clean = attend(q, k, v, mask=mask, scores=hidden, kernel=kernel)
    assert torch.allclose(out, clean, atol=1e-6)
    assert all(own.isfinite().all() for own in torch.autograd.grad(out.sum(), (q, k, v)))
