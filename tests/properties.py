"""What is true of attention, one rule a function: it takes an attention and raises where the rule is broken.

An attention has the signature of `regard.attend`, less its kernel. Nothing here looks inside: every rule is about
outputs and gradients. `on("cuda")` places the tensors elsewhere.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import (
    Mask,
    Positions,
    additive,
    alibi,
    causal,
    chunks,
    documents,
    global_tokens,
    padding,
    prefix,
    random_links,
    shaw,
    t5_buckets,
    window,
)
from regard.core.scores import ScoreTerm
from tests.tolerance import GRADIENT, OUTPUT, error, too_far

Attention = Callable[..., Tensor]
Property = Callable[[Attention], None]

PROPERTIES: dict[str, Property] = {}
NEAR = 5e-6  # of the largest number: what float32 leaves between two ways to the same sum
RESULTS = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
UNUSED = 1 << 40  # the position of a cache slot that holds nothing yet: later than any query
SHORT, LONG = 11, 149  # one block of a blocked kernel, and several with a rest

_device = torch.device("cpu")


@contextmanager
def on(device: str) -> Iterator[None]:
    """Inside, every property places its tensors on that device."""
    global _device
    before, _device = _device, torch.device(device)
    try:
        yield
    finally:
        _device = before


def rule(check: Property) -> Property:
    PROPERTIES[check.__name__] = check
    return check


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(_device, dtype)


def draw(
    i: int, j: int, *, b: int = 2, h: int = 6, g: int = 3, c: int = 5, e: int = 7, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, in which no two axes have one size."""
    shapes = (b, h, i, c), (b, g, j, c), (b, g, j, e)
    q, k, v = (noise(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    return q, k, v


def positions(i: int, j: int) -> tuple[Tensor, Tensor]:
    """Positions of the last i of j rows, and of all j, as a column and a row."""
    return torch.arange(j - i, j, device=_device)[:, None], torch.arange(j, device=_device)[None, :]


def ones(j: int, b: int = 2, g: int = 3, e: int = 7) -> Tensor:
    return torch.ones(b, g, j, e, device=_device)


def read_weights(attention: Attention, q: Tensor, k: Tensor, **rest: object) -> Tensor:
    """The weights (b, h, i, j) of any attention: V = identity reads them out."""
    j = k.shape[2]
    return attention(q, k, torch.eye(j, device=q.device, dtype=q.dtype).expand(*k.shape[:2], j, j), **rest)


def shown(attention: Attention, i: int, j: int, mask: Mask) -> Tensor:
    """The visible pairs (i, j): q = 0 weighs all that is visible alike."""
    q, k, _ = draw(i, j, b=1, h=1, g=1)
    return read_weights(attention, 0 * q, k, mask=mask)[0, 0] > 0


def gradients(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, *, rounded: torch.dtype | None = None, **rest: object
) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v for one fixed upstream gradient, rounded like the output."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, **rest)
    upstream = noise(*out.shape, seed=9, dtype=rounded or out.dtype).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream, materialize_grads=True)


def assert_same(actual: Tensor, expected: Tensor, message: str) -> None:
    """Bit for bit."""
    wrong = (actual != expected).nonzero()
    assert not len(wrong), f"{message}; {len(wrong)} numbers differ, the first at {wrong[0].tolist()}"


def assert_near(actual: Tensor, expected: Tensor, message: str, tolerance: float = NEAR) -> None:
    assert actual.shape == expected.shape, f"{message}; shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs()
    allowed = tolerance * max(1.0, expected.abs().max().item())
    wrong = (~(error <= allowed)).nonzero()  # so written, NaN is wrong too
    assert not len(wrong), (
        f"{message}; {len(wrong)} of {error.numel()} numbers are off by more than {allowed:.1e}, the first at "
        f"{wrong[0].tolist()}: {actual[tuple(wrong[0])].item():.6g}, not {expected[tuple(wrong[0])].item():.6g}"
    )


def assert_shows(seen: Tensor, expected: Tensor, name: str) -> None:
    wrong = (seen != expected).nonzero()
    assert not len(wrong), (
        f"{name} {'shows' if seen[tuple(wrong[0])] else 'hides'} key {wrong[0][1].item()} "
        f"{'to' if seen[tuple(wrong[0])] else 'from'} row {wrong[0][0].item()}; {len(wrong)} pairs are wrong"
    )


class NoNaN(TorchDispatchMode):
    """Raises at the first operation that makes a NaN, forward or backward."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            made = isinstance(x, Tensor) and x.is_floating_point() and "empty" not in func.name()
            assert not (made and x.isnan().any()), f"{func.name()} makes a NaN on the way"
        return out


def textbook(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | float = 0.0, beta: float | None = None, fused=False
) -> Tensor:
    """Attention as textbooks write it, in the precision of its inputs; every row has to see something."""
    share = q.shape[1] // k.shape[1]
    own = [head // share for head in range(q.shape[1])]
    k, v = k[:, own], v[:, own]
    scores = (q[:, :, :, None] * k[:, :, None]).sum(-1) * (q.shape[-1] ** -0.5 if beta is None else beta) + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    if fused:
        return scores.softmax(-1) @ v
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


@dataclass(frozen=True)
class Case:
    """A call, and the same mask and term written down a second time."""

    i: int
    j: int
    mask: Mask
    see: Callable[[Tensor, Tensor], Tensor]
    fading: bool = False

    def term(self) -> ScoreTerm | None:
        return alibi(slopes=SLOPES) if self.fading else None

    def bias(self, dtype: torch.dtype) -> Tensor | float:
        i, j = positions(self.i, self.j)
        return -SLOPES.to(_device, dtype)[:, None, None] * (i - j).abs() if self.fading else 0.0

    def textbook(self, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return textbook(q, k, v, self.see(*positions(self.i, self.j)), self.bias(q.dtype))


SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0, 0.0625, 0.75])
CASES = (
    Case(SHORT, SHORT, causal(), lambda i, j: j <= i),
    Case(LONG, LONG, causal(), lambda i, j: j <= i),
    Case(5, 13, causal(), lambda i, j: j <= i),
    Case(LONG, LONG, window(before=9, after=4), lambda i, j: (j >= i - 9) & (j <= i + 4)),
    Case(71, LONG, causal() & window(before=70), lambda i, j: (j >= i - 70) & (j <= i)),
    Case(LONG, LONG, causal() | prefix(3), lambda i, j: (j <= i) | (j < 3), fading=True),
    Case(9, 13, padding([12, 12]), lambda i, j: (j < 12) & (i >= 0), fading=True),
)


def hold_against_truth(attention: Attention, which: int, factor: float, cases: tuple[Case, ...] = CASES) -> None:
    """No farther from float64 than the textbook's way in the same precision, but for a factor and one ulp."""
    for case in cases:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = draw(case.i, case.j, dtype=dtype)
            actual = gradients(attention, *inputs, mask=case.mask, scores=case.term())[which]
            naive = gradients(case.textbook, *inputs)[which]
            truth = gradients(case.textbook, *(x.double() for x in inputs))[which]
            wrong = too_far(actual, naive, truth, factor)
            assert not wrong, f"{RESULTS[which]} under {case.mask}: {wrong}"


@rule
def outputs_match_the_truth(attention: Attention) -> None:
    hold_against_truth(attention, 0, OUTPUT)


@rule
def outputs_match_the_truth_when_all_is_visible(attention: Attention) -> None:
    everything = Case(9, 13, window(None, None), lambda i, j: (j >= 0) & (i >= 0))
    hold_against_truth(attention, 0, OUTPUT, (everything,))


@rule
def gradients_of_q_match_the_truth(attention: Attention) -> None:
    hold_against_truth(attention, 1, GRADIENT)


@rule
def gradients_of_k_match_the_truth(attention: Attention) -> None:
    hold_against_truth(attention, 2, GRADIENT)


@rule
def gradients_of_v_match_the_truth(attention: Attention) -> None:
    hold_against_truth(attention, 3, GRADIENT)


@rule
def gradients_reach_learned_terms(attention: Attention) -> None:
    q, k, v = draw(SHORT, SHORT)
    i, j = positions(SHORT, SHORT)
    learned = SLOPES.to(_device), noise(7, 5, seed=4), noise(6, SHORT, SHORT, seed=5)
    slopes, keys, bias = (x.clone().requires_grad_() for x in learned)
    out = attention(q, k, v, mask=causal(), scores=[alibi(slopes=slopes), shaw(keys), additive(bias)])
    assert out.requires_grad, "no gradient reaches the learned terms"
    actual = torch.autograd.grad(out.square().sum(), (slopes, keys, bias), materialize_grads=True)

    q, k, v, slopes, keys, bias = (x.double().requires_grad_() for x in (q, k, v, *learned))
    by_distance = (q[:, :, :, None] * keys[(j - i).clamp(-3, 3) + 3]).sum(-1) * 5**-0.5
    truth = textbook(q, k, v, j <= i, bias + by_distance - slopes[:, None, None] * (i - j).abs())
    expected = torch.autograd.grad(truth.square().sum(), (slopes, keys, bias))
    for name, x, y in zip(("slopes of alibi", "keys of shaw", "added scores"), actual, expected, strict=True):
        assert_near(x, y, f"the gradient of the {name} is wrong", 4 * NEAR)


@rule
def causality_is_bitwise(attention: Attention) -> None:
    """Later keys and values may change as they like: earlier outputs stay bit for bit."""
    for n in (SHORT, LONG):
        assert_blind_to_later(attention, n, causal())


@rule
def causality_holds_beside_another_mask(attention: Attention) -> None:
    for n in (SHORT, LONG):
        assert_blind_to_later(attention, n, causal() & padding([n - 1, n]))
        assert_blind_to_later(attention, n, causal() & window(before=5))


def assert_blind_to_later(attention: Attention, n: int, mask: Mask) -> None:
    q, k, v = draw(n, n)
    cut = n // 2
    later_k, later_v = (torch.cat([x[:, :, :cut], 50 * noise(*x[:, :, cut:].shape, seed=7)], 2) for x in (k, v))
    before, after = attention(q, k, v, mask=mask), attention(q, later_k, later_v, mask=mask)
    assert_same(after[:, :, :cut], before[:, :, :cut], f"rows before {cut} of {n} saw a later key under {mask}")
    assert (after[:, :, cut:] != before[:, :, cut:]).any(), "no row notices that keys and values have changed"


@rule
def poison_in_padding_stays_out(attention: Attention) -> None:
    """NaN and Inf in padded keys and values reach no output and no gradient."""
    for n in (SHORT, LONG):
        lengths, at = torch.tensor([n - 4, n - 1]), torch.arange(n)[:, None]
        right, left = at < lengths[:, None, None, None], at >= n - lengths[:, None, None, None]
        assert_clean(attention, n, n, right, "padding on the right", mask=padding(lengths))
        assert_clean(attention, n, n, left, "padding on the left", mask=padding(lengths, side="left", width=n))


@rule
def poison_in_unused_slots_stays_out(attention: Attention) -> None:
    """Keys that no query of the call may see are as good as absent: slots of a cache, keys behind the window."""
    slots = torch.arange(LONG)[:, None]
    assert_clean(attention, 3, LONG, slots < 75, "an unused cache slot", mask=causal(), positions=Positions(72))
    behind = (slots >= 72 - 4) & (slots < 75)
    mask = causal() & window(before=4)
    assert_clean(attention, 3, LONG, behind, "a key behind the window", mask=mask, positions=Positions(72))


@rule
def poison_behind_a_dense_mask_stays_out(attention: Attention) -> None:
    """A key head serves two query heads: a key is unseen where neither sees it."""
    visible = torch.ones(6, 5, 9, dtype=torch.bool, device=_device)
    visible[2, :, 4] = visible[3, :, 4] = visible[0, :, 6] = False
    seen = torch.ones(3, 9, 1, dtype=torch.bool)
    seen[1, 4] = False
    assert_clean(attention, 5, 9, seen, "a key that no head of its group sees", mask=visible)


def assert_clean(attention: Attention, i: int, j: int, seen: Tensor, name: str, **rest: object) -> None:
    q, k, v = draw(i, j)
    seen = seen.to(_device)
    clean = gradients(attention, q, k, v, **rest)
    for poison in (torch.nan, torch.inf, -torch.inf):
        dirty = gradients(attention, q, k.masked_fill(~seen, poison), v.masked_fill(~seen, poison), **rest)
        for x, actual, expected in zip(RESULTS, dirty, clean, strict=True):
            assert_near(actual, expected, f"{poison} in {name} changes {x}")
        for x, actual in zip(RESULTS[2:], dirty[2:], strict=True):
            assert not actual.masked_fill(seen, 0).any(), f"{name} gets {x}"


@rule
def blind_rows_give_zeros(attention: Attention) -> None:
    """A row that sees nothing gives zeros and zero gradients, and no NaN exists on the way, forward or backward."""
    for n in (SHORT, 71):
        i, j = positions(n, n)
        masks = {
            padding([0, n - 2]): torch.tensor([True, False], device=_device)[:, None].expand(2, n),
            causal() & padding([n - 3, n - 1], side="left", width=n): j < torch.tensor([[3], [1]], device=_device),
            causal() & ~window(before=4): (i < 5).T.expand(2, n),
            prefix(0): (i >= 0).T.expand(2, n),
        }
        for mask, blind in masks.items():
            assert_zero_where_blind(attention, draw(n, n), blind, str(mask), mask=mask)


@rule
def blind_rows_of_a_dense_mask_give_zeros(attention: Attention) -> None:
    i, j = positions(5, 9)
    assert_zero_where_blind(attention, draw(5, 9), (i == 6).T.expand(2, 5), "a dense mask", mask=(i != 6) & (j != 2))


@rule
def no_keys_give_zeros(attention: Attention) -> None:
    blind = torch.ones(2, 5, dtype=torch.bool, device=_device)
    assert_zero_where_blind(attention, draw(5, 0), blind, "no key at all")


@rule
def nothing_asked_gives_nothing(attention: Attention) -> None:
    """An empty batch and an empty step of queries are no errors."""
    q, k, v = draw(5, SHORT)
    for inputs in ((q[:0], k[:0], v[:0]), (q[:, :, :0], k, v)):
        out = attention(*inputs, mask=causal())
        expected = (*inputs[0].shape[:3], v.shape[3])
        assert out.shape == expected, f"q of shape {tuple(inputs[0].shape)} gives {tuple(out.shape)}, not {expected}"


def assert_zero_where_blind(
    attention: Attention, inputs: tuple[Tensor, Tensor, Tensor], blind: Tensor, name: str, **rest: object
) -> None:
    with NoNaN() if _device.type == "cpu" else nullcontext():
        out, *grads = gradients(attention, *inputs, **rest)
    for x, y in zip(RESULTS, (out, *grads), strict=True):
        assert not y.isnan().any(), f"{x} has NaN under {name}"
    rows = blind[:, None, :, None]
    assert not out.masked_fill(~rows, 0).any(), f"a blind row under {name} does not give zeros"
    assert not grads[0].masked_fill(~rows, 0).any(), f"a blind query under {name} gets a gradient"
    asleep = blind.all(1)
    assert not any(grad[asleep].any() for grad in grads), f"a sequence that sees nothing gets a gradient under {name}"
    assert out.masked_fill(rows, 1).any(-1).all(), f"a row that sees something gives zeros under {name}"


@rule
def padding_amount_and_side_do_not_matter(attention: Attention) -> None:
    q, k, v = draw(5, 5, b=1)
    alone = attention(q, k, v, mask=causal())
    for width in (8, 13, 71):
        for side in ("right", "left"):
            rows = slice(0, 5) if side == "right" else slice(width - 5, width)
            padded = [noise(*x.shape[:2], width, x.shape[3], seed=3) for x in (q, k, v)]
            for whole, x in zip(padded, (q, k, v), strict=True):
                whole[:, :, rows] = x
            mask = padding([5]) if side == "right" else padding([5], side="left", width=width)
            both = attention(*padded, mask=causal() & mask)[:, :, rows]
            assert_near(both, alone, f"5 tokens padded on the {side} to {width} give another result than alone")
            mean = attention(*padded, mask=mask, beta=0.0)[:, :, rows]
            expected = v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, 5, -1)
            assert_near(mean, expected, f"padding on the {side} to {width} counts in the mean of the keys")


@rule
def packed_documents_are_separate_sequences(attention: Attention) -> None:
    for lengths in ((5, 3, 9), (64, 7, 78)):
        n = sum(lengths)
        q, k, v = draw(n, n)
        ids = torch.repeat_interleave(torch.tensor([4, 1, 3]), torch.tensor(lengths))
        whole = attention(q, k, v, mask=documents(ids))
        ordered = attention(q, k, v, mask=causal() & documents(torch.stack([ids, ids + 1])))
        for own in torch.arange(n, device=_device).split(lengths):
            i, j = positions(len(own), len(own))
            parts = q[:, :, own], k[:, :, own], v[:, :, own]
            message = f"documents of lengths {lengths} see each other"
            assert_near(whole[:, :, own], textbook(*parts, j >= 0), message)
            assert_near(ordered[:, :, own], textbook(*parts, j <= i), message + " under causal()")


@rule
def output_is_linear_in_v(attention: Attention) -> None:
    q, k, v = draw(SHORT, 13)
    other = noise(*v.shape, seed=5)
    together = attention(q, k, 3 * v - 0.5 * other, mask=causal())
    apart = 3 * attention(q, k, v, mask=causal()) - 0.5 * attention(q, k, other, mask=causal())
    assert_near(together, apart, "attention to 3 v - u / 2 is not 3 attention to v - attention to u / 2")


@rule
def rows_sum_to_one(attention: Attention) -> None:
    """V = 1 comes out as 1: softmax runs over the keys, and over the visible ones only."""
    for i, j in ((SHORT, 13), (71, LONG)):
        q, k, _ = draw(i, j)
        for mask in (causal(), window(before=4, after=2), padding([j - 3, j - 1])):
            for term in (None, alibi(slopes=SLOPES)):
                out = attention(3 * q, k, ones(j), mask=mask, scores=term)
                assert_near(out, torch.ones_like(out), f"weights of a row do not sum to one under {mask} with {term}")


@rule
def identity_values_read_the_weights(attention: Attention) -> None:
    q, k, _ = draw(SHORT, 13)
    i, j = positions(SHORT, 13)
    weights = read_weights(attention, q, k, mask=causal())
    eye = torch.eye(13, device=_device).expand(2, 3, 13, 13)
    assert_near(weights, textbook(q, k, eye, j <= i), "V = identity does not read softmax(q . k / sqrt(c))")
    assert not weights.masked_fill(j <= i, 0).any(), "a hidden key weighs more than exactly zero"


@rule
def key_order_does_not_matter(attention: Attention) -> None:
    q, k, v = draw(SHORT, LONG)
    real = LONG - 4
    order = torch.cat([noise(real).argsort(), torch.arange(real, LONG, device=_device)])
    shuffled = attention(q, k[:, :, order], v[:, :, order], mask=padding([real, real]))
    expected = attention(q, k, v, mask=padding([real, real]))
    assert_near(shuffled, expected, "the same keys and values in another order give another result")


@rule
def queries_do_not_mix(attention: Attention) -> None:
    assert_apart(attention, "row", 2, "q")


@rule
def heads_do_not_mix(attention: Attention) -> None:
    assert_apart(attention, "head", 1, "qkv")


@rule
def batch_entries_do_not_mix(attention: Attention) -> None:
    assert_apart(attention, "batch entry", 0, "qkv")


@rule
def batch_size_does_not_change_a_result(attention: Attention) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = draw(SHORT, 13, b=7, dtype=dtype)
        together = attention(q, k, v, mask=causal())
        alone = torch.cat([attention(*(x[n : n + 1] for x in (q, k, v)), mask=causal()) for n in range(7)])
        tolerance = NEAR if dtype == torch.float32 else torch.finfo(dtype).eps
        assert_near(together, alone, f"seven {dtype} sequences in one batch differ from one at a time", tolerance)


def assert_apart(attention: Attention, name: str, axis: int, changed: str) -> None:
    """Changing entry 1 of an axis leaves all others bit for bit, and does change entry 1."""
    inputs = dict(zip("qkv", draw(SHORT, SHORT, g=6), strict=True))
    before = attention(*inputs.values(), mask=causal())
    for x in changed:
        inputs[x] = inputs[x].clone()
        inputs[x].select(axis, 1).mul_(-3)
    after = attention(*inputs.values(), mask=causal())
    others = torch.tensor([n for n in range(before.shape[axis]) if n != 1], device=_device)
    kept, expected = (x.index_select(axis, others) for x in (after, before))
    assert_same(kept, expected, f"changing one {name} changes others")
    assert (after.select(axis, 1) != before.select(axis, 1)).any(), f"changing a {name} changes nothing"


@rule
def grouped_heads_repeat(attention: Attention) -> None:
    """Query head h uses key head h // (h_count / g_count): 0 0 1 1 2 2, not 0 1 2 0 1 2."""
    for h, g in ((6, 3), (6, 2), (9, 3), (5, 1)):
        q, k, _ = draw(7, SHORT, h=h, g=g)
        names = torch.arange(g, device=_device, dtype=q.dtype)[:, None, None].expand(2, g, SHORT, 3)
        used = attention(q, k, names, mask=causal())[0, :, 0, 0].round().long().tolist()
        assert used == [head // (h // g) for head in range(h)], f"{h} query heads use the values of key heads {used}"
        keyed = read_weights(attention, q, k, mask=causal())
        expected = read_weights(attention, q, k.repeat_interleave(h // g, 1), mask=causal())
        assert_near(keyed, expected, f"{h} query heads do not use the keys of {g} key heads in turn")


@rule
def windows_count_neighbours(attention: Attention) -> None:
    """window(before=4) shows five keys: four earlier ones and itself."""
    for n in (SHORT, 71):
        i, j = positions(n, n)
        for before, after in ((4, 0), (0, 3), (2, 3), (0, 0), (3, None)):
            seen = shown(attention, n, n, window(before=before, after=after))
            latest = n if after is None else after
            counts = [min(row, before) + 1 + min(n - 1 - row, latest) for row in range(n)]
            assert seen.sum(1).tolist() == counts, (
                f"window(before={before}, after={after}) shows {seen.sum(1)[n // 2]} keys to row {n // 2} of {n}, "
                f"not {counts[n // 2]}"
            )
            assert_shows(seen, (j >= i - before) & (j <= i + latest), f"window(before={before}, after={after})")


@rule
def queries_are_the_last_rows(attention: Attention) -> None:
    """With 5 cached keys and 3 new tokens, queries are positions 5, 6 and 7."""
    for rows, n in ((3, 8), (71, LONG)):
        i, j = positions(rows, n)
        assert_shows(shown(attention, rows, n, causal()), j <= i, f"causal() with {rows} queries and {n} keys")
        q, k, v = draw(n, n)
        last, whole = attention(q[:, :, -rows:], k, v, mask=causal()), attention(q, k, v, mask=causal())
        assert_near(last, whole[:, :, -rows:], f"{rows} of {n} queries are not the last rows")


@rule
def cache_steps_equal_the_whole(attention: Attention) -> None:
    """Keys that grow, any split of the new tokens: the rows of one pass over the whole."""
    for term in (None, alibi(slopes=SLOPES)):
        for step in (1, 2, 5):
            assert_stepwise(attention, causal(), term, range(0, 13, step), step)


@rule
def cache_steps_keep_the_window(attention: Attention) -> None:
    for mask in (causal() & window(before=4), causal() & chunks(4, before=1)):
        for step in (1, 3):
            assert_stepwise(attention, mask, None, range(9, 13, step), step)


def assert_stepwise(attention: Attention, mask: Mask, term: ScoreTerm | None, starts: range, step: int) -> None:
    q, k, v = draw(13, 13)
    whole = attention(q, k, v, mask=mask, scores=term)
    for start in starts:
        stop = min(start + step, 13)
        rows = attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask=mask, scores=term)
        message = f"rows {start}..{stop - 1} over {stop} cached keys under {mask} with {term} differ from one pass"
        assert_near(rows, whole[:, :, start:stop], message)


@rule
def places_put_queries_into_a_fixed_cache(attention: Attention) -> None:
    """Every slot is handed over each time; places tell where the queries stand, and where the keys begin."""
    n = 77
    q, k, v = draw(n, n)
    mask, term = causal() & window(before=5), alibi(slopes=SLOPES)
    whole = attention(q, k, v, mask=mask, scores=term)
    for start, stop in ((0, 1), (6, 7), (30, 33), (64, 65), (70, 77)):
        for first in (0, max(0, start - 5)):
            inputs = q[:, :, start:stop], k[:, :, first:], v[:, :, first:]
            rows = attention(*inputs, mask=mask, scores=term, positions=Positions(start, first))
            message = f"queries {start}..{stop - 1} over keys from position {first} on differ from one pass"
            assert_near(rows, whole[:, :, start:stop], message)


@rule
def places_put_keys_into_a_rolling_cache(attention: Attention) -> None:
    """Position p lies in slot p % 7, so a window wraps round; empty slots hold NaN and a position far ahead."""
    n, slots = 19, 7
    q, k, v = draw(n, n)
    mask, term = causal() & window(before=slots - 1), alibi(slopes=SLOPES)
    whole = attention(q, k, v, mask=mask, scores=term)
    ring_k, ring_v = (torch.full((*x.shape[:2], slots, x.shape[3]), torch.nan, device=_device) for x in (k, v))
    at = torch.full((slots,), UNUSED, device=_device)
    for t in range(n):
        ring_k[:, :, t % slots], ring_v[:, :, t % slots], at[t % slots] = k[:, :, t], v[:, :, t], t
        row = attention(q[:, :, t : t + 1], ring_k, ring_v, mask=mask, scores=term, positions=Positions(t, at.clone()))
        assert_near(row, whole[:, :, t : t + 1], f"step {t} over a ring of {slots} slots differs from one pass")


@rule
def keys_may_lie_in_any_order_of_positions(attention: Attention) -> None:
    """A key's position, not its place in memory, says who sees it and how far away it is."""
    q, k, v = draw(LONG, LONG)
    at = noise(LONG, seed=4).argsort()
    near = causal() & window(before=5)
    for mask in (near, causal() & chunks(4, before=1), near | global_tokens(2), random_links(3)):
        for term in (None, alibi(slopes=SLOPES)):
            out = attention(q, k[:, :, at], v[:, :, at], mask=mask, scores=term, positions=Positions(0, at))
            expected = attention(q, k, v, mask=mask, scores=term)
            assert_near(out, expected, f"keys in another order with their positions, under {mask} with {term}")


@rule
def scaling_q_and_beta_cancel(attention: Attention) -> None:
    q, k, v = draw(SHORT, 13)
    expected = attention(q, k, v, mask=causal(), beta=0.7)
    for c in (0.25, 3.0):
        out = attention(c * q, k, v, mask=causal(), beta=0.7 / c)
        assert_near(out, expected, f"{c} q at beta / {c} differs from q at beta")


@rule
def default_beta_comes_from_the_width_of_q(attention: Attention) -> None:
    """c ** -0.5: not from the width of v, nor from all heads together, and once."""
    q, k, v = draw(7, SHORT, c=5, e=3)
    i, j = positions(7, SHORT)
    assert_near(attention(q, k, v, mask=causal()), textbook(q, k, v, j <= i, beta=5**-0.5), "beta is not c ** -0.5")


@rule
def beta_is_taken_as_it_is(attention: Attention) -> None:
    for rows in (7, SHORT):
        q, k, v = draw(rows, SHORT)
        i, j = positions(rows, SHORT)
        for beta in (0.3, 2.0, -0.5):
            out = attention(q, k, v, mask=causal(), beta=beta)
            assert_near(out, textbook(q, k, v, j <= i, beta=beta), f"beta={beta} is not taken as it is")


@rule
def beta_zero_is_the_mean_of_the_visible(attention: Attention) -> None:
    for n in (SHORT, LONG):
        q, k, v = draw(n, n, g=6)
        mean = v.cumsum(2) / torch.arange(1, n + 1, device=_device)[:, None]
        out = attention(9 * q, k, v, mask=causal(), beta=0.0)
        assert_near(out, mean, "beta=0 is not the mean of the visible values")


@rule
def beta_infinity_is_hard_and_shares_ties(attention: Attention) -> None:
    q = torch.ones(1, 1, 4, 1, device=_device)
    k = torch.tensor([2.0, 5.0, 3.0, 5.0, 9.0, 5.0], device=_device)[:, None].expand(1, 1, 6, 1)
    weights = read_weights(attention, q, k, mask=causal(), beta=torch.inf)[0, 0]
    expected = [[0, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0]]
    expected = torch.tensor(expected, device=_device, dtype=q.dtype)
    assert_near(weights, expected / expected.sum(1, keepdim=True), "beta=inf is not hard attention with ties shared")


@rule
def larger_beta_is_sharper(attention: Attention) -> None:
    q, k, _ = draw(7, SHORT)
    betas = (0.0, 0.1, 0.4, 1.0, 3.0)
    tops = [read_weights(attention, q, k, mask=causal(), beta=beta).amax(-1) for beta in betas]
    for beta, less, more in zip(betas[1:], tops, tops[1:], strict=False):
        assert (more > less).all(), f"the largest weight of a row does not grow up to beta={beta}"


@rule
def no_dropout_is_exact(attention: Attention) -> None:
    q, k, v = draw(SHORT, 13)
    with torch.random.fork_rng():
        outs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            outs.append(attention(q, k, v, mask=causal(), dropout=0.0))
    assert_same(outs[0], outs[1], "without dropout, another seed gives another result")
    assert_same(outs[0], attention(q, k, v, mask=causal()), "dropout=0 differs from no dropout")


@rule
def dropout_drops_weights_and_keeps_their_mean(attention: Attention) -> None:
    """Each weight falls alone with the given chance, and those left are scaled up for it."""
    q, k, _ = draw(9, SHORT, b=16)
    seen, share = SHORT - 1, 0.3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = read_weights(attention, 0 * q, k, mask=prefix(seen), dropout=share)[..., :seen]
    kept = weights != 0
    patterns = kept.flatten(0, 2).unique(dim=0)
    assert len(patterns) > 200, f"{kept[..., 0].numel()} rows share {len(patterns)} patterns of dropout"
    dropped = 1 - kept.float().mean().item()
    sigma = (share * (1 - share) / kept.numel()) ** 0.5
    assert abs(dropped - share) < 5 * sigma, f"dropout={share} drops a share of {dropped:.3f} of the weights"
    left = weights[kept]
    assert_near(left, torch.full_like(left, 1 / seen / (1 - share)), "weights that stay are not scaled by 1 / (1 - p)")


@rule
def very_negative_scores_do_not_beat_the_mask(attention: Attention) -> None:
    """However low the visible scores are, hidden keys weigh exactly nothing."""
    i, j = positions(SHORT, 13)
    q, k, _ = draw(SHORT, 13)
    low = torch.where(j <= i, -1e30, 0.0)
    weights = {
        "added scores of -1e30": read_weights(attention, q, k, mask=causal(), scores=additive(low)),
        "q . k near -1e12": read_weights(attention, torch.full_like(q, -1e6), torch.full_like(k, 1e6), mask=causal()),
    }
    for name, w in weights.items():
        assert not w.masked_fill(j <= i, 0).any(), f"{name}: hidden keys get weight"
        assert_near(w.sum(-1), torch.ones(w.shape[:-1], device=_device), f"{name}: visible keys lose weight")


@rule
def large_scores_do_not_overflow(attention: Attention) -> None:
    """Powers of two, so that every score is exact and a tie stays a tie in whatever order it is summed."""
    i, j = positions(SHORT, 13)
    for dtype, size in ((torch.float32, 2.0**15), (torch.float16, 2.0**8)):
        q, k, v = draw(SHORT, 13, dtype=dtype)
        q, k = q.sign() * size, k.sign() * size
        results = gradients(attention, q, k, v, mask=causal())
        for name, x in zip(RESULTS, results, strict=True):
            assert x.isfinite().all(), f"scores near {5**0.5 * size**2:.0e} in {dtype} overflow in {name}"
        truth = textbook(q.double(), k.double(), v.double(), j <= i)
        assert_near(results[0], truth, f"scores near {5**0.5 * size**2:.0e} in {dtype}", 4 * torch.finfo(dtype).eps)


@rule
def half_precision_accumulates_in_float32(attention: Attention) -> None:
    """Scores near 128 that differ by little: kept in half precision, they would be rounded to one another."""
    i, j = positions(SHORT, LONG)
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = draw(SHORT, LONG, dtype=dtype)
        q[..., 0], k[..., 0] = 16, 8
        truth = textbook(q.double(), k.double(), v.double(), j <= i, beta=1.0)
        out = attention(q, k, v, mask=causal(), beta=1.0)
        assert_near(out, truth, f"scores near 128 in {dtype} lose their differences", 2 * torch.finfo(dtype).eps)


@rule
def terms_keep_their_precision(attention: Attention) -> None:
    """Half-precision q and k do not round what is added to their scores."""
    i, j = positions(SHORT, LONG)
    q, k, v = draw(SHORT, LONG, dtype=torch.bfloat16)
    q[..., 0] = 16
    exact = [x.double() for x in (q, k, v)]
    bias, keys = 128 + noise(6, SHORT, LONG, seed=3), noise(7, 5, seed=4)
    keys[:, 0] = 8
    by_distance = (exact[0][:, :, :, None] * keys.double()[(j - i).clamp(-3, 3) + 3]).sum(-1)
    for term, added in ((additive(bias), bias), (shaw(keys), by_distance)):
        out = attention(q, k, v, mask=causal(), scores=term, beta=1.0)
        truth = textbook(*exact, j <= i, added.double(), beta=1.0)
        assert_near(out, truth, f"{term} near 128 loses its differences", 2 * torch.finfo(q.dtype).eps)


@rule
def dtype_is_kept(attention: Attention) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        inputs = draw(5, SHORT, dtype=dtype)
        for x in gradients(attention, *inputs, mask=causal(), scores=alibi(slopes=SLOPES)):
            assert x.dtype == dtype, f"{dtype} goes in and {x.dtype} comes out"


@rule
def inputs_are_left_as_they_were(attention: Attention) -> None:
    inputs = draw(SHORT, SHORT)
    before = [x.clone() for x in inputs]
    attention(*inputs, mask=causal() & padding([SHORT - 4, SHORT - 1]), scores=alibi(slopes=SLOPES), beta=0.4)
    for name, x, old in zip("qkv", inputs, before, strict=True):
        assert_same(x, old, f"{name} was changed in place")


@rule
def memory_layout_does_not_matter(attention: Attention) -> None:
    """Heads that are views of (b, n, h, c), as a projection leaves them."""
    q, k, v = draw(SHORT, 13)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for mask in (causal(), causal() & window(before=4)):
        out, expected = attention(*views, mask=mask), attention(q, k, v, mask=mask)
        assert_near(out, expected, "a view gives another result than a copy")


@rule
def dense_masks_show_where_true(attention: Attention) -> None:
    """True means visible, for one matrix, one a head, and one a sequence and head."""
    q, k, v = draw(7, SHORT)
    for shape in ((7, SHORT), (6, 7, SHORT), (2, 1, 7, SHORT), (1, 6, 7, SHORT), (2, 6, 7, SHORT)):
        visible = noise(*shape, seed=3) > 0.3
        visible[..., 5] = True
        expected = textbook(q, k, v, visible)
        assert_near(attention(q, k, v, mask=visible), expected, f"True does not mean visible in a mask {shape}")


@rule
def added_scores_are_not_scaled(attention: Attention) -> None:
    """beta acts on q . k, a tensor is added to that."""
    q, k, v = draw(7, SHORT)
    i, j = positions(7, SHORT)
    for shape in ((7, SHORT), (6, 1, SHORT), (2, 1, 7, SHORT)):
        bias = noise(*shape, seed=3)
        expected = textbook(q, k, v, j <= i, bias, beta=0.2)
        for scores in (bias, additive(bias)):
            out = attention(q, k, v, mask=causal(), scores=scores, beta=0.2)
            assert_near(out, expected, f"scores {shape} are not added after beta")


@rule
def masks_combine(attention: Attention) -> None:
    for rows, n in ((SHORT, SHORT), (9, 71)):
        i, j = positions(rows, n)
        near, old = window(before=3, after=1), prefix(2)
        expected = {
            near & causal(): (j >= i - 3) & (j <= i),
            near | old: ((j >= i - 3) & (j <= i + 1)) | (j < 2),
            causal() & ~near: (j <= i) & (j < i - 3),
            causal() & (near | old): (j <= i) & ((j >= i - 3) | (j < 2)),
            ~(near | old): (j >= 2) & ((j < i - 3) | (j > i + 1)),
        }
        for mask, seen in expected.items():
            assert_shows(shown(attention, rows, n, mask), seen, str(mask))


@rule
def chunks_are_whole_and_counted_from_zero(attention: Attention) -> None:
    for rows, n in ((SHORT, SHORT), (9, 71)):
        i, j = positions(rows, n)
        own, other = i // 4, j // 4
        expected = {
            chunks(4): other == own,
            chunks(4, before=1): (other <= own) & (other >= own - 1),
            chunks(4, after=1): (other >= own) & (other <= own + 1),
            chunks(4, before=None): other <= own,
        }
        for mask, seen in expected.items():
            assert_shows(shown(attention, rows, n, mask), seen, str(mask))


@rule
def a_prefix_is_seen_by_all(attention: Attention) -> None:
    for rows, n in ((SHORT, SHORT), (9, 71)):
        i, j = positions(rows, n)
        assert_shows(shown(attention, rows, n, prefix(3)), (j < 3).expand(rows, n), "prefix(3)")
        assert_shows(shown(attention, rows, n, prefix(3) | causal()), (j < 3) | (j <= i), "prefix(3) | causal()")


@rule
def global_tokens_see_all_and_are_seen_by_all(attention: Attention) -> None:
    for rows, n in ((SHORT, SHORT), (71, 71), (9, 71)):
        i, j = positions(rows, n)
        mask = global_tokens(2) | window(before=1)
        expected = (i < 2) | (j < 2) | ((j >= i - 1) & (j <= i))
        assert_shows(shown(attention, rows, n, mask), expected, str(mask))


@rule
def alibi_fades_with_distance(attention: Attention) -> None:
    """-m |i - j|, to both sides, from where the query stands, each query head at its own slope."""
    paper = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    for rows, n in ((7, SHORT), (71, LONG)):
        i, j = positions(rows, n)
        q, k, v = draw(rows, n)
        for term, slopes in ((alibi(heads=6), paper), (alibi(slopes=SLOPES), SLOPES)):
            bias = -slopes.to(_device)[:, None, None] * (i - j).abs()
            expected = textbook(q, k, v, (j >= i - 4) & (j <= i + 3), bias)
            out = attention(q, k, v, mask=window(before=4, after=3), scores=term)
            assert_near(out, expected, "alibi is not -m |i - j|")


@rule
def shaw_counts_from_query_to_key(attention: Attention) -> None:
    """The relative key of a pair is that of j - i: a later key has a positive distance."""
    keys = noise(5, 5, seed=4)
    for rows, n in ((7, SHORT), (71, LONG)):
        i, j = positions(rows, n)
        q, k, v = draw(rows, n)
        bias = (q[:, :, :, None] * keys[(j - i).clamp(-2, 2) + 2]).sum(-1) * 0.4
        expected = textbook(q, k, v, (j >= i - 5) & (j <= i + 3), bias, beta=0.4)
        out = attention(q, k, v, mask=window(before=5, after=3), scores=shaw(keys), beta=0.4)
        assert_near(out, expected, "shaw is not beta q_i . r[clip(j - i)]")


@rule
def t5_buckets_count_from_query_to_key(attention: Attention) -> None:
    """With 8 buckets, 0 is the query itself, 1 the key before it and 5 the key after it."""
    table = noise(8, 6, seed=4)
    for rows, n in ((7, SHORT), (71, LONG)):
        i, j = positions(rows, n)
        q, k, v = draw(rows, n)
        bias = table[torch.where(j > i, 5, i - j).clamp(0, 5)].permute(2, 0, 1)
        expected = textbook(q, k, v, (j - i).abs() <= 1, bias)
        out = attention(q, k, v, mask=window(before=1, after=1), scores=t5_buckets(table, max_distance=16))
        assert_near(out, expected, "a T5 bucket is not that of j - i")


@rule
def gradients_hold_at_every_magnitude(attention: Attention) -> None:
    """Large scores, whether q . k or beta or what is added makes them so. A kernel that computes weights once more
    from a log-sum-exp that has lost its digits is wrong here and nowhere else."""
    i, j = positions(SHORT, 13)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = draw(SHORT, 13, dtype=dtype)
        low = torch.zeros(SHORT, 13, device=_device)
        low[3], low[5], low[7, 2:4] = -1e9, torch.finfo(torch.float32).min, 1e9
        cases = {
            "beta=2^10": ({"beta": 2.0**10}, 0.0),
            "beta=2^20": ({"beta": 2.0**20}, 0.0),
            "beta=-2^27": ({"beta": -(2.0**27)}, 0.0),
            "rows of very negative scores": ({"scores": additive(low)}, _centred(low, j <= i)),
        }
        for size in (64.0, 2.0**12, 2.0**18):
            case = {"q": q.sign() * size, "k": k.sign() * size}
            _near_textbook(attention, case["q"], case["k"], v, {}, 0.0, f"ties near {size**2:.0e} in {dtype}")
        for name, (rest, bias) in cases.items():
            _near_textbook(attention, q, k, v, rest, bias, f"{name} in {dtype}")


def _centred(bias: Tensor, visible: Tensor) -> Tensor:
    """The same in float64 with the largest visible number of each row at 0: what is right without any rounding."""
    bias = bias.double()
    return bias - bias.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)


def _near_textbook(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, rest: dict[str, object], bias: Tensor | float, name: str
) -> None:
    i, j = positions(q.shape[2], k.shape[2])
    beta = rest.get("beta")
    actual = gradients(attention, q, k, v, mask=causal(), **rest)

    def exact(q: Tensor, k: Tensor, v: Tensor, turn: int = 0) -> Tensor:
        added = bias if isinstance(bias, float) else bias.to(q.dtype)
        return textbook(q.roll(turn, -1), k.roll(turn, -1), v, j <= i, added, beta, fused=turn % 2 > 0)

    truth = gradients(exact, *(x.double() for x in (q, k, v)), rounded=q.dtype)
    # the error of one order of summation is a matter of luck, so the worst of several counts
    tries = [gradients(exact, *(x.float() for x in (q, k, v)), rounded=q.dtype, turn=turn) for turn in range(4)]
    for which, (x, z) in enumerate(zip(actual, truth, strict=True)):
        naive = max((y[which].to(x.dtype) for y in tries), key=lambda y, z=z: error(y, z))
        if which and _device.type == "cuda" and x.dtype.itemsize == 2 and beta is None and x.isnan().any():
            continue  # on a GPU gradients in half precision may be NaN there, but not wrong
        wrong = too_far(x, naive, z, GRADIENT)
        assert not wrong, f"{RESULTS[which]} at {name}: {wrong}"


@rule
def visible_nan_gives_nan(attention: Attention) -> None:
    """In q, k, v or what is added: every query that sees it gets NaN, and no query of another sequence or head."""
    for n in (SHORT, LONG):
        for name in ("q", "k", "v", "scores"):
            q, k, v = draw(n, n)
            added = torch.zeros(2, 6, n, n, device=_device)
            {"q": q, "k": k, "v": v, "scores": added}[name][1, 2, n - 2, 1] = torch.nan
            out = attention(q, k, v, mask=window(before=3), **({"scores": additive(added)} if name == "scores" else {}))
            heads = slice(2, 3) if name in ("q", "scores") else slice(4, 6)
            rows = slice(n - 2, n) if name in ("k", "v") else slice(n - 2, n - 1)
            touched = out[1, heads, rows]
            bad = touched[..., 1] if name == "v" else touched
            if name == "scores":  # the pair (n - 2, 1) is behind the window
                assert out.isfinite().all(), "a NaN among scores that the mask hides reaches the output"
                continue
            assert bad.isnan().all(), f"NaN in {name} is visible to queries that do not get NaN"
            others = torch.ones(2, 6, dtype=torch.bool, device=_device)
            others[1, heads] = False
            assert out[others].isfinite().all(), f"NaN in {name} reaches other sequences or heads"


@rule
def a_score_of_minus_infinity_hides(attention: Attention) -> None:
    """Like a mask: no weight, zeros where nothing is left, and whatever k and v hold there stays there."""
    for n in (SHORT, LONG):
        i, j = positions(n, n)
        visible = (j != 4) & (i != 7)
        hiding = additive(torch.zeros(n, n, device=_device).masked_fill(~visible, -torch.inf))
        q, k, v = draw(n, n)
        clean = gradients(attention, q, k, v, mask=causal() & Mask.of("rows", lambda i, j: (j != 4) & (i != 7)))
        for poison in (1.0, torch.nan, torch.inf):
            dirty_k, dirty_v = k.clone(), v.clone()
            dirty_k[:, :, 4], dirty_v[:, :, 4] = poison, poison
            for x, actual, expected in zip(
                RESULTS, gradients(attention, q, dirty_k, dirty_v, mask=causal(), scores=hiding), clean, strict=True
            ):
                assert_near(actual, expected, f"-inf added where k and v hold {poison} changes {x}")


@rule
def a_score_of_plus_infinity_makes_its_row_nan(attention: Attention) -> None:
    for n in (SHORT, LONG):
        q, k, v = draw(n, n)
        added = torch.zeros(n, n, device=_device)
        added[6, 3] = added[5, 9] = torch.inf  # the second pair is hidden by the mask
        out = attention(q, k, v, mask=causal(), scores=additive(added))
        assert out[:, :, 6].isnan().all(), "+inf is a weight"
        others = torch.arange(n, device=_device) != 6
        assert out[:, :, others].isfinite().all(), "+inf reaches other rows"
