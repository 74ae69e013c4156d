"""What a run tells while it goes on: a line of JSON every so often, TensorBoard if asked for."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from regard.base.atomic_write import write_atomically
from regard.base.errors import ConfigError

NAME = "log.jsonl"


class Log:
    """`log.jsonl`, and events for TensorBoard beside it. Lines after the state that a run goes on from are dropped."""

    def __init__(self, folder: Path, start: int, *, tensorboard: bool = False) -> None:
        self._board: Any = _board(folder / "tensorboard", start) if tensorboard else None
        self._file: TextIO = _continued(folder / NAME, start)

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Figures after a number of steps."""
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(name, value, step)

    def settle(self) -> None:
        """Force all lines to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        # what could not be written has been told when it was added
        for each in (self._file, self._board):
            with suppress(OSError):
                if each is not None:
                    each.close()


def _continued(file: Path, start: int) -> TextIO:
    """The file, without what a killed run wrote after its last state or left unfinished."""
    kept = []
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        try:
            if json.loads(line)["step"] <= start:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            break
    write_atomically(file, lambda path: path.write_text("".join(kept)))
    return file.open("a")


def _board(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("TensorBoard is not installed: pip install tensorboard, or go on without it") from None
    return SummaryWriter(str(folder), purge_step=start + 1)
