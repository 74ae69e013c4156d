"""Safe loading of pickles that hold plain data: no code in the pickle is run.

Python's own `pickle` calls any function that a pickle names. This reader interprets the opcodes that build
dictionaries, lists, tuples, strings, bytes, integers, booleans, None and numpy arrays of uint8. It refuses any other
opcode, with an error that names it. A small file takes little time and memory: the number of opcodes is limited, the
keys of dictionaries are text, bytes or integers, and text that occurs several times is converted to bytes only once.
"""

import pickletools  # pickletools lists opcodes and runs none  # nosec B403
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.base.errors import DataError
from regard.base.files import describe

MAX_OPCODES = 4_000_000
# names that are allowed: those of pickled numpy arrays, in old and new versions, and of Python 2 bytes
KNOWN_FUNCTIONS = {
    **{f"numpy.{core}.multiarray._reconstruct": "array" for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": "frombuffer" for core in ("core", "_core")},
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "_codecs.encode": "encode",
}
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
MARK = object()
# errors of opcodes that do not fit the stack; where warnings are errors, an invalid escape sequence raises a Warning
DAMAGE = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, Warning)


@dataclass(frozen=True)
class NamedFunction:
    """A placeholder for a function or class that a pickle names, which is never called.

    kind  short name of the function, such as "frombuffer"
    """

    kind: str


@dataclass
class PartialArray:
    """A placeholder for a numpy array while a pickle is loaded. `values` is None until an opcode sets the values."""

    values: np.ndarray[Any, np.dtype[np.uint8]] | None = None


@dataclass
class ByteDtype:
    """A placeholder for the numpy dtype uint8. No other dtype is allowed in a pickle."""


def load_plain_pickle(where: str, data: bytes) -> Any:
    """Load a pickle without executing anything in it. Raises DataError unless it holds plain data only.

    Plain data are dictionaries, lists, tuples, strings, bytes, integers, booleans, None and uint8 arrays.

    where  name of the file in error messages
    """
    machine = _PickleMachine()
    name, position = "", 0
    try:
        for number, (opcode, argument, byte) in enumerate(pickletools.genops(data)):
            name, position = opcode.name, byte or 0
            if number > MAX_OPCODES:
                raise _RefusedOpcodeError(f"comes after {MAX_OPCODES:,} others, which are too many")
            if name == "STOP":
                return _finalize(machine.stack.pop(), {})
            machine.run(name, argument)
    except _RefusedOpcodeError as refusal:
        raise DataError(
            f"{where}: opcode {name} at byte {position} {refusal}; a pickle may hold dictionaries, lists, strings, "
            "bytes, integers and uint8 arrays only"
        ) from None
    except DAMAGE as error:
        reason = describe(error)
        raise DataError(f"{where} is damaged after opcode {name or 'none'} at byte {position}: {reason}") from None
    raise DataError(f"{where} is damaged: it ends after opcode {name} at byte {position} without STOP")


class _RefusedOpcodeError(Exception):
    """Raised for an opcode that is refused because it does not build plain data."""


class _PickleMachine:
    """An interpreter for the opcodes of a pickle, with the stack and the memo of the pickle protocol."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}
        self.encoded: dict[str, bytes] = {}

    def run(self, name: str, argument: Any) -> None:
        """Run one opcode of the pickle, with the argument that `pickletools.genops` decoded for it."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(MARK)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                stack.append(CONSTANTS[name])
            case "INT" | "BININT" | "BININT1" | "BININT2" | "LONG" | "LONG1" | "LONG4":
                stack.append(argument)
            case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                stack.append(bytes(argument))
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                stack.append(argument.encode("latin-1"))  # Python 2 strings are bytes
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memory[int(argument)] = stack[-1]
            case "MEMOIZE":
                self.memory[len(self.memory)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memory[int(argument)])
            case "APPEND":
                item = stack.pop()
                _check_type(stack[-1], list).append(item)
            case "APPENDS":
                items = self.pop_to_mark()
                _check_type(stack[-1], list).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "SETITEMS":
                items = self.pop_to_mark()
                _set_items(stack[-1], items)
            case "DICT":
                stack.append(_set_items({}, self.pop_to_mark()))
            case "LIST":
                stack.append(self.pop_to_mark())
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                if len(stack) < count:
                    raise ValueError("the stack is too short for a tuple")
                stack[-count:] = [tuple(stack[-count:])]
            case "GLOBAL":
                stack.append(_resolve_name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_resolve_name(f"{_check_type(module, str)}.{_check_type(attribute, str)}"))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self.call(function, arguments))
            case "BUILD":
                state = stack.pop()
                _build_state(stack[-1], state)
            case _:
                raise _RefusedOpcodeError("is not supported")

    def call(self, function: Any, arguments: Any) -> Any:
        """Return the result of a function that the pickle names, or a placeholder for it, without calling it.

        Only the few functions that build bytes and uint8 arrays are known. Raises _RefusedOpcodeError for any other.
        """
        kind = function.kind if isinstance(function, NamedFunction) else None
        match kind, arguments:
            case "encode", (str(text), "latin1" | "latin-1"):
                if text not in self.encoded:
                    self.encoded[text] = text.encode("latin-1")
                return self.encoded[text]
            case "dtype", ("u1" | b"u1", *_):
                return ByteDtype()
            case "dtype", (str(other), *_):
                raise _RefusedOpcodeError(f"makes an array of {other[:20]!r}")
            case "array", (NamedFunction("ndarray"), *_):
                return PartialArray()
            case "frombuffer", (bytes(buffer), ByteDtype(), tuple(shape), "C"):
                return PartialArray(_reshape_bytes(buffer, shape))
        raise _RefusedOpcodeError("calls a function that is not allowed")

    def pop_to_mark(self) -> list[Any]:
        """Pop all values above the last mark, and the mark itself; return the values."""
        index = len(self.stack) - 1
        while self.stack[index] is not MARK:
            index -= 1
            if index < 0:
                raise ValueError("there is no mark")
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items


def _resolve_name(path: str) -> NamedFunction:
    if path not in KNOWN_FUNCTIONS:
        raise _RefusedOpcodeError(f"names {path[:100]}, which could run code")
    return NamedFunction(KNOWN_FUNCTIONS[path])


def _set_items(target: Any, items: Sequence[Any]) -> Any:
    """Add items to a dictionary and return it. `items` alternates keys and values.

    Keys must be text, bytes or integers, because hashing a nested tuple could take exponential time.
    """
    for key in items[::2]:
        if not isinstance(key, str | bytes | int):
            raise ValueError(f"a key is a {type(key).__name__}, not text, bytes or an integer")
    _check_type(target, dict).update(zip(items[::2], items[1::2], strict=True))
    return target


def _build_state(target: Any, state: Any) -> None:
    match target, state:
        case ByteDtype(), tuple():
            return  # byte order and the like, which do not matter for uint8
        case PartialArray(), (int(), tuple(shape), ByteDtype(), False | 0, bytes(buffer)):
            target.values = _reshape_bytes(buffer, shape)
            return
    raise _RefusedOpcodeError("builds something other than a C-ordered uint8 array")


def _reshape_bytes(buffer: bytes, shape: tuple[Any, ...]) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    if len(shape) > 32 or any(not isinstance(size, int) or not 0 <= size < 1 << 40 for size in shape):
        raise ValueError("the shape of an array is not a few sizes")
    return np.frombuffer(buffer, dtype=np.uint8).reshape(shape)


def _check_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _finalize(value: Any, done: dict[int, Any]) -> Any:
    """Replace each `PartialArray` inside a loaded value by its numpy array.

    Raises ValueError if the values of a `PartialArray` were never set.

    done  dictionary from the id of each container that was already converted to the converted container, so that a
          container that is used twice is still one object in the result
    """
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, PartialArray):
        if value.values is None:
            raise ValueError("an array is not filled")
        return value.values
    if isinstance(value, NamedFunction | ByteDtype) or value is MARK:
        raise ValueError("it holds something that is not a value")
    if not isinstance(value, dict | list | tuple):
        return value
    if isinstance(value, dict):
        result: Any = {key: _finalize(item, done) for key, item in value.items()}
    else:
        result = type(value)(_finalize(item, done) for item in value)
    done[id(value)] = result
    return result
