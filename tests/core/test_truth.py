"""The truth is checked against three nested loops, and every kernel against the truth.

Numbers are judged by the one rule of `tests/tolerance.py`: a result may be off from float64 by little more than the
naive method is in the same dtype. A kernel that does not serve a call has to say so; nothing is skipped.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import mul
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from regard import (
    Mask,
    Positions,
    additive,
    alibi,
    attend,
    causal,
    chunks,
    dilated,
    documents,
    full,
    global_tokens,
    key_padding,
    padding,
    prefix,
    shaw,
    sink,
    softcap,
    t5_buckets,
    window,
)
from regard.base.errors import KernelRefusedError
from regard.core.absolute_positions import whole_grid
from regard.core.masks import as_mask
from regard.core.masks.algebra import Full
from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS, examples
from regard.core.scores import ScoreTerm, Sink
from tests.kernels import ALL_KERNELS, CPU_KERNELS
from tests.tolerance import GRADIENT, OUTPUT, error, too_far


@dataclass(frozen=True)
class Sizes:
    """b, h, g, i, j, c and e of a call: no two alike unless a test is about that."""

    b: int = 2
    h: int = 6
    g: int = 3
    i: int = 67
    j: int = 131
    c: int = 19
    e: int = 13

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in vars(self).items())


def ids(size: int, *, rows: int = 0) -> Tensor:
    """Document numbers in runs of unequal length, in another order in each row."""
    at = torch.arange(size)
    return torch.stack([(at * (3 + row) // 40 * 5 + row) % 7 for row in range(rows)]) if rows else at * 3 // 40 * 5 % 7


def matrix(*shape: int) -> Tensor:
    """A boolean matrix with a third of it hidden, a row that sees nothing and a key that nobody sees."""
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.3
    middle = shape[-2] // 2
    visible[..., middle : middle + 1, :] = False
    visible[..., shape[-1] // 3] = False
    return visible


MASKS: dict[str, Callable[[Sizes], Mask | Tensor | None]] = {
    "none": lambda s: None,
    **{name: (lambda s, name=name: parse_mask(examples(name, s.j)[0])) for name in FORMS},
    "open window": lambda s: window(None, None),
    "not causal": lambda s: ~causal(),
    "nothing": lambda s: ~full(),
    "window before": lambda s: window(before=9),
    "window after": lambda s: window(before=0, after=70),
    "window half open": lambda s: window(before=None, after=3),
    "window both": lambda s: window(before=5, after=11),
    "not window": lambda s: ~window(before=5, after=11),
    "chunks half open": lambda s: chunks(13, before=None),
    "no prefix": lambda s: prefix(0),
    "padding": lambda s: padding([max(0, s.j - 5 * n) for n in range(s.b)]),
    "key_padding": lambda s: key_padding([[int(j % (n + 3) != 1) for j in range(s.j)] for n in range(s.b)]),
    "padding to nothing": lambda s: padding([0, *[s.j - 1] * (s.b - 1)]),
    "padding left": lambda s: padding([max(0, s.j - 3 - 40 * n) for n in range(s.b)], side="left", width=s.j),
    "documents by sequence": lambda s: documents(ids(s.j, rows=s.b)),
    "predicate": lambda s: Mask.of("thirds", lambda i, j: (i + j) % 3 == 0),
    "causal window": lambda s: causal() & window(before=20),
    "window and global": lambda s: causal() & window(before=9) | global_tokens(3),
    "causal and padding": lambda s: causal() & padding([max(0, s.j - 5 - n) for n in range(s.b)]),
    "causal and documents": lambda s: causal() & documents(ids(s.j, rows=s.b)),
    "dilated chunks": lambda s: chunks(32, before=1) & dilated(5) | prefix(1),
    "prefix or causal": lambda s: prefix(9) | causal(),
    "predicate and causal": lambda s: causal() & Mask.of("even", lambda i, j: (i - j) % 2 == 0),
    "matrix": lambda s: matrix(s.i, s.j),
    "matrix by head": lambda s: matrix(s.h, s.i, s.j),
    "matrix by sequence": lambda s: matrix(s.b, 1, s.i, s.j),
    "matrix by both": lambda s: matrix(s.b, s.h, s.i, s.j),
    "matrix and causal": lambda s: causal() & matrix(s.h, s.i, s.j),
}
FEW, MANY = 1, 8  # draws of inputs
ORDERS = 2  # of summation in the naive method
# known by evaluation alone, even where they hide nothing
DATA = ("padding", "key_padding", "documents", "predicate", "matrix")


@dataclass(frozen=True)
class Terms:
    """Terms made from learned tensors, whose shapes and sizes they state."""

    make: Callable[..., list[ScoreTerm | Tensor]]
    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]] = field(default=lambda s: {})
    refused: tuple[str, ...] = ()  # terms that do more than add


def added(shape: Callable[[Sizes], tuple[int, ...]]) -> Terms:
    return Terms(lambda values: [additive(values)], lambda s: {"values": shape(s)})


TERMS = {
    "none": Terms(list),
    "alibi": Terms(lambda slopes: [alibi(slopes=slopes)], lambda s: {"slopes": (s.h,)}),
    "t5": Terms(lambda table: [t5_buckets(table, max_distance=50)], lambda s: {"table": (12, s.h)}),
    "t5 one way": Terms(
        lambda table: [t5_buckets(table, max_distance=99, bidirectional=False)], lambda s: {"table": (9, s.h)}
    ),
    "shaw": Terms(lambda keys: [shaw(keys)], lambda s: {"keys": (11, s.c)}),
    "softcap": Terms(lambda: [softcap(1.5)], refused=("softcap",)),
    "sink": Terms(lambda logits: [sink(logits)], lambda s: {"logits": (s.h,)}),
    "added (i j)": added(lambda s: (s.i, s.j)),
    "added (h i j)": added(lambda s: (s.h, s.i, s.j)),
    "added (b h i j)": added(lambda s: (s.b, s.h, s.i, s.j)),
    "added (b 1 1 j)": added(lambda s: (s.b, 1, 1, s.j)),
    "many": Terms(
        lambda slopes, keys, values, one, two: [sink(one), alibi(slopes=slopes), shaw(keys), values, sink(two)],
        lambda s: {"slopes": (s.h,), "keys": (5, s.c), "values": (s.h, 1, s.j), "one": (s.h,), "two": (s.h,)},
    ),
    "many and a cap": Terms(
        lambda values, table, logits: [
            values,
            softcap(2.0),
            t5_buckets(table, max_distance=40),
            sink(logits),
            softcap(3.0),
        ],
        lambda s: {"values": (s.i, 1), "table": (8, s.h), "logits": (s.h,)},
        refused=("softcap", "softcap"),
    ),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "axes turned": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "cut out": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one sequence for all": lambda x: x[:1].expand_as(x),
    "backwards": lambda x: x.flip(2).flip(2),
}


@dataclass(frozen=True)
class Case:
    """A call by the names of its parts."""

    mask: str = "none"
    term: str = "none"
    sizes: Sizes = Sizes()
    dtype: torch.dtype = torch.float32
    learned: torch.dtype | None = None  # dtype of what a term learns; that of q unless told
    layout: str = "contiguous"
    beta: float | None = None
    positions: Positions | None = None
    device: str = "cpu"

    def tensors(self, draw: int) -> dict[str, Tensor]:
        """q, k, v and what the terms learn, rounded to their dtypes."""
        s, source = self.sizes, torch.Generator().manual_seed(draw)
        shapes = {"q": (s.b, s.h, s.i, s.c), "k": (s.b, s.g, s.j, s.c), "v": (s.b, s.g, s.j, s.e)}
        made = {}
        for name, shape in (shapes | TERMS[self.term].shapes(s)).items():
            dtype = self.dtype if name in "qkv" else self.learned or self.dtype
            drawn = torch.randn(shape, generator=source, dtype=torch.float64)
            # weights spread over many keys and slopes that fade: else one or two numbers would decide on the error
            scaled = drawn / 2 if name == "q" else drawn.abs() / 8 if name == "slopes" else drawn
            made[name] = scaled.to(self.device, dtype)
        return made


class Pair(NamedTuple):
    """A query and a key: where they lie in q and k, where they stand, and the query itself."""

    b: int
    h: int
    row: int
    column: int
    i: int
    j: int
    q: list[float]
    beta: float


Numbers = dict[str, Any]  # nested lists by name


def by_loops(
    x: Numbers,
    see: Callable[[Pair], bool],
    change: Callable[[Numbers, float, Pair], float],
    sinks: tuple[str, ...],
    beta: float,
    queries: int,
    keys: list[int],
) -> list[Any]:
    """Attention by loops over plain numbers."""
    out = []
    for b, heads in enumerate(x["q"]):
        out.append([])
        for h, rows in enumerate(heads):
            g = h * len(x["k"][b]) // len(heads)
            extra = [x[name][h] for name in sinks]
            out[b].append([])
            for row, q in enumerate(rows):
                pairs = [Pair(b, h, row, column, queries + row, j, q, beta) for column, j in enumerate(keys)]
                scores = {
                    at.column: change(x, beta * sum(map(mul, q, x["k"][b][g][at.column])), at)
                    for at in pairs
                    if see(at)
                }
                top = max([*scores.values(), *extra], default=0.0)
                weights = {column: math.exp(score - top) for column, score in scores.items()}
                total = sum(weights.values()) + sum(math.exp(logit - top) for logit in extra)
                width = range(len(x["v"][b][g][0]))
                mixed = [sum(w * x["v"][b][g][column][e] for column, w in weights.items()) for e in width]
                out[b][h].append([number / total if scores else 0.0 for number in mixed])
    return out


LOOP_SIZES = Sizes(b=2, h=6, g=3, i=4, j=9, c=5, e=7)
PARITY = torch.tensor([[(h + 2 * row + column) % 3 > 0 for column in range(9)] for h in range(6) for row in range(4)])
LOOP_MASKS: dict[str, tuple[Mask | Tensor | None, Callable[[Pair], bool]]] = {
    "none": (None, lambda at: True),
    "causal": (causal(), lambda at: at.j <= at.i),
    "window": (window(before=2, after=1), lambda at: at.i - 2 <= at.j <= at.i + 1),
    "chunks, dilated": (chunks(4) | dilated(3), lambda at: at.i // 4 == at.j // 4 or (at.i - at.j) % 3 == 0),
    "padding": (padding([8, 3]), lambda at: at.j < (8, 3)[at.b]),
    "blind rows": (padding([0, 5]) & causal(), lambda at: at.b == 1 and at.j < 5 and at.j <= at.i),
    "global tokens": (causal() | global_tokens(2), lambda at: at.j <= at.i or at.i < 2 or at.j < 2),
    "documents": (documents(torch.arange(20) // 3), lambda at: at.i // 3 == at.j // 3),
    "matrix": (PARITY.view(6, 4, 9), lambda at: (at.h + 2 * at.row + at.column) % 3 > 0),
}
LOOP_LEARNED = {"slopes": (6,), "table": (8, 6), "keys": (5, 5), "one": (6,), "two": (6,), "values": (2, 1, 4, 9)}


def bucket(distance: int) -> int:
    """T5's rule for 8 buckets both ways, all distances from 20 on alike."""
    far = abs(distance)
    own = far if far < 2 else 2 + math.floor(2 * math.log(far / 2) / math.log(20 / 2))
    return min(own, 3) + (4 if distance > 0 else 0)


def clipped(distance: int) -> int:
    return max(-2, min(2, distance)) + 2


# what attend is handed, what happens to one score, and which learned numbers are one more score each
LOOP_TERMS: dict[str, tuple[Callable[..., list[ScoreTerm | Tensor]], Callable[..., float], tuple[str, ...]]] = {
    "none": (lambda x: [], lambda x, s, at: s, ()),
    "alibi": (lambda x: [alibi(slopes=x["slopes"])], lambda x, s, at: s - x["slopes"][at.h] * abs(at.i - at.j), ()),
    "t5": (
        lambda x: [t5_buckets(x["table"], max_distance=20)],
        lambda x, s, at: s + x["table"][bucket(at.j - at.i)][at.h],
        (),
    ),
    "shaw": (
        lambda x: [shaw(x["keys"])],
        lambda x, s, at: s + at.beta * sum(map(mul, at.q, x["keys"][clipped(at.j - at.i)])),
        (),
    ),
    "softcap": (lambda x: [softcap(0.7)], lambda x, s, at: 0.7 * math.tanh(s / 0.7), ()),
    "added": (lambda x: [x["values"]], lambda x, s, at: s + x["values"][at.b][0][at.row][at.column], ()),
    "sink": (lambda x: [sink(x["one"])], lambda x, s, at: s, ("one",)),
    "all in order": (
        lambda x: [x["values"], sink(x["one"]), softcap(1.1), sink(x["two"]), alibi(slopes=x["slopes"])],
        lambda x, s, at: (
            1.1 * math.tanh((s + x["values"][at.b][0][at.row][at.column]) / 1.1) - x["slopes"][at.h] * abs(at.i - at.j)
        ),
        ("one", "two"),
    ),
}
LOOP_PLACES = {
    "last rows": (None, 5, list(range(9))),
    "starts": (Positions(6, 3), 6, list(range(3, 12))),
    "any order": (Positions(4, torch.tensor([3, 0, 7, 1, 8, 2, 6, 5, 4])), 4, [3, 0, 7, 1, 8, 2, 6, 5, 4]),
}


def loop_tensors() -> dict[str, Tensor]:
    return Case(sizes=LOOP_SIZES, dtype=torch.float64).tensors(0) | {
        name: torch.randn(shape, dtype=torch.float64) for name, shape in LOOP_LEARNED.items()
    }


@pytest.mark.parametrize("beta", [None, 0.0, 1.3, -0.4])
@pytest.mark.parametrize("term", LOOP_TERMS)
@pytest.mark.parametrize("mask", LOOP_MASKS)
def test_the_reference_is_what_three_loops_compute(mask, term, beta):
    x = loop_tensors()
    (rule, see), (make, change, sinks) = LOOP_MASKS[mask], LOOP_TERMS[term]
    numbers = {name: values.tolist() for name, values in x.items()}
    truth = torch.tensor(
        by_loops(numbers, see, change, sinks, 5**-0.5 if beta is None else beta, 5, list(range(9))), dtype=torch.float64
    )
    out = attend(x["q"], x["k"], x["v"], mask=rule, scores=make(x) or None, beta=beta, kernel="reference")
    assert not too_far(out, out, truth, OUTPUT)


@pytest.mark.parametrize("positions", LOOP_PLACES)
@pytest.mark.parametrize("term", ["alibi", "t5", "shaw", "added"])
@pytest.mark.parametrize("mask", LOOP_MASKS)
def test_the_reference_stands_where_it_is_placed(mask, term, positions):
    x = loop_tensors()
    (rule, see), (make, change, sinks) = LOOP_MASKS[mask], LOOP_TERMS[term]
    at, queries, keys = LOOP_PLACES[positions]
    numbers = {name: values.tolist() for name, values in x.items()}
    truth = torch.tensor(by_loops(numbers, see, change, sinks, 0.6, queries, keys), dtype=torch.float64)
    out = attend(x["q"], x["k"], x["v"], mask=rule, scores=make(x), beta=0.6, kernel="reference", positions=at)
    assert not too_far(out, out, truth, OUTPUT)


def test_the_loops_see_every_difference_that_matters():
    """A score, a sink, a mask or a place changed a little is far outside what is allowed."""
    x = {name: values.tolist() for name, values in loop_tensors().items()}
    see, change = LOOP_MASKS["causal"][1], LOOP_TERMS["alibi"][1]
    plain = torch.tensor(by_loops(x, see, change, (), 0.6, 5, list(range(9))), dtype=torch.float64)
    others = {
        "beta": by_loops(x, see, change, (), 0.6 + 1e-12, 5, list(range(9))),
        "sink": by_loops(x, see, change, ("one",), 0.6, 5, list(range(9))),
        "mask": by_loops(x, lambda at: at.j < at.i, change, (), 0.6, 5, list(range(9))),
        "place": by_loops(x, see, change, (), 0.6, 6, list(range(9))),
        "term": by_loops(x, see, lambda x, s, at: s, (), 0.6, 5, list(range(9))),
    }
    for name, other in others.items():
        assert too_far(torch.tensor(other, dtype=torch.float64), plain, plain, OUTPUT), name


@pytest.mark.parametrize("mask", LOOP_MASKS)
def test_hard_attention_is_the_mean_of_the_largest(mask):
    x = loop_tensors()
    x["q"], x["k"] = x["q"].sign(), x["k"].sign()  # small whole numbers tie
    rule, see = LOOP_MASKS[mask]
    out = attend(x["q"], x["k"], x["v"], mask=rule, beta=math.inf, kernel="reference").tolist()
    q, k, v = (x[name].tolist() for name in "qkv")
    shared = 0
    for b, h, row in itertools.product(range(2), range(6), range(4)):
        pairs = [Pair(b, h, row, j, 5 + row, j, q[b][h][row], math.inf) for j in range(9)]
        scores = {at.j: sum(map(mul, at.q, k[b][h // 2][at.j])) for at in pairs if see(at)}
        best = [j for j, score in scores.items() if score == max(scores.values())]
        shared += len(best) > 1
        mean = [sum(v[b][h // 2][j][e] for j in best) / max(len(best), 1) for e in range(7)]
        assert out[b][h][row] == pytest.approx(mean, rel=1e-14, abs=1e-14)
    assert shared


Results = dict[str, Tensor]


def computed(attention: Callable[..., Tensor], case: Case, draws: int, exact: bool = False) -> Results:
    """The output and the gradient of everything that can learn, of all draws together."""
    results = [drawn(attention, case, draw, exact) for draw in range(draws)]
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def drawn(attention: Callable[..., Tensor], case: Case, draw: int, exact: bool) -> Results:
    tensors = {name: (x.double() if exact else x).requires_grad_() for name, x in case.tensors(draw).items()}
    q, k, v = (LAYOUTS[case.layout](tensors[name]) for name in "qkv")
    rest = {name: x for name, x in tensors.items() if name not in "qkv"}
    mask, terms = MASKS[case.mask](case.sizes), TERMS[case.term].make(**rest)
    if isinstance(mask, Tensor):
        mask = mask.to(case.device)
    out = attention(q, k, v, mask=mask, scores=terms or None, beta=case.beta, positions=case.positions)
    source = torch.Generator().manual_seed(draw + 100)
    upstream = torch.randn(out.shape, generator=source, dtype=torch.float64).to(case.device, case.dtype).to(out.dtype)
    grads = torch.autograd.grad(out, list(tensors.values()), upstream, materialize_grads=True)
    return {"the output": out.detach()} | dict(zip(tensors, grads, strict=True))


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None,
    scores: list[ScoreTerm | Tensor] | None,
    beta: float | None,
    positions: Positions | None,
    shuffle: int,
) -> Tensor:
    """What a textbook writes, every step in the dtype of q. Every sum runs in the order that the shuffle says."""
    (b, h, i, c), j, share = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    source = torch.Generator().manual_seed(shuffle)
    orders = (torch.randperm(n, generator=source) if shuffle else torch.arange(n) for n in (i, j, c, v.shape[3]))
    rows, columns, features, values = orders
    grid = whole_grid(positions or Positions.last_rows(i, j), b, h, i, j, q.device)
    visible = as_mask(mask).to(q.device).see(grid).expand(b, h, i, j)
    beta = c**-0.5 if beta is None else beta
    total = q[..., features] @ k[..., features].repeat_interleave(share, 1).mT * beta
    sinks = [q.new_full((h,), -torch.inf)]
    for term in scores or []:
        term = additive(term) if isinstance(term, Tensor) else term
        total = term.bind(q, beta)(total, grid).to(q.dtype)
        sinks += [term.logits.to(q.dtype)] if isinstance(term, Sink) else []
    visible, total = (x[:, :, rows][..., columns] for x in (visible, total))
    total = total.masked_fill(~visible, -torch.inf)
    total = torch.cat([total, *(x[:, None, None].expand(b, h, i, 1) for x in sinks)], -1)
    awake = visible.any(-1, keepdim=True)
    weights = torch.where(awake, total, 0).softmax(-1)[..., :j]
    out = weights @ v[:, :, columns][..., values].repeat_interleave(share, 1)
    return torch.where(awake, out, q.new_zeros(()))[:, :, rows.argsort()][..., values.argsort()]


def reference(*inputs: Tensor, **rest: object) -> Tensor:
    return attend(*inputs, **rest, kernel="reference")


@cache
def truth_and_naive(case: Case, draws: int) -> tuple[Results, Results]:
    """Remembered, because every kernel is held against them.

    What the naive method is off by is a matter of luck where few numbers are compared, the gradient of six slopes for
    instance. So it sums in several orders, and the worst counts.
    """
    truth = computed(reference, case, draws, exact=True)
    tries = [computed(partial(naive, shuffle=shuffle), case, draws) for shuffle in range(ORDERS)]
    return truth, {name: max((x[name] for x in tries), key=lambda x: error(x, truth[name])) for name in truth}


def hides_nothing(case: Case) -> bool:
    """Whether the rule shows every pair where this call stands, and can be known to."""
    mask = as_mask(MASKS[case.mask](case.sizes))
    if isinstance(mask, Full) or any(word in case.mask for word in DATA):
        return isinstance(mask, Full)
    i, j = case.sizes.i, case.sizes.j
    return i * j > 0 and bool(mask.dense(i, j, positions=case.positions).all())


def refusal(kernel: str, case: Case) -> list[str]:
    """The words in which a kernel must refuse a call, one text a reason; none where it must serve."""
    reasons = []
    if kernel == "flex":
        reasons += ["it computes in float32 at most"] * (case.dtype == torch.float64)
        reasons += ["it takes heads at least 16 wide"] * (min(case.sizes.c, case.sizes.e) < 16)
        learns = case.dtype == torch.float32 and len(TERMS[case.term].shapes(case.sizes)) > 0
        reasons += ["it adds up a learned term's gradient in no fixed order"] * learns
        reasons += ["it cannot centre a dense bias by row"] * (case.term == "many" or case.term.startswith("added"))
    if kernel in ("sdpa", "blocked"):
        reasons += [f"{name} does more than add to the scores" for name in TERMS[case.term].refused]
        reasons += unfused(case) if case.device == "cuda" else []
    if kernel == "blocked":
        reasons += ["the mask hides nothing"] * hides_nothing(case)
    if kernel in ("blocked", "flex"):
        reasons += ["a boolean matrix has no blocks that can be skipped"] * ("matrix" in case.mask)
        reasons += ["it does not take empty tensors"] * (0 in vars(case.sizes).values())
    return reasons


def unfused(case: Case) -> list[str]:
    """The words for heads that torch has no fused kernel for on a GPU."""
    s, size = case.sizes, case.dtype.itemsize
    if size == 8:
        return ["on a GPU torch has no fused kernel for float64"]
    odd = s.c * size % 16 > 0 or s.e * size % 16 > 0
    words = ["on a GPU torch's fused kernels take heads in multiples of"] * odd
    words += ["on a GPU torch's fused kernel for float32 knows no groups"] * (size == 4 and s.h != s.g)
    short = size == 4 and s.b * s.h * s.i * s.j <= 1 << 20
    return words + ["on a GPU torch's fused kernel for float32 rounds more than the whole matrix"] * short


def hold(kernel: str, case: Case) -> None:
    """The kernel serves the call as exactly as it must, or refuses for the reasons that it must."""

    def by_kernel(*inputs: Tensor, **rest: object) -> Tensor:
        return attend(*inputs, **rest, kernel=kernel)

    reasons = refusal(kernel, case)
    if reasons:
        with pytest.raises(KernelRefusedError) as caught:
            computed(by_kernel, case, FEW)
        assert len(caught.value.reasons) == len(reasons), caught.value
        for expected, said in zip(reasons, caught.value.reasons, strict=True):
            assert expected in said
        return
    # of thousands of results some are unlucky in one draw beside a lucky naive one: many draws tell luck from fault
    wrong = judged(by_kernel, case, FEW) and judged(by_kernel, case, MANY)
    assert not wrong, f"{kernel} for {case}: {wrong}"


def judged(attention: Callable[..., Tensor], case: Case, draws: int) -> list[str]:
    """What is too far from the truth."""
    truth, plain = truth_and_naive(case, draws)
    wrong = []
    for name, actual in computed(attention, case, draws).items():
        words = too_far(actual, plain[name], truth[name], OUTPUT if name == "the output" else GRADIENT)
        wrong += [f"{name} is {words}"] if words else []
    return wrong


@pytest.mark.parametrize("kernel", [kernel for kernel in CPU_KERNELS if kernel != "reference"])
@pytest.mark.parametrize("term", ["none", "many"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_kernel_under_every_mask(mask, term, kernel):
    hold(kernel, Case(mask, term))


@pytest.mark.parametrize("kernel", [kernel for kernel in CPU_KERNELS if kernel != "reference"])
@pytest.mark.parametrize("term", [term for term in TERMS if term not in ("none", "many")])
@pytest.mark.parametrize("mask", ["causal", "window and global", "causal and padding", "matrix by both"])
def test_every_kernel_with_every_term(mask, term, kernel):
    hold(kernel, Case(mask, term))


CALLS = [
    ("none", "none"),
    ("causal", "none"),
    ("causal", "sink"),
    ("window both", "none"),
    ("causal window", "many"),
    ("window and global", "alibi"),
    ("causal and padding", "t5"),
    ("padding left", "shaw"),
    ("not causal", "added (h i j)"),
    ("matrix by both", "many and a cap"),
]


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mask", "term"), CALLS)
def test_every_kernel_in_every_precision(mask, term, dtype, kernel):
    hold(kernel, Case(mask, term, dtype=dtype))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mask", "term"), [call for call in CALLS if call[1] != "none"])
def test_terms_that_learn_in_float32_beside_half_precision(mask, term, dtype, kernel):
    hold(kernel, Case(mask, term, dtype=dtype, learned=torch.float32))


LENGTHS = [
    (63, 63), (64, 64), (65, 65), (129, 129), (197, 197),
    (63, 64), (64, 65), (65, 129), (1, 197), (64, 197), (129, 193),
    (64, 63), (65, 64), (197, 129), (129, 64), (197, 3),
    (1, 3), (1, 64), (1, 65),
    (0, 65), (65, 0), (0, 0), (1, 0), (0, 1),
]  # fmt: skip
SHAPES = [
    *(Sizes(i=i, j=j) for i, j in LENGTHS),
    *(Sizes(b=b, i=65, j=129) for b in (1, 3)),
    *(Sizes(h=h, g=g, i=65, j=129) for h, g in ((1, 1), (5, 5), (5, 1), (6, 2), (9, 3))),
    *(Sizes(c=c, e=e, i=65, j=129) for c, e in ((17, 17), (11, 3), (3, 11), (1, 5), (5, 1), (64, 32), (5, 0))),
]


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[str(sizes) for sizes in SHAPES])
def test_every_kernel_at_every_size(number, kernel):
    hold(kernel, Case("window and global", "many", SHAPES[number]))
    hold(kernel, Case(*(("none", "none"), ("causal", "sink"), ("padding", "t5"))[number % 3], SHAPES[number]))


@pytest.mark.parametrize(
    ("kernel", "sees"), [("sdpa", 65), ("sdpa", 1), ("blocked", 1), ("eager", 65), ("eager", 1), ("reference", 65)]
)
def test_a_single_key_hands_over_its_value(kernel, sees):
    """Nothing depends on q and k then: their gradients are the rounding of a difference of equal numbers."""
    q, k, v = (x.requires_grad_() for x in Case(sizes=Sizes(i=65, j=1)).tensors(0).values())
    # under causal() the key is at the last row's position, and all other rows stand before it
    out = attend(q, k, v, mask=None if sees == 65 else causal(), kernel=kernel)
    assert torch.equal(out[:, :, 65 - sees :], v.repeat_interleave(2, 1).expand(2, 6, sees, 13))
    assert not out[:, :, : 65 - sees].any()
    upstream = torch.randn(out.shape)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    rounding = torch.finfo(q.dtype).eps * (upstream.abs() @ v.abs().repeat_interleave(2, 1).mT).max()
    assert dq.abs().max() <= rounding * k.abs().max()
    assert dk.abs().max() <= rounding * q.abs().max() * 2 * sees
    gathered = upstream[:, :, 65 - sees :].double().sum(2, keepdim=True).unflatten(1, (3, 2)).sum(2)
    assert torch.allclose(dv.double(), gathered, rtol=0, atol=1e-6 * gathered.abs().max().item())


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("mask", "term"), [("none", "none"), ("causal window", "alibi"), ("matrix by head", "shaw")])
def test_every_kernel_with_every_layout(mask, term, layout, kernel):
    hold(kernel, Case(mask, term, Sizes(i=65, j=129), layout=layout))


PLACES = {
    "queries ahead of all keys": Positions(150, 3),
    "queries in the middle": Positions(31),
    "queries before all keys": Positions(2, 90),
    "keys in another order": Positions(31, torch.randperm(131, generator=torch.Generator().manual_seed(7))),
    "keys with gaps": Positions(200, torch.arange(131) * 3),
}


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("positions", PLACES)
@pytest.mark.parametrize(
    ("mask", "term"),
    [
        ("causal", "none"),
        ("causal window", "alibi"),
        ("dilated chunks", "shaw"),
        ("random_links", "t5"),
        ("padding", "sink"),
    ],
)
def test_every_kernel_at_other_places(mask, term, positions, kernel):
    hold(kernel, Case(mask, term, positions=PLACES[positions]))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("beta", [0.0, 0.05, 1.0, -0.2])
@pytest.mark.parametrize(("mask", "term"), [("none", "none"), ("causal", "none"), ("causal window", "many")])
def test_every_kernel_at_every_temperature(mask, term, beta, kernel):
    hold(kernel, Case(mask, term, Sizes(i=65, j=65), beta=beta))


GRADIENTS_BY_DIFFERENCES = [
    ("causal", "none"),
    ("causal window", "many"),
    ("padding to nothing", "t5"),
    ("not causal", "alibi"),
    ("matrix by head", "added (b h i j)"),
    ("window and global", "many and a cap"),
]
TINY = Sizes(b=2, h=4, g=2, i=3, j=5, c=3, e=2)
TWO_BLOCKS = Sizes(b=2, h=4, g=2, i=65, j=67, c=3, e=2)


def function_of(case: Case, kernel: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The call as a function of all it can learn from."""
    tensors = case.tensors(0)

    def attention(*inputs: Tensor) -> Tensor:
        rest = dict(zip(tensors, inputs, strict=True))
        q, k, v = (rest.pop(name) for name in "qkv")
        terms = TERMS[case.term].make(**rest)
        return attend(q, k, v, mask=MASKS[case.mask](case.sizes), scores=terms or None, kernel=kernel)

    return attention, [x.requires_grad_() for x in tensors.values()]


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("sizes", [TINY, TWO_BLOCKS], ids=["tiny", "two blocks"])
@pytest.mark.parametrize(("mask", "term"), GRADIENTS_BY_DIFFERENCES)
def test_gradients_are_those_of_finite_differences(mask, term, sizes, kernel):
    case = Case(mask, term, sizes, torch.float64)
    if not refusal(kernel, case):
        assert torch.autograd.gradcheck(*function_of(case, kernel), fast_mode=True)


@pytest.mark.parametrize("kernel", ["eager", "reference"])
@pytest.mark.parametrize(("mask", "term"), GRADIENTS_BY_DIFFERENCES)
def test_second_gradients_are_those_of_finite_differences(mask, term, kernel):
    case = Case(mask, term, TINY, torch.float64)
    assert torch.autograd.gradgradcheck(*function_of(case, kernel), fast_mode=True)


ON_A_GPU = [
    ("none", "many and a cap", torch.float32),
    ("causal", "sink", torch.bfloat16),
    ("causal window", "alibi", torch.float32),
    ("window and global", "none", torch.bfloat16),
    ("window both", "added (b h i j)", torch.bfloat16),
    ("causal and padding", "none", torch.bfloat16),
    ("padding to nothing", "t5", torch.float32),
    ("documents by sequence", "t5 one way", torch.bfloat16),
    ("random_links", "none", torch.float16),
    ("not causal", "shaw", torch.bfloat16),
    ("predicate", "softcap", torch.float32),
    ("dilated chunks", "many", torch.bfloat16),
]  # each is a structure that flex compiles, forward and backward: seconds


@pytest.mark.cuda
class TestOnAGPU:
    @pytest.mark.parametrize("kernel", ALL_KERNELS)
    @pytest.mark.parametrize(("mask", "term", "dtype"), ON_A_GPU)
    def test_every_kernel(self, mask, term, dtype, kernel):
        hold(kernel, Case(mask, term, Sizes(i=133, j=197, c=24, e=40), dtype, device="cuda"))
        if kernel in ("sdpa", "blocked") and dtype == torch.float32 and "(" not in term:
            hold(kernel, Case(mask, term, Sizes(g=6, i=293, j=331, c=24, e=40), dtype, device="cuda"))

    @pytest.mark.parametrize("kernel", CPU_KERNELS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(("mask", "term"), CALLS)
    def test_every_kernel_in_every_precision(self, mask, term, dtype, kernel):
        hold(kernel, Case(mask, term, Sizes(g=6, c=24, e=40), dtype=dtype, device="cuda"))

    @pytest.mark.parametrize("kernel", CPU_KERNELS)
    @pytest.mark.parametrize("sizes", SHAPES, ids=str)
    def test_every_kernel_at_every_size(self, sizes, kernel):
        hold(kernel, Case("causal window", "alibi", sizes, device="cuda"))
        if kernel in ("sdpa", "blocked") and sizes.e:
            fitting = replace(sizes, g=sizes.h, c=24, e=40)
            hold(kernel, Case("causal window", "alibi", fitting, torch.bfloat16, device="cuda"))

    @pytest.mark.parametrize(("mask", "term"), [("matrix", "none"), ("none", "none")])
    def test_flex_refuses_what_it_cannot_do(self, mask, term):
        hold("flex", Case(mask, term, dtype=torch.float64, device="cuda"))
        hold("flex", Case(mask, term, Sizes(i=0, c=24, e=40), dtype=torch.float64, device="cuda"))
