"""The worker process of the explorer, so that a computation can be cancelled and cannot use up the server's memory.

The process keeps loaded models between tasks. If a cancelled task does not finish soon, or if a task needs too much
memory, the process is killed. The next task starts a new process.
"""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from regard.base.errors import RegardError

Progress = Callable[[str], None]
Task = Callable[[dict[str, Any], Progress], dict[str, Any]]
Message = tuple[str, dict[str, Any]]  # ("ready" | "progress" | "result" | "error", content)
LARGEST = 4 << 30  # bytes of memory after which the process is replaced
POLL = 0.1  # seconds between looks at whether the client is still there
START = 60.0  # time limit in seconds for importing what the tasks need
GRACE = 1.0  # time limit in seconds for a cancelled job to finish: most do, and the process keeps its models


class Worker:
    """Runs tasks in a separate process, one at a time."""

    def __init__(self, tasks: Callable[[], dict[str, Task]]) -> None:
        """Create the worker; its process starts with the first task.

        tasks  function that returns the tasks by name. It must be defined at the top level of a module, because the
               worker process imports it
        """
        self._tasks, self._lock = tasks, asyncio.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._ready = False  # whether the process has imported what the tasks need
        self._settling: asyncio.Task[None] | None = None  # kept, because a loop holds its tasks weakly

    @property
    def process_id(self) -> int | None:
        """The id of the worker process; None if it is not running."""
        return self._process.pid if self._process else None

    async def run(self, name: str, body: dict[str, Any], gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[Message]:
        """Run a task in the worker process and yield its messages: progress, then a result or an error.

        The task is stopped if the client disconnects, or if the process needs more than LARGEST bytes of memory.

        name  name of the task
        body  argument of the task
        gone  asynchronous function that returns whether the client has disconnected
        """
        while True:
            try:
                await asyncio.wait_for(self._lock.acquire(), POLL)
                break
            except TimeoutError:
                if await gone():
                    return
        finished = False
        try:
            fresh = not self._is_running()
            pipe = self._start()
            pipe.send((name, body))
            if fresh:
                yield "progress", {"text": "starting Python"}
            while not await gone():
                if process_memory(self.process_id) > LARGEST:
                    finished = True
                    self.stop()
                    yield "error", {"error": f"this needs more than {LARGEST >> 30} GiB of memory; take fewer tokens"}
                    return
                if not pipe.poll():
                    await asyncio.sleep(POLL / 4)
                    continue
                kind, content = pipe.recv()
                if kind == "ready":
                    self._ready = True
                    continue
                finished = kind != "progress"
                yield kind, content
                if finished:
                    return
        except (EOFError, OSError):
            finished = True
            self.stop()
            yield "error", {"error": "the computation ended unexpectedly; it may have needed too much memory"}
        finally:
            if finished:
                self._lock.release()
            else:
                # the server ends this task with the connection, so another one waits for the end of the job
                self._settling = asyncio.create_task(self._settle())

    async def _settle(self) -> None:
        """Wait up to GRACE seconds for a task whose client disconnected, then kill the process.

        If the process is still importing torch, wait up to START seconds instead: a new process would have to import
        it again.
        """
        try:
            end = time.monotonic() + (GRACE if self._ready else START)
            while self._pipe is not None and time.monotonic() < end:
                kind = self._pipe.recv()[0] if self._pipe.poll() else "progress"
                if kind == "ready":
                    self._ready, end = True, time.monotonic() + GRACE
                elif kind != "progress":
                    return
                await asyncio.sleep(POLL / 4)
            self.stop()
        except (EOFError, OSError, asyncio.CancelledError):
            self.stop()
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Kill the worker process and wait until it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
        self._ready = False

    def _is_running(self) -> bool:
        return self._process is not None and self._process.is_alive() and self._pipe is not None

    def _start(self) -> Connection:
        if self._pipe is not None and self._is_running():
            return self._pipe
        self.stop()
        context = multiprocessing.get_context("spawn")  # a forked process would inherit the server's threads and locks
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._tasks, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        return self._pipe


def _serve(pipe: Connection, tasks: Callable[[], dict[str, Task]], parent: int) -> None:
    """Run the worker process: receive tasks from the pipe and send back their messages.

    The process ends when the pipe closes, when the server process has ended, or when it uses more than LARGEST bytes
    of memory after a task.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    known = tasks()
    pipe.send(("ready", {}))
    with suppress(EOFError, KeyboardInterrupt, ConnectionError):
        while True:
            name, body = pipe.recv()
            try:
                answer: Message = ("result", known[name](body, lambda text: pipe.send(("progress", {"text": text}))))
            except RegardError as error:
                answer = ("error", {"error": str(error)})
            except MemoryError:
                answer = ("error", {"error": "this needs more memory than there is; take fewer tokens"})
            except Exception as error:  # models of others may raise anything; the page shows the first line
                first = (str(error).splitlines() or [""])[0][:300]
                answer = ("error", {"error": f"{type(error).__name__}: {first}"})
            pipe.send(answer)
            if process_memory(os.getpid()) > LARGEST:
                return


def _end_with(parent: int) -> None:
    """Exit this process when its parent process has ended, even during a task.

    parent  process id of the server
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def process_memory(process: int | None) -> int:
    """Return the resident memory of a process in bytes; 0 if the system does not report it."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
