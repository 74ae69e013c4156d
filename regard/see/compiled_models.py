"""Compiled code, in which nothing can be heard: told each time it is called, so that it never runs in silence.

What torch.compile makes asks at every call by which stance it is to run. While watching, that question is overheard and
passed on, so compiled code goes on running compiled; the watcher steps aside until it has run, since a compiler would
compile again with the watcher in it, or fail at it. TorchScript modules are overheard where they are called.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch

Tell = Callable[[object, str], None]  # is handed what was called, and how it runs
Aside = Callable[[], Callable[[], None]]  # gives the way back
ASKING = "torch._dynamo.eval_frame"
QUESTION = "_callback_from_stance"
UNCOMPILED = "_flex_attention_hop_wrapper"  # what flex_attention runs when it is called uncompiled: it is heard
MASKS = ("create_block_mask", "create_mask")  # no attention


@contextmanager
def listening(tell: Tell, aside: Aside) -> Iterator[None]:
    """Tell of each call of compiled code, from those of this moment on, and step aside while it runs."""
    with ExitStack() as stack:
        stack.enter_context(_replaced(torch.jit.ScriptModule, "__call__", lambda call: _scripted(call, tell)))
        if ASKING in sys.modules:
            stack.enter_context(_overhearing(tell, aside))
        else:  # nothing is compiled so far, and to load the compiler only to look would take a second
            stack.enter_context(_replaced(torch, "compile", lambda call: _first(call, stack, tell, aside)))
        yield


@contextmanager
def _overhearing(tell: Tell, aside: Aside) -> Iterator[None]:
    asking = sys.modules[ASKING]
    if not hasattr(asking, QUESTION):
        yield  # another version of torch, where this cannot be heard
        return

    def answer(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def stance(callback: Any) -> Any:
            found = original(callback)
            if callable(callback) and found is not None:  # None is to run as it is written
                _before(_asker(), tell, aside)
            return found

        return stance

    with _replaced(asking, QUESTION, answer):
        yield


def _before(asker: dict[str, Any], tell: Tell, aside: Aside) -> None:
    """Compiled code is about to run."""
    called = asker.get("fn")
    called = inspect.unwrap(called) if callable(called) else called
    name = getattr(called, "__name__", "")
    if name == UNCOMPILED:
        return
    if name not in MASKS:
        tell(called, "compiled")
    if isinstance(after := asker.get("cleanups"), list):  # what the wrapper does when the code has run or failed
        after.insert(0, aside())


def _asker() -> dict[str, Any]:
    """The names of the wrapper that asked: it may be asking through several watchers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _first(compile_: Callable[..., Any], stack: ExitStack, tell: Tell, aside: Aside) -> Callable[..., Any]:
    """torch.compile, which loads the compiler: after its first call there is something to overhear."""
    waiting = True

    @wraps(compile_)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        nonlocal waiting
        compiled = compile_(*args, **kwargs)
        if waiting and ASKING in sys.modules:
            waiting = False
            stack.enter_context(_overhearing(tell, aside))
        return compiled

    return compiling


def _scripted(call: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    @wraps(call)
    def heard(module: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
        tell(module, "as TorchScript")
        return call(module, *args, **kwargs)

    return heard


@contextmanager
def _replaced(owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have what `made` makes of an attribute in its place."""
    own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, made(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:  # it is inherited
            delattr(owner, name)
