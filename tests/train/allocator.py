"""The peak memory of torch's CPU allocator."""

import itertools
from collections.abc import Callable

import torch


def peak_allocated_bytes(act: Callable[[], object]) -> int:
    """Return the most bytes that the CPU allocator handed out at once while `act` ran."""
    with torch.profiler.profile(profile_memory=True) as profile:
        act()
    assert profile.profiler is not None
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes: list[int] = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))
