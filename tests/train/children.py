"""Processes that tests start and kill, forked from one that has loaded torch already."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

# torch loads its compiler when the first optimizer is made
PARTS = ("loop", "objectives", "distributed", "shards")
LOADED = ["torch._dynamo", *[f"regard.train.{part}" for part in PARTS]]


def start(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=target, args=args)
    process.start()
    return process
