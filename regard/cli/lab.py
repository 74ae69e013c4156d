"""`regard lab`: list, run and show the claims of the lab."""

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
from regard.cli.settings import parse_settings

if TYPE_CHECKING:
    from regard.lab.claim import Claim
    from regard.lab.errata import Erratum
    from regard.lab.results import Result

P = ParamSpec("P")
MOST_SHOWN = 8  # items of a list on the terminal
STYLES = {"supported": "green", "refuted": "red", "unclear": "yellow"}

app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)

Results = Annotated[
    Path | None, typer.Option("--results", help="Folder of results; default regard/lab in the user's cache")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
Html = Annotated[Path | None, typer.Option("--html", help="Write an HTML page that works offline")]
Figures = Annotated[Path | None, typer.Option("--figures", help="Save figures as SVG in this folder")]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed; default the seed of the setup")]


def plainly(command: Callable[P, None]) -> Callable[P, None]:
    """Show errors of a command as every other command shows them."""

    @wraps(command)
    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        from regard.cli import clean  # imported late: that module imports this one

        clean(command)(*args, **kwargs)

    return shown


@app.callback(invoke_without_command=True)
@plainly
def listing(context: typer.Context, results: Results = None, html: Html = None, json: Json = False) -> None:
    """List, run and show the claims of the lab."""
    if context.invoked_subcommand is not None:
        for name, value in (("results", results), ("html", html), ("json", json)):
            if value:
                sub = context.invoked_subcommand
                raise ConfigError(f"--{name} goes after the command: regard lab {sub} ... --{name}")
        return
    from regard.lab.claim import claims
    from regard.lab.results import verdict_word

    check_writable(html)
    found = latest_of(list(claims()), results)
    if json:
        show_json([summary_as_json(claim, result) for claim, result in found])
    else:
        show(*(chapter_table(name, found) for name in dict.fromkeys(claim.chapter for claim, _ in found)))
        words = [verdict_word(result) for claim, result in found]
        counts = ", ".join(f"{words.count(each)} {each}" for each in dict.fromkeys(words))
        changed = sum(result is not None and bool(run_options(result)) for _, result in found)
        note = f' ({changed} from quick or changed settings, marked "with")' if changed else ""
        show(Text(f"{len(found)} claims: {counts}{note}. `regard lab show ID` shows one in full."))
    write_page(html, found)


@app.command("run")
@plainly
def run(
    ids: Annotated[list[str], typer.Argument(metavar="ID...|all", help="Claims to run, or all of them")],
    smoke: Annotated[bool, typer.Option("--smoke", help="Use the quick setup, a few seconds per claim")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; repeatable")
    ] = None,
    seed: Seed = None,
    results: Results = None,
    figures: Figures = None,
    html: Html = None,
    json: Json = False,
    save_shipped: Annotated[
        bool, typer.Option("--save-shipped", help="For maintainers: also update the results shipped with the package")
    ] = False,
) -> None:
    """Run claims and save their results."""
    from regard.lab.results import default_folder, make_folder, save_shipped_results

    if save_shipped and (smoke or settings or seed is not None):
        raise ConfigError("--save-shipped works with the default setups only; leave out --smoke, --set and --seed")
    chosen = chosen_claims(ids)
    # build all setups first: a wrong setting must fail before anything runs
    setups = [
        claim.setup(parse_settings(settings or [], claim.module.Setup), seed=seed, smoke=smoke) for claim in chosen
    ]
    folder = make_folder(results or default_folder())
    figure_folder = None if figures is None else make_figure_folder(figures)
    check_writable(html)
    found: list[tuple[Claim, Result | None]] = []
    failed: dict[str, str] = {}
    for number, (claim, setup) in enumerate(zip(chosen, setups, strict=True), 1):
        budget = f"; its budget is {claim.budget:g} s" if setup == claim.module.Setup() else ""
        result = run_claim(claim, setup, folder, figure_folder, f"{number} of {len(chosen)}{budget}", failed)
        if result is not None:
            found.append((claim, result))
            if not json:
                show(verdict_line(claim, result))
    if save_shipped:
        save_shipped_results({claim.id: result for claim, result in found if result is not None})
    if json:
        show_json(
            [*(claim_as_json(*each) for each in found), *({"id": name, "error": failed[name]} for name in failed)]
        )
    write_page(html, found)
    unsupported = [claim.id for claim, result in found if result is not None and result.verdict.word != "supported"]
    if len(chosen) > 1:
        tell(f"{len(found) - len(unsupported)} of {len(chosen)} supported")
    for name, words in failed.items():
        tell(f"failed: {name}: {words}")
    if unsupported:
        tell(f"not supported: {', '.join(unsupported)}")
    if unsupported or failed:
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
    """Show one claim in full: question, formula, code, result, figure."""
    import inspect

    from regard.base.formulas import mathml, text

    check_writable(html)
    (claim,) = chosen_claims([name])
    ((_, result),) = latest_of([name], results)
    figure = figure_path(claim, result, figures)
    code = inspect.getsource(claim.module.run)
    if json:
        maths = {"tex": claim.maths, "text": text(claim.formula), "mathml": mathml(claim.formula)}
        more = {"maths": maths, "claim": claim.claim, "measures": claim.measures, "budget": claim.budget, "code": code}
        show_json({**claim_as_json(claim, result), **more, "figure": figure})
    else:
        show_claim(claim, result, text(claim.formula), code, figure)
    write_page(html, [(claim, result)])


@app.command("errata")
@plainly
def show_errata(results: Results = None, html: Html = None, json: Json = False) -> None:
    """List wrong answers of the course sheets, what refutes them and what is right."""
    from regard.lab.claim import claims
    from regard.lab.errata import errata
    from regard.lab.html_page import errata_page
    from regard.lab.results import shipped_results

    check_writable(html)
    found: list[Result] = []
    failed: dict[str, str] = {}
    shipped = shipped_results()
    for claim, result in latest_of([name for name in claims() if claims()[name].wrong_answers], results):
        # a counter-example must come from the current code with the default settings; otherwise do a quick run
        if result is None or not result.current or "--set" in result.command:
            result = shipped.get(claim.id)
            if result is None or not result.current:
                result = run_claim(claim, claim.setup(smoke=True), None, None, "quick setup", failed)
        if result is not None:
            found.append(result)
    listed_errata = errata(found)
    if json:
        show_json([asdict(each) for each in listed_errata])
    else:
        show(*map(erratum_table, listed_errata))
    if html is not None:
        write(html, errata_page(listed_errata))
    for name, words in failed.items():
        tell(f"failed: {name}: {words}")
    not_refuted = [each for each in listed_errata if not each.refuted]
    for each in not_refuted:
        tell(f"not refuted: {each.id}, sheet {each.source}: {each.says}")
    if not_refuted or failed:
        raise typer.Exit(1)


def chosen_claims(ids: list[str]) -> "list[Claim]":
    """Look up claims by id, without repeats."""
    from regard.lab.claim import claims
    from regard.lab.results import fingerprint

    known = claims()
    if "all" in ids and len(set(ids)) > 1:
        others = ", ".join(name for name in dict.fromkeys(ids) if name != "all")
        raise ConfigError(f"all means every claim, but {others} is named too; leave one of them out")
    for name in {*ids} - {"all", *known}:
        check_not_example(name)
    try:
        chosen = [known[name] for name in (known if "all" in ids else dict.fromkeys(ids))]
    except UnknownNameError as error:
        raise UnknownNameError(f"{error} (regard lab lists them)") from None
    for claim in chosen:
        fingerprint(claim)  # cached now, so that a file edited during the run counts as changed
    return chosen


def check_not_example(name: str) -> None:
    from regard.work.builtin_problems import BUILTIN_PROBLEMS

    if name in BUILTIN_PROBLEMS:
        raise UnknownNameError(f"{name} is a worked example, not a claim of the lab; see regard work {name}")


def latest_of(ids: list[str], results: Path | None) -> "list[tuple[Claim, Result | None]]":
    """Return claims with their latest results, from this machine or shipped."""
    from regard.lab.claim import claims
    from regard.lab.results import default_folder, latest_result, shipped_results

    shipped = shipped_results()
    return [(claims()[name], latest_result(claims()[name], results or default_folder(), shipped)) for name in ids]


def run_claim(
    claim: "Claim", setup: Any, folder: Path | None, figures: Path | None, place: str, failed: dict[str, str]
) -> "Result | None":
    """Run a claim and save its result; on an exception return None and record the reason in `failed`."""
    import traceback

    from regard.lab.results import make_result, save_result

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
        result = make_result(outcome, path)
        if path is not None:
            from regard.lab.html_page import figure_svg

            path.write_text(figure_svg(claim, result.numbers), encoding="utf-8")
    except Exception as error:  # any error: the other claims still run
        tell("".join(traceback.format_exception(error)).rstrip())
        failed[claim.id] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None
    if folder is not None:
        save_result(result, folder)
    return result


def figure_path(claim: "Claim", result: "Result | None", figures: Path | None) -> str | None:
    """Return the file of the claim's figure; draw it if a folder is given."""
    if figures is None:
        known = None if result is None else result.figure
        return known if known is not None and Path(known).is_file() else None
    from regard.lab.html_page import figure_svg

    if result is None or not result.current:
        raise ConfigError(f"there is no result to draw; run the claim first: regard lab run {claim.id}")
    path = make_figure_folder(figures) / f"{claim.id}.svg"
    write(path, figure_svg(claim, result.numbers))
    return str(path.absolute())


def make_figure_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"figures cannot be saved in {folder}: {error.strerror or error}") from None
    return folder


def check_writable(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: there is no folder {file.parent}")


def write(file: Path, text: str) -> None:
    """Write a file and report its size."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
    tell(f"wrote {file}, {file.stat().st_size:,} bytes")


def write_page(file: Path | None, found: "list[tuple[Claim, Result | None]]") -> None:
    if file is not None:
        from regard.lab.html_page import claims_page

        write(file, claims_page(found))


def summary_as_json(claim: "Claim", result: "Result | None") -> dict[str, Any]:
    """Return a claim and its verdict as plain values."""
    from regard.lab.results import verdict_word

    current = result if result is not None and result.current else None
    return {
        "id": claim.id,
        "chapter": claim.chapter,
        "question": claim.question,
        "source": claim.source,
        "verdict": verdict_word(result),
        "sentence": current.verdict.sentence if current else None,
        "command": current.command if current else None,
    }


def claim_as_json(claim: "Claim", result: "Result | None") -> dict[str, Any]:
    """Return a claim and its whole result as plain values."""
    from regard.lab.results import encode_floats

    if result is None or not result.current:
        return summary_as_json(claim, result) | {"wrong_answers": None, "result": None}
    wrong_answers = [
        {"source": answer.source, "says": answer.says, **asdict(verdict), "right": answer.right}
        for answer, verdict in result.wrong_answers
    ]
    values = asdict(result) | {"setup": asdict(result.setup), "call": result.call}
    return summary_as_json(claim, result) | {"wrong_answers": wrong_answers, "result": encode_floats(values)}


def verdict_text(word: str) -> Text:
    return Text(word, style=STYLES.get(word, "dim"))


def chapter_table(chapter: str, found: "list[tuple[Claim, Result | None]]") -> Table:
    """List the claims of a chapter with their verdicts."""
    from regard.lab.claim import CHAPTERS
    from regard.lab.results import verdict_word

    lines = Table("id", "verdict", "question", title=CHAPTERS[chapter], title_justify="left", box=box.SIMPLE_HEAD)
    lines.columns[0].no_wrap = True
    for claim, result in found:
        if claim.chapter != chapter:
            continue
        shown = verdict_text(verdict_word(result))
        if result is not None and (options := run_options(result)):
            shown.append(f"\nwith {options}", style="dim")
        lines.add_row(claim.id, shown, Text(claim.question))
    return lines


def run_options(result: "Result") -> str:
    """Return the options of the run; empty for the default setup."""
    return result.command.removeprefix(f"regard lab run {result.id}").strip()


def verdict_line(claim: "Claim", result: "Result") -> Table:
    """Show the verdict of a run and its verdicts on the sheets' wrong answers."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=9, no_wrap=True)
    line.add_column()
    line.add_row(
        verdict_text(result.verdict.word),
        Text.assemble((claim.id, "bold"), f" ({result.seconds:.1f} s): {result.verdict.sentence}"),
    )
    for answer, verdict in result.wrong_answers:
        line.add_row(verdict_text(verdict.word), Text(f'sheet {answer.source}, "{answer.says}": {verdict.sentence}'))
    return line


def show_claim(claim: "Claim", result: "Result | None", maths: str, code: str, figure: str | None) -> None:
    """Print one claim in full."""
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
        from rich.syntax import Syntax  # imported late: it is slow to load

        # the terminal's own colours
        show(Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        print(code)  # unwrapped
    now = verdict_word(result)
    outcome = Table.grid(padding=(0, 2, 0, 0))
    outcome.add_column(no_wrap=True)
    outcome.add_column()
    outcome.add_row(Text("verdict", style="dim"), verdict_text(now))
    if result is not None and now == result.verdict.word:
        outcome.add_row("", Text(result.verdict.sentence))
        for answer, verdict in result.wrong_answers:
            outcome.add_row(Text("sheet", style="dim"), Text(f'{answer.source} says "{answer.says}"'))
            outcome.add_row("", Text.assemble(verdict_text(verdict.word), f": {verdict.sentence}"))
            outcome.add_row("", Text(f"Correct: {answer.right}"))
        for name, value in result.numbers.items():
            outcome.add_row(Text("number", style="dim"), Text(f"{name}: {shortened(value)}"))
        outcome.add_row(Text("call", style="dim"), Text(result.call))
        outcome.add_row(Text("run", style="dim"), Text(f"{result.command}, {result.seconds:.1f} s, {result.created}"))
        outcome.add_row(Text("figure", style="dim"), Text(figure or "not drawn; use --figures FOLDER"))
    else:
        outcome.add_row(Text("to do", style="dim"), Text(f"regard lab run {claim.id}"))
    show(outcome)


def shortened(value: Any) -> str:
    """Write a number, or the first items of a list."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shortened(item)}" for name, item in value.items())
    if not isinstance(value, list):
        return str(value)
    first = ", ".join(map(shortened, value[:MOST_SHOWN]))
    return f"[{first}]" if len(value) <= MOST_SHOWN else f"[{first}, ...] ({len(value)} in all)"


def erratum_table(found: "Erratum") -> Table:
    """Show one wrong answer, what refutes it and what is right."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column()
    lines.add_row(Text("sheet", style="dim"), Text.assemble((found.source, "bold"), f" ({found.id})"))
    lines.add_row(Text("says", style="dim"), Text(found.says))
    lines.add_row(verdict_text(found.verdict), Text(found.counter_example))
    lines.add_row(Text("correct", style="dim"), Text(found.right))
    lines.add_row(Text("from", style="dim"), Text(found.command))
    lines.add_row("", "")
    return lines
