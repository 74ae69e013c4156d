"""`regard check`: which rules an attention or a decoder breaks."""

import ast
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import Field, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from regard.base.atomic_write import write_output
from regard.base.errors import ConfigError
from regard.base.validation import suggest
from regard.cli.help_panels import panel_option
from regard.cli.output import JsonOption, check_folder, print_message, show_json

if TYPE_CHECKING:
    from regard.conform.report import Report


# options about the target, for what cannot be measured, and those for every run; the others are conventions
TARGET = ("kind", "heads", "kv_heads", "width", "layout", "vocab")
EVERY_RUN = ("only", "without", "seed", "quick")
reports_option = panel_option("Reports")


def _parameter(each: "Field[Any]") -> inspect.Parameter:
    """Return the command-line option for one field of CheckOptions."""
    flag, choices = f"--{each.name.replace('_', '-')}", each.metadata["choices"]
    text = each.metadata["help"]
    if choices:
        text = f"{', '.join(choices[:-1])} or {choices[-1]}: {text}"
    kind, default = (list[str] | None, None) if each.name in ("only", "without") else (each.type, each.default)
    flags = [flag] if kind is bool else [f"{flag}/--no-{flag[2:]}"] if kind == bool | None else []
    panel = "Target" if each.name in TARGET else "Conventions (measured by default)"
    option = typer.Option(*flags, help=text, rich_help_panel=None if each.name in EVERY_RUN else panel)
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_check_options(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it has one option for every field of CheckOptions.

    The field `extra` has no option, because its values are Python objects.
    """
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
    ignore_policy: Annotated[
        bool, reports_option("--ignore-policy", help="Exit with 0 if only our policy differs")
    ] = False,
    json: JsonOption = False,
    save: Annotated[
        Path | None, reports_option(help="Also save the report as JSON, for `regard explore --report`")
    ] = None,
    junit: Annotated[Path | None, reports_option(help="Also write the report as JUnit XML to this file")] = None,
    github: Annotated[
        bool, reports_option("--github", envvar="GITHUB_ACTIONS", help="Also print findings as GitHub annotations")
    ] = False,
    list_facts: Annotated[bool, typer.Option("--list", help="List every fact instead")] = False,
    libraries: Annotated[
        bool, reports_option("--libraries", help="Check other libraries, as a Markdown table")
    ] = False,
    **options: Any,
) -> None:
    """Check which rules an attention or a decoder breaks.

    Exit code 1: broken or inexact. 3: differs from our policy only. 0: neither.

    Example: regard check torch.nn.functional:scaled_dot_product_attention
    """
    from regard.conform.options import CheckOptions

    if list_facts:
        show_facts(json)
        return
    if libraries:
        from regard.conform.libraries import rows

        for row in rows():
            print(row, flush=True)
        return
    # usage errors come first, without torch, which takes seconds to import
    source, name = split_target(target)
    for path in (junit, save):
        if path is not None:
            _check_writable(path)
    given = {key: value or () if key in ("only", "without") else value for key, value in options.items()}
    CheckOptions.from_keywords(given)
    subject = load_target(source, name)
    from regard.conform.checker import check

    try:
        report = check(subject, progress=show_progress, **given)
    except ConfigError as error:
        raise ConfigError(with_flags(str(error))) from error
    if json:
        show_json(report.to_dict())
    else:
        # example lines are not wrapped, so that they can be pasted
        Console(highlight=False).print(declare_with_flags(report), soft_wrap=True)
    if github:
        print("\n".join(report.annotations()), file=sys.stderr if json else sys.stdout)
    if junit is not None:
        write_output(junit, lambda file: file.write_text(report.junit(), encoding="utf-8"))
    if save is not None:
        write_output(save, lambda file: file.write_text(report.json(), encoding="utf-8"))
    if code := report.exit_code(ignore_policy):
        raise typer.Exit(code)


def split_target(target: str | None) -> tuple[str, str]:
    """Split `module:name` or `file.py:name` into the module or file and the name.

    Raise ConfigError if the text has another form or the file does not exist.
    """
    if target is None:
        raise ConfigError("no target: pass package.module:name, or path/to/file.py:name")
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise ConfigError(f"{target!r} is not a target; write package.module:name, or path/to/file.py:name")
    if source.endswith(".py") and not Path(source).is_file():
        raise ConfigError(f"there is no file {source}; give its path from here")
    return source, name


def _check_writable(path: Path) -> None:
    """Check that the report can be written to this file, else raise ConfigError. Called before the check runs."""
    check_folder(path)
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


def show_progress(name: str) -> None:
    """Print the name of the rule that is being checked, if stderr is a terminal."""
    if sys.stderr.isatty():
        print_message(f"checking {name}")


def with_flags(words: str) -> str:
    """Replace keyword arguments in an error message by command-line options: `pass vocab=` becomes `pass --vocab`."""
    words = re.sub(r"kind='(\w+)'", r"--kind \1", words)
    for name in ("heads", "kv_heads", "width", "layout", "vocab"):
        words = re.sub(rf"(?<![\w.(]){name}=(?=[\s,;:)]|$)", f"--{name.replace('_', '-')}", words)
    return words


def declare_with_flags(report: "Report") -> "Report":
    """Return the report with command-line options in place of keyword arguments.

    The options are those that a failure suggests to declare the behaviour as intended.
    """
    facts = []
    for each in report.facts:
        failure = each.failure and replace(each.failure, declare=declaration_flags(each.failure.declare))
        facts.append(replace(each, failure=failure))
    return replace(report, facts=tuple(facts))


def declaration_flags(declare: str) -> str:
    """Convert keyword arguments to options: `causal=False, window_after=1` becomes `--no-causal --window-after 1`."""
    call = ast.parse(f"f({declare})", mode="eval").body
    assert isinstance(call, ast.Call)
    given = {str(each.arg).replace("_", "-"): ast.literal_eval(each.value) for each in call.keywords}
    return " ".join(
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name} {shlex.quote(str(value))}"
        for name, value in given.items()
    )


def load_target(source: str, name: str) -> object:
    """Load the object of this name from a module or file. A class is called without arguments to make an instance."""
    path = Path(source)
    # as `python file.py` does: files in the same folder can be imported
    sys.path.insert(0, str(path.resolve().parent if path.suffix == ".py" else Path.cwd()))
    load = partial(_load_file, path) if path.suffix == ".py" else partial(import_module, source)
    module: Any = _guard(load, f"{source} cannot be loaded", "; import it by itself")
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [other for other in dir(found) if not other.startswith("_")]
            listed = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
            raise ConfigError(f"{source} has no {name}{suggest(part, known) or f'; it has: {listed}'}")
        found = getattr(found, part)
    if not isinstance(found, type):
        return found
    advice = f"; check an instance: write mine = {found.__name__}(...) in a file of your own, and pass file.py:mine"
    return _guard(found, f"{source}:{name} is a class that cannot be made without arguments", advice)


def _guard(run: Callable[[], object], words: str, advice: str) -> object:
    """Call `run` and return its result; convert any exception except KeyboardInterrupt into ConfigError.

    `run` executes code of the user. sys.exit(0) is converted too, because otherwise it would look like a successful
    check.

    words   beginning of the error message
    advice  end of the error message
    """
    try:
        return run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{words}: {type(error).__name__}: {error}{advice}") from error


def _load_file(path: Path) -> object:
    """Import a Python file and return its module. The module stays in sys.modules unless loading fails."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    known = sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is module:
            del sys.modules[path.stem]
        raise
    return module


def show_facts(json: bool) -> None:
    """Print every rule that `regard check` tests, as Markdown tables or as JSON."""
    from regard.conform.checker import list_facts
    from regard.conform.reference import HEADINGS, fact_table

    if json:
        facts = [(kind, fact) for kind, several in list_facts().items() for fact in several]
        texts = ("name", "grade", "student", "engineer", "cause")
        show_json([{"of": kind, **{x: getattr(fact, x) for x in texts}} for kind, fact in facts])
        return
    for kind, heading in HEADINGS.items():
        print("\n".join([heading, "", *fact_table(kind), ""]))
