"""Every score term against the formula of its paper, written out a second time in plain numbers."""

import math

import pytest
import torch
from torch import Tensor

from regard import additive, alibi, attend, causal, shaw, sink, softcap, t5_buckets, window
from regard.core.absolute_positions import Grid, Positions, whole_grid
from regard.core.kernels import fast_tanh
from regard.core.scores import Alibi, BoundTerm, ScoreTerm, Shaw, Sink, Softcap, alibi_slopes, as_terms, t5_bucket

B, H, I, J, C = 2, 6, 5, 9, 7  # noqa: E741 (the letters of the legend)
PLACES = [None, Positions(40, 3), Positions(5, torch.tensor([4, 0, 8, 30, 2, 1, 5, 3, 7]))]


def queries(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, H, I, C, dtype=dtype)


def grid(positions: Positions | None = None) -> Grid:
    return whole_grid(positions or Positions.last_rows(I, J), B, H, I, J)


def piecewise(positions: Positions | None = None) -> Grid:
    """The same pairs as gathered blocks have them: five axes, and not known to be the whole."""
    whole = grid(positions)
    row, column = whole.row.expand(I, J), whole.column.expand(I, J)
    parts = row, column, whole.i.expand(I, J), whole.j.expand(I, J)
    return Grid(whole.batch[None], whole.head[None], *(x.reshape(1, 1, 1, I, J) for x in parts))


def acted(term: ScoreTerm, scores: Tensor, q: Tensor, beta: float = 0.3, positions: Positions | None = None) -> Tensor:
    """What becomes of the scores, told the same by the whole grid and by its pieces."""
    bound = term.bind(q, beta)
    whole = bound(scores, grid(positions))
    pieces = bound(scores[None], piecewise(positions))[0]
    assert torch.equal(whole.expand(B, H, I, J), pieces.expand(B, H, I, J))
    return whole


def paper_slopes(heads: int) -> list[float]:
    """The authors' own code: a power of two has a geometric row, others fill up from the next longer one."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**step for step in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    below = 2 ** math.floor(math.log2(heads))
    return of_power(below) + paper_slopes(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", range(1, 17))
def test_slopes_follow_the_paper(heads):
    assert alibi_slopes(heads).tolist() == pytest.approx(paper_slopes(heads), rel=1e-6)


def test_slopes_of_eight_heads_are_halves():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]


def test_slopes_between_powers_of_two_come_after_those_of_the_power():
    assert alibi_slopes(3).tolist() == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(12).tolist()[:8] == alibi_slopes(8).tolist()


def test_alibi_takes_slopes_of_ones_own():
    slopes = torch.rand(H)
    assert alibi(slopes=slopes).tensors()[0] is slopes
    assert torch.equal(alibi(heads=H).tensors()[0], alibi_slopes(H))


def test_alibi_lowers_scores_by_distance_to_either_side():
    slopes = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 0.0], dtype=torch.float64)
    out = acted(alibi(slopes=slopes), torch.zeros(B, H, I, J, dtype=torch.float64), queries())
    for h, slope in enumerate(slopes.tolist()):
        for row in range(I):
            i = row + J - I  # queries are the last rows
            assert out[1, h, row].tolist() == [-slope * abs(i - j) for j in range(J)]


def test_alibi_goes_by_positions_not_by_rows():
    at = torch.tensor([4, 0, 8, 30, 2, 1, 5, 3, 7])
    out = acted(alibi(heads=H), torch.zeros(1, H, I, J), queries(), positions=Positions(11, at))
    assert torch.allclose(out[0, 2, 3], -alibi_slopes(H)[2].to(out) * (14 - at).abs())


def published_bucket(distance: int, buckets: int, reach: int, bidirectional: bool) -> int:
    """near + floor(far log(d / near) / log(reach / near)), without a logarithm: whole numbers are never rounded."""
    side = 0
    if bidirectional:
        buckets //= 2
        side = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    near = buckets // 2
    if distance < near:
        return side + distance
    far, step = buckets - near, 0
    # step <= far log(d / near) / log(reach / near)  is  reach^step near^far <= d^far near^step
    while step + 1 < far and reach ** (step + 1) * near**far <= distance**far * near ** (step + 1):
        step += 1
    return side + near + step


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 16), (6, 9), (12, 20), (4, 3), (64, 300), (10, 1000)])
def test_buckets_follow_the_published_formula(buckets, reach, bidirectional):
    distances = range(-reach - 7, reach + 8)
    expected = [published_bucket(d, buckets, reach, bidirectional) for d in distances]
    assert t5_bucket(torch.tensor(distances), buckets, reach, bidirectional).tolist() == expected
    assert set(expected) <= set(range(buckets))


@pytest.mark.parametrize(
    ("bidirectional", "far"), [(True, {-20: 10, 20: 26, -5: 5, 7: 23, 999: 31}), (False, {-20: 17, 5: 0})]
)
def test_buckets_known_by_heart(bidirectional, far):
    """Values of the released model: 32 buckets, 128 far."""
    assert t5_bucket(torch.tensor(list(far)), 32, 128, bidirectional).tolist() == list(far.values())


def test_buckets_agree_with_the_logarithm_where_it_is_not_at_a_border():
    for distance in range(17, 128):
        exact = 8 * math.log(distance / 8) / math.log(16)
        if abs(exact - round(exact)) > 1e-6:
            assert t5_bucket(torch.tensor(-distance), 32, 128, True).item() == 8 + min(int(exact), 7)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize(
    "positions", [None, Positions(40, 3), Positions(5, torch.tensor([4, 0, 8, 30, 2, 1, 5, 3, 7]))], ids=str
)
def test_t5_adds_the_number_of_head_and_bucket(bidirectional, positions):
    table, scores = torch.randn(12, H, dtype=torch.float64), torch.randn(B, H, I, J, dtype=torch.float64)
    out = acted(t5_buckets(table, max_distance=20, bidirectional=bidirectional), scores, queries(), positions=positions)
    at = grid(positions)
    for row in range(I):
        for column in range(J):
            distance = (at.j[0, column] - at.i[row, 0]).item()
            added = table[published_bucket(distance, 12, 20, bidirectional)]
            assert torch.equal(out[:, :, row, column], scores[:, :, row, column] + added)


@pytest.mark.parametrize("positions", PLACES, ids=["last rows", "starts", "any order"])
@pytest.mark.parametrize("rows", [1, 5, 31])
def test_shaw_is_the_query_times_the_relative_key(rows, positions):
    """The explicit form, with a tensor of relative keys (i, j, c)."""
    q, keys = queries(), torch.randn(rows, C, dtype=torch.float64)
    out = acted(shaw(keys), torch.zeros(B, H, I, J, dtype=torch.float64), q, beta=0.3, positions=positions)
    at, reach = grid(positions), rows // 2
    relative = keys[(at.j - at.i).clamp(-reach, reach) + reach]
    assert relative.shape == (I, J, C)
    assert torch.allclose(out, 0.3 * torch.einsum("bhic,ijc->bhij", q, relative), rtol=1e-13, atol=1e-13)


def test_softcap_is_a_tanh():
    scores = torch.linspace(-50, 50, B * H * I * J, dtype=torch.float64).view(B, H, I, J)
    out = acted(softcap(3), scores, queries())
    assert out.flatten().tolist() == pytest.approx([3 * math.tanh(s / 3) for s in scores.flatten().tolist()], rel=1e-14)
    assert out.abs().max() <= 3


def test_a_large_cap_leaves_scores_alone():
    scores = torch.randn(B, H, I, J, dtype=torch.float64)
    assert torch.allclose(acted(softcap(1e6), scores, queries()), scores, rtol=1e-9)


def attended(scores: object, mask: object = None, kernel: str = "eager") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, h, n, C, dtype=torch.float64) for h, n in ((H, I), (3, J), (3, J)))
    return attend(q, k, v, scores=scores, mask=mask, kernel=kernel), q, k, v


@pytest.mark.parametrize("kernel", ["reference", "eager", "sdpa"])
def test_a_sink_is_one_more_key_of_value_zero(kernel):
    logits = torch.randn(H, dtype=torch.float64)
    out, q, k, v = attended(sink(logits), kernel=kernel)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.cat([q @ k.mT * C**-0.5, logits[:, None, None].expand(B, H, I, 1)], -1)
    weights = scores.softmax(-1)
    expected = weights @ torch.cat([v, torch.zeros(B, H, 1, C, dtype=v.dtype)], 2)
    assert torch.allclose(out, expected, rtol=1e-13, atol=1e-13)
    assert (weights[..., :J].sum(-1) < 1).all()


@pytest.mark.parametrize("kernel", ["reference", "eager", "sdpa", "blocked"])
def test_several_sinks_take_their_shares_together(kernel):
    one, two, three = torch.randn(3, H, dtype=torch.float64)
    together = torch.log(one.exp() + two.exp() + three.exp())
    torch.manual_seed(5)
    apart, *_ = attended([sink(one), sink(two), sink(three)], causal(), kernel)
    torch.manual_seed(5)
    expected, *_ = attended(sink(together), causal(), kernel)
    assert torch.allclose(apart, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kernel", ["reference", "eager", "sdpa", "blocked"])
def test_a_sink_acts_last_wherever_it_stands(kernel):
    logits, bias = torch.randn(H, dtype=torch.float64), torch.randn(I, J, dtype=torch.float64)
    outs = []
    for terms in ([sink(logits), bias], [bias, sink(logits)]):
        torch.manual_seed(5)
        outs.append(attended(terms, causal(), kernel)[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("logit", [-1e4, -math.inf])
def test_a_sink_far_below_takes_nothing(logit):
    torch.manual_seed(5)
    with_sink, *_ = attended(sink(torch.full((H,), logit, dtype=torch.float64)))
    torch.manual_seed(5)
    without, *_ = attended(None)
    assert torch.allclose(with_sink, without, rtol=1e-14, atol=1e-14)


def test_a_row_that_sees_nothing_gives_zeros_beside_a_sink():
    out, *_ = attended(sink(torch.randn(H, dtype=torch.float64)), causal() & ~window(before=7))
    assert not out[:, :, :4].any()
    assert out[:, :, 4:].all()


RANKS = [
    (I, J), (1, J), (I, 1), (1, 1),
    (H, I, J), (1, I, J), (H, 1, J), (H, I, 1), (H, 1, 1),
    (B, H, I, J), (B, 1, I, J), (B, 1, 1, J), (1, H, I, 1), (B, H, 1, 1), (1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_a_tensor_is_added_as_it_broadcasts(shape):
    values, scores = torch.randn(shape, dtype=torch.float64), torch.randn(B, H, I, J, dtype=torch.float64)
    assert torch.equal(acted(additive(values), scores, queries()), scores + values)


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_the_gradient_of_a_tensor_has_its_shape(shape):
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for at in (grid(), piecewise()):
        out = additive(values).bind(queries(), 1.0)(torch.zeros((), dtype=torch.float64), at)
        upstream = torch.randn(B, H, I, J, dtype=torch.float64)
        full = *out.shape[:-4], B, H, I, J
        (grad,) = torch.autograd.grad(out.expand(full), values, upstream.expand(full))
        assert torch.allclose(grad, upstream.sum_to_size((1,) * (4 - len(shape)) + shape).view(shape))


def test_a_plain_tensor_is_an_additive_term():
    values = torch.randn(I, J)
    (term,) = as_terms(values)
    assert term.name == "additive"
    assert term.tensors()[0] is values


def test_terms_are_taken_in_the_order_given():
    terms = [softcap(2.0), alibi(heads=H), torch.zeros(I, J)]
    assert [term.name for term in as_terms(terms)] == ["softcap", "alibi", "additive"]
    assert [term.name for term in as_terms(tuple(terms))] == ["softcap", "alibi", "additive"]
    assert as_terms(None) == as_terms([]) == ()


@pytest.mark.parametrize("kernel", ["eager", "reference"])
def test_the_order_of_terms_matters_and_is_as_given(kernel):
    """A cap before the slopes leaves these alone; a cap after them presses all together."""
    slopes = torch.full((H,), 2.0, dtype=torch.float64)
    for terms, formula in (
        ([softcap(1.0), alibi(slopes=slopes)], lambda s, d: torch.tanh(s) - 2 * d),
        ([alibi(slopes=slopes), softcap(1.0)], lambda s, d: torch.tanh(s - 2 * d)),
    ):
        out, q, k, v = attended(terms, kernel=kernel)
        at = grid()
        scores = formula(q @ k.repeat_interleave(2, 1).mT * C**-0.5, (at.i - at.j).abs())
        assert torch.allclose(out, scores.softmax(-1) @ v.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)


def test_terms_act_after_beta():
    bias = torch.randn(I, J, dtype=torch.float64)
    q, k, v = (torch.randn(B, H, n, C, dtype=torch.float64) for n in (I, J, J))
    out = attend(q, k, v, scores=[bias, softcap(1.0)], beta=0.2, kernel="eager")
    expected = torch.tanh(q @ k.mT * 0.2 + bias).softmax(-1) @ v
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)


TERMS = {
    "alibi": lambda: alibi(heads=H),
    "t5_buckets": lambda: t5_buckets(torch.zeros(8, H), max_distance=16),
    "shaw": lambda: shaw(torch.zeros(5, C)),
    "softcap": lambda: softcap(2.0),
    "sink": lambda: sink(torch.zeros(H)),
    "additive": lambda: additive(torch.zeros(H, I, J)),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_goes_by_its_name(name):
    assert TERMS[name]().name == name
    assert repr(TERMS[name]()) == name


@pytest.mark.parametrize("name", TERMS)
def test_settings_are_equal_for_terms_that_compile_alike(name):
    """The contents of a tensor are no setting; what code is made for is."""
    one, other = TERMS[name](), TERMS[name]()
    for tensor in other.tensors():
        tensor.uniform_()
    assert one.settings() == other.settings()
    assert hash(one.settings()) == hash(other.settings())
    assert name in one.settings()


def test_settings_differ_where_code_differs():
    table = torch.zeros(8, H)
    different = [
        alibi(heads=H),
        sink(torch.zeros(H)),
        sink(torch.zeros(H + 1)),
        softcap(2.0),
        softcap(3.0),
        shaw(torch.zeros(5, C)),
        shaw(torch.zeros(7, C)),
        t5_buckets(table, max_distance=16),
        t5_buckets(table, max_distance=17),
        additive(torch.zeros(H, 1, J)),
        additive(torch.zeros(H, I, J)),
        additive(torch.zeros(I, J)),
    ]
    assert len({term.settings() for term in different}) == len(different)


@pytest.mark.parametrize("name", TERMS)
def test_which_terms_only_add(name):
    assert TERMS[name]().additive == (name not in ("softcap", "sink"))


def test_terms_of_values_are_told_apart_by_identity_and_caps_by_value():
    assert softcap(2) == softcap(2.0) != softcap(3.0)
    assert alibi(heads=H) != alibi(heads=H)
    assert isinstance(softcap(2), Softcap)
    assert isinstance(alibi(heads=3), Alibi)
    assert isinstance(shaw(torch.zeros(3, C)), Shaw)
    assert isinstance(sink(torch.zeros(3)), Sink)


def test_a_term_of_ones_own_needs_no_checks_and_no_tensors():
    class Halved(ScoreTerm):
        """s / 2."""

        name = "halved"
        additive = False

        def bind(self, q: Tensor, beta: float) -> BoundTerm:
            return lambda scores, grid: scores / 2

    out, q, k, v = attended(Halved())
    expected = (q @ k.repeat_interleave(2, 1).mT * C**-0.5 / 2).softmax(-1) @ v.repeat_interleave(2, 1)
    assert torch.allclose(out, expected, rtol=1e-13, atol=1e-13)
    assert Halved().settings() == ("halved",)
    assert Halved().tensors() == ()
    assert Halved().check(q, J) is None


OF_VALUES = {
    "alibi": lambda x: alibi(slopes=x),
    "t5_buckets": lambda x: t5_buckets(x, max_distance=16),
    "shaw": shaw,
    "sink": sink,
    "sinks": lambda x: [sink(x), sink(x / 2)],
    "additive": additive,
}
SHAPES = {"t5_buckets": (8, H), "shaw": (5, C), "additive": (H, I, J)}


@pytest.mark.parametrize("kernel", ["reference", "eager", "sdpa", "blocked"])
@pytest.mark.parametrize("name", OF_VALUES)
def test_values_in_half_precision_are_read_exactly(name, kernel):
    """Values in bfloat16 beside q in float32 are used as they are: no sum or product is made in their precision."""
    values = (300 * torch.randn(SHAPES.get(name, (H,)))).bfloat16() / 300
    q, k, v = (torch.randn(B, H, n, C) for n in (I, J, J))
    make = OF_VALUES[name]
    out = attend(q, k, v, scores=make(values), mask=causal(), kernel=kernel)
    expected = attend(q, k, v, scores=make(values.float()), mask=causal(), kernel=kernel)
    assert out.dtype == torch.float32
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "blocked"])
def test_a_bias_is_not_rounded_to_half_precision(dtype, kernel):
    """A bias of -9.97 is -9.9375 in bfloat16, which changes a weight by 3 %."""
    n, source = 97, torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, n, 16, generator=source).to(dtype) for _ in range(3))
    q = q * 0
    values = -10 * torch.rand(n, n, generator=source)
    out = attend(q, k, v, mask=causal() & window(before=40), scores=additive(values), kernel=kernel)
    exact = attend(
        *(x.double() for x in (q, k, v)),
        mask=causal() & window(before=40),
        scores=additive(values.double()),
        kernel="reference",
    )
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * rounding


@pytest.mark.parametrize("tanh", [torch.tanh, fast_tanh.tanh], ids=["exact", "fast"])
def test_a_softcap_inside_a_kernel_is_the_same(tanh):
    """Infinities stay, so that -inf still hides its key. On the CPU the fast tanh is exact."""
    scores = torch.tensor([0.0, 1e-30, 0.3, -7.0, 1e4, -1e30, math.inf, -math.inf, math.nan], requires_grad=True)
    term = softcap(5.0)
    own = term.bind_in_kernel(torch.zeros(1), tanh)(scores, grid())
    other = term.bind(torch.zeros(1), 1.0)(scores, grid())
    assert torch.allclose(own, other, rtol=2e-7, atol=0, equal_nan=True)
    finite = scores.isfinite()
    (slope,), (expected,) = (torch.autograd.grad(x[finite].sum(), scores) for x in (own, other))
    assert torch.allclose(slope[finite], expected[finite], rtol=1e-5, atol=1e-7)


def test_only_shaw_needs_the_queries_and_relative_terms_the_distance():
    terms = [
        alibi(heads=H),
        t5_buckets(torch.zeros(8, H)),
        softcap(2.0),
        sink(torch.zeros(H)),
        additive(torch.zeros(I, J)),
    ]
    assert not any(term.reads_queries for term in terms)
    assert shaw(torch.zeros(5, C)).reads_queries
    assert [term.relative for term in terms] == [True, True, False, True, False]


@pytest.mark.parametrize(
    "term", [alibi(heads=H), t5_buckets(torch.linspace(-3, 3, 8 * H).view(8, H), max_distance=9)], ids=repr
)
def test_equal_distances_have_equal_biases(term):
    """What `relative` promises: blocks of keys that slide with the queries share one bias."""
    bound, zeros = term.bind(torch.zeros(1), 1.0), torch.zeros(())
    assert torch.equal(bound(zeros, grid(Positions(5, 3))), bound(zeros, grid(Positions(905, 903))))
