"""torch's scaled_dot_product_attention: fused kernels for full and causal masks, a dense mask otherwise."""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.base.tracing import assume_constant_result, can_read_values, is_exporting, is_meta_or_fake
from regard.core.kernels.cpu_flash import as_bias, flash_attention, run_directly, split_scale
from regard.core.kernels.gradients import (
    TRACED_LIMIT,
    GradientGuard,
    add_sink_key,
    can_poison_rows,
    dense_row_attention,
    keep_layout,
    keep_traced_layout,
    needs_gradient,
    poison_gradient,
    poison_input_gradients,
    poison_saved_lse,
    score_bound,
)
from regard.core.kernels.products import is_finite
from regard.core.kernels.request import (
    MOST_PREPARED,
    PreparedCall,
    Request,
    center_bias,
    in_unsupported_transform,
    sum_terms,
    visible_keys,
)
from regard.core.masks.algebra import Full
from regard.core.masks.plan_cache import Memo, joint_key

SUMMARY = "torch's fused attention; cuDNN first on Hopper"
RANK = 2
SHORT = 1 << 20  # entries: 4 MiB in float32
# cuDNN's kernel measured 1.75x torch's flash kernel on an H200 (4 x 16 heads x 4096 x 128, bfloat16)
_HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_get_order, _set_order = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
_HOPPER_VALUES = [backend.value for backend in _HOPPER_ORDER]


def refusals(request: Request) -> list[str]:
    reasons = []
    if request.hard:
        reasons.append("beta=inf is hard attention, and the fused kernels know only softmax")
    elif request.steep:
        reasons.append(f"beta={request.beta:g} would drive scores out of the range of floats")
    reasons += [
        f"{term.name} does more than add to the scores, which is all the fused kernels allow"
        for term in request.terms
        if not term.additive and term.name != "sink"
    ]
    reasons += unfused_reasons(request)
    if in_unsupported_transform(request.q.device):
        reasons.append("torch's fused attention has no rule for vmap, forward-mode and second derivatives")
    return reasons


def work(request: Request) -> float:
    b, h, _, i, j, _, _ = request.sizes
    if request.plain:
        return b * h * i * j * (1.0 if isinstance(request.mask, Full) else 0.6)
    return 1.3 * b * h * i * j


def memory(request: Request) -> int:
    b, h, _, i, j, _, _ = request.sizes
    learned = any(tensor.requires_grad for term in request.terms for tensor in term.tensors())
    if request.q.device.type == "cpu" and (request.dropout or learned):
        return 4 * b * h * i * j * max(4, request.q.element_size())  # torch uses its unfused path for these
    if request.plain:
        return 4 * b * h * i  # the log-sum-exp of each row
    if request.terms:
        return 2 * b * h * i * (j + 1) * request.q.element_size()
    return (request.mask.batch() or 1) * (request.mask.heads() or 1) * i * j * (1 + request.q.element_size())


def run(request: Request) -> Float[Tensor, "b h i e"]:
    if request.plain:
        return fused_attention(
            request.q, request.k, request.v, request.beta, request.dropout, causal=request.causal_square
        )
    return _run_dense(request.q, request.k, request.v, request.beta, get_dense_bias(request), request)


def prepare(request: Request) -> PreparedCall | None:
    """Return a function that computes this attention call again for other q, k and v.

    The call must have no score terms and no dropout. Returns None if the dense mask would be too large to store.
    """
    if request.plain:
        return _repeat(request, DenseBias(None, None, None), request.causal_square)
    _, _, _, i, j, _, _ = request.sizes
    if i * j * (request.mask.batch() or 1) * (request.mask.heads() or 1) > MOST_PREPARED:
        return None
    with torch.no_grad():  # activation checkpointing counts what is saved; a repeated call would save less
        dense = get_dense_bias(request)
    dense = replace(dense, added=None if dense.added is None else as_bias(dense.added, request.q.dtype))
    if request.q.is_cuda and request.mask.tensors() and dense.unseen is not None:
        return _repeat_when_known(request, dense)
    return _repeat(request, _drop_empty_masks(dense), causal=False)


def _repeat(request: Request, dense: "DenseBias", causal: bool) -> PreparedCall:
    """Return a function of q, k and v that computes an attention call again with this dense bias.

    causal  whether the mask is causal and passed to the kernel as `is_causal`, not in the bias
    """
    beta, device = request.beta, request.q.device
    plain = dense.unseen is None and dense.blind is None
    on_cpu = request.q.is_cpu and dense.blind is None and request.q.shape[3] == request.v.shape[3]
    on_hopper = request.q.is_cuda and plain and _is_hopper(device.index or 0)
    grouped = request.q.shape[1] != request.k.shape[1]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ordinary = (on_cpu or on_hopper) and q.stride(3) == k.stride(3) == v.stride(3) == 1
        if ordinary and on_cpu:
            # if keys that no query sees hold NaN or infinity, the output shows it, or a score of -inf hides it
            out = run_directly(q, k, v, dense.added, causal, beta)
            if out is not None:
                return out
        elif ordinary and not needs_gradient(q, k, v):
            return _run_cudnn_first(q, k, v, dense.added, 0.0, causal, beta, grouped)
        if plain:
            return fused_attention(q, k, v, beta, 0.0, causal=causal, added=dense.added)
        return _run_dense(q, k, v, beta, dense)

    return call


def _repeat_when_known(request: Request, dense: "DenseBias") -> PreparedCall:
    """Return what `_repeat` returns, if it is not yet known whether the bias has any hidden keys or empty rows.

    `unseen` and `blind` of the bias are then tensors on the GPU that may be False everywhere. Whether they are is
    copied to the host asynchronously. Calls after the copy skip the step that sets hidden keys and empty rows to 0, if
    there are none.
    """
    masks = [mask for mask in (dense.unseen, dense.blind) if mask is not None]
    some = torch.stack([mask.any() for mask in masks])
    arrived = torch.empty(some.shape, dtype=some.dtype, pin_memory=True).copy_(some, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(some.device))
    call, known = _repeat(request, dense, causal=False), False

    def repeat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal call, known
        if not known and copied.query():
            flags = iter(arrived.tolist())
            unseen, blind = (x if x is not None and next(flags) else None for x in (dense.unseen, dense.blind))
            call, known = _repeat(request, DenseBias(dense.added, unseen, blind), causal=False), True
        return call(q, k, v)

    return repeat


def _run_dense(
    q: Tensor, k: Tensor, v: Tensor, beta: float, dense: "DenseBias", request: Request | None = None
) -> Tensor:
    """Compute fused attention with a dense bias.

    request  the attention call, if it has score terms or dropout; else None
    """
    # the weight of a hidden key is exactly 0, which hides all finite values
    readable = dense.unseen is not None and q.device.type == "cpu" and can_read_values(q)
    if dense.unseen is not None and not (readable and is_finite(k, v)):
        k, v = k.masked_fill(dense.unseen, 0), v.masked_fill(dense.unseen, 0)
    if dense.blind is not None:
        q = q.masked_fill(dense.blind, 0)
    out = fused_attention(q, k, v, beta, 0.0 if request is None else request.dropout, added=dense.added)
    return out if dense.blind is None or takes_empty_rows(q) else out.masked_fill(dense.blind, 0)


@dataclass(frozen=True)
class DenseBias:
    """The dense mask and bias of an attention call.

    added   boolean mask, or additive bias with -inf at hidden keys; None if nothing is hidden or added
    unseen  keys that no query sees; None if there are none
    blind   queries that see no key; None if there are none
    """

    added: Tensor | None
    unseen: Bool[Tensor, "#b #g j 1"] | None
    blind: Bool[Tensor, "#b #h i 1"] | None


def takes_empty_rows(q: Tensor) -> bool:
    """Return whether the fused kernel computes zeros and zero gradients for a row in which every score is -inf.

    True for torch's kernel on the CPU. The result of other kernels may be NaN. If the result of this function is False,
    callers let such a row see all keys, and set the output of the row to 0 afterwards.
    """
    return q.device.type == "cpu" and not is_exporting()


_biases: Memo[DenseBias] = Memo(8)
_KEEP = 1 << 22  # largest number of entries of a matrix that is cached


def get_dense_bias(request: Request) -> DenseBias:
    """Return the dense mask and bias of an attention call.

    On the CPU, small results for masks without tensors and for constant score terms are cached.
    """
    terms = [term.key() for term in request.terms]
    _, h, g, i, j, _, _ = request.sizes
    constant = i > 1 and None not in terms and request.positions.consecutive
    if request.q.device.type != "cpu" or not can_read_values(request.q):
        return _build_dense_bias(request)
    if not constant or request.mask.tensors():
        return _drop_empty_masks(_build_dense_bias(request))
    at = (request.positions.queries, request.positions.keys)
    key = joint_key(request.mask, (*terms, *at, h, g, i, j, request.q.dtype))
    return _biases.get(key, request.mask, lambda: _drop_empty_masks(_build_dense_bias(request)), _is_small)


def _is_small(dense: DenseBias) -> bool:
    return dense.added is None or dense.added.numel() <= _KEEP


def _drop_empty_masks(dense: DenseBias) -> DenseBias:
    """Return the dense bias with `unseen` replaced by None if it is False everywhere, and the same for `blind`."""
    unseen, blind = (x if x is not None and x.any() else None for x in (dense.unseen, dense.blind))
    return DenseBias(dense.added, unseen, blind)


def _build_dense_bias(request: Request) -> DenseBias:
    visible, unseen, blind = request.visible(), None, None
    if visible is not None:
        unseen, blind = ~visible_keys(visible, request.k.shape[1]), ~visible.any(-1, keepdim=True)
        if request.terms:  # they may read q
            request = replace(request, q=request.q.masked_fill(blind, 0))
    terms = request.bound_terms()
    bias = sum_terms(terms, request.grid(), request.q) if terms else None
    if visible is not None and blind is not None and not takes_empty_rows(request.q):
        visible = visible | blind  # such a row needs finite scores; it is zeroed afterwards
        bias = bias.masked_fill(blind, 0) if bias is not None and request.hides_by_score else bias
    return DenseBias(join_bias(request.q, request.k.shape[2], visible, bias, request.sink), unseen, blind)


def fused_attention_with_lse(request: Request) -> tuple[Float[Tensor, "b h i e"], Float[Tensor, "b h i"]] | None:
    """Compute the output and log-sum-exp of an attention call on a GPU with cuDNN. None if cuDNN would not run."""
    q, k, v = request.q, request.k, request.v
    half = q.element_size() == 2 and q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3] <= 128
    if (
        not half
        or not _is_hopper(q.device.index or 0)
        or request.dropout
        or not torch.backends.cuda.cudnn_sdp_enabled()
    ):
        return None
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, request.causal_square, False, scale=request.beta
    )[:2]
    return out, lse.reshape(q.shape[:3])


def join_bias(q: Tensor, j: int, visible: Tensor | None, bias: Tensor | None, sink: Tensor | None) -> Tensor | None:
    """Combine mask, bias and attention sink into one additive matrix.

    If there is no bias and no sink, the boolean mask is returned unchanged.
    """
    if bias is None and sink is None:
        return visible
    added = center_bias(bias, visible, sink, q.shape[2], j)
    return added.to(q.dtype) if q.device.type == "cuda" else added  # the fused kernels of a GPU take no other


def fused_attention(
    q: Float[Tensor, "n h i c"],
    k: Float[Tensor, "n g j c"],
    v: Float[Tensor, "n g j e"],
    beta: float,
    dropout: float,
    *,
    causal: bool = False,
    added: Tensor | None = None,
) -> Float[Tensor, "n h i e"]:
    """Compute torch's fused attention (`scaled_dot_product_attention`) with exact gradients.

    added  boolean mask, or bias that is added to the scores; an attention sink is one more column. None if there is no
           mask and no bias
    """
    c, e = q.shape[-1], v.shape[-1]
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:  # torch has no fused kernels for others
        q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v))
    # padding with zeros changes no dot product; the extra columns of the output are cut off below
    if q.device.type == "cpu" and c != e:
        q, k, v = (
            pad(x, (0, max(c, e) - x.shape[-1])) for x in (q, k, v)
        )  # the CPU's fused kernel takes one width for q, k and v
    if q.device.type == "cuda":
        out = _on_gpu(q, k, v, beta, dropout, causal, added)
    else:
        out = _on_cpu(q, k, v, beta, dropout, causal, added)
    return out if out.shape[-1] == e else out[..., :e]


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, beta: float, dropout: float, causal: bool, added: Tensor | None) -> Tensor:
    empty = 0 in (*q.shape, k.shape[2])
    if empty or is_meta_or_fake(q) or (torch.compiler.is_compiling() and is_exporting()):
        return _traced_on_cpu(q, *add_sink_key(k, v, added), beta, dropout, causal, added)
    if dropout or needs_gradient(added):  # torch has no fused kernel for these
        exact = torch.promote_types(q.dtype, torch.float32)
        attention = dense_row_attention(added, causal, beta, dropout)
        return attention(q.to(exact), k.to(exact), v.to(exact), slice(0, q.shape[2])).to(q.dtype)
    return flash_attention(q, k, v, added, causal, beta)


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    # a branch, so that the compiler guards on it: torch takes no symbolic boolean
    return True if q.shape[1] != k.shape[1] else False  # noqa: SIM210


def _traced_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, beta: float, dropout: float, causal: bool, added: Tensor | None
) -> Tensor:
    """Compute attention with torch's own operators only, for exported programs, fake tensors and empty tensors.

    In exported programs, gradients that would be wrong are NaN instead.
    """
    grouped = _is_grouped(q, k)
    if is_meta_or_fake(q) and needs_gradient(q, k, v) and not torch.compiler.is_compiling():
        factor, beta = split_scale(beta, q.dtype)
        q = q if factor == 1.0 else q * factor  # as the real kernel does, so that counted memory is that of a real pass
    out = scaled_dot_product_attention(q, k, v, added, dropout, causal, scale=beta, enable_gqa=grouped)
    if is_meta_or_fake(q) or not is_exporting():
        return out
    if needs_gradient(q, k, v):
        out = poison_gradient(out, score_bound(q, k, beta) > TRACED_LIMIT)
    if added is None:
        # the kernel gives zeros to a short row of NaN; all rows see the first key, whose score is NaN then
        first = k[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
        lost = (q * first).sum(-1, keepdim=True).isnan()
        out = out * torch.ones_like(lost, dtype=out.dtype).masked_fill(lost, math.nan)
    return out


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, beta: float, dropout: float, causal: bool, added: Tensor | None) -> Tensor:
    if added is not None and added.dtype == torch.bool:
        # torch fills in -65504 for cuDNN, which scores below it would lose to
        added = torch.zeros_like(added, dtype=q.dtype).masked_fill_(~added, -math.inf)
    if not needs_gradient(q, k, v):
        return _cudnn_first(q, *add_sink_key(k, v, added), added, dropout, causal, beta)
    steered = can_read_values(q)
    if steered and can_poison_rows(q, beta):
        out = _cudnn_first(q, *add_sink_key(k, v, added), added, dropout, causal, beta)
        poison_saved_lse(out)
        keep_layout(out)
        return out
    guard, passed, learned = None, (q, k, v), needs_gradient(added)
    if steered:
        lost = "dropout draws its own weights" if dropout else "the score terms are learned"
        guard = GradientGuard(dense_row_attention(added, causal, beta), lost if dropout or learned else "")
        passed = guard.enter(q, k, v)
    elif not is_meta_or_fake(q) and not learned:
        passed = poison_input_gradients(q, k, v, score_bound(q, k, beta) > TRACED_LIMIT)
    out = _cudnn_first(passed[0], *add_sink_key(*passed[1:], added), added, dropout, causal, beta)
    if guard is not None:
        out = guard.leave(out, score_bound(q, k, beta))
        keep_layout(out)
    elif not is_meta_or_fake(q):
        out = poison_gradient(out, score_bound(q, k, beta) > TRACED_LIMIT) if learned else keep_traced_layout(out)
    return out


def _cudnn_first(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, dropout: float, causal: bool, beta: float
) -> Tensor:
    """Run torch's fused attention. On Hopper GPUs, torch uses cuDNN if it can, else one of its other kernels."""
    grouped = _is_grouped(q, k)
    if not _is_hopper(q.device.index or 0):
        return scaled_dot_product_attention(q, k, v, added, dropout, causal, scale=beta, enable_gqa=grouped)
    if torch.compiler.is_compiling():
        with sdpa_kernel(_HOPPER_ORDER, set_priority=True):
            return scaled_dot_product_attention(q, k, v, added, dropout, causal, scale=beta, enable_gqa=grouped)
    return _run_cudnn_first(q, k, v, added, dropout, causal, beta, grouped)


def _run_cudnn_first(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, dropout: float, causal: bool, beta: float, grouped: bool
) -> Tensor:
    # does the same as sdpa_kernel, which takes 17 microseconds
    before = _get_order()
    _set_order(_HOPPER_VALUES)
    try:
        return scaled_dot_product_attention(q, k, v, added, dropout, causal, scale=beta, enable_gqa=grouped)
    finally:
        _set_order(before)


def unfused_reasons(request: Request) -> list[str]:
    """Return the reasons why torch has no suitable fused GPU kernel for this attention call.

    Without a fused kernel, torch would silently build the whole score matrix.
    """
    if request.q.device.type != "cuda":
        return []
    _, h, g, _, _, c, e = request.sizes
    size = request.q.element_size()
    if size == 8:
        return ["on a GPU torch has no fused kernel for float64"]
    reasons = []
    if c * size % 16 or e * size % 16:
        reasons.append(f"on a GPU torch's fused kernels take heads in multiples of {16 // size}, not c={c} and e={e}")
    if size == 4 and h != g:
        reasons.append(f"on a GPU torch's fused kernel for float32 knows no groups, and h={h} but g={g}")
    if size == 4 and is_short(request):
        reasons.append(
            "on a GPU torch's fused kernel for float32 rounds more than the whole matrix, which is small here"
        )
    return reasons


def is_short(request: Request) -> bool:
    """Return whether this attention call is on a GPU and small enough for the explicit score matrix.

    A call from the explicit score matrix has the smallest rounding error.
    """
    b, h, _, i, j, _, _ = request.sizes
    return request.q.device.type == "cuda" and b * h * i * j <= SHORT


def rounds_bias(request: Request) -> bool:
    """Return whether this kernel would round score terms: on a GPU, the bias is in half precision if q is."""
    return request.q.device.type == "cuda" and request.q.element_size() == 2 and len(request.terms) > 0


@assume_constant_result
def _is_hopper(device: int) -> bool:
    return _compute_capability(device) == 9


@cache
def _compute_capability(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]
