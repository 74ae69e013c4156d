"""The conformance checker: find the rules that an attention or a decoder breaks, each with a small input that shows it.

Names are imported when they are used, so that the command line can read `CheckOptions` without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.conform.checker import check as check
    from regard.conform.pytest_class import conformance as conformance
    from regard.conform.report import Report as Report

__all__ = ["Report", "check", "conformance"]

_MODULES = {"Report": "report", "check": "checker", "conformance": "pytest_class"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
