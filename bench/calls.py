"""Host time of small attention calls, compared with torch's scaled_dot_product_attention: `python -m bench.calls`.

Host time is the CPU time of the calling thread. It includes Python and the launch of kernels, and on a CPU the kernel
itself (set OMP_NUM_THREADS=1). On a GPU the thread does not wait for the device between calls. Outputs and gradients
are compared with float64 before the timing.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.attention import SMALL, SMALL_MASKS, check_attention
from bench.peers import Attention
from bench.report import describe_machine
from bench.timing import Ratio
from regard import Mask, Positions, attend, causal, full

CACHED = 512  # keys of a call with one query, as in generation


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Mask, int, Attention, Attention]]:
    """Yield the cases to time: (name, mask, number of queries, call of regard, call of torch)."""
    for mask in (full(), causal()):
        yield repr(mask), mask, SMALL, _ours(mask), _torch(None, mask == causal())
    for mask in SMALL_MASKS:
        visible = mask.dense(SMALL, device=device)
        added = torch.zeros(visible.shape, device=device, dtype=dtype).masked_fill(~visible, -torch.inf)
        yield repr(mask), mask, SMALL, _ours(mask), _torch(added)
    last = Positions(queries=CACHED - 1)
    yield f"causal(), last of {CACHED}", causal(), 1, _ours(causal(), last), _torch(None)


def _ours(mask: Mask, positions: Positions | None = None) -> Attention:
    return lambda q, k, v: attend(q, k, v, mask=mask, positions=positions)


def _torch(added: Tensor | None, is_causal: bool = False) -> Attention:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=added, is_causal=is_causal)


def host_microseconds(call: Callable[[], object], repeats: int, device: str) -> float:
    """Return the mean CPU time of a call in microseconds, without waiting for the device between calls."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return 1e6 * (time.thread_time() - start) / repeats


def settings(attention: Attention, inputs: tuple[Tensor, ...], grad: Tensor) -> dict[str, Callable[[], object]]:
    """Return the functions to time by name: forward without gradients, forward for gradients, forward and backward."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    return {
        "forward": lambda: attention(*inputs),
        "forward, for gradients": lambda: attention(*leaves),
        "forward + backward": lambda: torch.autograd.grad(attention(*leaves), leaves, grad),
    }


def compare(ours: Callable[[], object], other: Callable[[], object], rounds: int, repeats: int, device: str) -> str:
    """Time our call and another one in alternating rounds. Returns the cells of a Markdown table row."""
    for call in (ours, other, ours, other):
        call()
    pairs = []
    for turn in range(rounds):
        order = [ours, other] if turn % 2 else [other, ours]
        times = [host_microseconds(call, repeats, device) for call in order]
        pairs.append(tuple(times if turn % 2 else times[::-1]))
    ratios = sorted(own / peer for own, peer in pairs)
    ratio = Ratio(median(ratios), ratios[0], ratios[-1])
    own, peer = (median(column) for column in zip(*pairs, strict=True))
    more = median(a - b for a, b in pairs)
    return f"{own:.1f} | {peer:.1f} | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) | {more:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.calls", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--repeats", type=int, default=50, help="calls in a round")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    options = parser.parse_args()
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print(f"{describe_machine(device).partition(';')[0]}; our time / torch's, median (range) over alternating rounds\n")
    print("| case | | us | torch us | ratio (range) | us more |\n| --- | --- | --- | --- | --- | --- |")
    for name, mask, i, ours, other in cases(device, dtype):
        if options.only not in name:
            continue
        source = torch.Generator(device).manual_seed(0)
        sizes = (i, CACHED, CACHED, i) if i == 1 else (i, i, i, i)
        q, k, v, grad = (torch.randn((1, 8, n, 64), generator=source, device=device, dtype=dtype) for n in sizes)
        if i > 1:
            check_attention(mask, ours, q, k, v, grad)
        escaped = name.replace("|", "\\|")
        mine, peers = settings(ours, (q, k, v), grad), settings(other, (q, k, v), grad)
        for setting, call in mine.items():
            cells = compare(call, peers[setting], options.rounds, options.repeats, device)
            print(f"| `{escaped}` | {setting} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
