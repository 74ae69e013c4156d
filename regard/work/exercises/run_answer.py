"""Call a student's function or module on the inputs of a check.

As a script this file is the process in which a submission runs. The script reads requests from one file descriptor
and writes replies to another, one JSON line each. It imports nothing from this package, so that a submission finds
neither solutions nor checks in its process.
"""

import ast
import base64
import contextlib
import copy
import importlib
import json
import os
import struct
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CELL = "cell "  # the file name of a notebook cell in a traceback, followed by its number
FORBIDDEN = "regard.work"
# audit events of Python that start, signal or limit processes, load native code, open connections or find objects
FORBIDDEN_EVENTS = ("subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.kill", "ctypes.", "socket.",
                    "pty.", "gc.", "resource.")  # fmt: skip
FILE_EVENTS = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
               "os.truncate", "shutil.", "sqlite3.connect")  # fmt: skip
# Landlock, which restricts a process in the kernel of Linux: its system calls, and the bits of its rights
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, NO_NEW_PRIVILEGES = 444, 445, 446, 38
WRITE_FILE, READ_FILE, TRUNCATE = 1 << 1, 1 << 2, 1 << 14
CHANGE_FOLDER = sum(1 << bit for bit in range(4, 14))  # remove, make and move its entries


@dataclass(frozen=True)
class RaisedError:
    """An exception raised by a student's code: its type, its message, and the line in the student's file."""

    kind: str
    location: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}{self.location}: {self.message}" if self.message else f"{self.kind}{self.location}"


@dataclass(frozen=True)
class TorchModule:
    """A torch.nn module to be passed to the constructor of a student's class, given by its name and settings."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NextTokenTable:
    """A language model given by a table of next-token probabilities after the last one or two tokens.

    table  probabilities, with one axis per earlier token and the next token on the last axis
    """

    table: np.ndarray

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        known = list(tokens[-(self.table.ndim - 1) :])
        row: np.ndarray = self.table[(*[0] * (self.table.ndim - 1 - len(known)), *known)]
        return row


@dataclass(frozen=True)
class OtherValue:
    """A result of a type that no check expects, described by its repr."""

    text: str

    def __repr__(self) -> str:
        return self.text


def perform(answer: Any, request: tuple[Any, ...]) -> Any:
    """Call a student's function, or build or run a student's module; return the result, or a RaisedError.

    request  one of:

    ("call", arguments)                     call the function; returns its result
    ("build", arguments)                    build the module; returns the shapes of its state dict, and the
                                            names of its trainable parameters
    ("run", arguments, weights, inputs)     run the module with these weights; returns its output, and the names
                                            of the parameters that have a gradient
    """
    kind, arguments, *rest = copy.deepcopy(request)
    try:
        with np.errstate(all="ignore"):
            if kind == "call":
                return answer(*arguments) if callable(answer) else RaisedError("NotCallable", "", shorten(answer))
            import torch

            if not (isinstance(answer, type) and issubclass(answer, torch.nn.Module)):
                return RaisedError("NotAModule", "", shorten(answer))
            built = [
                getattr(torch.nn, each.name)(**each.settings) if isinstance(each, TorchModule) else each
                for each in arguments
            ]
            with torch.random.fork_rng(devices=[]):
                module = answer(*built).double().eval()
            if kind == "build":
                shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
                return shapes, [name for name, each in module.named_parameters() if each.requires_grad]
            return _run_module(module, *rest)
    except (Exception, SystemExit) as error:  # whatever a student's code raises is reported
        code = getattr(answer, "__code__", None) or getattr(getattr(answer, "forward", None), "__code__", None)
        return describe_error(error, [] if code is None else [code.co_filename])


def _run_module(module: Any, weights: dict[str, Any], inputs: tuple[Any, ...]) -> Any:
    module.load_state_dict(weights)
    output = module(*inputs)
    if not getattr(output, "requires_grad", False):
        return output, []
    output.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    # the gradient of a parameter without effect, such as the bias of the keys, is a rounding error
    reached = [name for name, grad in gradients.items() if grad is not None and float(grad.abs().max()) > 1e-9]
    return output.detach(), reached


def describe_error(error: BaseException, files: Iterable[str]) -> RaisedError:
    """Describe an exception, with the innermost line of its traceback that is in the student's files or notebook."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        lines, message = [(error.filename or "", error.lineno)], error.msg
    own = [(file, line) for file, line in lines if file in files or file.startswith(CELL)]
    if not own:
        return RaisedError(type(error).__name__, "", message)
    file, line = own[-1]
    return RaisedError(type(error).__name__, f" in line {line}{f' of {file}' * file.startswith(CELL)}", message)


def shorten(value: Any) -> str:
    """Return the repr of a value, shortened to 120 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


DATACLASSES = {each.__name__: each for each in (RaisedError, TorchModule, NextTokenTable)}


def encode(value: Any) -> Any:
    """Convert arguments or results to JSON values: numbers, strings, arrays, tensors and containers of them.

    JSON is used instead of pickle so that data from a submission cannot run code in the grading process.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": data, "dtype": str(value.dtype), "shape": list(value.shape)}
    if type(value).__name__ in DATACLASSES:
        return {type(value).__name__: {name: encode(each) for name, each in vars(value).items()}}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return {"tensor": encode(value.detach().numpy())}
    return {"other": shorten(value)}


def decode(value: Any) -> Any:
    """Convert JSON values back to the values that `encode` was given; a value of an unknown type is an OtherValue."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.frombuffer(base64.b64decode(value["array"]), value["dtype"]).reshape(value["shape"]).copy()
    if "tensor" in value:
        import torch

        return torch.from_numpy(decode(value["tensor"]))
    ((name, inside),) = value.items()
    if name == "tuple":
        return tuple(decode(inside))
    if name == "dict":
        return {decode(key): decode(each) for key, each in inside}
    if name == "other":
        return OtherValue(inside)
    return DATACLASSES[name](**{key: decode(each) for key, each in inside.items()})


def execute(sources: list[tuple[str, str]]) -> tuple[types.ModuleType, list[RaisedError]]:
    """Run source files statement by statement, continuing after errors.

    Returns the module that the statements define, and the errors.

    sources  pairs of file name and source code
    """
    module = types.ModuleType("student")
    sys.modules["student"] = module  # dataclasses and pickle look their module up there
    errors = []
    files = [file for file, _ in sources]
    for file, source in sources:
        try:
            statements = ast.parse(source, file).body
        except (SyntaxError, ValueError) as error:
            errors.append(describe_error(error, files))
            continue
        for statement in statements:
            try:
                # this runs in a separate process
                exec(compile(ast.Module([statement], []), file, "exec"), vars(module))  # nosec B102
            except (Exception, SystemExit) as error:
                errors.append(describe_error(error, files))
    return module, errors


def import_libraries(sources: list[tuple[str, str]]) -> None:
    """Import the libraries that the sources use. Some need operations on import that `restrict` forbids afterwards.

    sources  pairs of file name and source code
    """
    for _, source in sources:
        with contextlib.suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(source)):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                for name in names:
                    with contextlib.suppress(Exception):
                        if name and not name.startswith(FORBIDDEN):
                            importlib.import_module(name)


def forbid_imports() -> None:
    """Install an audit hook that forbids importing `regard.work`, also indirectly, and starting processes."""

    # all that a hook uses is in its defaults: closures, globals and builtins can be replaced by a submission
    def hook(event: str, args: tuple[Any, ...], *, package: str = FORBIDDEN, within: str = f"{FORBIDDEN}.") -> None:
        if event != "import":
            return
        name = "".join(args[:1])  # of a subclass of str, whose methods may lie, an ordinary copy
        if name == package or name.startswith(within):
            raise ImportError(f"{package} cannot be imported while answers are graded")
        if name == "_posixsubprocess":
            raise ImportError("processes cannot be started while answers are graded")

    for name in ("_posixsubprocess", "subprocess"):
        importlib.import_module(name)
    sys.addaudithook(hook)


def restrict(hidden: list[str], readable: list[str], megabytes: int) -> bool:
    """Restrict what this process can do, before it runs a submission.

    Limits memory and file size. Forbids starting processes, native calls, network connections, reading hidden files,
    and writing outside the folder of the process. Audit hooks of Python enforce this for Python code. Landlock enforces
    the restrictions on files and network for native code too, on Linux kernels that have it. Returns whether Landlock
    is used.

    hidden     folders that the process is forbidden to read
    readable   folders inside hidden ones that the process can read
    megabytes  memory limit
    """
    import resource

    secret_folders = [Path(each) for each in hidden]
    shown_folders = [each for each in map(Path, readable) if any(_is_inside(each, other) for other in secret_folders)]
    enforced = lock_files(secret_folders, [*shown_folders, Path(__file__)])
    status = Path("/proc/self/status")
    used = int(status.read_text().partition("VmData:")[2].split()[0]) * 1024 if status.exists() else 0
    with contextlib.suppress(ValueError):  # macOS refuses the limit
        resource.setrlimit(resource.RLIMIT_DATA, (used + megabytes * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 2**20,) * 2)

    def refuse(*args: object, **keywords: object) -> None:
        raise PermissionError("processes cannot be started while answers are graded")

    # these functions start a process without an audit event
    sys.modules["_posixsubprocess"].fork_exec = sys.modules["subprocess"]._fork_exec = refuse  # type: ignore[attr-defined]
    # the target of a link in a shown folder is not shown
    shown = {each for folder in shown_folders for each in _identify_all(folder, follow_links=False)}
    secret = {each for folder in secret_folders for each in _identify_all(folder)} - shown
    # files are known by their inodes, because a submission can replace the functions that resolve paths
    forbid_files(
        frozenset(secret - {_identify(Path(__file__))}),  # this file stays readable: it is read to describe an error
        _identify(Path.cwd()),
        Path("/proc").stat().st_dev if status.exists() else None,
    )
    return enforced


def _is_inside(path: Path, folder: Path) -> bool:
    return folder == path or folder in path.parents


def landlock_version() -> int:
    """Return the version of Landlock, the part of the Linux kernel that restricts a process; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, _system_call(CREATE_RULESET, None, 0, 1))


def _system_call(number: int, *arguments: Any) -> int:
    import ctypes

    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    values = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    result: int = call(ctypes.c_long(number), *values)
    return result


def _set_no_new_privileges() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))


def lock_files(hidden: list[Path], readable: list[Path]) -> bool:
    """Use Landlock to forbid reading hidden files and writing outside the current folder, also by native code.

    TCP connections and signals to other processes are forbidden too, if the kernel supports this. The process cannot
    lift these restrictions. Returns False if the system has no Landlock.

    hidden    folders that may not be read
    readable  files and folders inside hidden ones that may be read
    """
    version = landlock_version()
    if version == 0:
        return False
    handled = (WRITE_FILE | READ_FILE | CHANGE_FOLDER | TRUNCATE) & ((1 << {1: 13, 2: 14}.get(version, 15)) - 1)
    everything = 0b11  # of the network: bind, connect; of other processes: abstract sockets, signals
    attributes = struct.pack("=QQQ", handled, everything * (version >= 4), everything * (version >= 6))
    rules = _system_call(CREATE_RULESET, attributes, len(attributes), 0)

    def allow(path: Path | str, rights: int) -> None:
        try:
            opened = os.open(path, os.O_PATH)
        except OSError:  # it may not be opened at all
            return
        rights &= handled if Path(path).is_dir() else handled & ~CHANGE_FOLDER
        _system_call(ADD_RULE, rules, 1, struct.pack("=Qi", rights, opened), 0)
        os.close(opened)

    def allow_reading(path: Path) -> None:
        """Allow reading everything in a folder except the hidden folders in it. Symbolic links are not followed."""
        if path in hidden:
            return
        if not any(path in folder.parents for folder in hidden):
            allow(path, READ_FILE)
            return
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                if not entry.is_symlink():
                    allow_reading(path / entry.name)

    # below a folder that cannot be listed, the folders of Python are known all the same
    for root in {Path(each).resolve() for each in ("/", *sys.path, sys.prefix, sys.base_prefix)}:
        allow_reading(root)
    for path in readable:
        allow(path, READ_FILE)
    allow(Path.cwd(), handled)
    allow(os.devnull, WRITE_FILE)
    _set_no_new_privileges()
    if _system_call(RESTRICT_SELF, rules, 0) != 0:
        raise OSError("Landlock refuses to restrict the process")
    os.close(rules)
    return True


def _identify_all(folder: Path, follow_links: bool = True) -> Iterator[tuple[int, int]]:
    """Yield the device and inode numbers of a folder and all files in it, except for links to missing files.

    follow_links  whether to yield the numbers of a link's target instead of those of the link itself
    """
    yield _identify(folder)
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield _identify(path, follow_links)


def _identify(path: Path, follow_links: bool = True) -> tuple[int, int]:
    found = path.stat(follow_symlinks=follow_links)
    return found.st_dev, found.st_ino


def forbid_files(secret: frozenset[tuple[int, int]], folder: tuple[int, int], proc: int | None) -> None:
    """Install an audit hook that forbids reading secret files, and writing or changing files outside the folder.

    The hook also forbids starting processes, loading native code, opening connections, and the other audit events in
    FORBIDDEN_EVENTS.

    secret  device and inode numbers of the secret files
    folder  device and inode number of the folder
    proc    device number of /proc, which shows the memory of other processes; None if there is no /proc
    """

    def hook(
        event: str,
        args: tuple[Any, ...],
        *,
        secret: frozenset[tuple[int, int]] = secret,
        folder: tuple[int, int] = folder,
        proc: int | None = proc,
        stat: Any = os.stat,
        is_instance: Any = isinstance,
        texts: Any = (str, bytes),
        text: Any = str,
        missing: Any = OSError,
        refusal: Any = PermissionError,
        writing: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT,
        forbidden_events: tuple[str, ...] = FORBIDDEN_EVENTS,
        file_events: tuple[str, ...] = FILE_EVENTS,
    ) -> None:
        # memory that is shared, not private, has no limit
        if event.startswith(forbidden_events) or (event == "mmap.__new__" and args[0] == -1):
            raise refusal(f"{event} is not allowed while answers are graded")
        opens = event == "open"
        if not opens and not event.startswith(file_events):
            return
        path: Any
        for path in args[:1] if opens else args:
            if not is_instance(path, texts):
                continue
            # methods of a subclass may lie: an ordinary copy is tested
            path = "".join([path]) if is_instance(path, text) else b"".join([path])
            if path in ("/dev/null", b"/dev/null"):
                continue
            try:
                found = stat(path)
                is_folder = found.st_mode & 0o170000 == 0o040000
            except missing:
                found, is_folder = None, False
            if opens and found is not None and ((found.st_dev, found.st_ino) in secret or found.st_dev == proc):
                raise refusal(f"{path!r} cannot be read while answers are graded")
            # an open folder is a way around this test: os.open(..., dir_fd=...)
            if opens and not is_folder and not args[2] & writing:
                continue
            slash, up = ("/", "..") if is_instance(path, text) else (b"/", b"..")
            above: Any = path if is_folder else path.rpartition(slash)[0] or (slash if path[:1] == slash else up[:1])
            last = None
            while True:
                try:
                    found = stat(above)
                except missing:
                    found = None
                if found is None or (found.st_dev, found.st_ino) == last:
                    raise refusal(f"{path!r} cannot be written while answers are graded")
                last = found.st_dev, found.st_ino
                if last == folder:
                    break
                above = above + slash + up

    sys.addaudithook(hook)


def main(requests: int, replies: int) -> None:
    """Run a submission in this process, then answer the requests of the grading process until it ends.

    requests, replies  file descriptors of the pipes to read requests from and to write replies to
    """
    with os.fdopen(requests, encoding="utf-8") as lines, os.fdopen(replies, "w", encoding="utf-8") as out:

        def reply(value: Any) -> None:
            out.write(json.dumps(value) + "\n")
            out.flush()

        start = json.loads(lines.readline())
        sources = [(file, source) for file, source in start["sources"]]
        forbid_imports()
        import_libraries(sources)
        sys.path[:0] = start["readable"]
        restrict(start["hidden"], start["readable"], start["megabytes"])
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # errors until here are of the grading, later ones of the submission
        reply({"ready": True})
        module, errors = execute(sources)
        reply({"names": list(vars(module)), "errors": [asdict(each) for each in errors]})
        for line in lines:
            name, request = json.loads(line)
            reply(encode(perform(vars(module).get(name), decode(request))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
