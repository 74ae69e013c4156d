"""Help for importing libraries that import torchvision."""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

_kept: list[torch.library.Library] = []


def let_torchvision_load() -> None:
    """timm and transformers import torchvision, whose compiled operators are not built for every torch.

    Where they are, nothing is done. Where they are not, importing it needs no more of them than their names.
    """
    found = find_spec("torchvision")
    if found is None or found.origin is None or _kept or _loads():
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    names = {first or second for first, second in re.findall(r'"torchvision::(\w+)"|register_meta\("(\w+)"', text)}
    library = torch.library.Library("torchvision", "FRAGMENT")
    _kept.append(library)
    for name in sorted(names):
        library.define(f"{name}(Tensor x) -> Tensor")


def _loads() -> bool:
    try:
        import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        return False
    return True
