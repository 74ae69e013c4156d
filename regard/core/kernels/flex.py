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
from regard.core.kernels import compiled_flex, eager, fast_tanh
from regard.core.kernels.gradients import (
    TRACED_LIMIT,
    WRONG_LSE,
    GradientGuard,
    can_poison_rows,
    is_ordinary,
    poison_gradient,
    poison_large_rows,
)
from regard.core.kernels.request import PreparedCall, Request, in_unsupported_transform, transform_levels
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.block_tables import block_table, find_hidden_keys_and_empty_rows
from regard.core.masks.plan_cache import Memo, joint_key
from regard.core.scores import Additive, BoundTerm

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SUMMARY = "torch's flex_attention with a BlockMask from the mask algebra"
RANK = 1
COARSE = 128  # flex's own block size, and the only one its gradient takes
FINE = 64  # skips more of a sparse mask


def _tiles(width: int) -> dict[str, int]:
    """Return the kernel options of flex_attention for sparse masks: small tiles, the fastest measured on an H200.

    The measurements are in docs/log.md.

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
    if torch.compiler.is_compiling() and not compiled_flex.can_trace(request):
        reasons.append(compiled_flex.LIMITS)
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
    """Return whether a call is so large that FlexAttention is faster than a dense mask even if no block is hidden.

    Large means more than 10^7 query-key pairs, summed over sequences and heads.
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
    if torch.compiler.is_compiling():
        return compiled_flex.traced_density(request, COARSE)
    i, j = request.q.shape[2], request.k.shape[2]
    return block_table(request.mask, i, j, COARSE, positions=request.positions).density


def _takes_small_tiles(request: Request) -> bool:
    """Return whether flex_attention can use small tiles for this call.

    Small tiles need half precision, heads of width at most 128 and at least one block of queries.
    """
    _, _, _, i, _, c, e = request.sizes
    return request.q.element_size() == 2 and max(c, e) <= 128 and i >= COARSE


def _choose_tiles(request: Request, sparse: bool) -> dict[str, int]:
    """Return kernel options of flex_attention: small tiles for sparse masks, and in the forward pass for score terms.

    With a score term, flex_attention's default tiles of 128 x 128 use up all registers: a soft-cap took 1.8 times as
    long as with small tiles, and the table of `t5_buckets` did not fit into shared memory.

    sparse  whether `_is_sparse` is True for the call
    """
    tiles = _tiles(max(request.q.shape[-1], request.v.shape[-1]))
    if sparse:
        return tiles
    changed = any(term.name != "sink" for term in request.terms)
    forward = {name: size for name, size in tiles.items() if name.startswith("fwd_")}
    return forward if changed and _takes_small_tiles(request) else {}


def _is_sparse(request: Request) -> bool:
    """Return whether less than half of the blocks are visible, and small tiles are possible."""
    return _takes_small_tiles(request) and _density(request) < 0.5


def _has_learned_terms(request: Request) -> bool:
    return any(tensor.requires_grad for term in request.terms for tensor in term.tensors())


def _needs_gradient(request: Request) -> bool:
    learned = any(x.requires_grad for x in (request.q, request.k, request.v)) or _has_learned_terms(request)
    return torch.is_grad_enabled() and learned


@dataclass(frozen=True)
class BlockMaskPlan:
    """A cached FlexAttention call. Calls with equal mask and sizes share one plan.

    blocks    the BlockMask; None if the mask hides nothing
    unseen    keys that no query sees; None if there are none
    blind     queries that see no key; None if there are none
    function  compiled flex_attention
    options   kernel options
    """

    blocks: "BlockMask | None"
    unseen: Bool[Tensor, "#b 1 j 1"] | None  # keys that no query sees
    blind: Bool[Tensor, "#b 1 i 1"] | None  # queries that see nothing
    function: Callable[..., Any]
    options: dict[str, Any]


def run(request: Request) -> Float[Tensor, "b h i e"]:
    return _run_plan(request, _trace_plan(request) if torch.compiler.is_compiling() else _get_plan(request))


def prepare(request: Request) -> PreparedCall:
    """Return a function that computes this attention call again for other q, k and v.

    The call must have no score terms and no dropout.
    """
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
    # float16 rounds less than the fast tanh
    fast = request.q.dtype == torch.bfloat16 and request.q.is_cuda and fast_tanh.is_available()
    terms = request.bound_terms(fast_tanh.tanh if fast else torch.tanh)
    if not _has_default_beta(request):
        # a Python number would be compiled in, and every new beta would compile again
        beta = torch.full((), request.beta, dtype=torch.float32, device=request.q.device)
        terms = [lambda scores, grid: scores * beta, *terms]
    result: tuple[Tensor, Any] = plan.function(
        request.q,
        k,
        v,
        sink,
        training,
        score_mod=_score_mod(terms, _position_function(request.positions, request.q.device)) if terms else None,
        block_mask=plan.blocks,
        scale=request.beta if _has_default_beta(request) else 1.0,
        enable_gqa=request.q.shape[1] != k.shape[1],
        kernel_options=plan.options,
    )
    out, largest = result
    if cheap:
        poison_large_rows(out, largest)
    elif guard is not None:
        out = guard.leave(out, largest.amax())
    elif training:
        rows = is_ordinary(request.q, request.beta)
        out = poison_gradient(out, largest[..., None] > WRONG_LSE if rows else largest.amax() > TRACED_LIMIT)
    return out if plan.blind is None else out.masked_fill(plan.blind, 0)


def _unseen_by_score(term: Additive, g: int) -> Bool[Tensor, "#b #g j 1"] | None:
    """Return which keys an additive term hides from every query with -inf.

    None if the values of the term are the same for all keys.

    g  number of key heads; a key is hidden in a key head if all query heads that share this key head hide the key
    """
    values = term.values.detach().reshape((1, 1, *term.values.shape)[-4:])
    if values.shape[-1] == 1:
        return None
    unseen = (values == -math.inf).all(-2)
    return (unseen if unseen.shape[1] == 1 else unseen.unflatten(1, (g, -1)).all(2))[..., None]


def _has_default_beta(request: Request) -> bool:
    """Return whether beta is the default c ** -0.5, which is compiled in as a constant.

    Any other beta is passed as a tensor, so that a new value does not compile again.
    """
    return bool(request.beta == request.q.shape[-1] ** -0.5)


PositionFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _position_function(positions: Positions, device: torch.device) -> PositionFunction:
    """Return a function that converts query and key indices to absolute positions.

    The first positions are stored as tensors, because they change in each step of generation with a KV cache, and a new
    Python number would recompile flex_attention.
    """
    keys = positions.keys
    if isinstance(keys, Tensor):
        at = keys.to(device)
        start = torch.full((), positions.queries, device=device)
        return lambda q, kv: (q + start, at[kv])
    if positions.queries == 0 and keys == 0:
        return lambda q, kv: (q, kv)
    first_query, first_key = (torch.full((), start, device=device) for start in (positions.queries, keys))
    return lambda q, kv: (q + first_query, kv + first_key)


def _score_mod(terms: list[BoundTerm], positions: PositionFunction) -> Callable[..., Tensor]:
    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        grid = Grid(b, h, q, kv, *positions(q, kv))
        changed = score
        for term in terms:
            changed = term(changed, grid)
        return changed.to(score.dtype)

    return modify


def mask_mod(mask: Mask, positions: Positions, device: torch.device) -> Callable[..., Tensor]:
    """Convert a mask to FlexAttention's mask_mod: a function of batch, head, query and key index.

    positions  absolute positions of the queries and keys, to which the mask_mod converts their indices
    """
    at = _position_function(positions, device)
    return lambda b, h, q, kv: mask.see(Grid(b, h, q, kv, *at(q, kv)))


_plans: Memo[BlockMaskPlan] = Memo(64)


def _get_plan(request: Request) -> BlockMaskPlan:
    q, k, v = request.q, request.k, request.v
    settings = tuple(term.settings() for term in request.terms)
    training = _needs_gradient(request)  # a plan is built with gradients disabled
    kind = (
        request.positions,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        q.device,
        training,
        settings,
        _has_default_beta(request),
    )
    rest = kind if isinstance(request.positions.keys, int) else None
    return _plans.get(joint_key(request.mask, rest), request.mask, lambda: _build_plan(request, training))


def _build_plan(request: Request, training: bool) -> BlockMaskPlan:
    mask, positions, device = request.mask, request.positions, request.q.device
    i, j = request.q.shape[2], request.k.shape[2]
    sparse = _is_sparse(request)
    divisible = i % COARSE == 0 and j % COARSE == 0
    options = {"IS_DIVISIBLE": divisible, **_choose_tiles(request, sparse)}
    function = _get_compiled((_compile_key(request), training, *options.items()))
    if isinstance(mask, Full):
        return BlockMaskPlan(None, None, None, function, options)
    table = block_table(mask, i, j, FINE if sparse and not training else COARSE, positions=positions)
    unseen, blind = find_hidden_keys_and_empty_rows(mask, positions, i, j, table)
    state = table.state if table.state.ndim == 3 else table.state[None]
    blocks = block_mask(state.to(device), mask_mod(mask, positions, device), i, j, table.size)
    unseen, blind = (None if flags is None else flags[:, None, :, None].to(device) for flags in (unseen, blind))
    return BlockMaskPlan(blocks, unseen, blind, function, options)


def _trace_plan(request: Request) -> BlockMaskPlan:
    """Return the plan of a call in compiled code: flex_attention is traced, and an operator computes the block mask."""
    sparse, training = _is_sparse(request), _needs_gradient(request)
    options: dict[str, Any] = _choose_tiles(request, sparse)
    # a branch, so that the compiler guards on it: with symbolic lengths flex would check each key against the end
    divisible = request.q.shape[2] % COARSE == 0 and request.k.shape[2] % COARSE == 0
    options["IS_DIVISIBLE"] = True if divisible else False  # noqa: SIM210
    see = mask_mod(request.mask, request.positions, request.q.device)
    size = FINE if sparse and not training else COARSE
    blocks, unseen, blind = compiled_flex.trace_block_mask(request, size, training, see)
    return BlockMaskPlan(blocks, unseen, blind, _call_flex, options)


def block_mask(state: Int8[Tensor, "b q k"], mask_mod: Callable[..., Tensor], i: int, j: int, size: int) -> "BlockMask":
    """Convert a block table to a FlexAttention BlockMask.

    A BlockMask lists, for each query block, its partly and its fully visible key blocks.
    """
    from torch.nn.attention.flex_attention import (
        BlockMask,  # importing it loads the compiler, which takes as long as torch itself
    )

    some, which, whole, which_whole = compiled_flex.list_blocks(state)
    return BlockMask.from_kv_blocks(some, which, whole, which_whole, size, mask_mod, (i, j))


def _compile_key(request: Request) -> Hashable:
    """Return the key under which compiled code is cached: mask structure, score terms, dtype, device, heads and widths.

    The contents of mask tensors and the sequence lengths are not part of the key.
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
        _has_default_beta(request),
    )


def _mask_structure(mask: Mask) -> Hashable:
    """Return the structure of a mask as a hashable value, without the contents of its tensors."""
    return (type(mask), *(_mask_structure(child) for child in mask.children())) if mask.tensors() else mask


_functions: dict[Hashable, Callable[..., Any]] = {}
_MOST_FUNCTIONS = 256  # a new predicate in every step must not fill the memory


def _call_flex(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, training: bool, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Call flex_attention, with an attention sink if one is given.

    Returns the output and, in training, the absolute value of the log-sum-exp of each row, else None. The caller
    compares this value with the limit above which the gradients of flex_attention are wrong. The log-sum-exp does not
    include the sink. The value is 0 for a row that sees no key.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if sink is None and not training:
        out: Tensor = flex_attention(q, k, v, **settings)
        return out, None
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **settings)
    if sink is not None:
        # a sink adds one exponential to the sum, so the keys get sigmoid(lse - sink) of the weight
        out = out * torch.sigmoid(aux.lse - sink[:, None])[..., None].to(out.dtype)
    lse = aux.lse.detach()
    return out, lse.masked_fill(lse == -math.inf, 0).abs() if training else None


def _get_compiled(structure: Hashable) -> Callable[..., Any]:
    """Return the compiled flex_attention function for one result of `_compile_key`, passed as `structure`.

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
