"""Measure how much disk space regard adds to an installation of torch and numpy: `python -m tools.installed_size`.

The size is that of all packages that regard needs at run time, except packages that torch and numpy need too. Byte code
is not counted. The packages of the current environment are measured.
"""

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import regard


def closure(*names: str) -> set[str]:
    """Return the normalised names of these packages and of all packages that they require, without extras."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        needs = map(Requirement, metadata.requires(name) or [])
        # without extras, and without what another platform or version of Python needs
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def added_packages() -> set[str]:
    """Return the names of regard and of all packages that regard requires but torch and numpy do not."""
    return closure("regard") - closure("torch", "numpy")


def installed_bytes(name: str) -> int:
    """Return the size of a package's installed files in bytes, without byte code."""
    if name == "regard":  # an editable installation lists no files
        files = list(Path(regard.__file__).parent.rglob("*"))
    else:
        files = [Path(str(file.locate())) for file in metadata.files(name) or []]
    return sum(file.stat().st_size for file in files if file.suffix != ".pyc" and file.is_file())


def main() -> None:
    """Print the size of each package that regard adds, the largest first, and the total."""
    sizes = {name: installed_bytes(name) for name in added_packages()}
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        print(f"{sizes[name] / 1e6:8.1f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:8.1f} MB  ({total / 2**20:.1f} MiB) together")


if __name__ == "__main__":
    main()
