"""attend inside torch's transforms: compiled, exported, under autocast, vmapped, differentiated, on the meta device."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

from regard import (
    Mask,
    Positions,
    additive,
    alibi,
    attend,
    causal,
    channel_attend,
    dilated,
    documents,
    explain,
    full,
    global_tokens,
    key_padding,
    padding,
    prefix,
    recording,
    shaw,
    sink,
    softargmax,
    softcap,
    t5_buckets,
    window,
)
from regard.base.errors import KernelRefusedError
from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS, examples
from regard.core.scores import ScoreTerm
from tests.tolerance import OUTPUT, too_far

# a GPU's fused kernels take widths in multiples of 8
B, H, G, I, J, C, E = 2, 6, 3, 7, 11, 8, 24  # noqa: E741 (the letters of the legend)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def draw(i: int = I, j: int = J, *lead: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0):
    """q, k and v, the same for the same seed, with more axes before them if need be."""
    source = torch.Generator().manual_seed(seed)
    shapes = (B, H, i, C), (B, G, j, C), (B, G, j, E)
    return [torch.randn(*lead, *shape, generator=source, dtype=torch.float64).to(device, dtype) for shape in shapes]


def near(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)


LABELS = torch.stack([torch.arange(J) // 4, torch.arange(J) // 3])
VISIBLE = torch.rand(H, I, J, generator=torch.Generator().manual_seed(1)) > 0.3
MASKS: dict[str, Mask | Tensor | None] = {
    "none": None,
    **{name: parse_mask(examples(name, J)[0]) for name in FORMS},
    "not causal": ~causal(),
    "nothing": ~full(),
    "window": window(before=2, after=3),
    "causal window": causal() & window(before=3),
    "window and global": causal() & window(before=3) | global_tokens(2),
    "not both": ~(causal() & window(before=3)),
    "prefix or causal": prefix(3) | causal(),
    "padding": padding([3, 9]),
    "key_padding": key_padding(torch.arange(J) >= torch.tensor([[3], [0]])),
    "padding left": causal() & padding([3, 9], side="left", width=J),
    "documents": documents(LABELS),
    "predicate": Mask.of("thirds", lambda i, j: (i + j) % 3 == 0),
    "matrix": VISIBLE,
    "matrix and causal": causal() & VISIBLE,
}
TERMS: dict[str, Callable[[], ScoreTerm | list[ScoreTerm | Tensor] | None]] = {
    "none": lambda: None,
    "alibi": lambda: alibi(heads=H),
    "t5": lambda: t5_buckets(torch.linspace(-1, 1, 8 * H).view(8, H), max_distance=9),
    "shaw": lambda: shaw(torch.linspace(-1, 1, 5 * C).view(5, C)),
    "softcap": lambda: softcap(1.5),
    "sink": lambda: sink(torch.linspace(-1, 1, H)),
    "added": lambda: additive(torch.linspace(-1, 1, H * I * J).view(H, I, J)),
    "many": lambda: [torch.linspace(-1, 1, I * J).view(I, J), softcap(2.0), alibi(heads=H), sink(torch.zeros(H))],
}


DYNAMIC: dict[str, dict[str, Any]] = {
    "plain": {"mask": None},
    "causal": {},
    "cross attention": {"i": I, "mask": None},
    "causal with keys before": {"i": I},
    "window": {"mask": causal() & window(before=3)},
    "window both ways": {"mask": window(before=2, after=3)},
    "window and global": {"mask": MASKS["window and global"]},
    "prefix": {"mask": prefix(3) | causal()},
    "padding": {"mask": padding([3, 9])},
    "padding and causal": {"mask": causal() & padding([3, 9])},
    "matrix": {"i": I, "mask": VISIBLE},
    "offsets": {"i": I, "positions": Positions(5)},
    "offsets of queries and keys": {"i": I, "positions": Positions(5, 2)},
    "alibi": {"scores": alibi(heads=H)},
    "softcap": {"scores": softcap(1.5)},
    "t5": {"scores": TERMS["t5"]()},
    "shaw": {"scores": TERMS["shaw"]()},
    "sink": {"scores": TERMS["sink"]()},
    "beta": {"beta": 0.3},
    "eager": {"kernel": "eager"},
}
LENGTHS_OF_ITS_OWN = ("matrix",)
SPARSE = {
    "causal window": causal() & window(before=3),
    "global": causal() & window(before=3) | global_tokens(2),
    "dilated": causal() & dilated(5),
    "not": ~(causal() | window(None, 100)),
}
SPARSE_WITH_TENSORS: dict[str, Callable[[int], dict[str, Any]]] = {
    "documents": lambda n: {"mask": causal() & documents(torch.stack([torch.arange(n) // 40, torch.arange(n) // 30]))},
    "padding": lambda n: {"mask": causal() & window(before=9) & padding(torch.tensor([n - 9, 20]))},
    "padding left": lambda n: {
        "mask": causal() & window(before=9) & padding(torch.tensor([n - 9, 20]), side="left", width=n)
    },
    "key_padding": lambda n: {
        "mask": causal() & window(before=9) & key_padding(torch.arange(n) >= torch.tensor([[3], [n]]))
    },
    "not padding": lambda n: {"mask": (causal() & window(before=9) | global_tokens(2)) & ~padding([3, 4])},
    "alibi": lambda n: {"mask": causal() & window(before=9), "scores": alibi(heads=H)},
    "t5": lambda n: {"mask": causal() & window(before=9), "scores": TERMS["t5"]()},
    "sink": lambda n: {"mask": causal() & window(before=9), "scores": [alibi(heads=H), TERMS["sink"]()]},
    "added": lambda n: {"mask": causal() & window(before=9), "scores": torch.linspace(-1, 1, n * n).view(n, n)},
    "added -inf": lambda n: {
        "mask": causal() & window(before=9),
        "scores": torch.zeros(n, n).masked_fill(torch.arange(n)[:, None] % 7 < 3, -math.inf),
    },
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing compiled is left over, and torch's own remarks on its own code are no errors of ours."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "eager") -> Callable[..., Any]:
    """In one graph, or it raises."""
    return torch.compile(function, fullgraph=True, backend=backend)


class TestCompiled:
    @pytest.mark.parametrize("mask", MASKS)
    def test_every_mask(self, mask):
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask])

        inputs = draw()
        assert near(compiled(run)(*inputs), run(*inputs))

    @pytest.mark.parametrize("term", TERMS)
    def test_every_term(self, term):
        terms = TERMS[term]()

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS["causal window"], scores=terms)

        inputs = draw()
        assert near(compiled(run)(*inputs), run(*inputs))

    @pytest.mark.parametrize("kernel", [None, "eager"])
    @pytest.mark.parametrize(
        ("mask", "term"), [("none", "none"), ("causal", "shaw"), ("window and global", "alibi"), ("padding", "sink")]
    )
    def test_gradients(self, mask, term, kernel):
        terms = TERMS[term]()
        learned = [x.requires_grad_() for x in terms.tensors()] if terms is not None else []

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask], scores=terms, kernel=kernel)

        leaves = [x.requires_grad_() for x in draw()]
        upstream = torch.randn(B, H, I, E)
        expected = torch.autograd.grad(run(*leaves), leaves + learned, upstream)
        actual = torch.autograd.grad(compiled(run, "aot_eager")(*leaves), leaves + learned, upstream)
        assert all(near(x, y, 1e-5) for x, y in zip(actual, expected, strict=True))

    def test_real_code_forward_and_backward(self):
        slopes = torch.rand(H, requires_grad=True)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=causal() & window(before=3), scores=alibi(slopes=slopes))

        leaves = [x.requires_grad_() for x in draw()]
        out = compiled(run, "inductor")(*leaves)
        assert near(out, run(*leaves))
        upstream = torch.randn(B, H, I, E)
        actual = torch.autograd.grad(out, [*leaves, slopes], upstream)
        expected = torch.autograd.grad(run(*leaves), [*leaves, slopes], upstream)
        assert all(near(x, y, 2e-5) for x, y in zip(actual, expected, strict=True))

    @pytest.mark.parametrize(
        ("mask", "kernel", "square"),
        [("none", None, True), ("causal", None, False), ("causal", "eager", True), ("window and global", None, False)],
    )
    def test_only_the_first_two_lengths_compile(self, mask, kernel, square):
        counter = CompileCounter()

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask], kernel=kernel)

        fast = compiled(run, counter)
        for i, j in ((7, 11), (9, 16), (33, 65), (70, 130)):
            inputs = draw(j if square else i, j)
            assert near(fast(*inputs), run(*inputs))
        assert counter.frame_count <= 2

    @pytest.mark.parametrize("case", DYNAMIC)
    def test_dynamic_sizes_from_the_start(self, case):
        rest = {"i": J, "mask": causal(), **DYNAMIC[case]}
        i = rest.pop("i")
        fast = torch.compile(lambda *x: attend(*x, **rest), fullgraph=True, dynamic=True, backend="eager")
        for shift in (0, 2) if case not in LENGTHS_OF_ITS_OWN else (0,):
            inputs = [x.requires_grad_(case in ("plain", "window")) for x in draw(i + shift, J + shift)]
            assert near(fast(*inputs), attend(*inputs, **rest), 1e-5)

    def test_lengths_that_become_square_and_back(self):
        """causal() over as many queries as keys is the fused kernel's own triangle, else a dense mask."""
        fast = compiled(lambda q, k, v: attend(q, k, v, mask=causal()))
        for i, j in ((7, 7), (9, 9), (5, 9), (11, 11), (6, 13), (1, 13), (13, 13)):
            inputs = draw(i, j)
            assert near(fast(*inputs), attend(*inputs, mask=causal()))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: {"mask": causal() & window(before=3) | prefix(2)},
            lambda: {"mask": padding([3, 9])},
            lambda: {"mask": padding(torch.tensor([3, 9])) & causal()},
            lambda: {"mask": documents(torch.arange(J) // 4)},
            lambda: {"mask": torch.ones(I, J, dtype=torch.bool).tril()},
            lambda: {"scores": [alibi(heads=H), sink(torch.zeros(H))]},
            lambda: {"scores": [torch.ones(I, J), softcap(2.0)]},
            lambda: {"mask": causal(), "positions": Positions(3)},
            lambda: {"mask": causal(), "positions": Positions(3, torch.arange(J))},
            lambda: {"mask": causal(), "beta": math.inf},
            lambda: {"beta": 0.0},
        ],
        ids=["rules", "lengths", "tensor of lengths", "documents", "matrix", "terms", "cap", "start", "positions",
             "hard", "mean"],
    )  # fmt: skip
    def test_masks_and_terms_made_inside(self, make):
        """As in the forward of a model."""

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, **make())

        inputs = draw()
        assert near(compiled(run)(*inputs), run(*inputs))

    def test_channels_and_the_soft_choice(self):
        q, _, _ = draw()
        assert near(compiled(channel_attend)(q, 2 * q, q), channel_attend(q, 2 * q, q))
        assert near(compiled(softargmax)(q), softargmax(q))

    @pytest.mark.parametrize("kernel", [None, "eager"])
    def test_a_beta_that_changes(self, kernel):
        """From the second value on the compiler takes it for a variable."""
        inputs = draw()
        attention = compiled(lambda q, k, v, beta: attend(q, k, v, beta=beta, kernel=kernel))
        choice = compiled(lambda scores, beta: softargmax(scores, beta))
        for beta in (0.1, 0.2, 0.3, math.inf, 0.0, 0.4):
            assert near(attention(*inputs, beta), attend(*inputs, beta=beta, kernel=kernel)), beta
            assert near(choice(inputs[0], beta), softargmax(inputs[0], beta)), beta

    def test_dropout_drops(self):
        q, k, _ = draw()
        eye = torch.eye(J).expand(B, G, J, J)
        weights = compiled(lambda q, k, v: attend(q, k, v, dropout=0.5))(0 * q, k, eye)
        assert 0.3 < (weights == 0).float().mean() < 0.7

    @pytest.mark.parametrize("mask", SPARSE)
    @pytest.mark.parametrize("kernel", [None, "blocked"])
    def test_masks_by_position_run_the_same_kernel_as_outside(self, mask, kernel):
        """One graph for all lengths; the choice between kernels is made when it runs."""
        rest = {"mask": SPARSE[mask], "kernel": kernel}
        fast = torch.compile(lambda *x: attend(*x, **rest), fullgraph=True, dynamic=True, backend="aot_eager")
        names = set()
        for i, j in ((150, 300), (70, 70), (331, 331)):
            inputs = draw(i, j)
            with recording() as inside:
                out = fast(*inputs)
            with recording() as outside:
                expected = attend(*inputs, **rest)
            assert inside == outside
            assert near(out, expected)
            names.update(inside)
        assert names == ({"blocked"} if kernel else {"sdpa", "blocked"})
        leaves = [x.requires_grad_() for x in inputs]
        upstream = torch.randn_like(expected)
        with recording() as inside:
            out = fast(*leaves)
        assert inside == outside
        actual = torch.autograd.grad(out, leaves, upstream)
        expected = torch.autograd.grad(attend(*leaves, **rest), leaves, upstream)
        assert all(near(x, y, 1e-5) for x, y in zip(actual, expected, strict=True))

    @pytest.mark.parametrize("case", SPARSE_WITH_TENSORS)
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_masks_with_data_and_score_terms_run_the_same_kernel_as_outside(self, case, dynamic):
        run = lambda x, rest: attend(*x, **rest)  # noqa: E731
        fast = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for n in (331, 70) if dynamic else (331,):
            rest = SPARSE_WITH_TENSORS[case](n)
            leaves = [x.requires_grad_() for x in draw(n, n)]
            with recording() as inside:
                out = fast(leaves, rest)
            with recording() as outside:
                expected = run(leaves, rest)
            assert inside == outside == [explain(*leaves, **rest).chosen]
            assert inside == (["blocked"] if n == 331 else ["sdpa"])
            upstream = torch.randn_like(expected)
            actual = torch.autograd.grad(out, leaves, upstream)
            for own, other in zip(actual, torch.autograd.grad(expected, leaves, upstream), strict=True):
                assert near(own, other, 1e-5)
            assert near(out, expected)
            with torch.no_grad():
                assert near(fast(leaves, rest), expected)

    def test_data_that_change_are_seen_by_compiled_code(self):
        inputs, lengths = draw(331, 331), torch.tensor([300, 20])
        fast = compiled(lambda *x: attend(*x[:3], mask=causal() & window(before=9) & padding(x[3])), "aot_eager")
        fast(*inputs, lengths)
        lengths[0] = 9
        mask = causal() & window(before=9) & padding([9, 20])
        assert near(fast(*inputs, lengths), attend(*inputs, mask=mask, kernel="eager"))

    def test_terms_that_are_learned_get_their_gradient_in_compiled_code(self):
        inputs, table = draw(331, 331), torch.linspace(-1, 1, 8 * H).view(8, H).requires_grad_()
        run = lambda *x: attend(*x[:3], mask=causal() & window(before=9), scores=t5_buckets(x[3], max_distance=9))  # noqa: E731
        upstream = torch.randn(B, H, 331, E)
        (actual,) = torch.autograd.grad(compiled(run, "aot_eager")(*inputs, table), table, upstream)
        (expected,) = torch.autograd.grad(run(*inputs, table), table, upstream)
        assert near(actual, expected, 1e-4)

    def test_gradients_are_exact_at_large_scores(self):
        q, k, v = draw(300, 300)
        leaves = [(1e6 * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
        upstream = torch.randn(B, H, 300, E)
        fast = compiled(lambda *x: attend(*x, mask=causal() & window(before=3)), "aot_eager")
        actual = torch.autograd.grad(fast(*leaves), leaves, upstream)
        outside = torch.autograd.grad(attend(*leaves, mask=causal() & window(before=3)), leaves, upstream)
        assert all((x - y).norm() <= 1e-6 * y.norm() for x, y in zip(actual, outside, strict=True))
        exact = [x.detach().double().requires_grad_() for x in leaves]
        truth = attend(*exact, mask=causal() & window(before=3), kernel="reference")
        (of_v,) = torch.autograd.grad(truth, exact[2:], upstream.double())
        assert near(actual[2], of_v.float(), 1e-5)

    def test_a_kernel_that_cannot_be_traced_is_not_chosen(self):
        inputs = draw(300, 300)
        mask = window(before=3) & Mask.of("thirds", lambda i, j: i // 100 == j // 100)
        fast = compiled(lambda *x: attend(*x, mask=mask))
        with recording() as ran:
            out = fast(*inputs)
        assert ran == ["sdpa"]
        assert near(out, attend(*inputs, mask=mask, kernel="blocked"))

    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # the checks of annotations
    def test_a_graph_may_break_around_a_refusal(self):
        run = torch.compile(lambda q, k, v: attend(q, k, v, kernel="blocked"), backend="eager")
        with pytest.raises(KernelRefusedError, match="the mask hides nothing"):
            run(*draw())

    def test_inside_a_transform(self):
        inputs = draw(I, J, 3)
        expected = torch.stack([attend(*x, mask=causal()) for x in zip(*inputs, strict=True)])
        assert near(compiled(vmap(lambda q, k, v: attend(q, k, v, mask=causal(), kernel="eager")))(*inputs), expected)


class Wrapped(torch.nn.Module):
    """An attention as a model holds it."""

    def __init__(self, kernel: str | None = None, **rest: Any) -> None:
        super().__init__()
        self.rest, self.kernel = rest, kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, kernel=self.kernel, **self.rest)


class TestExported:
    @pytest.mark.parametrize("kernel", [None, "eager"])
    @pytest.mark.parametrize("mask", ["none", "causal", "window and global", "not causal", "padding"])
    def test_for_one_length(self, mask, kernel):
        inputs = tuple(draw())
        program = torch.export.export(Wrapped(kernel, mask=MASKS[mask]), inputs)
        assert near(program.module()(*inputs), attend(*inputs, mask=MASKS[mask], kernel=kernel))

    @pytest.mark.parametrize("kernel", [None, "eager"])
    @pytest.mark.parametrize("mask", ["none", "causal", "window and global", "padding"])
    def test_for_every_length(self, mask, kernel):
        i, j = torch.export.Dim("i", min=2, max=4096), torch.export.Dim("j", min=2, max=4096)
        shapes = {"q": {2: i}, "k": {2: j}, "v": {2: j}}
        program = torch.export.export(Wrapped(kernel, mask=MASKS[mask]), tuple(draw()), dynamic_shapes=shapes)
        for lengths in ((7, 11), (9, 15), (70, 130)):
            inputs = draw(*lengths)
            assert near(program.module()(*inputs), attend(*inputs, mask=MASKS[mask]))


class TestAutocast:
    @pytest.fixture(params=DEVICES)
    def device(self, request: pytest.FixtureRequest) -> Iterator[str]:
        with torch.autocast(request.param, dtype=torch.bfloat16):
            yield request.param

    @pytest.mark.parametrize("kernel", [None, "eager", "sdpa", "blocked", "reference"])
    @pytest.mark.parametrize("term", ["none", "alibi", "t5", "shaw", "sink", "added"])
    def test_it_is_attention_to_lowered_inputs(self, term, kernel, device):
        """Bit for bit: what comes after is as exact as without autocast."""
        inputs = draw(device=device)
        terms = TERMS[term]()
        if terms is not None:
            terms = copy.deepcopy(terms)
            object.__setattr__(terms, next(iter(vars(terms))), terms.tensors()[0].to(device))
        out = attend(*inputs, mask=causal(), scores=terms, kernel=kernel)
        with torch.autocast(device, enabled=False):
            low = [x.bfloat16() for x in inputs]
            expected = attend(*low, mask=causal(), scores=terms, kernel=kernel)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, expected)

    @pytest.mark.parametrize("dtypes", [(16, 32, 32), (32, 16, 32), (16, 16, 32)], ids=str)
    def test_mixed_inputs_are_accepted(self, dtypes, device):
        kinds = {16: torch.bfloat16, 32: torch.float32}
        inputs = [x.to(kinds[bits]) for x, bits in zip(draw(device=device), dtypes, strict=True)]
        out = attend(*inputs)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, attend(*(x.bfloat16() for x in inputs)))

    def test_float64_is_left_alone(self, device):
        inputs = draw(dtype=torch.float64, device=device)
        out = attend(*inputs, mask=causal(), scores=shaw(torch.ones(5, C, dtype=torch.float64, device=device)))
        assert out.dtype == torch.float64
        with torch.autocast(device, enabled=False):
            terms = shaw(torch.ones(5, C, dtype=torch.float64, device=device))
            truth = attend(*inputs, mask=causal(), scores=terms, kernel="reference")
        assert not too_far(out, out, truth, OUTPUT)

    @pytest.mark.parametrize("kernel", ["eager", "sdpa", "blocked"])
    def test_gradients_come_back_in_the_dtype_of_the_inputs(self, kernel, device):
        leaves = [x.requires_grad_() for x in draw(device=device)]
        out = attend(*leaves, mask=causal(), kernel=kernel)
        upstream = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, upstream)
        truth = attend(*leaves, mask=causal(), kernel="reference")
        exact = torch.autograd.grad(truth, leaves, upstream)
        for x, y in zip(grads, exact, strict=True):
            assert x.dtype == torch.float32
            assert torch.allclose(x, y, atol=0.05)

    def test_scores_are_as_exact_as_without(self, device):
        """The naive method under autocast rounds its scores; ours may be at most twice as far off as that."""
        q, k, v = (x.bfloat16() for x in draw(device=device))
        naive = (q @ k.repeat_interleave(2, 1).mT * C**-0.5).softmax(-1).bfloat16() @ v.repeat_interleave(2, 1)
        truth = attend(q.double(), k.double(), v.double(), kernel="reference")
        for kernel in ("eager", "sdpa"):
            assert not too_far(attend(q, k, v, kernel=kernel), naive, truth, OUTPUT)


TRANSFORMED = ["none", "causal", "causal window", "padding", "matrix"]


class TestFunctional:
    @pytest.mark.parametrize("kernel", [None, "eager", "sdpa", "reference"])
    @pytest.mark.parametrize("mask", TRANSFORMED)
    def test_grad(self, mask, kernel):
        q, k, v = draw()

        def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask], kernel=kernel).square().sum()

        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        actual = grad(loss, argnums=(0, 1, 2))(q, k, v)
        assert all(near(x, y, 1e-5) for x, y in zip(actual, expected, strict=True))
        out, back = vjp(lambda q: attend(q, k, v, mask=MASKS[mask], kernel=kernel), q)
        assert near(back(2 * out)[0], expected[0], 1e-5)

    def test_grad_through_blocked(self):
        q, k, v = draw(70, 70)
        loss = lambda q: attend(q, k, v, mask=window(before=3), kernel="blocked").square().sum()  # noqa: E731
        expected = grad(lambda q: attend(q, k, v, mask=window(before=3), kernel="eager").square().sum())(q)
        assert near(grad(loss)(q), expected, 1e-5)

    @pytest.mark.parametrize("kernel", [None, "eager", "reference"])
    @pytest.mark.parametrize("mask", TRANSFORMED)
    def test_vmap(self, mask, kernel):
        inputs = draw(I, J, 3)
        q, k, v = inputs

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask], kernel=kernel)

        expected = torch.stack([run(*x) for x in zip(q, k, v, strict=True)])
        assert near(vmap(run)(q, k, v), expected)
        moved = [x.movedim(0, 3) for x in inputs]
        assert near(vmap(run, in_dims=3, out_dims=2)(*moved), expected.movedim(0, 2))
        assert near(vmap(run, in_dims=(0, None, None))(q, k[0], v[0]), torch.stack([run(x, k[0], v[0]) for x in q]))
        assert near(vmap(run, in_dims=(None, None, 0))(q[0], k[0], v), torch.stack([run(q[0], k[0], x) for x in v]))

    @pytest.mark.parametrize("term", TERMS)
    def test_vmap_with_a_term(self, term):
        inputs, terms = draw(I, J, 3), TERMS[term]()

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=causal(), scores=terms)

        assert near(vmap(run)(*inputs), torch.stack([run(*x) for x in zip(*inputs, strict=True)]))

    def test_vmap_over_what_a_term_learns(self):
        q, k, v = draw()
        slopes = torch.rand(3, H)
        expected = torch.stack([attend(q, k, v, scores=alibi(slopes=x)) for x in slopes])
        assert near(vmap(lambda x: attend(q, k, v, scores=alibi(slopes=x)))(slopes), expected)

    @pytest.mark.parametrize("mask", TRANSFORMED)
    def test_gradients_for_each_sample(self, mask):
        inputs = draw(I, J, 3)

        def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask]).square().sum()

        expected = torch.stack([grad(loss)(*x) for x in zip(*inputs, strict=True)])
        assert near(vmap(grad(loss))(*inputs), expected, 1e-5)

    @pytest.mark.parametrize("mask", TRANSFORMED)
    def test_jacobians_forward_and_reverse(self, mask):
        q, k, v = draw(3, 4) if mask in ("none", "causal", "causal window") else draw()

        def row(q: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask])[1, 2, -1]

        by_reverse = jacrev(row)(q)
        assert by_reverse.shape == (E, *q.shape)
        assert near(jacfwd(row)(q), by_reverse, 1e-5)
        leaf = q.clone().requires_grad_()
        first = torch.autograd.grad(row(leaf)[0], leaf)[0]
        assert near(by_reverse[0], first, 1e-5)

    @pytest.mark.parametrize("kernel", [None, "eager", "reference"])
    @pytest.mark.parametrize("mask", TRANSFORMED)
    def test_jvp(self, mask, kernel):
        (q, k, v), (dq, dk, dv) = draw(dtype=torch.float64), draw(dtype=torch.float64, seed=1)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=MASKS[mask], kernel=kernel)

        out, tangent = jvp(run, (q, k, v), (dq, dk, dv))
        step = 1e-6
        ahead, behind = (run(q + s * dq, k + s * dk, v + s * dv) for s in (step, -step))
        assert near(out, run(q, k, v), 1e-12)
        assert near(tangent, (ahead - behind) / (2 * step), 1e-7)

    def test_forward_mode_without_torch_func(self):
        q, k, v = draw()
        with forward_mode.dual_level():
            out = attend(forward_mode.make_dual(q, q), k, v)
            tangent = forward_mode.unpack_dual(out).tangent
        assert near(tangent, jvp(lambda q: attend(q, k, v), (q,), (q,))[1], 1e-5)

    def test_a_fused_kernel_inside_vmap_says_why_not(self):
        for kernel in ("sdpa", "blocked"):
            with pytest.raises(KernelRefusedError, match="no rule for vmap, forward-mode and second"):
                vmap(lambda *x, kernel=kernel: attend(*x, mask=window(before=3), kernel=kernel))(*draw(I, J, 3))

    def test_second_derivatives(self):
        q, k, v = draw(3, 4, dtype=torch.float64)
        q = q.requires_grad_()

        def twice(kernel: str | None) -> Tensor:
            (first,) = torch.autograd.grad(attend(q, k, v, kernel=kernel).square().sum(), q, create_graph=True)
            return torch.autograd.grad(first.square().sum(), q)[0]

        for kernel in (None, "sdpa", "eager"):
            assert near(twice(kernel), twice("reference"), 1e-10)

    def test_parameters_by_functional_call(self):
        class Learned(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.slopes = torch.nn.Parameter(torch.rand(H))

            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attend(q, k, v, mask=causal(), scores=alibi(slopes=self.slopes)).square().sum()

        model, inputs = Learned(), draw()
        parameters = dict(model.named_parameters())
        actual = grad(lambda p: functional_call(model, p, tuple(inputs)))(parameters)["slopes"]
        expected = torch.autograd.grad(model(*inputs), model.slopes)[0]
        assert near(actual, expected, 1e-5)


class TestOnMeta:
    @pytest.mark.parametrize("kernel", [None, "eager", "sdpa", "reference"])
    @pytest.mark.parametrize("mask", MASKS)
    def test_shapes_come_out_without_numbers(self, mask, kernel):
        out = attend(*draw(device="meta"), mask=MASKS[mask], kernel=kernel)
        assert (out.shape, out.device.type) == ((B, H, I, E), "meta")

    @pytest.mark.parametrize("term", [name for name in TERMS if name not in ("added", "many")])
    def test_terms_follow(self, term):
        out = attend(*draw(device="meta", dtype=torch.bfloat16), mask=causal(), scores=TERMS[term]())
        assert (out.shape, out.dtype) == ((B, H, I, E), torch.bfloat16)

    @pytest.mark.parametrize("mask", ["none", "causal window", "random_links"])
    def test_rules_are_explained(self, mask):
        there, here = (explain(*draw(device=device), mask=MASKS[mask]) for device in ("meta", "cpu"))
        assert (there.visible, there.chosen) == (here.visible, here.chosen)

    def test_blocked_plans_for_a_rule(self):
        assert attend(*draw(device="meta"), mask=causal(), kernel="blocked").shape == (B, H, I, E)


class TestKept:
    @pytest.mark.parametrize("name", [name for name in MASKS if MASKS[name] is not None and "matrix" not in name])
    def test_masks_are_copied_and_pickled(self, name):
        mask = MASKS[name]
        copies = [copy.copy(mask), copy.deepcopy(mask)]
        if name != "predicate":  # its function is what the caller gave
            copies.append(pickle.loads(pickle.dumps(mask)))
            file = io.BytesIO()
            torch.save(mask, file)
            file.seek(0)
            copies.append(torch.load(file, weights_only=False))
        for other in copies:
            assert other == mask
            assert hash(other) == hash(mask)
            assert repr(other) == repr(mask)
            assert torch.equal(other.dense(I, J), mask.dense(I, J))

    @pytest.mark.parametrize("name", [name for name in TERMS if name not in ("none", "many")])
    def test_terms_are_copied_and_pickled(self, name):
        term = TERMS[name]()
        inputs = draw()
        for other in (copy.copy(term), copy.deepcopy(term), pickle.loads(pickle.dumps(term))):
            assert repr(other) == repr(term)
            assert other.settings() == term.settings()
            assert torch.equal(attend(*inputs, scores=other), attend(*inputs, scores=term))

    def test_a_deep_copy_learns_by_itself(self):
        term = alibi(slopes=torch.rand(H))
        other = copy.deepcopy(term)
        other.tensors()[0].zero_()
        assert term.tensors()[0].any()
        mask = documents(LABELS.clone())
        theirs = copy.deepcopy(mask)
        theirs.tensors()[0].zero_()
        assert mask != theirs

    def test_a_model_that_holds_them_is_copied_and_saved_whole(self):
        model = Wrapped(mask=causal() & padding([3, 9]), scores=alibi(heads=H))
        inputs = draw()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(*inputs), model(*inputs))


def test_a_refusal_keeps_its_reasons_under_the_compiler():
    run = compiled(lambda q, k, v: attend(q, k, v, mask=MASKS["predicate"], kernel="blocked"))
    with pytest.raises(Exception, match=r"in compiled code it takes regard.s own masks on the CPU"):
        run(*draw())


@pytest.mark.parametrize("side", ["left", "right"])
def test_lengths_that_are_traced(side):
    """Nothing may look at the lengths while the compiler or a transform stands in for them."""
    q, k, v = draw(J, J)
    lengths = torch.tensor([J, 5])[:B]
    width = J if side == "left" else None

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return attend(q, k, v, mask=causal() & padding(lengths, side=side, width=width))

    assert near(compiled(run)(q, k, v, lengths), run(q, k, v, lengths))
    one_by_one = vmap(lambda *x: run(*(each[None] for each in x))[0])
    assert near(one_by_one(q, k, v, lengths), run(q, k, v, lengths))
