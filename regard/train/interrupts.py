"""Signals that stop a run: Ctrl-C (SIGINT) and SIGTERM are recorded, so that a checkpoint can be saved first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterruptedError(KeyboardInterrupt):
    """Raised after a signal stopped a training run. If the current step could be finished, a checkpoint was saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalRecorder:
    """Context manager: record the first SIGINT or SIGTERM in `received` instead of stopping the process.

    The second signal stops the process immediately, as usual.
    """

    def __init__(self, enabled: bool = True) -> None:
        # Python allows handlers in the main thread only
        self.enabled = enabled and threading.current_thread() is threading.main_thread()
        self.received: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "SignalRecorder":
        if self.enabled:
            self._handlers = {each: signal.signal(each, self._record) for each in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Context manager: raise TrainingInterruptedError instead of an error that follows a recorded signal.

        A terminal sends Ctrl-C to all processes of the run. It can therefore end a compiler that torch.compile started,
        and then the compilation fails.
        """
        try:
            yield
        except Exception as error:
            if self.received is None:
                raise
            raise TrainingInterruptedError(self.received) from error

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        self._handlers = {}
