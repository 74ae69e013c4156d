"""The metrics log of a run: one line of JSON per entry, and TensorBoard events on request."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from regard.base.atomic_write import write_atomically
from regard.base.errors import DataError
from regard.base.extras import import_optional
from regard.base.files import parse_json

NAME = "log.jsonl"


class MetricsLog:
    """Writes the metrics of a training run to `log.jsonl` and, if `tensorboard` is True, to TensorBoard.

    folder       the folder of the run
    start        the step from which the run is resumed; lines of later steps are removed
    tensorboard  write TensorBoard events too, to the subfolder `tensorboard`
    """

    def __init__(self, folder: Path, start: int, *, tensorboard: bool = False) -> None:
        self._board: Any = _summary_writer(folder / "tensorboard", start) if tensorboard else None
        self._file: TextIO = _open_log(folder / NAME, start)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a training step."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Force all lines to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        # a write that failed has been reported by `add`
        for each in (self._file, self._board):
            with suppress(OSError):
                if each is not None:
                    each.close()


def _open_log(file: Path, start: int) -> TextIO:
    """Open the log for appending; first remove lines of steps after `start` and an unfinished line of a killed run."""
    lines = []
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        try:
            if parse_json(file, line)["step"] <= start:
                lines.append(line + "\n")
        except (DataError, KeyError, TypeError):
            break
    write_atomically(file, lambda path: path.write_text("".join(lines)))
    return file.open("a")


def _summary_writer(folder: Path, start: int) -> Any:
    tensorboard = import_optional("torch.utils.tensorboard", "tensorboard", "--tensorboard")
    return tensorboard.SummaryWriter(str(folder), purge_step=start + 1)
