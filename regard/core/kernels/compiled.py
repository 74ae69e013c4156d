"""Masked attention under torch.compile: a custom operator that runs the same kernel as in eager mode.

torch.compile cannot trace the list of visible blocks, which depends on the lengths. The operator
`regard::masked_attention` receives mask and score terms as text and their tensors as a list, and chooses the blocks
when it runs, so that one graph serves all lengths.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.base.tracing import constant, is_exporting
from regard.core.absolute_positions import Positions
from regard.core.kernels import cpu_flash
from regard.core.kernels.gradients import needs_gradient
from regard.core.kernels.operators import define_operator, register_once
from regard.core.kernels.record import record_kernel
from regard.core.kernels.request import Request
from regard.core.masks.algebra import And, Mask, Not
from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS
from regard.core.masks.forms.documents import DocumentMask
from regard.core.masks.forms.key_padding import KeyPaddingMask
from regard.core.masks.forms.padding import PaddingMask
from regard.core.scores import Additive, Alibi, ScoreTerm, Sink, T5Buckets

_PACKAGE, _ALGEBRA = "regard.core.masks.", "regard.core.masks.algebra"
# expressions that stand for masks with data; their tensors are passed beside the text
_DATA = {PaddingMask: "padding([0])", DocumentMask: "documents([0])", KeyPaddingMask: "key_padding([[0]])"}
_TERMS = (Alibi, T5Buckets, Additive, Sink)
LIMITS = (
    "in compiled code it takes regard's own masks on the CPU, with alibi, t5_buckets, additive and sink if these are "
    "not learned, and no dropout"
)


def can_trace(request: Request) -> bool:
    """Return whether the custom operator for compiled code can compute this attention call. LIMITS lists its limits."""
    if request.q.device.type != "cpu" or request.dropout > 0:
        return False
    if is_exporting() or not request.positions.consecutive:
        return False
    for term in request.terms:  # a plain loop, which torch.compile can trace
        if type(term) not in _TERMS or needs_gradient(*term.tensors()):
            return False
    return is_expression(request.mask)


def is_expression(mask: Mask) -> bool:
    """Return whether the mask can be written as text and parsed again: it consists of masks of this package only."""
    children = mask.children()
    if len(children) > 0:
        return type(mask).__module__ == _ALGEBRA and all(is_expression(child) for child in children)
    if type(mask) in _DATA:
        return True
    own = type(mask).__module__.startswith(_PACKAGE) and len(mask.tensors()) == 0 and not mask.opaque()
    return own and repr(mask).partition("(")[0] in FORMS


def write_text(mask: Mask) -> str:
    """Return the mask as a text expression, such as "causal() & padding([0])", where [0] replaces a tensor."""
    if isinstance(mask, PaddingMask) and mask.width is not None:
        return f"padding([0], side='left', width={constant(mask.width)})"
    if type(mask) in _DATA:
        return _DATA[type(mask)]
    parts = [write_text(child) for child in mask.children()]
    if isinstance(mask, Not):
        return f"~{parts[0]}"
    return f"({(' & ' if isinstance(mask, And) else ' | ').join(parts)})" if len(parts) > 0 else repr(mask)


def _term_text(term: ScoreTerm) -> str:
    side = "both" if isinstance(term, T5Buckets) and term.bidirectional else "one"
    return f"{term.name} {constant(term.max_distance)} {side}" if isinstance(term, T5Buckets) else term.name


def _read_term(text: str, tensor: Tensor) -> ScoreTerm:
    name, *settings = text.split()
    if name == "t5_buckets":
        return T5Buckets(tensor, int(settings[0]), settings[1] == "both")
    made: dict[str, Callable[[Tensor], ScoreTerm]] = {"alibi": Alibi, "additive": Additive, "sink": Sink}
    return made[name](tensor)


def masked_attention(request: Request, kernel: str = "") -> Float[Tensor, "b h i e"]:
    """Compute attention in compiled code with a custom operator.

    kernel  "blocked" or "sdpa"; "" chooses the cheaper one when the operator runs
    """
    q, k, v = request.q, request.k, request.v
    c, e = q.shape[-1], v.shape[-1]
    if c != e:  # the fused kernel takes one width
        q, k, v = (pad(x, (0, max(c, e) - x.shape[-1])) for x in (q, k, v))
    at = (request.positions.queries, request.positions.keys)
    data = [tensor for term in request.terms for tensor in term.tensors()] + list(request.mask.tensors())
    texts = (write_text(request.mask), ",".join([_term_text(term) for term in request.terms]))
    arguments = (q, k, v, [x.detach() for x in data], *texts, kernel, *at, request.beta)
    operators = torch.ops.regard
    learning = needs_gradient(q, k, v)
    out: Tensor = (
        operators.masked_attention(*arguments)[0] if learning else operators.masked_attention_inference(*arguments)
    )
    return out[..., :e] if c > e else out


@lru_cache(maxsize=256)
def parse_text(text: str) -> Mask:
    return parse_mask(text)


Arguments = tuple[Tensor, Tensor, Tensor, list[Tensor], str, str, str, int, int, float]


def _prepare(arguments: Arguments) -> tuple[Request, str]:
    from regard.core.kernels import blocked, sdpa  # they import this module

    q, k, v, data, text, term_texts, kernel, queries, keys, beta = arguments
    tensors = iter(data)
    terms = tuple(_read_term(each, next(tensors)) for each in term_texts.split(",") if each)
    mask = parse_text(text).map_tensors(lambda stand_in: next(tensors))
    hides = any(term.may_hide() for term in terms)
    request = Request(q, k, v, mask, terms, beta, 0.0, Positions(queries, keys), hides)
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
    """The fused-kernel calls that make up one attention call.

    The object holds the inputs of these calls. It joins their outputs to the attention output, and splits the gradient
    of the attention output into one gradient for each call.
    """

    def __init__(self, request: Request, kernel: str) -> None:
        from regard.core.kernels import blocked, sdpa

        self.rows: Callable[[Tensor], list[Tensor]]
        self.join: Callable[[list[Tensor]], Tensor]
        self.split: Callable[[Tensor], list[Tensor]]  # the adjoint of join
        self.add: Callable[[list[Tensor]], Tensor]  # the adjoint of the keys of the inputs, and of the values
        b = request.q.shape[0]
        if kernel == "blocked":
            plan = blocked.get_plan(request)
            self.inputs = list(blocked.fused_inputs(request, plan))
            self.rows = lambda x: list(blocked.gather_rows(x, plan))
            self.join = lambda outs: blocked.assemble(outs, plan, b)
            self.split = lambda grad: blocked.gather_gradient(grad, plan)
            self.add = lambda grads: blocked.scatter_keys(grads, self.inputs, plan, b)
        else:
            dense = sdpa.get_dense_bias(request)
            q, k, v = request.q, request.k, request.v
            q, k, v = _fill_zeros(q, dense.blind), _fill_zeros(k, dense.unseen), _fill_zeros(v, dense.unseen)
            added = cpu_flash.as_bias(dense.added, q.dtype)
            self.inputs = [blocked.FusedInputs(q, k, v, added, None)]
            self.rows = lambda x: [x]
            self.join = lambda outs: _fill_zeros(outs[0], dense.blind)
            self.split = lambda grad: [_fill_zeros(grad, dense.blind)]
            self.add = lambda grads: _fill_zeros(grads[0], dense.unseen)

    def assemble(self, outs: list[Tensor]) -> Tensor:
        """Join the outputs of the fused-kernel calls to the output of the attention call."""
        return self.join([_fill_zeros(out, part.hidden) for out, part in zip(outs, self.inputs, strict=True)])

    def gradients(self, grad: Tensor) -> list[Tensor]:
        """Split the gradient of the attention output into one for each fused-kernel call, as in the backward pass."""
        return [_fill_zeros(own, part.hidden) for own, part in zip(self.split(grad), self.inputs, strict=True)]


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the attention output and the log-sum-exp of each row from the arguments of the custom operator."""
    request, kernel = _prepare(arguments)
    record_kernel(kernel)
    parts, outs, sums = _Parts(request, kernel), [], []
    for q, k, v, added, *_ in parts.inputs:
        if k.shape[2]:
            out, lse = cpu_flash.forward(q, k, v, added, False, request.beta)
        else:
            out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3])
        outs.append(out)
        sums.append(lse[..., None])
    return parts.assemble(outs).contiguous(), parts.assemble(sums)[..., 0].contiguous()


def _backward(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    request, kernel = _prepare(arguments)
    parts = _Parts(request, kernel)
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    pieces = zip(parts.inputs, parts.gradients(grad), parts.rows(out), parts.rows(lse[..., None]), strict=True)
    for (q, k, v, added, *_), own_grad, own, own_lse in pieces:
        if k.shape[2]:
            made = cpu_flash.backward(own_grad, q, k, v, added, own, own_lse[..., 0], False, request.beta)
        else:
            made = torch.zeros_like(q), k, v
        for each, tensor in zip(found, made, strict=True):
            each.append(tensor)
    of_q, of_k, of_v = parts.assemble(found[0]), parts.add(found[1]), parts.add(found[2])
    return of_q.contiguous(), of_k.contiguous(), of_v.contiguous()


@register_once("masked_library")
def _register(library: torch.library.Library) -> None:
    settings = "str mask, str terms, str kernel, SymInt queries, SymInt keys, float beta"
    rest = f"Tensor q, Tensor k, Tensor v, Tensor[] data, {settings}"
    gradients = f"masked_attention_backward(Tensor grad, Tensor out, Tensor lse, {rest})"

    def fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=exact)

    def fake_gradients(grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[:3])

    def setup_context(ctx: Any, inputs: Arguments, output: tuple[Tensor, Tensor]) -> None:
        ctx.rest = inputs[4:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3])

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *data = ctx.saved_tensors
        grads = torch.ops.regard.masked_attention_backward(grad, out, lse, q, k, v, data, *ctx.rest)
        return *grads, [None] * len(data), *(None for _ in ctx.rest)

    define_operator(library, f"masked_attention_inference({rest}) -> Tensor", _infer, lambda *x: fake(*x)[0], "CPU")
    define_operator(library, f"masked_attention({rest}) -> (Tensor, Tensor)", _forward, fake, "CPU")
    define_operator(library, f"{gradients} -> (Tensor, Tensor, Tensor)", _backward, fake_gradients, "CPU")
    torch.library.register_autograd("regard::masked_attention", differentiate, setup_context=setup_context, lib=library)
