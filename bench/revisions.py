"""Compare the speed of attention calls with an earlier revision: `python -m bench.revisions REV`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
# runs in both trees, so it uses only names that both have: medians of times, forward and with the gradient
SCRIPT = """
import json, sys, time, torch
from regard import alibi, attend, causal, window
linear, backward, only = sys.argv[1] == "linear", sys.argv[2] == "backward", sys.argv[3]
gpu = torch.cuda.is_available()
device, half = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
cases = {
    "causal 64": ((2, 4, 64, 32), half, dict(mask=causal())),
    "causal 128": ((4, 8, 128, 64), half, dict(mask=causal())),
    "causal 512": ((1, 8, 512, 64), half, dict(mask=causal())),
    "alibi 512": ((1, 8, 512, 64), half, dict(mask=causal(), scores=alibi(heads=8))),
    "window 4096": ((1, 2, 4096, 64), half, dict(mask=causal() & window(before=255))),
}
if linear:  # calls that take seconds, or minutes in old revisions
    from regard.core.linear import elu_plus_one, linear_attend, performer, relu, squared_relu
    long, maps = (1, 16, 16384, 64), (elu_plus_one(), relu(), squared_relu(), performer(64, 64))
    cases = {f"{type(f).__name__} {getattr(f, 'name', '')}": (long, torch.float32, dict(features=f)) for f in maps}
elif gpu:
    cases |= {
        "causal 4096": ((4, 16, 4096, 128), half, dict(mask=causal())),
        "window 16384": ((1, 8, 16384, 64), half, dict(mask=causal() & window(before=255))),
        "causal 1024 float32": ((2, 8, 1024, 64), torch.float32, dict(mask=causal())),
    }
run = (lambda *x, **rest: linear_attend(*x, mask=causal(), **rest).out) if linear else attend
# on a CPU the CPU time of one thread, in units of torch's attention, called in turns: other programs lengthen both
clock = time.thread_time if not gpu and torch.get_num_threads() == 1 else time.perf_counter
def seconds(call):
    start = clock()
    call()
    if gpu: torch.cuda.synchronize()
    return clock() - start
def typical(call, unit, repeats):
    warm = 1 if linear and repeats > 1 else 0 if linear else 3
    times = [(seconds(call), seconds(unit) if unit else 1e-3) for _ in range(repeats + warm)][warm:]
    own, peer = (sorted(column)[repeats // 2] for column in zip(*times))
    return own / peer
sdpa = torch.nn.functional.scaled_dot_product_attention
for name, (shape, dtype, rest) in cases.items():
    if only not in name: continue
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    many = 8 if q.numel() < 1 << 15 else 1
    unit = None if gpu or linear else lambda: sdpa(q, k, v, is_causal=True)
    with torch.no_grad():
        forward = typical(lambda: run(q, k, v, **rest), unit, 3 if linear else 60 * many)
    for x in (q, k, v): x.requires_grad_()
    both = unit and (lambda: torch.autograd.grad(sdpa(q, k, v, is_causal=True).sum(), (q, k, v)))
    train = lambda: torch.autograd.grad(run(q, k, v, **rest).sum(), (q, k, v))
    times = [forward] + ([typical(train, both, 1 if linear else 30 * many)] if backward else [])
    print(json.dumps([name, times]), flush=True)
"""


def measure(tree: Path, cases: str, backward: bool, only: str) -> dict[str, list[float]]:
    """Return the time of the forward pass of each case, measured with the code in one source tree.

    tree      folder with a checkout of the repository
    backward  return a second time for each case: of the forward and the backward pass together
    """
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, cases, "backward" if backward else "", only]
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True)
    if run.returncode:
        raise SystemExit(run.stderr.decode()[-2000:])
    return dict(map(json.loads, run.stdout.splitlines()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("revision", help="the earlier revision, such as v0.1.0, or a folder that holds its tree")
    options.add_argument("--rounds", type=int, default=5, help="times that both are measured, in turns")
    options.add_argument("--linear", action="store_true", help="causal linear attention of 16,384 tokens instead")
    options.add_argument(
        "--forward", action="store_true", help="without gradients, which take minutes in old revisions"
    )
    options.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    chosen = options.parse_args()
    cases = "linear" if chosen.linear else "attention"
    with tempfile.TemporaryDirectory() as folder:
        old = Path(chosen.revision).resolve()
        if not old.is_dir():
            old = Path(folder)
            tree = subprocess.run(
                ["git", "archive", chosen.revision, "regard"], cwd=ROOT, check=True, stdout=subprocess.PIPE
            )
            subprocess.run(["tar", "-x", "-C", old], input=tree.stdout, check=True)
        trees = (old, ROOT)
        rounds = [
            tuple(measure(tree, cases, not chosen.forward, chosen.only) for tree in trees) for _ in range(chosen.rounds)
        ]
    titles = ["case", "forward", *(() if chosen.forward else ("forward and backward",))]
    print(f"| {' | '.join(titles)} |  (times as fast as {chosen.revision}: median, range)\n|{'---|' * len(titles)}")
    for name in rounds[0][1]:
        cells = []
        for which in range(len(titles) - 1):
            ratios = sorted(before[name][which] / now[name][which] for before, now in rounds)
            cells.append(f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
