"""Make torchvision importable if its compiled operators were built for another version of torch."""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

_libraries: list[torch.library.Library] = []  # a library's operators exist as long as the object does


def let_torchvision_load() -> None:
    """Register the names of torchvision's operators without code, so that `import torchvision` works.

    timm and transformers import torchvision, which may not be built for the installed version of torch. Call this
    function before importing them. It does nothing if torchvision is missing or can be imported.
    """
    found = find_spec("torchvision")
    if found is None or found.origin is None or _libraries or can_import():
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    names = {first or second for first, second in re.findall(r'"torchvision::(\w+)"|register_meta\("(\w+)"', text)}
    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for name in sorted(names):
        library.define(f"{name}(Tensor x) -> Tensor")


def can_import() -> bool:
    """Return whether `import torchvision` works. It fails if torchvision was built for another version of torch."""
    try:
        import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        return False
    return True
