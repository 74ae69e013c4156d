"""Run a submission in a separate process, which runs `run_answer.py`, with limits on time and memory."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regard
from regard.base.errors import ConfigError, RegardError
from regard.work.exercises import run_answer
from regard.work.exercises.run_answer import RaisedError, decode, encode

STARTUP_SECONDS = 120.0  # time to start Python and import libraries, before the student's code runs
MAX_REPLY = 64 * 2**20  # bytes of one reply
Sources = list[tuple[str, str]]  # pairs of the file name shown in a traceback and the source


@dataclass(frozen=True)
class Limits:
    """Limits on the process that runs a student's submission.

    seconds    time limit for running the file, and again for each call of one of its functions or classes
    megabytes  memory limit
    """

    seconds: float = 60.0
    megabytes: int = 2048

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.megabytes > 0):
            raise ConfigError(f"seconds and megabytes must be positive, not {self.seconds:g} and {self.megabytes}")


class ProcessEndedError(Exception):
    """Raised if the process that runs a submission ended, sent an invalid reply, or was stopped at a limit."""


@contextmanager
def reject_malformed_replies() -> Iterator[None]:
    """Context manager that converts errors in decoding a reply into ProcessEndedError.

    Such errors occur because a submission can write any data to the pipe.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ProcessEndedError("sent a reply that is not a result") from None


@dataclass
class AnswerProcess:
    """A separate process that has run a student's submission and calls its functions on request.

    names   the names that the submission defines
    errors  the errors that were raised while the submission ran
    """

    process: "subprocess.Popen[bytes]"
    requests: int
    replies: int
    limits: Limits
    names: list[str] = field(default_factory=list)
    errors: list[RaisedError] = field(default_factory=list)
    _buffer: bytes = b""

    def ask(self, name: str, request: tuple[Any, ...]) -> Any:
        """Let the process call a function or class of the submission, and return the result.

        name     name of the function or class
        request  what to do with it: a tuple that begins with "call", "build" or "run", as for `perform`
        """
        with reject_malformed_replies():
            reply = decode(self._exchange([name, encode(request)], self.limits.seconds))
            if request[0] != "call" and not isinstance(reply, RaisedError):
                result, names = reply  # a module's shapes or output, and names of parameters
                if not all(isinstance(each, str) for each in names):
                    raise TypeError
                if request[0] == "build" and not all(isinstance(n, int) for shape in result.values() for n in shape):
                    raise TypeError
            return reply

    def _exchange(self, message: Any, seconds: float) -> Any:
        try:
            with open(self.requests, "wb", closefd=False) as out:
                out.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise ProcessEndedError(f"ended the process with exit code {self.process.wait()}") from None
        return self.read_reply(seconds)

    def read_reply(self, seconds: float) -> Any:
        """Read the next reply of the process, one line of JSON, and return it decoded.

        Raises ProcessEndedError if no reply comes within `seconds`, the process ends, or the reply is too long.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ProcessEndedError(f"took longer than {seconds:g} seconds")
            data = os.read(self.replies, 1 << 20)
            self._buffer += data
            if not data:
                raise ProcessEndedError(f"ended the process with exit code {self.process.wait()}")
            if len(self._buffer) > MAX_REPLY:
                raise ProcessEndedError("sent more than 64 MB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class GradingError(RegardError):
    """Raised if grading fails for a reason outside the submission, such as a process that cannot start."""


def _solution_folders() -> list[Path]:
    """Return the folder `regard/work`, which has the solutions, of every copy of regard that Python can import."""
    own = Path(regard.__file__).parent
    copies = (Path(each) / own.name / "work" for each in sys.path)
    return [own / "work", *(each for each in copies if each.is_dir())]


@contextmanager
def run_submission(
    sources: Sources, limits: Limits, hidden: Sequence[Path] = (), readable: Sequence[Path] = ()
) -> Iterator[AnswerProcess]:
    """Run a submission's sources in a separate process and yield the process (context manager).

    sources   pairs of file name and source code
    limits    time and memory limits of the process
    hidden    folders that the submission is forbidden to read, such as the submissions of others
    readable  folders inside hidden ones that the submission can read and import from

    Raises GradingError if the process ends before it runs the submission.
    """
    if os.name != "posix":
        raise ConfigError("grading files needs Linux or macOS: their limits on processes are used")
    package = Path(regard.__file__).parent
    python_path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": python_path, "MPLBACKEND": "agg", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as startup_errors:
        (read_requests, requests), (replies, write_replies) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-P", run_answer.__file__, str(read_requests), str(write_replies)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=startup_errors,
            env=env, cwd=folder, pass_fds=(read_requests, write_replies), start_new_session=True,
        )  # fmt: skip
        os.close(read_requests)
        os.close(write_replies)
        started = AnswerProcess(process, requests, replies, limits)
        # the process runs in another folder, so all paths are absolute
        start = {"sources": sources, "hidden": [str(each.resolve()) for each in (*_solution_folders(), *hidden)]}
        start |= {"readable": [str(each.resolve()) for each in readable], "megabytes": limits.megabytes}
        try:
            try:
                started._exchange(start, STARTUP_SECONDS)
            except ProcessEndedError as error:
                startup_errors.seek(0)
                reason = startup_errors.read(MAX_REPLY).decode(errors="replace").strip().rpartition("\n")[2]
                raise GradingError(
                    f"the process that runs submissions {error} before it ran this one, so nothing is graded: {reason}"
                ) from None
            with reject_malformed_replies():
                found = started.read_reply(limits.seconds)
                started.names, started.errors = found["names"], [RaisedError(**each) for each in found["errors"]]
            yield started
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # including the processes that it started
                process.wait()
            os.close(requests)
            os.close(replies)
