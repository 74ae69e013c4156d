"""`regard check`: which rules an attention or a decoder breaks."""

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from regard.base.errors import ConfigError
from regard.cli.output import show, show_json, tell

if TYPE_CHECKING:
    from regard.conform.fact import Fact
    from regard.conform.report import Report


def _parameter(each: "Field[Any]") -> inspect.Parameter:
    """The command-line option of one field of CheckOptions."""
    flag, choices = f"--{each.name.replace('_', '-')}", each.metadata["choices"]
    text = f"{' or '.join(choices)}: {each.metadata['help']}" if choices else each.metadata["help"]
    kind, default = each.type, each.default
    if each.name in ("only", "without"):
        kind, default = list[str] | None, None
    if kind is bool:
        option = typer.Option(flag, help=text)
    elif kind == bool | None:
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=text)
    else:
        option = typer.Option(help=text)
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_check_options(run: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for every field of CheckOptions but `extra`, which takes Python values."""
    from regard.conform.options import CheckOptions

    own = list(inspect.signature(run).parameters.values())
    derived = [_parameter(each) for each in fields(CheckOptions) if each.name != "extra"]
    parameters = [own[0], *derived, *(each for each in own[1:] if each.kind is not each.VAR_KEYWORD)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


@_with_check_options
def command(
    target: Annotated[
        str | None, typer.Argument(help="What to check: package.module:name, or path/to/file.py:name")
    ] = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON")] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write the report as JUnit XML to this file")] = None,
    list_facts: Annotated[bool, typer.Option("--list", help="List every fact instead")] = False,
    libraries: Annotated[bool, typer.Option("--libraries", help="Check other libraries, as a Markdown table")] = False,
    **options: Any,
) -> None:
    """Check which rules an attention or a decoder breaks."""
    from regard.conform.checker import check, list_facts as every_fact

    if list_facts:
        show_facts(every_fact(), json)
        return
    if libraries:
        from regard.conform.libraries import table

        print(table())
        return
    if target is None:
        raise ConfigError("no target: pass package.module:name, or path/to/file.py:name")
    if junit is not None:
        _check_writable(junit)
    given = {name: value or () if name in ("only", "without") else value for name, value in options.items()}
    try:
        report = check(load_target(target), progress=show_progress, **given)
    except ConfigError as error:
        raise ConfigError(with_flags(str(error))) from error
    if json:
        show_json(report.to_dict())
    else:
        # example lines are not wrapped, so that they can be pasted
        Console(highlight=False).print(declare_with_flags(report), soft_wrap=True)
    if junit is not None:
        try:
            junit.write_text(report.junit(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{junit} cannot be written: {error.strerror or error}") from None
    if not report.ok:
        raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    """Raise before the check runs if the report cannot be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


def show_progress(name: str) -> None:
    """Print the fact that is tested, if stderr is a terminal."""
    if sys.stderr.isatty():
        tell(f"checking {name}")


def with_flags(words: str) -> str:
    """Advice with command-line flags: `pass vocab=` becomes `pass --vocab`."""
    words = re.sub(r"kind='(\w+)'", r"--kind \1", words)
    for name in ("heads", "kv_heads", "width", "layout", "vocab"):
        words = re.sub(rf"(?<![\w.(]){name}=(?=[\s,;:)]|$)", f"--{name.replace('_', '-')}", words)
    return words


def declare_with_flags(report: "Report") -> "Report":
    """The report, with declarations as command-line flags."""
    facts = [
        each
        if each.failure is None
        else replace(each, failure=replace(each.failure, declare=declaration_flags(each.failure.declare)))
        for each in report.facts
    ]
    return replace(report, facts=tuple(facts))


def declaration_flags(declare: str) -> str:
    """A declaration as flags: `causal=False, window_after=1` becomes `--no-causal --window-after 1`."""
    if not declare:
        return declare
    call = ast.parse(f"f({declare})", mode="eval").body
    assert isinstance(call, ast.Call)
    words = []
    for each in call.keywords:
        name, value = str(each.arg).replace("_", "-"), ast.literal_eval(each.value)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name} {f'{value!r}' if ' ' in str(value) else value}")
    return " ".join(words)


def load_target(target: str) -> object:
    """The object named by module:name or file.py:name. A class is instantiated without arguments."""
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"{target!r} is not a target; write package.module:name, or path/to/file.py:name")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = ", ".join(other for other in vars(module) if not other.startswith("_"))
            raise ConfigError(f"{source} has no {name}; it has: {near}")
        found = getattr(found, part)
    if not isinstance(found, type):
        return found
    advice = f"; check an instance: write mine = {found.__name__}(...) in a file of your own, and pass file.py:mine"
    return _guard(found, f"{target} is a class that cannot be made without arguments", advice)


def _guard(run: Callable[[], Any], words: str, advice: str) -> Any:
    """Call a foreign function; sys.exit() in it is an error too, so that it is not taken for success."""
    try:
        return run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{words}: {type(error).__name__}: {error}{advice}") from error


def _load_file(source: str) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"there is no file {source}; give its path from here")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module, load = module_from_spec(spec), spec.loader.exec_module
    # as `python file.py` does: files in the same folder can be imported, and the module is in sys.modules
    sys.path.insert(0, str(path.resolve().parent))
    known = sys.modules.setdefault(path.stem, module)
    try:
        _guard(lambda: load(module), f"{source} cannot be loaded", "; run it by itself")
    except ConfigError:
        if known is module:
            del sys.modules[path.stem]
        raise
    return module


def _load_module(source: str) -> Any:
    from importlib import import_module

    sys.path.insert(0, str(Path.cwd()))
    try:
        return _guard(lambda: import_module(source), f"{source} cannot be loaded", "; import it by itself")
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise ConfigError(f"there is no module {source}: {error.__cause__}; pass a path, or install it") from error
        raise


def show_facts(facts: "Mapping[str, Sequence[Fact]]", json: bool) -> None:
    """Print every fact, as tables or as JSON."""
    if json:
        texts = ("name", "student", "engineer", "cause")
        show_json(
            [
                {"of": kind, **{x: getattr(fact, x) for x in texts}}
                for kind, several in facts.items()
                for fact in several
            ]
        )
        return
    for kind, several in facts.items():
        lines = Table(
            "fact", "rule", title=f"facts of a{'n' if kind == 'attention' else ''} {kind}", box=box.SIMPLE_HEAD
        )
        for fact in several:
            lines.add_row(fact.name, f"{fact.student}\n{fact.engineer}\n[dim]usual causes: {fact.cause}[/dim]")
        show(lines)
