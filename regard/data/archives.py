"""Bundles: a folder, a zip or a tar as files by name, read one at a time."""

import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.base.errors import DataError
from regard.data.folders import files, left_by_system
from regard.data.plain_text import read_bytes

TARS = (".tar", ".tar.gz", ".tgz")
# what systems and browsers add to the name of a copy, before its ending
COPIED = re.compile(r"( ?\((\d+|copy)\)|( -)? copy( \d+)?)*(\.bin|\.zip)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Bundle:
    """The files of one place. Names are those that stand last in their paths; `paths` says where each lies."""

    place: Path
    paths: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.paths))

    def where(self, name: str) -> str:
        """The file as errors name it."""
        return f"{self.place}:{self.paths[name]}" if self.place.is_file() else str(self.place / self.paths[name])

    def read(self, name: str) -> bytes:
        """The bytes of one file."""
        path = self.paths[name]
        if self.place.is_dir():
            return read_bytes(self.place / path)
        try:
            if is_tar(self.place):
                with tarfile.open(self.place) as tar:
                    member = tar.extractfile(path)
                    assert member is not None  # only plain files were listed
                    found = member.read()
                    if len(found) != tar.getmember(path).size:
                        raise EOFError(f"{len(found)} of {tar.getmember(path).size} bytes")
                    return found
            with zipfile.ZipFile(self.place) as archive:
                return archive.read(path)  # checks the sum of the file too
        except Exception as error:  # every way of packing raises errors of its own
            raise DataError(f"{self.where(name)} is damaged and cannot be unpacked: {error}") from None


def open_bundle(place: Path) -> Bundle:
    """The bundle at a place: the files that lie in a folder itself, or all of an archive."""
    try:
        if place.is_dir():
            paths = [file.name for file in files(place)]
        elif is_tar(place):
            with tarfile.open(place) as tar:
                paths = [member.name for member in tar if member.isfile()]
                _check_end(place, tar)
        else:
            with zipfile.ZipFile(place) as archive:
                paths = [name for name in archive.namelist() if not name.endswith("/")]
    except DataError:
        raise
    except Exception as error:  # every way of packing raises errors of its own
        raise DataError(f"{place} is damaged or no archive: {error}") from None
    paths = [path for path in paths if not any(map(left_by_system, path.removeprefix("./").split("/")))]
    named = {path.rpartition("/")[2]: path for path in paths}
    if len(named) < len(paths):
        # a class folder of images is no bundle; an archive with two files of one name is not understood
        raise DataError(f"{place} has several files of one name in different folders; unpack it and give one folder")
    return Bundle(place, named)


def _check_end(place: Path, tar: tarfile.TarFile) -> None:
    """Raise where a tar that was listed goes on otherwise than with the zeros that end it."""
    assert tar.fileobj is not None  # it was just read
    tar.fileobj.seek(tar.offset)
    after = tar.fileobj.read(-1)
    if len(after) < tarfile.BLOCKSIZE or after.strip(b"\0"):
        # the library takes a header that it cannot read for the end
        raise DataError(
            f"{place} is damaged or cut off: what can be read of it ends at byte {tar.offset} (unpacked); expected at "
            f"least {tarfile.BLOCKSIZE} zeros and nothing else from there on, but there are {len(after)} bytes"
            f"{', not all zero' if after.strip(bytes(1)) else ''}; fetch it again"
        )


def check_copies(place: Path, names: Sequence[str], what: str) -> None:
    """Raise where two of the names are one file and its copy, such as `train.bin` and `train (1).bin`."""
    known: dict[str, str] = {}
    for name in names:
        before = known.setdefault(COPIED.sub("", name, count=1), name)
        if before != name:
            raise DataError(f"{place} has {before} and {name}, which are one {what} twice; leave one of them there")


def is_tar(place: Path) -> bool:
    return place.name.lower().endswith(TARS)


def is_zip(place: Path) -> bool:
    return place.suffix.lower() == ".zip"
