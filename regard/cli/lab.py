"""`regard lab`: list, run and show the claims of the lab, its errata, and the answers to the course sheets."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.base.atomic_write import write_output
from regard.base.errors import ConfigError, UnknownNameError
from regard.cli.output import JsonOption, check_folder, print_message, show, show_json, write_file
from regard.cli.settings import parse_settings

if TYPE_CHECKING:
    from regard.lab.answers import SheetAnswer
    from regard.lab.claim import Claim
    from regard.lab.errata import Erratum, WrongAnswer
    from regard.lab.results import Result

P = ParamSpec("P")
MOST_SHOWN = 8  # items of a list on the terminal
STYLES = {"supported": "green", "refuted": "red", "unclear": "yellow"}

app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)

Results = Annotated[
    Path | None, typer.Option("--results", help="Folder of results [default: regard/lab in the user cache]")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write an HTML page that works offline")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown")]
Figures = Annotated[Path | None, typer.Option("--figures", help="Save figures as SVG in this folder")]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed [default: the seed of the setup]")]


def with_error_messages(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command of `regard lab` so that its errors are printed like those of every other command."""

    @wraps(command)
    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        from regard.cli import print_errors  # imported late: that module imports this one

        print_errors(command)(*args, **kwargs)

    return shown


@app.callback(invoke_without_command=True)
@with_error_messages
def listing(context: typer.Context, results: Results = None, html: Html = None, json: JsonOption = False) -> None:
    """List the claims you can run, and the answers to the sheets.

    Example: regard lab --json
    """
    if context.invoked_subcommand is not None:
        for name, value in (("results", results), ("html", html), ("json", json)):
            if value:
                sub = context.invoked_subcommand
                raise ConfigError(f"--{name} goes after the command: regard lab {sub} ... --{name}")
        return
    from regard.lab.claim import claims
    from regard.lab.results import verdict_word

    check_folder(html)
    found = latest_of(list(claims()), results)
    if json:
        show_json([summary_as_json(claim, result) for claim, result in found])
    else:
        show(*(chapter_table(name, found) for name in dict.fromkeys(claim.chapter for claim, _ in found)))
        words = [verdict_word(result) for claim, result in found]
        counts = ", ".join(f"{words.count(each)} {each}" for each in dict.fromkeys(words))
        changed = sum(result is not None and bool(result.options) for _, result in found)
        note = f' ({changed} from quick or changed settings, marked "with")' if changed else ""
        show(Text(f"{len(found)} claims: {counts}{note}. `regard lab show ID` shows one in full."))
    write_page(html, found)


@app.command("run")
@with_error_messages
def run(
    ids: Annotated[list[str], typer.Argument(metavar="ID...|all", help="Claims to run, or all of them")],
    smoke: Annotated[bool, typer.Option("--smoke", help="Use the quick setup, a few seconds per claim")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated")
    ] = None,
    seed: Seed = None,
    results: Results = None,
    figures: Figures = None,
    html: Html = None,
    json: JsonOption = False,
    save_shipped: Annotated[
        bool, typer.Option("--save-shipped", help="For maintainers: also update the results shipped with the package")
    ] = False,
) -> None:
    """Run the experiments of claims and save their results.

    Example: regard lab run beta --smoke
    """
    from regard.lab.results import default_folder, make_folder, save_shipped_results

    if save_shipped and (smoke or settings or seed is not None):
        raise ConfigError("--save-shipped works with the default setups only; leave out --smoke, --set and --seed")
    chosen = chosen_claims(ids)
    # build all setups first: a wrong setting must fail before anything runs
    setups = [
        claim.setup(parse_settings(settings or [], claim.module.Setup), seed=seed, smoke=smoke) for claim in chosen
    ]
    folder = make_folder(results or default_folder())
    figure_folder = None if figures is None else make_folder(figures, "figures")
    check_folder(html)
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
        failures = [{"id": name, "error": words} for name, words in failed.items()]
        show_json([*(claim_as_json(*each) for each in found), *failures])
    write_page(html, found)
    unsupported = [claim.id for claim, result in found if result is not None and result.verdict.word != "supported"]
    if len(chosen) > 1:
        print_message(f"{len(found) - len(unsupported)} of {len(chosen)} supported")
    if unsupported:
        print_message(f"not supported: {', '.join(unsupported)}")
    finish(failed, bool(unsupported))


@app.command("show")
@with_error_messages
def show_one(
    name: Annotated[str, typer.Argument(metavar="ID", help='The claim to show, or a question such as "002 1.2a"')],
    results: Results = None,
    figures: Figures = None,
    html: Html = None,
    json: JsonOption = False,
) -> None:
    """Show one claim in full: question, formula, code, result, figure.

    Example: regard lab show beta
    """
    import inspect

    from regard.base.formulas import mathml, text
    from regard.lab.answers import PLACE

    check_folder(html)
    if PLACE.fullmatch(name):
        sheet, *question = name.split()
        show_sheet(sheet, question, results=results, figures=figures, html=html, json=json)
        return
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


@app.command("sheet")
@with_error_messages
def show_sheet(
    sheet: Annotated[
        str | None, typer.Argument(metavar="SHEET", help="A course sheet, such as 002 [default: list them]")
    ] = None,
    question: Annotated[
        list[str] | None, typer.Argument(metavar="QUESTION", help="A question, such as 1.2a [default: all]")
    ] = None,
    results: Results = None,
    figures: Figures = None,
    html: Html = None,
    json: JsonOption = False,
    markdown: Markdown = False,
) -> None:
    """List the course sheets, or show the answers of one.

    Example: regard lab sheet 002 1.2a
    """
    from regard.lab import answers, html_page

    check_folder(html)
    if json and markdown:
        raise ConfigError("--json and --markdown are two forms of the same text; leave one of them out")
    if sheet is None:
        for name, value in (("figures", figures), ("html", html), ("markdown", markdown)):
            if value:
                raise ConfigError(f"--{name} needs a sheet: regard lab sheet 002 --{name}")
        titles = answers.sheet_titles()
        rows = [
            (number, f"{len(answers.sheet_questions(number))} questions. {title}") for number, title in titles.items()
        ]
        show_json(titles) if json else show(
            facts_table(rows), Text("`regard lab sheet 002` lists the questions of one.")
        )
        return
    questions = answers.sheet_questions(sheet)
    shown = [answers.find_answer(" ".join([sheet, *question]))] if question else list(questions.items())
    failed: dict[str, str] = {}
    result = result_for_texts(results, failed)
    if json:
        every = [answer_as_json(place, answer, result) for place, answer in shown]
        show_json(every[0] if question else every)
    elif markdown:
        print("\n\n".join(html_page.answer_markdown(place, answer, result) for place, answer in shown))
    elif question:
        show_answer(*shown[0], result)
    else:
        show(facts_table([(place.split(" ", 1)[1], answer.questions[place]) for place, answer in shown]))
    if figures is not None:
        from regard.lab.claim import claims

        for name in dict.fromkeys(name for _, answer in shown for name in answer.claims):
            figure_path(claims()[name], result(name), figures)
    if html is not None:
        write(html, html_page.answers_page(f"Sheet {sheet}", shown, result))
    finish(failed)


@app.command("errata")
@with_error_messages
def show_errata(results: Results = None, html: Html = None, json: JsonOption = False) -> None:
    """List wrong answers of the sheets, with what refutes them.

    Example: regard lab errata --html errata.html
    """
    from regard.lab.errata import errata, wrong_answers
    from regard.lab.html_page import errata_page

    check_folder(html)
    failed: dict[str, str] = {}
    result = result_for_texts(results, failed)
    known: list[Result] = []
    for name in dict.fromkeys(answer.claim for answer in wrong_answers()):
        with suppress(ConfigError):  # a claim that cannot be run is named at the end
            known.append(result(name))
    found = errata(known)
    if json:
        show_json([asdict(each) for each in found])
    else:
        for each in found:
            show(facts_table([*erratum_rows(each), ("from", each.command)]), Text(""))
    if html is not None:
        write(html, errata_page(found))
    not_refuted = [each for each in found if not each.refuted]
    for each in not_refuted:
        print_message(f"not refuted: {each.id}, sheet {each.source}: {each.says}")
    finish(failed, bool(not_refuted))


def finish(failed: dict[str, str], unsuccessful: bool = False) -> None:
    """Print the errors of the lab claims that failed to run; exit with code 1 if the command was not successful.

    failed        error message of each claim that failed to run, by its id; exit with code 1 if there are any
    unsuccessful  whether to exit with code 1 for another reason, such as a claim that is not supported
    """
    for name, words in failed.items():
        print_message(f"failed: {name}: {words}")
    if failed or unsuccessful:
        raise typer.Exit(1)


def chosen_claims(ids: list[str]) -> "list[Claim]":
    """Return the lab claims with these ids, without repeats; the id "all" means every claim."""
    from regard.lab.claim import claims
    from regard.lab.results import fingerprint
    from regard.work.builtin_problems import BUILTIN_PROBLEMS

    known = claims()
    if "all" in ids and len(set(ids)) > 1:
        others = ", ".join(name for name in dict.fromkeys(ids) if name != "all")
        raise ConfigError(f"all means every claim, but {others} is named too; leave one of them out")
    for name in set(ids) - set(known):
        if name in BUILTIN_PROBLEMS:
            raise UnknownNameError(f"{name} is a worked example, not a claim of the lab; see regard work {name}")
    try:
        chosen = [known[name] for name in (known if "all" in ids else dict.fromkeys(ids))]
    except UnknownNameError as error:
        raise UnknownNameError(f"{error} (regard lab lists them)") from None
    for claim in chosen:
        fingerprint(claim)  # cached now, so that a file edited during the run counts as changed
    return chosen


def latest_of(ids: list[str], results: Path | None) -> "list[tuple[Claim, Result | None]]":
    """Return lab claims with their latest results, from this machine or shipped with the package.

    The result is None if a claim has not been run.

    results  folder of results; None is the default folder
    """
    from regard.lab.claim import claims
    from regard.lab.results import default_folder, latest_result, shipped_results

    shipped = shipped_results()
    return [(claims()[name], latest_result(claims()[name], results or default_folder(), shipped)) for name in ids]


def result_for_texts(results: Path | None, failed: dict[str, str]) -> "Callable[[str], Result]":
    """Return a function from the id of a lab claim to its result with default settings.

    If no saved result is up to date, the function runs the experiment in its quick setup. If this run fails, its error
    message is added to `failed`.

    results  folder of results; None is the default folder
    failed   dictionary from the id of a claim to an error message
    """
    from regard.lab.results import shipped_results

    shipped = shipped_results()
    known: dict[str, Result] = {}

    def find(name: str) -> "Result":
        ((claim, latest),) = latest_of([name], results)
        candidates = [known.get(name), None if latest is None or latest.settings else latest, shipped.get(name)]
        result = next((each for each in candidates if each is not None and each.current), None)
        result = result or run_claim(claim, claim.setup(smoke=True), None, None, "quick setup", failed)
        if result is None:
            raise ConfigError(f"{name} has no result and failed to run: {failed[name]}")
        known[name] = result
        return result

    return find


def run_claim(
    claim: "Claim", setup: Any, folder: Path | None, figures: Path | None, place: str, failed: dict[str, str]
) -> "Result | None":
    """Run a lab claim and save its result. If the run fails, return None and record the reason in `failed`.

    setup    settings of the experiment
    folder   folder in which the result is saved; None does not save it
    figures  folder in which the figure is drawn; None draws none
    place    words after the id of the claim in the progress message, such as "2 of 5"
    failed   dictionary to which the error message is added by the id of the claim
    """
    import traceback

    from regard.lab.html_page import figure_svg
    from regard.lab.results import make_result, save_result

    print_message(f"running {claim.id} ({place})")
    try:
        path = None if figures is None else figures / f"{claim.id}.svg"
        result = make_result(claim.run(setup), path)
        if path is not None:
            svg = figure_svg(claim, result.numbers)
            write_output(path, lambda file: file.write_text(svg, encoding="utf-8"))
    except Exception as error:  # after any error the other claims still run
        print_message("".join(traceback.format_exception(error)).rstrip())
        failed[claim.id] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None
    if folder is not None:
        save_result(result, folder)
    return result


def figure_path(claim: "Claim", result: "Result | None", figures: Path | None) -> str | None:
    """Return the file of the figure of a lab claim; None if there is none.

    If `figures` is a folder, the figure is drawn into this folder. If it is None, the file is the one that was drawn
    when `result` was computed; None if that file no longer exists.
    """
    from regard.lab.html_page import figure_svg
    from regard.lab.results import make_folder

    if figures is None:
        known = None if result is None else result.figure
        return known if known is not None and Path(known).is_file() else None
    if result is None or not result.current:
        raise ConfigError(f"there is no result to draw; run the claim first: regard lab run {claim.id}")
    path = make_folder(figures, "figures") / f"{claim.id}.svg"
    write(path, figure_svg(claim, result.numbers))
    return str(path.absolute())


def write(file: Path, text: str) -> None:
    """Write a text file and print its name and size on stderr."""
    write_file(file, lambda path: path.write_text(text, encoding="utf-8"))


def write_page(file: Path | None, found: "list[tuple[Claim, Result | None]]") -> None:
    """Write lab claims and their results as an HTML page; do nothing if `file` is None."""
    if file is not None:
        from regard.lab.html_page import claims_page

        write(file, claims_page(found))


def summary_as_json(claim: "Claim", result: "Result | None") -> dict[str, Any]:
    """Return a lab claim and the verdict of its result (whether the claim is supported) as a JSON object."""
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
    """Return a lab claim and its complete result as a JSON object."""
    from regard.lab.errata import errata
    from regard.lab.results import encode_floats

    if result is None or not result.current:
        return summary_as_json(claim, result) | {"wrong_answers": None, "result": None}
    values = asdict(result) | {"setup": asdict(result.setup), "call": result.call}
    wrong = [asdict(each) for each in errata([result])]
    return summary_as_json(claim, result) | {"wrong_answers": wrong, "result": encode_floats(values)}


def answer_as_json(place: str, answer: "SheetAnswer", result: "Callable[[str], Result]") -> dict[str, Any]:
    """Return the answer to a question of a course sheet as a JSON object.

    place   sheet and number of the question, such as "002 1.2a"
    result  function from the id of a lab claim to its result
    """
    sheet, number = place.split(" ", 1)
    return {
        "sheet": sheet,
        "question": f"{number} {answer.questions[place]}",
        "answer": answer.body(result),
        "formula": answer.formulas,
        "claims": list(answer.claims),
        "command": answer.command,
        "errata": [asdict(each) for each in answer.errata(place, result)],
    }


def verdict_text(word: str) -> Text:
    return Text(word, style=STYLES.get(word, "dim"))


def facts_table(rows: "Sequence[tuple[str | Text, str | Text]]") -> Table:
    """Return a table of names and values, without borders."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(
            Text(name, style="dim") if isinstance(name, str) else name,
            value if isinstance(value, Text) else Text(value),
        )
    return table


def chapter_table(chapter: str, found: "list[tuple[Claim, Result | None]]") -> Table:
    """Return a table of the lab claims of a chapter with their verdicts."""
    from regard.lab.claim import CHAPTERS
    from regard.lab.results import verdict_word

    lines = Table("id", "verdict", "question", title=CHAPTERS[chapter], title_justify="left", box=box.SIMPLE_HEAD)
    lines.columns[0].no_wrap = True
    for claim, result in found:
        if claim.chapter != chapter:
            continue
        shown = verdict_text(verdict_word(result))
        if result is not None and result.options:
            shown.append(f"\nwith {result.options}", style="dim")
        lines.add_row(claim.id, shown, Text(claim.question))
    return lines


def verdict_line(claim: "Claim", result: "Result") -> Table:
    """Return a table with the verdict on a lab claim, and the verdicts on the wrong answers that its run examined."""
    sentence = Text.assemble((claim.id, "bold"), f" ({result.seconds:.1f} s): {result.verdict.sentence}")
    rows = [(verdict_text(result.verdict.word), sentence)]
    for answer, verdict in result.wrong_answers:
        rows.append((verdict_text(verdict.word), Text(f"{quotation(answer)}: {verdict.sentence}")))
    return facts_table(rows)


def quotation(answer: "WrongAnswer | Erratum") -> str:
    """Return one line of text that quotes a wrong answer of a course sheet, with the sheet and its status."""
    return f'sheet {answer.source}, {answer.place} ({answer.status}): "{answer.quote}"'


def erratum_rows(found: "Erratum") -> list[tuple[str | Text, str | Text]]:
    """Return the table rows of one wrong answer of a course sheet: the quotation, what refutes it and what is right."""
    return [
        ("sheet", Text.assemble((found.source, "bold"), f", {found.place} ({found.id})")),
        (found.status, f'"{found.quote}"'),
        (verdict_text(found.verdict), found.counter_example),
        ("correct", found.right),
    ]


def show_claim(claim: "Claim", result: "Result | None", maths: str, code: str, figure: str | None) -> None:
    """Print a lab claim in full: question, formula, experiment code, verdict, measured numbers and figure.

    maths   the formula as plain text
    code    source code of the experiment
    figure  file of the figure; None if there is none
    """
    from regard.lab.errata import errata
    from regard.lab.results import verdict_word

    show(Text(claim.question, style="bold"), Text(""))
    show(*(Text(f"    {line}") for line in maths.splitlines()), Text(""))
    facts = {"id": claim.id, "claim": claim.claim, "measures": claim.measures, "source": claim.source}
    show(facts_table([*facts.items(), ("budget", f"{claim.budget:g} seconds on two cores")]), Text(""))
    if Console().is_terminal:
        from rich.syntax import Syntax  # imported late: it is slow to load

        # the terminal's own colours
        show(Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        print(code)  # unwrapped
    now = verdict_word(result)
    rows: list[tuple[str | Text, str | Text]] = [("verdict", verdict_text(now))]
    if result is not None and now == result.verdict.word:
        rows += [("", result.verdict.sentence), *(row for each in errata([result]) for row in erratum_rows(each))]
        rows += [("number", f"{name}: {shorten(value)}") for name, value in result.numbers.items()]
        rows += [("call", result.call), ("run", f"{result.command}, {result.seconds:.1f} s, {result.created}")]
        rows.append(("figure", figure or "not drawn; use --figures FOLDER"))
    else:
        rows.append(("to do", f"regard lab run {claim.id}"))
    show(facts_table(rows))


def show_answer(place: str, answer: "SheetAnswer", result: "Callable[[str], Result]") -> None:
    """Print the answer to a question of a course sheet.

    place   sheet and number of the question, such as "002 1.2a"
    result  function from the id of a lab claim to its result
    """
    from rich.markdown import Markdown as RichMarkdown

    from regard.lab.answers import formulas_as_text

    show(Text(f"Sheet {place}: {answer.questions[place]}", style="bold"), Text(""))
    show(RichMarkdown(formulas_as_text(answer.body(result))), Text(""))
    rows = [row for each in answer.errata(place, result) for row in erratum_rows(each)]
    rows += [("command", answer.command), ("see also", answer.view)] if answer.view else [("command", answer.command)]
    if answer.claims:
        sheet, question = place.split(" ", 1)
        quoted = f'"{question}"' if " " in question else question
        rows.append(("figure", f"regard lab sheet {sheet} {quoted} --figures FOLDER, or --html PAGE"))
    show(facts_table(rows))


def shorten(value: Any) -> str:
    """Format a measured value for printing; only the first items of a list are shown."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shorten(item)}" for name, item in value.items())
    if not isinstance(value, list):
        return str(value)
    first = ", ".join(map(shorten, value[:MOST_SHOWN]))
    return f"[{first}]" if len(value) <= MOST_SHOWN else f"[{first}, ...] ({len(value)} in all)"
