"""The tensors of a state as a folder to which every process adds its pieces, in safetensors.

torch.distributed.checkpoint says which piece lies in which file, so a folder written by some processes is read by
any other number of them, and by one.
"""

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from regard.base.errors import CheckpointError
from regard.train.checkpoint import UNFINISHED
from regard.train.process_group import Processes, local_shard


def write(folder: Path, tensors: dict[str, Tensor], world: Processes) -> dict[str, str]:
    """Write the pieces of all processes beside the folder and rename them when they are whole; checksums by name."""
    beside = folder.with_name(UNFINISHED + folder.name)
    world.shared(lambda: _cleared(beside))
    writer = HuggingFaceStorageWriter(str(beside), save_distributed=True)
    try:
        with _alone_or_not():
            save(_apart(tensors), storage_writer=writer, no_dist=world.size == 1)
    except CheckpointException as error:  # it is no Exception, and holds one for each process
        if world.leads:
            _cleared(beside)  # room for whoever has to make some
        raise _first(error) from error
    files = world.shared(lambda: sorted(each.name for each in beside.iterdir()))
    mine = world.gathered(lambda: {name: _synced_digest(beside / name) for name in files[world.rank :: world.size]})
    world.shared(lambda: _renamed(beside, folder))
    return {f"{folder.name}/{name}": digest for each in mine for name, digest in each.items()}


def read(folder: Path, like: Callable[[str], Tensor | None], world: Processes) -> dict[str, Tensor]:
    """The tensors of a folder; of those that are cut like a tensor of this run, this process's pieces alone."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        there = reader.read_metadata().state_dict_metadata
        tensors = {
            name: world.hollow(about.size, about.properties.dtype, like(name))
            for name, about in there.items()
            if isinstance(about, TensorStorageMetadata)
        }
        with _alone_or_not():
            load(tensors, storage_reader=reader, no_dist=world.size == 1)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {_first(error)}") from None
    return tensors


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with copies of those that share their memory, as tied weights do: safetensors has none such."""
    apart, seen = {}, set[int]()
    for name, tensor in tensors.items():
        memory = local_shard(tensor).untyped_storage().data_ptr()
        apart[name] = (tensor.clone() if memory in seen else tensor).detach().contiguous()
        seen.add(memory)
    return apart


@contextmanager
def _alone_or_not() -> Iterator[None]:
    """One process is as good as several, and no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _first(error: CheckpointException) -> OSError:
    """What went wrong in the first process in which something did."""
    failure = next(iter(error.failures.values()))[0]
    return failure if isinstance(failure, OSError) else OSError(f"{type(failure).__name__}: {failure}")


def _cleared(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _synced_digest(file: Path) -> str:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _renamed(beside: Path, folder: Path) -> None:
    folder.with_suffix(".json").unlink(missing_ok=True)  # a damaged state of the same step, and what was left of it
    if folder.is_dir():
        shutil.rmtree(folder)
    beside.rename(folder)
