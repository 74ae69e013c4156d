"""How fast a machine is: a few stated rates, by name or measured here, that turn counts into seconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from regard.base.errors import ConfigError, UnknownNameError
from regard.base.validation import check_number
from regard.train.op_counter import Tally

GIB = 1 << 30
SAMPLES = 5  # of which the fastest counts: a busy machine only makes things slower


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device does in a second.

    source    where the numbers come from
    float32   floating-point operations in matrix products, at best; so the two others
    memory    bytes that can be read or written, at best
    reached   the share of both that a model's own sizes reach
    launch    seconds that any operation takes, however small
    link      bytes from one device to another
    latency   seconds that a message between devices takes, however small
    capacity  bytes of memory; None is not said
    gpu       whether it is one: its fused attention has dropout inside, a CPU's has not
    """

    name: str
    source: str
    float32: float
    bfloat16: float
    float16: float
    memory: float
    reached: float
    launch: float
    link: float
    latency: float
    capacity: int | None = None
    gpu: bool = True

    def __post_init__(self) -> None:
        for name in ("float32", "bfloat16", "float16", "memory", "reached", "link"):
            if not check_number(f"Rates({name})", getattr(self, name)) > 0:
                raise ConfigError(f"Rates({name}) must be above 0, not {getattr(self, name)}")
        for name in ("launch", "latency"):
            if check_number(f"Rates({name})", getattr(self, name)) < 0:
                raise ConfigError(f"Rates({name}) is a time in seconds, 0 or more, not {getattr(self, name)}")

    def arithmetic(self, dtype: torch.dtype) -> float:
        """Floating-point operations in a second on numbers of this kind."""
        halves = {torch.bfloat16: self.bfloat16, torch.float16: self.float16}
        return self.reached * halves.get(dtype, self.float32)


_SHEET = "peaks of NVIDIA's data sheet without sparsity; a launch fitted to steps on an H200; the rest assumed"
MACHINES = {
    "h200": Rates(
        name="h200", source=_SHEET, float32=67e12, bfloat16=989e12, float16=989e12, memory=4.8e12, reached=0.6,
        launch=3.5e-5, link=450e9, latency=2e-5, capacity=141 * 10**9,
    ),
    "h100": Rates(
        name="h100", source=_SHEET, float32=67e12, bfloat16=989e12, float16=989e12, memory=3.35e12, reached=0.6,
        launch=3.5e-5, link=450e9, latency=2e-5, capacity=80 * 10**9,
    ),
    "a100": Rates(
        name="a100", source=_SHEET, float32=19.5e12, bfloat16=312e12, float16=312e12, memory=2.04e12, reached=0.6,
        launch=3.5e-5, link=300e9, latency=2e-5, capacity=80 * 10**9,
    ),
    "cpu": Rates(
        name="cpu", source="one core of a server, rounded from what `measured` gave; links between processes assumed",
        float32=7e10, bfloat16=7e10, float16=3e9, memory=1e10, reached=1.0, launch=3e-6, link=1e9, latency=2e-4,
        gpu=False,
    ),
}  # fmt: skip


def machine(name: str) -> Rates:
    """The rates of a named machine, or of this one where the name is `measured`."""
    if name == "measured":
        return measured()
    if name not in MACHINES:
        raise UnknownNameError(f"there is no machine {name!r}; there are {', '.join(MACHINES)} and measured")
    return MACHINES[name]


def measured(device: torch.device | str | None = None) -> Rates:
    """The rates of this machine, from products of matrices and steps without any, at sizes that models have."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = where.type == "cuda"
    rows, width = (65_536, 1024) if gpu else (2048, 128)
    products = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w = torch.ones(rows, width, dtype=dtype, device=where), torch.ones(width, width, dtype=dtype, device=where)
        products[dtype] = 2 * rows * width**2 / _fastest(lambda x=x, w=w: x @ w, where)  # type: ignore[misc]
    memory = _plain(rows, width, where)[1]
    launch = _plain(1, 8, where)[0]
    like = MACHINES["h200" if gpu else "cpu"]
    return Rates(
        name=f"measured {where.type}", source=f"measured here; links between devices as of {like.name}",
        float32=products[torch.float32], bfloat16=products[torch.bfloat16], float16=products[torch.float16],
        memory=memory, reached=1.0, launch=launch, link=like.link, latency=like.latency,
        capacity=torch.cuda.get_device_properties(where).total_memory if gpu else None,
        gpu=gpu,
    )  # fmt: skip


def _plain(rows: int, width: int, device: torch.device) -> tuple[float, float]:
    """Seconds an operation and bytes a second, over there and back through layers that have no product."""
    layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.LayerNorm(width), nn.GELU()))).to(device)
    x = torch.ones(rows, width, device=device)

    def step() -> None:
        layers(x).sum().backward()
        layers.zero_grad()

    seconds = _fastest(step, device)
    with Tally(layers) as tally:
        step()
    costs = tally.work.costs.values()
    return seconds / sum(cost.calls for cost in costs), sum(cost.moved for cost in costs) / seconds


def _fastest(act: Callable[[], object], device: torch.device) -> float:
    """Seconds that an act takes, after one that does not count."""
    taken = []
    for _ in range(SAMPLES + 1):
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
