"""`regard work`: the worked solution of an attention problem, a student's answer checked, a quiz, exercises."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from regard.base.errors import ConfigError
from regard.cli import work_exercises, work_quiz
from regard.cli.expressions import parse_mask
from regard.cli.output import show_json, tell

if TYPE_CHECKING:
    from regard.work.exact_numbers import Value
    from regard.work.problem import Heads, Problem
    from regard.work.solution import Solution

SOLVE = "solve"


class Solving(TyperGroup):
    """A group that solves unless the first word names another of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [SOLVE, *args])


def mount(app: typer.Typer, clean: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Put `work` into the command line; a further command of its own is one more line here."""
    group = typer.Typer(cls=Solving, rich_markup_mode=None, add_completion=False)
    group.command(SOLVE)(clean(command))
    group.command("quiz")(clean(work_quiz.command))
    group.command("exercises")(clean(work_exercises.command))
    app.add_typer(group, name="work", help="Work attention out by hand; check a student; quiz; exercises.")


def command(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="three-tokens, udl-12-1, udl-12-2, or a .json, .csv or .npz file"),
    ] = None,
    q: Annotated[str | None, typer.Option("--q", help="Queries: '1,-1/2;0,1', or a .csv, .json or .npy file")] = None,
    k: Annotated[str | None, typer.Option("--k", help="Keys")] = None,
    v: Annotated[str | None, typer.Option("--v", help="Values")] = None,
    inputs: Annotated[str | None, typer.Option(help="Inputs, instead of queries, keys and values")] = None,
    wq: Annotated[str | None, typer.Option(help="Weights that make queries of the inputs")] = None,
    wk: Annotated[str | None, typer.Option(help="Weights that make keys")] = None,
    wv: Annotated[str | None, typer.Option(help="Weights that make values")] = None,
    wo: Annotated[str | None, typer.Option(help="Weights that mix the joined heads")] = None,
    convention: Annotated[
        str | None, typer.Option(help="rows (a token is a row) or columns; rows unless the problem says")
    ] = None,
    scaled: Annotated[
        bool | None, typer.Option("--scaled/--unscaled", help="Whether scores are divided by the root of the width")
    ] = None,
    mask: Annotated[str | None, typer.Option(help="Who sees whom, for instance 'causal()'")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads that share the width of the matrices")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="text, markdown, latex or html; by --out unless given")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file: .txt, .md, .tex or .html")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the attention map here too: .png, .svg or .pdf")] = None,
    digits: Annotated[int, typer.Option(min=1, max=15, help="Decimals that are shown")] = 6,
    steps: Annotated[str, typer.Option(help="all: every entry worked out; brief: the matrices alone")] = "all",
    check: Annotated[
        Path | None, typer.Option(help="A student's answer, a .json file: say where its first slip is")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The numbers as JSON")] = False,
) -> None:
    """Work attention out step by step, or check a student's steps with --check.

    Other commands: regard work quiz, regard work exercises.
    """
    from regard.work.solution import solve

    if steps not in ("all", "brief"):
        raise ConfigError(f"--steps is all or brief, not {steps!r}")
    given = {"q": q, "k": k, "v": v, "inputs": inputs, "wq": wq, "wk": wk, "wv": wv, "wo": wo}
    settings = {"convention": convention, "scaled": scaled, "heads": heads}
    solution = solve(
        load(
            source,
            {name: words for name, words in given.items() if words is not None},
            {name: value for name, value in settings.items() if value is not None},
            mask,
        )
    )
    if picture is not None:
        from regard.work.map_picture import maps, save

        save(maps(solution), picture)
        tell(f"saved {picture}")
    if check is not None:
        review(solution, check, json)
    elif json:
        show_json(as_json(solution))
    else:
        write(solution, format_, out, digits, steps)


def load(source: str | None, given: dict[str, str], settings: dict[str, Any], mask: str | None) -> "Problem":
    """The problem that is meant: by name or from a file, with what was typed in its place."""
    from regard.work.builtin_problems import BUILTIN_PROBLEMS
    from regard.work.files import SUFFIXES, read_fields, read_matrix
    from regard.work.problem import build

    if source is None and not given:
        raise ConfigError(f"say what to work out: {', '.join(BUILTIN_PROBLEMS)}, a file, or --q, --k and --v")
    matrices: dict[str, Heads] = {}
    biases: dict[str, tuple[tuple[Value, ...], ...]] = {}
    own: dict[str, Any] = {}
    if source is not None and Path(source).suffix.lower() in SUFFIXES:
        matrices, biases, own = read_fields(Path(source), parse_mask)
        own.setdefault("name", Path(source).stem)
    elif source is not None:
        matrices, biases, own = BUILTIN_PROBLEMS[source]()
    for name, words in given.items():
        matrices[name] = read_matrix(words, f"--{name}")
    if mask is not None:
        own["mask"] = parse_mask(mask)
    return build(matrices=matrices, biases=biases, **{"name": "your matrices", **own, **settings})


def review(solution: "Solution", path: Path, json: bool) -> None:
    """Say where the first slip of an answer is; exit code 1 where there is one."""
    from regard.work.check import check
    from regard.work.student_answer import read_answer

    found = check(solution, read_answer(path, solution))
    if json:
        show_json(found.to_dict())
    else:
        typer.echo(str(found))
    if not found.ok:
        raise typer.Exit(1)


def write(solution: "Solution", wanted: str | None, out: Path | None, digits: int, steps: str) -> None:
    """The solution in writing, on stdout or into a file."""
    from regard.work.writing import FORMATS, SUFFIXES
    from regard.work.writing.document import document

    if wanted is None and out is not None and out.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{out} tells no format; end it in {', '.join(SUFFIXES)}, or give --format")
    name = wanted or (SUFFIXES[out.suffix.lower()] if out is not None else "text")
    written = FORMATS[name](document(solution, digits=digits, every_step=steps == "all"), digits)
    if out is None:
        typer.echo(written, nl=False)
        return
    try:
        out.write_text(written, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    tell(f"saved {out}")


def as_json(solution: "Solution") -> dict[str, Any]:
    """Every step in numbers, exact ones as text beside their decimals."""
    from regard.base.formulas import text
    from regard.work.describe_map import read_map
    from regard.work.exact_numbers import HIDDEN, format_value, is_exact

    problem = solution.problem
    return {
        "problem": problem.name,
        "convention": problem.convention,
        "scaled": problem.scaled,
        "mask": repr(problem.mask),
        "heads": len(problem.heads),
        "steps": [
            {
                "step": step.key,
                "head": step.head,
                "title": step.title,
                "values": [[None if value == HIDDEN else float(value) for value in row] for row in step.values],
                "exact": [
                    [text(format_value(value)) if is_exact(value) else None for value in row] for row in step.values
                ],
            }
            for step in solution.steps
        ],
        "reading": [read_map(problem, solution.weights(number + 1)) for number in range(len(problem.heads))],
    }
