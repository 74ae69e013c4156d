"""`regard work`: work out an attention problem, check a student's answer, take a quiz, do exercises."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from regard.base.atomic_write import write_output
from regard.base.errors import ConfigError
from regard.cli import work_exercises, work_grade, work_quiz
from regard.cli.help_panels import PanelCommand, panel_option
from regard.cli.output import JsonOption, PictureOption, check_picture, print_message, save_picture, show_json

if TYPE_CHECKING:
    from regard.work.problem import BiasPerHead, MatrixPerHead, Problem
    from regard.work.solution import Solution

SOLVE = "solve"


class SolveByDefault(TyperGroup):
    """A command group that runs its command `solve` unless the first argument is the name of another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [SOLVE, *args])


def mount(app: typer.Typer, print_errors: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Add the command group `regard work` to the command line."""
    group = typer.Typer(cls=SolveByDefault, rich_markup_mode=None, add_completion=False)
    group.command(SOLVE, cls=PanelCommand)(print_errors(command))
    group.command("quiz")(print_errors(work_quiz.command))
    group.command("exercises")(print_errors(work_exercises.command))
    group.command("grade")(print_errors(work_grade.command))
    app.add_typer(group, name="work", help="Worked solutions, checked answers, quiz, exercises, grading.")


projection_option = panel_option("Mask, heads, projections")
output_option = panel_option("Output")


def command(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE]",
            help="three-tokens, udl-12-1, udl-12-2, or a .json, .csv or .npz file",
        ),
    ] = None,
    q: Annotated[str | None, typer.Option("--q", help="Queries: '1,-1/2;0,1', or a .csv, .json or .npy file")] = None,
    k: Annotated[str | None, typer.Option("--k", help="Keys")] = None,
    v: Annotated[str | None, typer.Option("--v", help="Values")] = None,
    inputs: Annotated[str | None, projection_option(help="Inputs, instead of queries, keys and values")] = None,
    wq: Annotated[str | None, projection_option(help="Projection weights of the queries")] = None,
    wk: Annotated[str | None, projection_option(help="Projection weights of the keys")] = None,
    wv: Annotated[str | None, projection_option(help="Projection weights of the values")] = None,
    wo: Annotated[str | None, projection_option(help="Weights of the output projection")] = None,
    convention: Annotated[
        str | None, projection_option(help="rows (a token is a row) or columns [default: rows, or as in the problem]")
    ] = None,
    scaled: Annotated[
        bool | None,
        typer.Option(
            "--scaled/--unscaled",
            help="Divide scores by the root of the width [default: scaled, or as in the problem]",
        ),
    ] = None,
    mask: Annotated[str | None, projection_option(help="A mask expression, such as 'causal()'")] = None,
    heads: Annotated[int | None, projection_option(min=1, help="Number of heads that share the width")] = None,
    format_: Annotated[
        str | None, output_option("--format", help="text, markdown, latex or html [default: by the ending of --out]")
    ] = None,
    out: Annotated[Path | None, output_option(help="Write to this file: .txt, .md, .tex or .html")] = None,
    picture: PictureOption = None,
    digits: Annotated[int, output_option(min=1, max=15, help="Number of decimals to show")] = 6,
    steps: Annotated[str, output_option(help="all: calculate every entry; brief: show the matrices only")] = "all",
    check: Annotated[Path | None, typer.Option(help="Find the first mistake in a student's .json file")] = None,
    json: JsonOption = False,
) -> None:
    """Work out attention, or --check a calculation. Also: quiz, exercises, grade.

    Example: regard work three-tokens --format latex
    """
    from regard.work.solution import solve

    check_picture(picture)
    if steps not in ("all", "brief"):
        raise ConfigError(f"--steps is all or brief, not {steps!r}")
    matrices = {"q": q, "k": k, "v": v, "inputs": inputs, "wq": wq, "wk": wk, "wv": wv, "wo": wo}
    settings = {"convention": convention, "scaled": scaled, "heads": heads}
    solution = solve(
        load_problem(
            source,
            {name: text for name, text in matrices.items() if text is not None},
            {name: value for name, value in settings.items() if value is not None},
            mask,
        )
    )
    if picture is not None:
        from regard.work.map_picture import attention_maps, draw_maps

        save_picture(draw_maps(attention_maps(solution)), picture)
    if check is not None:
        check_answer(solution, check, json)
    elif json:
        show_json(to_json(solution))
    else:
        write_solution(solution, format_, out, digits, steps)


def load_problem(source: str | None, typed: dict[str, str], settings: dict[str, Any], mask: str | None) -> "Problem":
    """Load an attention problem from a file or by its built-in name; command-line options replace parts of it.

    source    name of a built-in problem or path of a file; None if all matrices are typed
    typed     matrices typed as options, by name, such as {"q": "1,0;0,1"}
    settings  settings typed as options, such as {"scaled": True}
    mask      a mask expression; None keeps that of the problem
    """
    from regard.core.masks.expression import parse_mask
    from regard.work.builtin_problems import BUILTIN_PROBLEMS
    from regard.work.files import SUFFIXES, read_fields, read_matrix
    from regard.work.problem import build_problem

    if source is None and not typed:
        raise ConfigError(f"name a problem: {', '.join(BUILTIN_PROBLEMS)}, a file, or --q, --k and --v")
    matrices: dict[str, MatrixPerHead] = {}
    biases: dict[str, BiasPerHead] = {}
    own: dict[str, Any] = {}
    if source is not None and Path(source).suffix.lower() in SUFFIXES:
        matrices, biases, own = read_fields(Path(source), parse_mask)
        own.setdefault("name", Path(source).stem)
    elif source is not None:
        matrices, biases, own = BUILTIN_PROBLEMS[source]()
    for name, text in typed.items():
        matrices[name] = read_matrix(text, f"--{name}")
    if mask is not None:
        own["mask"] = parse_mask(mask)
    return build_problem(matrices=matrices, biases=biases, **{"name": "your matrices", **own, **settings})


def check_answer(solution: "Solution", path: Path, json: bool) -> None:
    """Check a student's answer against the solution and print the review. Exits with code 1 if there is a mistake."""
    from regard.work.check import check
    from regard.work.student_answer import read_answer

    review = check(solution, read_answer(path, solution))
    if json:
        show_json(review.to_dict())
    else:
        typer.echo(str(review))
    if not review.ok:
        raise typer.Exit(1)


def write_solution(solution: "Solution", format_name: str | None, out: Path | None, digits: int, steps: str) -> None:
    """Write the worked solution to a file, or to stdout if `out` is None.

    format_name  "text", "markdown", "latex" or "html"; None takes the format of the file's ending, or text for stdout
    digits       number of decimals
    steps        "all" calculates every entry, "brief" shows the matrices only
    """
    from regard.work.writing import FORMATS, SUFFIXES
    from regard.work.writing.document import build_document

    if format_name is None and out is not None and out.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"the ending of {out} is unknown; use one of {', '.join(SUFFIXES)}, or add --format")
    name = format_name or (SUFFIXES[out.suffix.lower()] if out is not None else "text")
    text = FORMATS[name](build_document(solution, digits=digits, every_step=steps == "all"), digits)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_output(out, lambda file: file.write_text(text, encoding="utf-8"))
    print_message(f"saved {out}")


def to_json(solution: "Solution") -> dict[str, Any]:
    """Convert a worked solution to a JSON object.

    The entries of each step are given as floating-point numbers and, where an exact number is known, also as its text.
    """
    from regard.base.formulas import text
    from regard.work.describe_map import describe_map
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
        "description": [describe_map(problem, solution.weights(head + 1)) for head in range(len(problem.heads))],
    }
