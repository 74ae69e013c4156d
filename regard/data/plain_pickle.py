"""Pickles read as plain values, without running anything that they name.

A pickle is a program: whoever loads one with Python's own `pickle` runs it. This reader knows the instructions that
build dictionaries, lists, tuples, text, bytes and whole numbers, and numpy's way of writing arrays of bytes. Any other
instruction is refused by name, before it does anything.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.base.errors import DataError

# what may be named: how numpy writes an array, by its old and its new address, and how Python 2 bytes are written
KNOWN = {
    **{f"numpy.{core}.multiarray._reconstruct": "array" for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": "frombuffer" for core in ("core", "_core")},
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "_codecs.encode": "encode",
}
MARK = object()


@dataclass(frozen=True)
class Named:
    """A function that a pickle names; it is never called."""

    kind: str


@dataclass
class Array:
    """An array on its way: numpy makes it empty first and fills it by a later instruction."""

    values: np.ndarray[Any, np.dtype[np.uint8]] | None = None


@dataclass
class Dtype:
    """The type of an array; only bytes are read."""


def plain_pickle(where: str, data: bytes) -> Any:
    """The value in a pickle, or an error that names the instruction which is not read; `where` names the file."""
    stack: list[Any] = []
    memory: dict[int, Any] = {}
    name, position = "", 0
    try:
        for opcode, argument, place in pickletools.genops(data):
            name, position = opcode.name, place or 0
            if name == "STOP":
                return _finished(stack.pop(), {})
            _do(name, argument, stack, memory)
    except _Refused as refusal:
        raise DataError(
            f"{where}: opcode {name} at byte {position} {refusal}; only plain dictionaries, lists, text, bytes, whole "
            "numbers and uint8 arrays are read from a pickle"
        ) from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{where} is damaged after opcode {name or 'none'} at byte {position}: {error}") from None
    raise DataError(f"{where} is damaged: it ends after opcode {name} at byte {position} without STOP")


class _Refused(Exception):  # noqa: N818 (never leaves this file)
    """What an instruction asks for is not plain data."""


def _do(name: str, argument: Any, stack: list[Any], memory: dict[int, Any]) -> None:
    """One instruction."""
    match name:
        case "PROTO" | "FRAME":
            pass
        case "MARK":
            stack.append(MARK)
        case "EMPTY_DICT":
            stack.append({})
        case "EMPTY_LIST":
            stack.append([])
        case "EMPTY_TUPLE":
            stack.append(())
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        case "INT" | "BININT" | "BININT1" | "BININT2" | "LONG" | "LONG1" | "LONG4":
            stack.append(argument)
        case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
            stack.append(argument)
        case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
            stack.append(bytes(argument))
        case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
            stack.append(argument.encode("latin-1"))  # the text of Python 2 is bytes
        case "PUT" | "BINPUT" | "LONG_BINPUT":
            memory[int(argument)] = stack[-1]
        case "MEMOIZE":
            memory[len(memory)] = stack[-1]
        case "GET" | "BINGET" | "LONG_BINGET":
            stack.append(memory[int(argument)])
        case "APPEND":
            item = stack.pop()
            _of(stack[-1], list).append(item)
        case "APPENDS":
            items = _marked(stack)
            _of(stack[-1], list).extend(items)
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            _of(stack[-1], dict)[key] = value
        case "SETITEMS":
            items = _marked(stack)
            _of(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        case "DICT":
            items = _marked(stack)
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        case "LIST":
            stack.append(_marked(stack))
        case "TUPLE":
            stack.append(tuple(_marked(stack)))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            count = int(name[-1])
            if len(stack) < count:
                raise ValueError("nothing to take a tuple from")
            stack[-count:] = [tuple(stack[-count:])]
        case "GLOBAL":
            stack.append(_named(argument.replace(" ", ".")))
        case "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(f"{module}.{attribute}"))
        case "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_made(function, arguments))
        case "BUILD":
            state = stack.pop()
            _fill(stack[-1], state)
        case _:
            raise _Refused("is not read")


def _named(path: str) -> Named:
    if path not in KNOWN:
        raise _Refused(f"names {path}, which could run code")
    return Named(KNOWN[path])


def _made(function: Any, arguments: Any) -> Any:
    """What a call of one of the few known functions would give, made here."""
    kind = function.kind if isinstance(function, Named) else None
    match kind, arguments:
        case "encode", (str(text), "latin1" | "latin-1"):
            return text.encode("latin-1")
        case "dtype", ("u1" | b"u1", *_):
            return Dtype()
        case "dtype", (kind_of_number, *_):
            raise _Refused(f"makes an array of {kind_of_number!r}")
        case "array", (Named("ndarray"), *_):
            return Array()
        case "frombuffer", (bytes(buffer), Dtype(), tuple(shape), "C"):
            return Array(_shaped(buffer, shape))
    raise _Refused("calls something that is no array of bytes")


def _fill(made: Any, state: Any) -> None:
    match made, state:
        case Dtype(), tuple():
            return  # byte order and the like, which single bytes do not have
        case Array(), (int(), tuple(shape), Dtype(), False | 0, bytes(buffer)):
            made.values = _shaped(buffer, shape)
            return
    raise _Refused("fills something that is no array of bytes in rows")


def _shaped(buffer: bytes, shape: tuple[Any, ...]) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"an array cannot have the shape {shape}")
    return np.frombuffer(buffer, dtype=np.uint8).reshape(shape)


def _marked(stack: list[Any]) -> list[Any]:
    """What was put on the stack since the last mark, taken off with it."""
    place = len(stack) - 1
    while stack[place] is not MARK:
        place -= 1
        if place < 0:
            raise ValueError("no mark was set")
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _finished(value: Any, done: dict[int, Any]) -> Any:
    """The value with its arrays in place of what held them; `done` are parts met before, which stay shared."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Array):
        if value.values is None:
            raise ValueError("an array was never filled")
        return value.values
    if isinstance(value, Named | Dtype) or value is MARK:
        raise ValueError("it holds something that is no value")
    if not isinstance(value, dict | list | tuple):
        return value
    if isinstance(value, dict):
        made: Any = {_finished(key, done): _finished(item, done) for key, item in value.items()}
    else:
        made = type(value)(_finished(item, done) for item in value)
    done[id(value)] = made
    return made
