"""Read files by name from a folder or a tar archive."""

import io
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from regard.base import files
from regard.base.errors import DataError
from regard.base.files import describe
from regard.data.folders import check_all_read, is_system_file, list_files
from regard.data.plain_text import read_bytes

GZIP_PREFIX = b"\x1f\x8b"
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class Archive:
    """The files of a folder or of a tar archive.

    path     the folder or the archive
    members  for each file name, the path of the file inside the folder or archive
    tar      bytes of the archive, decompressed; empty for a folder
    """

    path: Path
    members: Mapping[str, str]
    tar: bytes = b""  # decompressed; empty for a folder

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.members))

    def check_all_read(self, read: Collection[str], expected: str) -> None:
        """Raise DataError if the archive has files that were not read.

        Descriptions of the data set, such as a README, need not be read.

        read      names of the files that were read
        expected  what files were expected, for the error message
        """
        check_all_read([self.path / name for name in read], [self.path / name for name in self], expected)

    def full_path(self, name: str) -> str:
        """Return the path of a file, including the path of the archive or folder, for error messages."""
        return f"{self.path}:{self.members[name]}" if self.path.is_file() else str(self.path / self.members[name])

    def read(self, name: str) -> bytes:
        """Return the bytes of one file."""
        member = self.members[name]
        if self.path.is_dir():
            return read_bytes(self.path / member)
        try:
            with tarfile.open(fileobj=io.BytesIO(self.tar), mode="r:") as tar:
                size = tar.getmember(member).size
                file = tar.extractfile(member)
                assert file is not None  # only regular files are listed
                data = file.read(size) if size <= len(self.tar) else b""  # a sparse file can state any size
                if len(data) != size:
                    raise EOFError(f"it has {len(data)} of {size} bytes")
                return data
        except Exception as error:  # tarfile raises errors of many kinds
            raise DataError(f"{self.full_path(name)} is damaged and cannot be unpacked: {describe(error)}") from None


def open_archive(path: Path) -> Archive:
    """Open a folder or a tar archive: list the files directly in the folder, or all files of the archive."""
    data = b""
    if files.is_folder(path):
        members = [file.name for file in list_files(path)]
    else:
        data = files.read_bytes(path)
        data = files.decompress(path, data) if data.startswith(GZIP_PREFIX) else data
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                members = [member.name for member in tar if member.isfile()]
                end = tar.offset
        except Exception as error:  # tarfile raises errors of many kinds
            raise DataError(f"{path} is damaged or not an archive: {describe(error)}") from None
        # tarfile takes a damaged header for the end, which is a block of zeros
        if len(data) - end < tarfile.BLOCKSIZE or data[end:].strip(b"\0"):
            raise DataError(f"{path} is damaged or truncated at byte {end} (decompressed); download it again")
    members = [member for member in members if not any(map(is_system_file, member.removeprefix("./").split("/")))]
    names = {member.rpartition("/")[2]: member for member in members}
    if len(names) < len(members):
        raise DataError(f"{path} has files with the same name in different folders; unpack it and pass one folder")
    return Archive(path, names, data)


def is_tar(path: Path) -> bool:
    """Return whether a file has the name of a tar archive, such as .tar.gz."""
    return path.name.lower().endswith(TAR_SUFFIXES)
