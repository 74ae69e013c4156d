"""Archives: the files of a folder or of a tar, by name."""

import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from regard.base.errors import DataError
from regard.data.folders import check_all_read, is_system_file, list_files
from regard.data.plain_text import read_bytes

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class Archive:
    """The files of a folder or a tar; `members` maps file names to paths inside it."""

    path: Path
    members: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.members))

    def check_all_read(self, read: Collection[str], expected: str) -> None:
        """Raise if a file is neither read nor a description of the data set."""
        check_all_read([self.path / name for name in read], [self.path / name for name in self], expected)

    def full_path(self, name: str) -> str:
        """The path of a file, for errors."""
        return f"{self.path}:{self.members[name]}" if self.path.is_file() else str(self.path / self.members[name])

    def read(self, name: str) -> bytes:
        """Read one file."""
        member = self.members[name]
        if self.path.is_dir():
            return read_bytes(self.path / member)
        try:
            with tarfile.open(self.path) as tar:
                file = tar.extractfile(member)
                assert file is not None  # only regular files are listed
                data = file.read()
                if len(data) != tar.getmember(member).size:
                    raise EOFError(f"{len(data)} of {tar.getmember(member).size} bytes")
                return data
        except Exception as error:  # each compression method raises errors of its own
            raise DataError(f"{self.full_path(name)} is damaged and cannot be unpacked: {error}") from None


def open_archive(path: Path) -> Archive:
    """List the files directly in a folder, or all files of a tar."""
    if path.is_dir():
        members = [file.name for file in list_files(path)]
    else:
        try:
            with tarfile.open(path) as tar:
                members = [member.name for member in tar if member.isfile()]
                _check_tar_end(path, tar)
        except DataError:
            raise
        except Exception as error:  # each compression method raises errors of its own
            raise DataError(f"{path} is damaged or not an archive: {error}") from None
    members = [member for member in members if not any(map(is_system_file, member.removeprefix("./").split("/")))]
    names = {member.rpartition("/")[2]: member for member in members}
    if len(names) < len(members):
        raise DataError(f"{path} has files with the same name in different folders; unpack it and pass one folder")
    return Archive(path, names)


def _check_tar_end(path: Path, tar: tarfile.TarFile) -> None:
    """Raise if the end of a listed tar is not a block of zeros: tarfile takes a damaged header for the end."""
    assert tar.fileobj is not None  # it was just read
    tar.fileobj.seek(tar.offset)
    rest = tar.fileobj.read(-1)
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise DataError(f"{path} is damaged or truncated at byte {tar.offset} (decompressed); download it again")


def is_tar(path: Path) -> bool:
    """Whether a file is named like a tar."""
    return path.name.lower().endswith(TAR_SUFFIXES)
