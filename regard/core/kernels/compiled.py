"""Masked attention in compiled code: an operator that runs the kernel which would run outside.

torch.compile cannot trace the list of visible blocks, which depends on the lengths. The operator
`regard::masked_attention` receives the mask as an expression and plans when it runs: one graph serves all lengths.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.core.absolute_positions import Positions
from regard.core.kernels import cpu_flash
from regard.core.kernels.gradients import needs_gradient
from regard.core.kernels.record import record_kernel
from regard.core.kernels.request import Request
from regard.core.masks.algebra import Mask
from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS

_PACKAGE, _ALGEBRA = "regard.core.masks.", "regard.core.masks.algebra"


def can_trace(request: Request) -> bool:
    """Whether the operator can run this request: a mask by position on the CPU, without score terms and dropout."""
    if request.q.device.type != "cpu" or len(request.terms) > 0 or request.dropout > 0:
        return False
    if torch.compiler.is_exporting() or not request.positions.by_number:
        return False
    return _is_expression(request.mask)


def _is_expression(mask: Mask) -> bool:
    """Whether `parse_mask(repr(mask))` is the mask: all forms are regard's own and hold numbers only."""
    children = mask.children()
    if len(children) > 0:
        return type(mask).__module__ == _ALGEBRA and all(_is_expression(child) for child in children)
    own = type(mask).__module__.startswith(_PACKAGE) and len(mask.tensors()) == 0 and not mask.opaque()
    return own and repr(mask).partition("(")[0] in FORMS


def masked_attention(request: Request, kernel: str = "") -> Float[Tensor, "b h i e"]:
    """Attention by the named kernel, or by the one that would be chosen outside compiled code."""
    q, k, v = request.q, request.k, request.v
    c, e = q.shape[-1], v.shape[-1]
    if c != e:  # the fused kernel takes one width
        q, k, v = (pad(x, (0, max(c, e) - x.shape[-1])) for x in (q, k, v))
    at = (request.positions.queries, request.positions.keys)
    arguments = (q, k, v, repr(request.mask), kernel, *at, request.beta)
    operators = torch.ops.regard
    learning = needs_gradient(q, k, v)
    out: Tensor = (
        operators.masked_attention(*arguments)[0] if learning else operators.masked_attention_inference(*arguments)
    )
    return out[..., :e] if c > e else out


@lru_cache(maxsize=256)
def _parse(text: str) -> Mask:
    return parse_mask(text)


Arguments = tuple[Tensor, Tensor, Tensor, str, str, int, int, float]


def _prepare(arguments: Arguments) -> tuple[Request, str]:
    from regard.core.kernels import blocked, sdpa  # they import this module

    q, k, v, text, kernel, queries, keys, beta = arguments
    request = Request(q, k, v, _parse(text), (), beta, 0.0, Positions(queries, keys))
    skips = not blocked.own_refusals(request)
    return request, kernel or ("blocked" if skips and blocked.work(request) <= sdpa.work(request) else "sdpa")


def _infer(*arguments: Any) -> Tensor:
    from regard.core.kernels import blocked, sdpa

    request, kernel = _prepare(arguments)
    record_kernel(kernel)
    out: Tensor = blocked.run(request) if kernel == "blocked" else sdpa.run(request)
    return out.contiguous()


def _fill_zeros(x: Tensor, where: Tensor | None) -> Tensor:
    return x if where is None else x.masked_fill(where, 0)


class _Parts:
    """The inputs of each fused-kernel call of a request, and functions that join outputs and split gradients."""

    def __init__(self, request: Request, kernel: str) -> None:
        from regard.core.kernels import blocked, sdpa

        self.rows: Callable[[Tensor], list[Tensor]]
        self.assemble: Callable[[list[Tensor]], Tensor]
        self.gradients: Callable[[Tensor], list[Tensor]]  # the adjoint of assemble
        b, h = request.q.shape[:2]
        if kernel == "blocked":
            plan = blocked.get_plan(request)
            self.inputs = list(blocked.gather(request, plan))
            self.added: list[Tensor | None] = [
                blocked.repeat_for_heads(group.bias(request.q.dtype), b, h) for group in plan.groups
            ]
            self.rows = lambda x: list(blocked.gather_rows(x, plan))
            self.assemble = lambda outs: blocked.assemble(outs, plan, b)
            self.gradients = lambda grad: blocked.gather_gradient(grad, plan)
        else:
            dense = sdpa.get_dense_bias(request)
            q, k, v = request.q, request.k, request.v
            q, k, v = _fill_zeros(q, dense.blind), _fill_zeros(k, dense.unseen), _fill_zeros(v, dense.unseen)
            self.inputs, self.added = [(q, k, v)], [cpu_flash.as_bias(dense.added, q.dtype)]
            self.rows = lambda x: [x]
            self.assemble = lambda outs: _fill_zeros(outs[0], dense.blind)
            self.gradients = lambda grad: [_fill_zeros(grad, dense.blind)]


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The attention output and the log-sum-exp of each row, for the arguments of the operator."""
    request, kernel = _prepare(arguments)
    record_kernel(kernel)
    parts, outs, sums = _Parts(request, kernel), [], []
    for (q, k, v), added in zip(parts.inputs, parts.added, strict=True):
        if k.shape[2]:
            out, lse = cpu_flash.forward(q, k, v, added, False, request.beta)
        else:
            out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3])
        outs.append(out)
        sums.append(lse[..., None])
    return parts.assemble(outs).contiguous(), parts.assemble(sums)[..., 0].contiguous()


def _backward(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [x.detach().requires_grad_() for x in arguments[:3]]
    request, kernel = _prepare((*leaves, *arguments[3:]))
    with torch.enable_grad():  # autograd knows how to undo the gathering of blocks
        parts = _Parts(request, kernel)
    grads = parts.gradients(grad)
    made: list[Tensor] = []
    used: list[Tensor] = []
    pieces = zip(parts.inputs, parts.added, grads, parts.rows(out), parts.rows(lse[..., None]), strict=True)
    for (q, k, v), added, of_out, own, own_lse in pieces:
        if k.shape[2]:
            used += [q, k, v]
            inputs = (of_out, q.detach(), k.detach(), v.detach(), added, own, own_lse[..., 0])
            made += cpu_flash.backward(*inputs, False, request.beta)
    if not used:
        return torch.zeros_like(leaves[0]), torch.zeros_like(leaves[1]), torch.zeros_like(leaves[2])
    of_q, of_k, of_v = torch.autograd.grad(used, leaves, made)
    return of_q.contiguous(), of_k.contiguous(), of_v.contiguous()


def _register(library: torch.library.Library) -> None:
    rest = "Tensor q, Tensor k, Tensor v, str mask, str kernel, SymInt queries, SymInt keys, float beta"
    library.define(f"masked_attention_inference({rest}) -> Tensor")
    library.define(f"masked_attention({rest}) -> (Tensor, Tensor)")
    library.define(
        f"masked_attention_backward(Tensor grad, Tensor out, Tensor lse, {rest}) -> (Tensor, Tensor, Tensor)"
    )
    library.impl("masked_attention_inference", _infer, "CPU")
    library.impl("masked_attention", _forward, "CPU")
    library.impl("masked_attention_backward", _backward, "CPU")

    def fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=exact)

    def setup_context(ctx: Any, inputs: Arguments, output: tuple[Tensor, Tensor]) -> None:
        ctx.rest = inputs[3:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:3], *output)

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch.ops.regard.masked_attention_backward(grad, out, lse, q, k, v, *ctx.rest)
        return *grads, *(None for _ in ctx.rest)

    register_fake = torch.library.register_fake
    register_fake("regard::masked_attention_inference", lambda *x: fake(*x)[0], lib=library)
    register_fake("regard::masked_attention", fake, lib=library)
    register_fake(
        "regard::masked_attention_backward",
        lambda grad, out, lse, *x: tuple(y.new_empty(y.shape) for y in x[:3]),
        lib=library,
    )
    torch.library.register_autograd("regard::masked_attention", differentiate, setup_context=setup_context, lib=library)


if getattr(torch.ops.regard, "masked_library", None) is None:  # this module may be imported again, operators may not
    _library = torch.library.Library("regard", "FRAGMENT")
    torch.ops.regard.masked_library = _library  # type: ignore[attr-defined]  # operators live as long as their library
    _register(_library)
