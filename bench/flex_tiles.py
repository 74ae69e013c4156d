"""Time flex_attention with several tile sizes for sparse masks on this GPU: `python -m bench.flex_tiles`.

`regard/core/kernels/flex.py` uses the tile sizes that were fastest.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from bench.timing import time_alternating
from regard import Mask, causal, global_tokens, window
from regard.core.absolute_positions import Grid
from regard.core.kernels.flex import block_mask

N, HEADS = 32768, 16
MASKS = (causal() & window(before=255), causal() & window(before=255) | global_tokens(64))
FORWARD = {
    "default": (128, {}),
    "64 x 64": (128, {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}),
    "64 x 64 in blocks of 64": (64, {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}),
    "128 x 64": (128, {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}),
}
SMALL = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}


def _backward(m1: int, n1: int, m2: int, n2: int) -> dict[str, int]:
    blocks = {"bwd_BLOCK_M1": m1, "bwd_BLOCK_N1": n1, "bwd_BLOCK_M2": m2, "bwd_BLOCK_N2": n2}
    return {**SMALL, **blocks, "bwd_num_warps": 4, "bwd_num_stages": 3}


BOTH = {"default": {}, "32 64 64 32": _backward(32, 64, 64, 32), "64 64 64 64": _backward(64, 64, 64, 64)}


def main() -> None:
    for width in (64, 128):
        shape = (1, HEADS, N, width)
        q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        for mask in MASKS:
            for name, (size, options) in FORWARD.items():
                _print("forward", width, mask, name, _time(_attention(mask, size, options), q, k, v, None))
            for name, options in BOTH.items():
                _print("forward + backward", width, mask, name, _time(_attention(mask, 128, options), q, k, v, grad))


def _attention(mask: Mask, size: int, options: dict[str, int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention)
    state = mask.block_table(N, N, size).state[None].cuda()
    blocks = block_mask(state, lambda b, h, i, j: mask.see(Grid(b, h, i, j, i, j)), N, N, size)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=blocks, kernel_options=dict(options))  # type: ignore[arg-type]
        return out

    return run


def _time(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None
) -> float:
    leaves = [x.detach().requires_grad_(grad is not None) for x in (q, k, v)]

    def run() -> object:
        out = attention(*leaves)
        return out if grad is None else torch.autograd.grad(out, leaves, grad)

    return time_alternating({"regard": run}, rounds=5, min_seconds=0.03, device="cuda").median("regard") * 1e3


def _print(what: str, width: int, mask: Mask, name: str, milliseconds: float) -> None:
    print(f"{what:<19} c={width:<4} {mask!r:<52} {name:<24} {milliseconds:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
