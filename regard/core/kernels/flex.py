"""torch's flex_attention on a GPU: its block mask comes from the algebra instead of from trying every pair.

Each combination of mask and terms is compiled once, for all lengths.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from regard.core.absolute_positions import Grid, Positions
from regard.core.kernels import eager
from regard.core.kernels.gradients import TRACED_LIMIT, Guard, can_steer, guarded_by_rows, poison_large_rows, poisoned
from regard.core.kernels.request import Request, in_transform
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.block_tables import ALL, SOME, block_table, unseen_and_blind
from regard.core.masks.data import has_matrix
from regard.core.masks.plan_cache import Memo, joint_key
from regard.core.scores import Additive, BoundTerm

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SUMMARY = "torch's flex_attention with a block mask worked out from the algebra"
COARSE = 128  # flex's own block size, and the only one its gradient takes
FINE = 64  # wastes less of a sparse mask


def _tiles(width: int) -> dict[str, int]:
    """For sparse masks: short rows of blocks want small tiles (measured on an H200, docs/log.md)."""
    short = 64 if width <= 64 else 32  # of a gradient's tile; wider heads do not leave room for more
    return {
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        "bwd_BLOCK_M1": short,
        "bwd_BLOCK_N1": 64,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": short,
        "bwd_num_warps": 4,
        "bwd_num_stages": 3,
    }


def refusals(call: Request) -> list[str]:
    reasons = []
    if call.q.device.type != "cuda":
        reasons.append(f"it needs a GPU, but q lies on {call.q.device}")
    if call.q.dtype == torch.float64:
        reasons.append("it computes in float32 at most, and q is float64")
    if min(call.q.shape[-1], call.v.shape[-1]) < 16:
        reasons.append(f"it takes heads at least 16 wide, not c={call.q.shape[-1]} and e={call.v.shape[-1]}")
    if call.dropout:
        reasons.append("it has no dropout")
    if call.steep and not call.hard:
        reasons.append(f"beta={call.beta:g} would drive scores out of the range of floats")
    if call.hard:
        reasons.append("beta=inf is hard attention, and it knows only softmax")
    if call.q.dtype == torch.float32 and torch.is_grad_enabled() and _learned_terms(call):
        reasons.append("it adds up a learned term's gradient in no fixed order, too inexact for float32")
    sums = all(term.additive or term.name == "sink" for term in call.terms)
    if sums and any(isinstance(term, Additive) for term in call.terms):
        reasons.append("it cannot centre a dense bias by row, so a large one would round the scores away; sdpa can")
    if has_matrix(call.mask):
        reasons.append("a boolean matrix is dense already; write the rule with regard's masks")
    if torch.compiler.is_compiling():
        reasons.append("its block mask is worked out in Python, which torch.compile cannot trace")
    if in_transform():
        reasons.append("it has no rule for vmap, forward-mode and second derivatives")
    if 0 in call.sizes:
        reasons.append("it does not take empty tensors")
    return reasons


def work(call: Request) -> float:
    b, h, _, i, j, _, _ = call.sizes
    return 1.1 * b * h * i * j * _density(call) + 2e6


def surely_best(call: Request) -> bool:
    """Whether even with nothing to skip it would do less work than a dense mask: true for all but short calls."""
    b, h, _, i, j, _, _ = call.sizes
    return b * h * i * j > 1e7


def memory(call: Request) -> int:
    b, h, _, i, j, _, _ = call.sizes
    return 4 * b * h * i + 16 * -(-i // FINE) * -(-j // FINE)


def _density(call: Request) -> float:
    if isinstance(call.mask, Full):
        return 1.0
    if call.mask.tensors():
        return 0.5  # its table would have to wait for the device; some blocks can surely be skipped
    i, j = call.q.shape[2], call.k.shape[2]
    return block_table(call.mask, i, j, COARSE, positions=call.positions).density


def _sparse(call: Request) -> bool:
    """Whether small tiles pay and fit: half precision, heads up to 128 wide, more than a few queries."""
    _, _, _, i, _, c, e = call.sizes
    return call.q.element_size() == 2 and max(c, e) <= 128 and i >= COARSE and _density(call) < 0.5


def _learned_terms(call: Request) -> bool:
    return any(tensor.requires_grad for term in call.terms for tensor in term.tensors())


def _training(call: Request) -> bool:
    learned = any(x.requires_grad for x in (call.q, call.k, call.v)) or _learned_terms(call)
    return torch.is_grad_enabled() and learned


@dataclass(frozen=True)
class BlockMaskPlan:
    """How calls of one kind are served."""

    blocks: "BlockMask | None"
    unseen: Bool[Tensor, "#b 1 j 1"] | None  # keys that nobody sees
    blind: Bool[Tensor, "#b 1 i 1"] | None  # queries that see nothing
    function: Callable[..., Any]
    options: dict[str, Any]


def run(call: Request) -> Float[Tensor, "b h i e"]:
    plan = _plan(call)
    k, v = call.k, call.v
    if plan.unseen is not None:
        k, v = k.masked_fill(plan.unseen, 0), v.masked_fill(plan.unseen, 0)
    for term in call.terms:
        if isinstance(term, Additive) and (unseen := _unseen_by_score(term, k.shape[1])) is not None:
            k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    guard = None
    training = _training(call)
    cheap = training and can_steer(call.q) and guarded_by_rows(call.q, call.beta)
    if training and can_steer(call.q) and not cheap:
        learned = "the score terms are learned" if _learned_terms(call) else ""
        guard = Guard(partial(eager.attention, call), learned)
        q, k, v = guard.enter(call.q, k, v)
        call = replace(call, q=q)
    sink = call.sink
    terms = call.bound_terms()
    if not _usual(call):
        # a number would be compiled in, and a schedule of temperatures has more of them than code is made for
        beta = torch.tensor(call.beta, device=call.q.device)
        terms = [lambda scores, grid: scores * beta, *terms]
    result = plan.function(
        call.q,
        k,
        v,
        sink is not None or training,
        score_mod=_score_mod(terms, _positions(call.positions, call.q.device)) if terms else None,
        block_mask=plan.blocks,
        scale=call.beta if _usual(call) else 1.0,
        enable_gqa=call.q.shape[1] != k.shape[1],
        kernel_options=plan.options,
    )
    out: Tensor = result
    if sink is not None or training:
        out, aux = result
        lse = aux.lse.detach()
        lse = lse.masked_fill(lse == -math.inf, 0)  # a row that sees nothing
    if cheap:
        poison_large_rows(out, lse)
    elif training:
        largest = lse.abs().amax()
        out = poisoned(out, largest > TRACED_LIMIT) if guard is None else guard.leave(out, largest)
    if sink is not None:
        # a sink is one more exponential in the sum: what is left for the keys is sigmoid(lse - sink)
        out = out * torch.sigmoid(aux.lse - sink[:, None])[..., None].to(out.dtype)
    return out if plan.blind is None else out.masked_fill(plan.blind, 0)


def _unseen_by_score(term: Additive, g: int) -> Bool[Tensor, "#b #g j 1"] | None:
    """The keys that a tensor of scores hides from all queries with -inf; None where it has no axis of keys."""
    values = term.values.detach().reshape((1, 1, *term.values.shape)[-4:])
    if values.shape[-1] == 1:
        return None
    unseen = (values == -math.inf).all(-2)
    return (unseen if unseen.shape[1] == 1 else unseen.unflatten(1, (g, -1)).all(2))[..., None]


def _usual(call: Request) -> bool:
    """Whether beta is the one of all calls of this width, so that it may be compiled in."""
    return bool(call.beta == call.q.shape[-1] ** -0.5)


PositionFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _positions(positions: Positions, device: torch.device) -> PositionFunction:
    """Absolute positions from indices. Starts travel as tensors, so that a cache step compiles nothing anew."""
    keys = positions.keys
    if isinstance(keys, Tensor):
        at = keys.to(device)
        start = torch.tensor(positions.queries, device=device)
        return lambda q, kv: (q + start, at[kv])
    if positions.queries == 0 and keys == 0:
        return lambda q, kv: (q, kv)
    starts = torch.tensor([positions.queries, keys], device=device)
    return lambda q, kv: (q + starts[0], kv + starts[1])


def _score_mod(terms: list[BoundTerm], positions: PositionFunction) -> Callable[..., Tensor]:
    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        grid = Grid(b, h, q, kv, *positions(q, kv))
        changed = score
        for term in terms:
            changed = term(changed, grid)
        return changed.to(score.dtype)

    return modify


def _mask_mod(mask: Mask, positions: PositionFunction) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: mask.see(Grid(b, h, q, kv, *positions(q, kv)))


_plans: Memo[BlockMaskPlan] = Memo(64)


def _plan(call: Request) -> BlockMaskPlan:
    q, k, v = call.q, call.k, call.v
    settings = tuple(term.settings() for term in call.terms)
    kind = (call.positions, q.shape, k.shape, v.shape, q.dtype, q.device, _training(call), settings, _usual(call))
    rest = kind if isinstance(call.positions.keys, int) else None
    return _plans.get(joint_key(call.mask, rest), call.mask, lambda: _planned(call))


def _planned(call: Request) -> BlockMaskPlan:
    mask, positions, device = call.mask, call.positions, call.q.device
    i, j = call.q.shape[2], call.k.shape[2]
    sparse = _sparse(call)
    divisible = i % COARSE == 0 and j % COARSE == 0
    function = _compiled((_structure(call), sparse, divisible))
    options = {"IS_DIVISIBLE": divisible, **(_tiles(max(call.q.shape[-1], call.v.shape[-1])) if sparse else {})}
    if isinstance(mask, Full):
        return BlockMaskPlan(None, None, None, function, options)
    table = block_table(mask, i, j, FINE if sparse and not _training(call) else COARSE, positions=positions)
    unseen, blind = unseen_and_blind(mask, positions, i, j, table)
    state = table.state if table.state.ndim == 3 else table.state[None]
    blocks = block_mask(state.to(device), _mask_mod(mask, _positions(positions, device)), i, j, table.size)
    unseen, blind = (None if flags is None else flags[:, None, :, None].to(device) for flags in (unseen, blind))
    return BlockMaskPlan(blocks, unseen, blind, function, options)


def block_mask(state: Int8[Tensor, "b q k"], mask_mod: Callable[..., Tensor], i: int, j: int, size: int) -> "BlockMask":
    """flex's own form of a block table: for each query block the key blocks to look at, and those to take whole."""
    from torch.nn.attention.flex_attention import BlockMask  # it loads the compiler, which takes as long as torch

    lists = []
    for kind in (SOME, ALL):
        hit = (state == kind)[:, None]
        order = hit.int().argsort(dim=-1, descending=True, stable=True)
        lists.append((hit.sum(-1, dtype=torch.int32), order.int()))
    (some, which), (whole, which_whole) = lists
    return BlockMask.from_kv_blocks(some, which, whole, which_whole, size, mask_mod, (i, j))


def _structure(call: Request) -> Hashable:
    """What is compiled in: rules, settings and the sizes that code is made for. Data and lengths may change."""
    b, h, g, i, j, c, e = call.sizes
    ones = (b == 1, i <= COARSE, j <= COARSE)  # an axis of size one is compiled apart
    starts = (
        isinstance(call.positions.keys, Tensor),
        call.positions == Positions(0, 0) if isinstance(call.positions.keys, int) else False,
    )
    terms = tuple(term.settings() for term in call.terms)
    return (
        _rules(call.mask),
        terms,
        call.q.dtype,
        call.q.device,
        h,
        g,
        c,
        e,
        ones,
        starts,
        _training(call),
        _usual(call),
    )


def _rules(mask: Mask) -> Hashable:
    """A mask without its data."""
    return (type(mask), *(_rules(child) for child in mask.children())) if mask.tensors() else mask


_functions: dict[Hashable, Callable[..., Any]] = {}
_MOST_FUNCTIONS = 256  # a fresh predicate in every step must not fill the memory


def _call_flex(q: Tensor, k: Tensor, v: Tensor, with_lse: bool, **settings: Any) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    return flex_attention(q, k, v, return_aux=AuxRequest(lse=True) if with_lse else None, **settings)


def _compiled(structure: Hashable) -> Callable[..., Any]:
    """The compiled function of one structure.

    The compiler counts recompilations by code object and gives up after a few; a code object for each structure
    keeps one mask's from using up another's. fullgraph makes it raise instead of running the dense path unseen.
    """
    if structure not in _functions:
        while len(_functions) >= _MOST_FUNCTIONS:
            _functions.pop(next(iter(_functions)))
        code = _call_flex.__code__.replace(co_name=f"flex_{len(_functions)}")
        own = FunctionType(code, _call_flex.__globals__)
        _functions[structure] = torch.compile(own, fullgraph=True)
    return _functions[structure]
