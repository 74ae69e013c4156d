"""tanh in one instruction of NVIDIA GPUs, for soft-capped scores in bfloat16 inside flex_attention.

The instruction `tanh.approx.f32` has a relative error of at most 2^-11, an eighth of the rounding error of bfloat16.
The exact tanh of CUDA takes longer than all other operations of flex_attention on a score.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.base.tracing import assume_constant_result
from regard.core.kernels.operators import define_operator, register_once


def tanh(x: Tensor) -> Tensor:
    """Return tanh(x): approximated by `tanh.approx.f32` in GPU code that inductor compiles, exact elsewhere."""
    out: Tensor = torch.ops.regard.fast_tanh(x)
    return out


@assume_constant_result
def is_available() -> bool:
    """Return whether inductor can compile `tanh.approx.f32`. The first call registers the instruction."""
    return _register_lowering()


@cache
def _register_lowering() -> bool:
    try:  # torch has no public way to use an instruction in a score_mod
        from torch._inductor.lowering import make_pointwise, register_lowering
        from torch._inductor.virtualized import ops
    except ImportError:
        return False

    def instruction(x: Any) -> Any:
        return ops.inline_asm_elementwise(x, asm="tanh.approx.f32 $0, $1;")

    register_lowering(torch.ops.regard.fast_tanh)(make_pointwise(instruction))
    return True


@register_once("tanh_library")
def _register(library: torch.library.Library) -> None:
    define_operator(library, "fast_tanh(Tensor x) -> Tensor", torch.tanh, torch.empty_like)

    def save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    def differentiate(ctx: Any, grad: Tensor) -> Tensor:
        out: Tensor = ctx.saved_tensors[0]
        return grad * (1 - out * out)

    torch.library.register_autograd("regard::fast_tanh", differentiate, setup_context=save, lib=library)
    torch.library.register_vmap("regard::fast_tanh", lambda info, axes, x: (tanh(x), axes[0]), lib=library)
