"""`regard check`: which rules an attention or a decoder breaks."""

import ast
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from regard.base.errors import ConfigError
from regard.cli.output import show, show_json, tell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regard.conform.fact import Fact
    from regard.conform.report import Report


def command(
    target: Annotated[
        str | None, typer.Argument(help="What to check: package.module:name, or path/to/file.py:name")
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="It sees no later key, or it does")
    ] = None,
    window_before: Annotated[int | None, typer.Option(help="Earlier keys in sight besides the own one")] = None,
    window_after: Annotated[int | None, typer.Option(help="Later keys in sight")] = None,
    alignment: Annotated[str | None, typer.Option(help="bottom-right or top-left, where i < j")] = None,
    grouping: Annotated[str | None, typer.Option(help="repeat (0 0 1 1) or tile (0 1 0 1)")] = None,
    scale: Annotated[float | None, typer.Option(help="The factor of q . k; 1/sqrt(c) unless given")] = None,
    rotary: Annotated[str | None, typer.Option(help="half or interleaved")] = None,
    bias: Annotated[str | None, typer.Option(help="none, alibi or any")] = None,
    softcap: Annotated[float | None, typer.Option(help="The cap of scores")] = None,
    qk_norm: Annotated[str | None, typer.Option(help="rms, layer or l2, where q and k are normalised")] = None,
    sink: Annotated[bool | None, typer.Option("--sink/--no-sink", help="A sink takes weight and gives nothing")] = None,
    view: Annotated[str | None, typer.Option(help="any, where heads, rows or lengths see other keys")] = None,
    mask_argument: Annotated[str | None, typer.Option(help="The argument that takes a mask")] = None,
    mask_polarity: Annotated[str | None, typer.Option(help="What True means there: keep or drop")] = None,
    mask_values: Annotated[str | None, typer.Option(help="boolean, or additive")] = None,
    blind_rows: Annotated[str | None, typer.Option(help="zero, nan, mean or unmasked")] = None,
    poison: Annotated[str | None, typer.Option(help="'stays out' or reaches")] = None,
    decoder: Annotated[
        bool | None, typer.Option("--decoder/--attention", help="Which of both it is, where that is not plain")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a module, where it does not tell")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads, where they are fewer and it does not tell")] = None,
    width: Annotated[int | None, typer.Option(help="The width of a head, where it does not tell")] = None,
    layout: Annotated[
        str | None, typer.Option(help="The axes of a function, such as 'b n h c', where they shall not be found out")
    ] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens a decoder knows, where it does not tell")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Test this fact alone; may be given again")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave this fact out; may be given again")] = None,
    seed: Annotated[int, typer.Option(help="Where random numbers start")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what takes seconds")] = False,
    json: Annotated[bool, typer.Option("--json", help="The report as JSON")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML to this file too")] = None,
    list_facts: Annotated[bool, typer.Option("--list", help="List every fact instead")] = False,
    libraries: Annotated[bool, typer.Option("--libraries", help="Check other libraries, as a Markdown table")] = False,
) -> None:
    """Tell which rules an attention or a decoder breaks."""
    from regard.conform.check import check, facts

    if list_facts:
        show_facts(facts(), json)
        return
    if libraries:
        from regard.conform.libraries import table

        print(table())
        return
    if target is None:
        raise ConfigError("say what to check: regard check package.module:name, or path/to/file.py:name")
    said: dict[str, Any] = {
        "causal": causal,
        "window_before": window_before,
        "window_after": window_after,
        "alignment": alignment,
        "grouping": grouping,
        "scale": scale,
        "rotary": rotary,
        "bias": bias,
        "softcap": softcap,
        "qk_norm": qk_norm,
        "sink": sink,
        "view": view,
        "mask_argument": mask_argument,
        "mask_polarity": mask_polarity,
        "mask_values": mask_values,
        "blind_rows": blind_rows,
        "poison": poison,
    }
    if junit is not None and not junit.parent.is_dir():
        raise ConfigError(f"{junit} cannot be written: there is no folder {junit.parent}")
    if junit is not None and junit.is_dir():
        raise ConfigError(f"{junit} cannot be written: it is a folder; name a file in it")
    if junit is not None and not os.access(junit if junit.exists() else junit.parent, os.W_OK):
        raise ConfigError(f"{junit} cannot be written: permission denied")
    try:
        report = check(
            load(target),
            kind=None if decoder is None else "decoder" if decoder else "attention",
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            layout=layout,
            vocab=vocab,
            only=only or (),
            without=without or (),
            seed=seed,
            quick=quick,
            progress=tell_fact,
            **said,
        )
    except ConfigError as error:
        raise ConfigError(in_options(str(error))) from error
    if json:
        show_json(report.to_dict())
    else:
        shown = with_options(report)
        Console(highlight=False).print(shown, soft_wrap=True)  # an example is pasted, so its lines stay whole
    if junit is not None:
        try:
            junit.write_text(report.junit(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{junit} cannot be written: {error.strerror or error}") from None
    if not report.ok:
        raise typer.Exit(1)


def tell_fact(name: str) -> None:
    """Tell somebody who waits at a terminal; a log has no use for it."""
    if sys.stderr.isatty():
        tell(f"checking {name}")


def in_options(words: str) -> str:
    """Advice as one types it here: `say vocab=` becomes `say --vocab`."""
    words = words.replace("kind='decoder'", "--decoder").replace("kind='attention'", "--attention")
    for name in ("heads", "kv_heads", "width", "layout", "vocab"):
        words = re.sub(rf"(?<![\w.(]){name}=(?=[\s,;:)]|$)", f"--{name.replace('_', '-')}", words)
    return words


def with_options(report: "Report") -> "Report":
    """The report, with what to declare as one types it here."""
    facts = [
        each
        if each.failure is None
        else replace(each, failure=replace(each.failure, declare=option(each.failure.declare)))
        for each in report.facts
    ]
    return replace(report, facts=tuple(facts))


def option(declare: str) -> str:
    """A declaration as options: `causal=False, window_after=1` becomes `--no-causal --window-after 1`."""
    if not declare:
        return declare
    called = ast.parse(f"f({declare})", mode="eval").body
    assert isinstance(called, ast.Call)
    words = []
    for each in called.keywords:
        name, value = str(each.arg).replace("_", "-"), ast.literal_eval(each.value)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name} {f'{value!r}' if ' ' in str(value) else value}")
    return " ".join(words)


def load(target: str) -> object:
    """The thing meant by module:name or file.py:name. A class is called without arguments."""
    from importlib import import_module
    from importlib.util import module_from_spec, spec_from_file_location

    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{target!r} does not name a thing; write package.module:name, or path/to/file.py:name")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"there is no file {place}; give its path as seen from here")
        spec = spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        # as python itself does: what lies beside the file can be imported, and the file is a module that can be found
        sys.path.insert(0, str(path.resolve().parent))
        known = sys.modules.setdefault(path.stem, module)
        try:
            spec.loader.exec_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() too: what ends before it was checked is no pass
            if known is module:
                del sys.modules[path.stem]
            raise ConfigError(f"{place} does not load: {type(error).__name__}: {error}; run it by itself") from error
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(f"there is no module {place}: {error}; give a path to a file, or install it") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ConfigError(f"{place} does not load: {type(error).__name__}: {error}; import it by itself") from error
    thing: object = module
    for part in name.split("."):
        if not hasattr(thing, part):
            near = ", ".join(other for other in vars(module) if not other.startswith("_"))
            raise ConfigError(f"{place} has no {name}; it has: {near}")
        thing = getattr(thing, part)
    if not isinstance(thing, type):
        return thing
    try:
        return thing()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            f"{target} is a class that cannot be made without arguments ({type(error).__name__}: {error}); check an "
            f"instance: write mine = {thing.__name__}(...) in a file of your own, and give file.py:mine"
        ) from error


def show_facts(facts: "Mapping[str, Sequence[Fact]]", json: bool) -> None:
    if json:
        show_json(
            [
                {
                    "of": kind,
                    "name": fact.name,
                    "student": fact.student,
                    "engineer": fact.engineer,
                    "cause": fact.cause,
                }
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
