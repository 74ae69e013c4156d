"""Start processes quickly: they are forked from a server that has imported torch."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

# torch imports its compiler when the first optimizer is created
PARTS = ("loop", "objectives", "distributed", "sharded_safetensors")
LOADED = ["torch._dynamo", *[f"regard.train.{part}" for part in PARTS]]


def start(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=target, args=args)
    process.start()
    return process
