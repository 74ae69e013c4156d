"""Sharded checkpoints: a folder of safetensors files to which every process writes its shards.

torch.distributed.checkpoint records which shard is in which file, so a checkpoint can be resumed on a different number
of processes, also on a single process.
"""

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

from regard.base.atomic_write import UNFINISHED
from regard.base.errors import CheckpointError
from regard.base.files import file_digest
from regard.train.process_group import ProcessGroup, local_shard


def save_sharded(folder: Path, tensors: dict[str, Tensor], group: ProcessGroup) -> dict[str, str]:
    """Write a sharded checkpoint to a folder of safetensors files. Returns the checksum of each file, by name.

    Each process writes its shards to a temporary folder, which is then renamed.
    """
    temporary = folder.with_name(UNFINISHED + folder.name)
    group.run_on_main(lambda: _create_empty(temporary))
    writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
    try:
        with _without_single_process_warning():
            save(_copy_shared(tensors), storage_writer=writer, no_dist=group.world_size == 1)
    except CheckpointException as error:  # not a subclass of Exception; holds the errors of all processes
        if group.is_main:
            _create_empty(temporary)  # free the disk space
        raise _first_failure(error) from error
    files = group.run_on_main(lambda: sorted(each.name for each in temporary.iterdir()))
    own = files[group.rank :: group.world_size]
    digests = group.all_gather(lambda: {name: _sync_and_digest(temporary / name) for name in own})
    group.run_on_main(lambda: _replace_folder(temporary, folder))
    return {f"{folder.name}/{name}": digest for each in digests for name, digest in each.items()}


def load_sharded(folder: Path, like: Callable[[str], Tensor | None], group: ProcessGroup) -> dict[str, Tensor]:
    """Load the tensors of a sharded checkpoint, each sharded like the tensor that `like(name)` returns.

    If `like(name)` is None, the tensor is loaded unsharded.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        metadata = reader.read_metadata().state_dict_metadata
        tensors = {
            name: group.empty_like(about.size, about.properties.dtype, like(name))
            for name, about in metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }
        with _without_single_process_warning():
            load(tensors, storage_reader=reader, no_dist=group.world_size == 1)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {_first_failure(error)}") from None
    return tensors


def _copy_shared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with a copy of each tensor that shares memory with an earlier one, such as tied weights.

    safetensors cannot store tensors that share memory.
    """
    separate, seen = {}, set[int]()
    for name, tensor in tensors.items():
        memory = local_shard(tensor).untyped_storage().data_ptr()
        separate[name] = (tensor.clone() if memory in seen else tensor).detach().contiguous()
        seen.add(memory)
    return separate


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _first_failure(error: CheckpointException) -> OSError:
    """Return the error of the first process that failed, as an OSError."""
    failure = next(iter(error.failures.values()))[0]
    return failure if isinstance(failure, OSError) else OSError(f"{type(failure).__name__}: {failure}")


def _create_empty(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _sync_and_digest(file: Path) -> str:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return file_digest(file)


def _replace_folder(temporary: Path, folder: Path) -> None:
    folder.with_suffix(".json").unlink(missing_ok=True)  # the file of a damaged checkpoint of the same step
    if folder.is_dir():
        shutil.rmtree(folder)
    temporary.rename(folder)
