"""`regard lab`: the questions of the lab, their runs and their verdicts."""

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.base.errors import ConfigError, UnknownNameError
from regard.cli.output import show, show_json, tell
from regard.cli.settings import read_settings

if TYPE_CHECKING:
    from regard.lab.claim import Claim
    from regard.lab.errata import Erratum
    from regard.lab.results import Result

P = ParamSpec("P")
MOST_SHOWN = 8  # items of a list on the terminal
STYLES = {"supported": "green", "refuted": "red", "unclear": "yellow"}

app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)

Results = Annotated[
    Path | None, typer.Option("--results", help="Folder of results; regard/lab in the user's cache unless given")
]
Json = Annotated[bool, typer.Option("--json", help="The same as JSON")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page that needs no network")]
Figures = Annotated[Path | None, typer.Option("--figures", help="Draw figures into this folder, as SVG")]
Seed = Annotated[int | None, typer.Option("--seed", help="Where random numbers start; the setup's own unless given")]


def plainly(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with errors shown as those of every other command are."""

    @wraps(command)
    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        from regard.cli import clean  # not on loading: that module loads this one

        clean(command)(*args, **kwargs)

    return shown


@app.callback(invoke_without_command=True)
@plainly
def listing(context: typer.Context, results: Results = None, html: Html = None, json: Json = False) -> None:
    """List the claims of the lab with their verdicts, or run them."""
    if context.invoked_subcommand is not None:
        given = [name for name, value in (("results", results), ("html", html), ("json", json)) if value]
        if given:
            sub = context.invoked_subcommand
            raise ConfigError(f"--{given[0]} goes after the command: regard lab {sub} ... --{given[0]}")
        return
    from regard.lab.claim import claims
    from regard.lab.results import verdict_word

    check_writable(html)
    found = latest_of(list(claims()), results)
    if json:
        show_json([listed(claim, result) for claim, result in found])
    else:
        show(*(chapter_table(name, found) for name in dict.fromkeys(claim.chapter for claim, _ in found)))
        words = [verdict_word(claim, result) for claim, result in found]
        tally = ", ".join(f"{words.count(each)} {each}" for each in dict.fromkeys(words))
        changed = sum(result is not None and bool(options_of(claim, result)) for claim, result in found)
        apart = f' ({changed} from quick or changed settings, marked "with")' if changed else ""
        show(Text(f"{len(found)} claims: {tally}{apart}. `regard lab show ID` tells all of one."))
    write_page(html, found)


@app.command("run")
@plainly
def run(
    ids: Annotated[list[str], typer.Argument(metavar="ID...|all", help="Claims to run, or all of them")],
    smoke: Annotated[bool, typer.Option("--smoke", help="The quick setup, some seconds at most")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be given again")
    ] = None,
    seed: Seed = None,
    results: Results = None,
    figures: Figures = None,
    html: Html = None,
    json: Json = False,
    save_shipped: Annotated[
        bool, typer.Option("--save-shipped", help="For maintainers: also into the file that comes with the package")
    ] = False,
) -> None:
    """Run claims and keep what came out."""
    from regard.lab.results import default_folder, keep_shipped, open_result

    if save_shipped and (smoke or settings or seed is not None):
        raise ConfigError("--save-shipped keeps what every user sees: it goes with the setups as they are")
    chosen = chosen_claims(ids)
    # all setups first: a wrong setting is told before an hour of running, not after it
    setups = [
        claim.setup(read_settings(settings or [], claim.module.Setup), seed=seed, smoke=smoke) for claim in chosen
    ]
    folder = open_result(results or default_folder())
    drawn = None if figures is None else opened_figures(figures)
    check_writable(html)
    found: list[tuple[Claim, Result | None]] = []
    failed: dict[str, str] = {}
    for number, (claim, setup) in enumerate(zip(chosen, setups, strict=True), 1):
        budget = f"; its budget is {claim.budget:g} s" if setup == claim.module.Setup() else ""
        result = made(claim, setup, folder, drawn, f"{number} of {len(chosen)}{budget}", failed)
        if result is not None:
            found.append((claim, result))
            if not json:
                show(verdict_line(claim, result))
    if save_shipped:
        from regard.lab.claim import claims

        keep_shipped({claim.id: result for claim, result in found if result is not None}, set(claims()))
    if json:
        show_json([*(told(*each) for each in found), *({"id": name, "error": failed[name]} for name in failed)])
    write_page(html, found)
    against = [claim.id for claim, result in found if result is not None and result.verdict.word != "supported"]
    if len(chosen) > 1:
        tell(f"{len(found) - len(against)} of {len(chosen)} supported")
    for name, words in failed.items():
        tell(f"failed: {name}: {words}")
    if against:
        tell(f"not supported: {', '.join(against)}")
    if against or failed:
        raise typer.Exit(1)


@app.command("show")
@plainly
def show_one(
    name: Annotated[str, typer.Argument(metavar="ID", help="The claim to show")],
    results: Results = None,
    figures: Figures = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Tell all of one claim: question, maths, code, result, figure."""
    import inspect

    from regard.lab.formula import formula_text, mathml

    check_writable(html)
    (claim,) = chosen_claims([name])
    ((_, result),) = latest_of([name], results)
    figure = figure_of(claim, result, figures)
    code = inspect.getsource(claim.module.run)
    if json:
        maths = {"tex": claim.maths, "text": formula_text(claim.maths), "mathml": mathml(claim.maths)}
        more = {"maths": maths, "claim": claim.claim, "measures": claim.measures, "budget": claim.budget, "code": code}
        show_json({**told(claim, result), **more, "figure": figure})
    else:
        show_claim(claim, result, formula_text(claim.maths), code, figure)
    write_page(html, [(claim, result)])


@app.command("errata")
@plainly
def show_errata(results: Results = None, html: Html = None, json: Json = False) -> None:
    """Tell the sheets' wrong answers, what refutes them and what is right."""
    from regard.lab.claim import claims
    from regard.lab.errata import errata
    from regard.lab.html_page import errata_page
    from regard.lab.results import shipped_results

    check_writable(html)
    found: list[tuple[Claim, Result]] = []
    failed: dict[str, str] = {}
    wrong = [name for name in claims() if claims()[name].sheet]
    with_package = shipped_results()
    for claim, result in latest_of(wrong, results):
        # a counter-example comes from a run of the claim as it is now, with its own settings; else a quick one is made
        if result is None or not result.fresh(claim) or "--set" in result.command:
            packed = with_package.get(claim.id)
            usable = packed is not None and packed.fresh(claim)
            result = packed if usable else made(claim, claim.setup(smoke=True), None, None, "quick setup", failed)
        if result is not None:
            found.append((claim, result))
    told_of = errata(found)
    if json:
        show_json([asdict(each) for each in told_of])
    else:
        for each in told_of:
            show(erratum_table(each))
    if html is not None:
        write(html, errata_page(told_of))
    for name, words in failed.items():
        tell(f"failed: {name}: {words}")
    standing = [each for each in told_of if not each.stands]
    for each in standing:
        tell(f"not refuted: {each.id}, sheet {each.source}: {each.says}")
    if standing or failed:
        raise typer.Exit(1)


def chosen_claims(ids: list[str]) -> "list[Claim]":
    """The claims of these names, each once."""
    from regard.lab.claim import claims
    from regard.lab.results import fingerprint

    known = claims()
    if "all" in ids and len(set(ids)) > 1:
        others = ", ".join(name for name in dict.fromkeys(ids) if name != "all")
        raise ConfigError(f"all stands for every claim and goes alone, but {others} is named beside it; leave one out")
    for name in {*ids} - {"all", *known}:
        check_is_no_example(name)
    try:
        chosen = [known[name] for name in (known if "all" in ids else dict.fromkeys(ids))]
    except UnknownNameError as error:
        raise UnknownNameError(f"{error} (regard lab lists them)") from None
    for claim in chosen:
        fingerprint(claim)  # before anything runs, so that a file edited meanwhile is found to be another
    return chosen


def check_is_no_example(name: str) -> None:
    from regard.work.builtin_problems import BUILTIN_PROBLEMS

    if name in BUILTIN_PROBLEMS:
        raise UnknownNameError(f"{name} is a worked example and no claim of the lab; see regard work {name}")


def latest_of(ids: list[str], results: Path | None) -> "list[tuple[Claim, Result | None]]":
    """Claims with the latest that came of them, here or with the package."""
    from regard.lab.claim import claims
    from regard.lab.results import default_folder, latest_result, shipped_results

    with_package = shipped_results()
    return [(claims()[name], latest_result(claims()[name], results or default_folder(), with_package)) for name in ids]


def made(
    claim: "Claim", setup: Any, folder: Path | None, figures: Path | None, place: str, failed: dict[str, str]
) -> "Result | None":
    """The result of a run, kept where a folder is given; nothing where it failed, and why is then in `failed`."""
    import traceback

    from regard.lab.results import result_of, save_result

    words = f"running {claim.id} ({place})"
    console = Console(stderr=True)
    try:
        if console.is_terminal:
            with console.status(words):
                outcome = claim.run(setup)
        else:
            tell(words)
            outcome = claim.run(setup)
        path = None if figures is None else figures / f"{claim.id}.svg"
        result = result_of(outcome, path)
        if path is not None:
            from regard.lab.html_page import svg

            path.write_text(svg(claim, result.numbers), encoding="utf-8")
    except Exception as error:  # whatever it is: the other claims are still to be run
        tell("".join(traceback.format_exception(error)).rstrip())
        failed[claim.id] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None
    if folder is not None:
        save_result(result, folder)
    return result


def figure_of(claim: "Claim", result: "Result | None", figures: Path | None) -> str | None:
    """Where the claim's figure is, drawn now if a folder for it is given."""
    if figures is None:
        known = None if result is None else result.figure
        return known if known is not None and Path(known).is_file() else None
    from regard.lab.html_page import svg

    if result is None or not result.fresh(claim):
        raise ConfigError(f"there are no numbers to draw; run it first: regard lab run {claim.id}")
    path = opened_figures(figures) / f"{claim.id}.svg"
    write(path, svg(claim, result.numbers))
    return str(path.absolute())


def opened_figures(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"figures cannot be drawn into {folder}: {error.strerror or error}") from None
    return folder


def check_writable(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: there is no folder {file.parent}")


def write(file: Path, text: str) -> None:
    """Write a file and say so."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
    tell(f"wrote {file}, {file.stat().st_size:,} bytes")


def write_page(file: Path | None, found: "list[tuple[Claim, Result | None]]") -> None:
    if file is not None:
        from regard.lab.html_page import page

        write(file, page(found))


def listed(claim: "Claim", result: "Result | None") -> dict[str, Any]:
    """A claim in a list, as plain values."""
    from regard.lab.results import verdict_word

    fresh = result if result is not None and result.fresh(claim) else None
    return {
        "id": claim.id,
        "chapter": claim.chapter,
        "question": claim.question,
        "source": claim.source,
        "verdict": verdict_word(claim, result),
        "sentence": fresh.verdict.sentence if fresh else None,
        "command": fresh.command if fresh else None,
    }


def told(claim: "Claim", result: "Result | None") -> dict[str, Any]:
    """A claim and all that came of it, as plain values."""
    from regard.lab.results import jsonable

    if result is None or not result.fresh(claim):
        return listed(claim, result) | {"sheet": None, "result": None}
    sheet = [
        {"source": each.source, "says": each.says, **asdict(verdict), "right": each.right}
        for each, verdict in result.sheet(claim)
    ]
    kept = {name: value for name, value in asdict(result).items() if name not in ("id", "verdict", "command")}
    return listed(claim, result) | {"sheet": sheet, "result": jsonable(kept)}


def verdict_text(word: str) -> Text:
    return Text(word, style=STYLES.get(word, "dim"))


def chapter_table(chapter: str, found: "list[tuple[Claim, Result | None]]") -> Table:
    """The claims of a chapter with their verdicts."""
    from regard.lab.claim import CHAPTERS
    from regard.lab.results import verdict_word

    lines = Table("id", "verdict", "question", title=CHAPTERS[chapter], title_justify="left", box=box.SIMPLE_HEAD)
    lines.columns[0].no_wrap = True
    for claim, result in found:
        if claim.chapter != chapter:
            continue
        shown = verdict_text(verdict_word(claim, result))
        if result is not None and (options := options_of(claim, result)):
            shown.append(f"\nwith {options}", style="dim")
        lines.add_row(claim.id, shown, Text(claim.question))
    return lines


def options_of(claim: "Claim", result: "Result") -> str:
    """What was asked for beside the claim: nothing where the run is the full one with its own settings."""
    return result.command.removeprefix(f"regard lab run {claim.id}").strip()


def verdict_line(claim: "Claim", result: "Result") -> Table:
    """What came of a run, and below what it says of the sheets."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=9, no_wrap=True)
    line.add_column()
    line.add_row(
        verdict_text(result.verdict.word),
        Text.assemble((claim.id, "bold"), f" ({result.seconds:.1f} s): {result.verdict.sentence}"),
    )
    for sheet, verdict in result.sheet(claim):
        line.add_row(verdict_text(verdict.word), Text(f'sheet {sheet.source}, "{sheet.says}": {verdict.sentence}'))
    return line


def show_claim(claim: "Claim", result: "Result | None", maths: str, code: str, figure: str | None) -> None:
    """All of one claim on the terminal."""
    from regard.lab.results import verdict_word

    show(Text(claim.question, style="bold"), Text(""))
    show(*(Text(f"    {line}") for line in maths.splitlines()), Text(""))
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, words in {
        "id": claim.id, "claim": claim.claim, "measures": claim.measures, "source": claim.source,
        "budget": f"{claim.budget:g} seconds on two cores",
    }.items():  # fmt: skip
        facts.add_row(Text(name, style="dim"), Text(words))
    show(facts, Text(""))
    if Console().is_terminal:
        from rich.syntax import Syntax  # not on loading: it brings every language there is to colour

        # the terminal's own colours, which its reader can see on its own background
        show(Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        print(code)  # as it is: neither wrapped nor filled up
    now = verdict_word(claim, result)
    outcome = Table.grid(padding=(0, 2, 0, 0))
    outcome.add_column(no_wrap=True)
    outcome.add_column()
    outcome.add_row(Text("verdict", style="dim"), verdict_text(now))
    if result is not None and now == result.verdict.word:
        outcome.add_row("", Text(result.verdict.sentence))
        for sheet, verdict in result.sheet(claim):
            outcome.add_row(Text("sheet", style="dim"), Text(f'{sheet.source} says "{sheet.says}"'))
            outcome.add_row("", Text.assemble(verdict_text(verdict.word), f": {verdict.sentence}"))
            outcome.add_row("", Text(f"Right is: {sheet.right}"))
        for name, value in result.numbers.items():
            outcome.add_row(Text("number", style="dim"), Text(f"{name}: {shortened(value)}"))
        outcome.add_row(Text("call", style="dim"), Text(result.call))
        outcome.add_row(Text("made by", style="dim"), Text(f"{result.command}, {result.seconds:.1f} s, {result.made}"))
        outcome.add_row(Text("figure", style="dim"), Text(figure or "not drawn; --figures FOLDER draws it"))
    else:
        outcome.add_row(Text("to do", style="dim"), Text(f"regard lab run {claim.id}"))
    show(outcome)


def shortened(value: Any) -> str:
    """A number, or the first of many."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shortened(item)}" for name, item in value.items())
    if not isinstance(value, list):
        return str(value)
    first = ", ".join(map(shortened, value[:MOST_SHOWN]))
    return f"[{first}]" if len(value) <= MOST_SHOWN else f"[{first}, ...] ({len(value)} in all)"


def erratum_table(found: "Erratum") -> Table:
    """One wrong answer, what refutes it and what is right."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column()
    lines.add_row(Text("sheet", style="dim"), Text.assemble((found.source, "bold"), f" ({found.id})"))
    lines.add_row(Text("says", style="dim"), Text(found.says))
    lines.add_row(verdict_text(found.verdict), Text(found.counter_example))
    lines.add_row(Text("right", style="dim"), Text(found.right))
    lines.add_row(Text("from", style="dim"), Text(found.command))
    lines.add_row("", "")
    return lines
