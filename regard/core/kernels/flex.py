"""torch's flex_attention on a GPU, with a BlockMask computed from the mask algebra instead of from every pair.

Each combination of mask and score terms is compiled once for all lengths.
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

from regard.base.tracing import can_read_values
from regard.core.absolute_positions import Grid, Positions
from regard.core.kernels import eager
from regard.core.kernels.gradients import (
    TRACED_LIMIT,
    GradientGuard,
    can_poison_rows,
    poison_gradient,
    poison_large_rows,
)
from regard.core.kernels.request import PreparedCall, Request, in_unsupported_transform, transform_levels
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.block_tables import ALL, SOME, block_table, find_hidden_keys_and_empty_rows
from regard.core.masks.plan_cache import Memo, joint_key
from regard.core.scores import Additive, BoundTerm

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SUMMARY = "torch's flex_attention with a BlockMask from the mask algebra"
RANK = 1
COARSE = 128  # flex's own block size, and the only one its gradient takes
FINE = 64  # skips more of a sparse mask


def _tiles(width: int) -> dict[str, int]:
    """Return flex_attention's kernel options for sparse masks, which set small tiles (measured on an H200, see
    docs/log.md).

    width  width of a head
    """
    short = 64 if width <= 64 else 32  # of a tile in the backward pass; wider heads leave no room for more
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


def refusals(request: Request) -> list[str]:
    reasons = []
    if request.q.device.type != "cuda":
        reasons.append(f"it needs a GPU, but q is on {request.q.device}")
    if request.q.dtype == torch.float64:
        reasons.append("it computes in float32 at most, and q is float64")
    if min(request.q.shape[-1], request.v.shape[-1]) < 16:
        reasons.append(f"it takes heads at least 16 wide, not c={request.q.shape[-1]} and e={request.v.shape[-1]}")
    if request.dropout:
        reasons.append("it has no dropout")
    if request.steep and not request.hard:
        reasons.append(f"beta={request.beta:g} would drive scores out of the range of floats")
    if request.hard:
        reasons.append("beta=inf is hard attention, and it knows only softmax")
    if request.q.dtype == torch.float32 and torch.is_grad_enabled() and _has_learned_terms(request):
        reasons.append("it adds up a learned term's gradient in no fixed order, too inexact for float32")
    sums = all(term.additive or term.name == "sink" for term in request.terms)
    if sums and any(isinstance(term, Additive) for term in request.terms):
        reasons.append("it cannot centre a dense bias by row, so a large one would round the scores away; sdpa can")
    if part := request.mask.by_pair():
        reasons.append(f"{part} has no blocks that can be skipped; write the rule with regard's masks")
    if torch.compiler.is_compiling():
        reasons.append("its block mask is computed in Python, which torch.compile cannot trace")
    if in_unsupported_transform(request.q.device) or transform_levels():
        reasons.append("it has no rule for torch.func transforms, forward-mode and second derivatives")
    if request.positions.offsets is not None:
        reasons.append("its block mask is the same for all sequences, and these have offsets of their own")
    if 0 in request.sizes:
        reasons.append("it does not take empty tensors")
    return reasons


def work(request: Request) -> float:
    b, h, _, i, j, _, _ = request.sizes
    return 1.1 * b * h * i * j * _density(request) + 2e6


def is_surely_best(request: Request) -> bool:
    """Return whether FlexAttention is faster than a dense mask even if it cannot skip any block.

    True for long inputs.
    """
    b, h, _, i, j, _, _ = request.sizes
    return b * h * i * j > 1e7


def memory(request: Request) -> int:
    b, h, _, i, j, _, _ = request.sizes
    return 4 * b * h * i + 16 * -(-i // FINE) * -(-j // FINE)


def _density(request: Request) -> float:
    if isinstance(request.mask, Full):
        return 1.0
    if request.mask.tensors():
        return 0.5  # a block table would synchronise with the device; assume that half can be skipped
    i, j = request.q.shape[2], request.k.shape[2]
    return block_table(request.mask, i, j, COARSE, positions=request.positions).density


def _is_sparse(request: Request) -> bool:
    """Return whether to use small tiles: they are possible, and less than half of the blocks are visible.

    Small tiles need half precision, heads of width at most 128 and at least one block of queries.
    """
    _, _, _, i, _, c, e = request.sizes
    return request.q.element_size() == 2 and max(c, e) <= 128 and i >= COARSE and _density(request) < 0.5


def _has_learned_terms(request: Request) -> bool:
    return any(tensor.requires_grad for term in request.terms for tensor in term.tensors())


def _needs_gradient(request: Request) -> bool:
    learned = any(x.requires_grad for x in (request.q, request.k, request.v)) or _has_learned_terms(request)
    return torch.is_grad_enabled() and learned


@dataclass(frozen=True)
class BlockMaskPlan:
    """A cached FlexAttention call: BlockMask, compiled function and options.

    Calls with equal mask and sizes share it.
    """

    blocks: "BlockMask | None"
    unseen: Bool[Tensor, "#b 1 j 1"] | None  # keys that no query sees
    blind: Bool[Tensor, "#b 1 i 1"] | None  # queries that see nothing
    function: Callable[..., Any]
    options: dict[str, Any]


def run(request: Request) -> Float[Tensor, "b h i e"]:
    return _run_plan(request, _get_plan(request))


def prepare(request: Request) -> PreparedCall:
    """Return a function of q, k and v that repeats this attention call, which has no score terms and no dropout."""
    mask, beta, positions = request.mask, request.beta, request.positions
    plans = {_needs_gradient(request): _get_plan(request)}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = Request(q, k, v, mask, (), beta, 0.0, positions)
        plan = plans.get(_needs_gradient(own))
        if plan is None:
            plan = plans[_needs_gradient(own)] = _get_plan(own)
        return _run_plan(own, plan)

    return call


def _run_plan(request: Request, plan: BlockMaskPlan) -> Float[Tensor, "b h i e"]:
    k, v = request.k, request.v
    if plan.unseen is not None:
        k, v = k.masked_fill(plan.unseen, 0), v.masked_fill(plan.unseen, 0)
    if plan.blind is not None:
        request = replace(request, q=request.q.masked_fill(plan.blind, 0))
    for term in request.terms:
        if isinstance(term, Additive) and (unseen := _unseen_by_score(term, k.shape[1])) is not None:
            k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    guard = None
    training = _needs_gradient(request)
    cheap = training and can_read_values(request.q) and can_poison_rows(request.q, request.beta)
    if training and can_read_values(request.q) and not cheap:
        learned = "the score terms are learned" if _has_learned_terms(request) else ""
        guard = GradientGuard(partial(eager.attention, request), learned)
        q, k, v = guard.enter(request.q, k, v)
        request = replace(request, q=q)
    sink = request.sink
    terms = request.bound_terms()
    if not _has_default_beta(request):
        # a Python number would be compiled in, and every new beta would compile again
        beta = torch.tensor(request.beta, device=request.q.device)
        terms = [lambda scores, grid: scores * beta, *terms]
    result = plan.function(
        request.q,
        k,
        v,
        sink is not None or training,
        score_mod=_score_mod(terms, _position_function(request.positions, request.q.device)) if terms else None,
        block_mask=plan.blocks,
        scale=request.beta if _has_default_beta(request) else 1.0,
        enable_gqa=request.q.shape[1] != k.shape[1],
        kernel_options=plan.options,
    )
    out: Tensor = result
    if sink is not None or training:
        out, aux = result
        lse = aux.lse.detach()
        lse = lse.masked_fill(lse == -math.inf, 0)  # a row that sees nothing
    if sink is not None:
        # a sink adds one exponential to the sum, so the keys get sigmoid(lse - sink) of the weight
        out = out * torch.sigmoid(aux.lse - sink[:, None])[..., None].to(out.dtype)
    # after the factor of the sink, through which gradients reach the log-sum-exp too
    if cheap:
        poison_large_rows(out, lse)
    elif training:
        largest = lse.abs().amax()
        out = poison_gradient(out, largest > TRACED_LIMIT) if guard is None else guard.leave(out, largest)
    return out if plan.blind is None else out.masked_fill(plan.blind, 0)


def _unseen_by_score(term: Additive, g: int) -> Bool[Tensor, "#b #g j 1"] | None:
    """Return which keys an additive term hides from every query with -inf. None if its values do not vary by key."""
    values = term.values.detach().reshape((1, 1, *term.values.shape)[-4:])
    if values.shape[-1] == 1:
        return None
    unseen = (values == -math.inf).all(-2)
    return (unseen if unseen.shape[1] == 1 else unseen.unflatten(1, (g, -1)).all(2))[..., None]


def _has_default_beta(request: Request) -> bool:
    """Return whether beta is c ** -0.5. The default may be compiled in as a constant."""
    return bool(request.beta == request.q.shape[-1] ** -0.5)


PositionFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _position_function(positions: Positions, device: torch.device) -> PositionFunction:
    """Return a function from query and key indices to absolute positions.

    The offsets are tensors, so that a step of generation with a KV cache does not recompile.
    """
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


def mask_mod(mask: Mask, positions: Positions, device: torch.device) -> Callable[..., Tensor]:
    """Convert a mask to FlexAttention's mask_mod: a function of batch, head, query and key index."""
    at = _position_function(positions, device)
    return lambda b, h, q, kv: mask.see(Grid(b, h, q, kv, *at(q, kv)))


_plans: Memo[BlockMaskPlan] = Memo(64)


def _get_plan(request: Request) -> BlockMaskPlan:
    q, k, v = request.q, request.k, request.v
    settings = tuple(term.settings() for term in request.terms)
    kind = (
        request.positions,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        q.device,
        _needs_gradient(request),
        settings,
        _has_default_beta(request),
    )
    rest = kind if isinstance(request.positions.keys, int) else None
    return _plans.get(joint_key(request.mask, rest), request.mask, lambda: _build_plan(request))


def _build_plan(request: Request) -> BlockMaskPlan:
    mask, positions, device = request.mask, request.positions, request.q.device
    i, j = request.q.shape[2], request.k.shape[2]
    sparse = _is_sparse(request)
    divisible = i % COARSE == 0 and j % COARSE == 0
    function = _get_compiled((_compile_key(request), sparse, divisible))
    options = {"IS_DIVISIBLE": divisible, **(_tiles(max(request.q.shape[-1], request.v.shape[-1])) if sparse else {})}
    if isinstance(mask, Full):
        return BlockMaskPlan(None, None, None, function, options)
    table = block_table(mask, i, j, FINE if sparse and not _needs_gradient(request) else COARSE, positions=positions)
    unseen, blind = find_hidden_keys_and_empty_rows(mask, positions, i, j, table)
    state = table.state if table.state.ndim == 3 else table.state[None]
    blocks = block_mask(state.to(device), mask_mod(mask, positions, device), i, j, table.size)
    unseen, blind = (None if flags is None else flags[:, None, :, None].to(device) for flags in (unseen, blind))
    return BlockMaskPlan(blocks, unseen, blind, function, options)


def block_mask(state: Int8[Tensor, "b q k"], mask_mod: Callable[..., Tensor], i: int, j: int, size: int) -> "BlockMask":
    """Convert a block table to a FlexAttention BlockMask.

    A BlockMask lists, for each query block, its partly and its fully visible key blocks.
    """
    from torch.nn.attention.flex_attention import (
        BlockMask,  # importing it loads the compiler, which takes as long as torch itself
    )

    lists = []
    for kind in (SOME, ALL):
        hit = (state == kind)[:, None]
        order = hit.int().argsort(dim=-1, descending=True, stable=True)
        lists.append((hit.sum(-1, dtype=torch.int32), order.int()))
    (some, which), (whole, which_whole) = lists
    return BlockMask.from_kv_blocks(some, which, whole, which_whole, size, mask_mod, (i, j))


def _compile_key(request: Request) -> Hashable:
    """Return the key under which compiled code is cached: mask structure, terms, dtype, device, heads and widths.

    Mask contents and sequence lengths are not part of the key.
    """
    b, h, g, i, j, c, e = request.sizes
    ones = (b == 1, i <= COARSE, j <= COARSE)  # an axis of size one is compiled separately
    starts = (
        isinstance(request.positions.keys, Tensor),
        request.positions == Positions(0, 0) if isinstance(request.positions.keys, int) else False,
    )
    terms = tuple(term.settings() for term in request.terms)
    return (
        _mask_structure(request.mask),
        terms,
        request.q.dtype,
        request.q.device,
        h,
        g,
        c,
        e,
        ones,
        starts,
        _needs_gradient(request),
        _has_default_beta(request),
    )


def _mask_structure(mask: Mask) -> Hashable:
    """Return the structure of a mask as a hashable value, without the contents of its tensors."""
    return (type(mask), *(_mask_structure(child) for child in mask.children())) if mask.tensors() else mask


_functions: dict[Hashable, Callable[..., Any]] = {}
_MOST_FUNCTIONS = 256  # a new predicate in every step must not fill the memory


def _call_flex(q: Tensor, k: Tensor, v: Tensor, with_lse: bool, **settings: Any) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    return flex_attention(q, k, v, return_aux=AuxRequest(lse=True) if with_lse else None, **settings)


def _get_compiled(structure: Hashable) -> Callable[..., Any]:
    """Return the compiled flex_attention function for one structure (see `_compile_key`).

    The compiler counts recompilations per code object and gives up after a few. Each structure has its own code
    object, so that recompilations of one mask do not count for another. With fullgraph=True the compiler raises
    an error instead of silently running the dense path.
    """
    if structure not in _functions:
        while len(_functions) >= _MOST_FUNCTIONS:
            _functions.pop(next(iter(_functions)))
        code = _call_flex.__code__.replace(co_name=f"flex_{len(_functions)}")
        own = FunctionType(code, _call_flex.__globals__)
        _functions[structure] = torch.compile(own, fullgraph=True)
    return _functions[structure]
