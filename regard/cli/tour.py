"""`regard tour`: an introduction to attention in the terminal. Every number is computed when it runs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from regard.cli.explain import blank, explanation_json, explanation_table
from regard.cli.look import build_report, replace_nonfinite, report_as_json
from regard.cli.looking.inputs import build_input
from regard.cli.looking.models import load_model
from regard.cli.looking.terminal import chosen_map, heads_table
from regard.cli.masks import gallery, summarize_forms
from regard.cli.output import JsonOption, show, show_json
from regard.cli.pretrained import example_input
from regard.cli.work import load_problem, to_json

if TYPE_CHECKING:
    from regard.core.kernels import Explanation
    from regard.see.report import AttentionReport

POSITIONS = 12
TRAINED = "induction-gpt"
HEADS = 3  # number of heads of the trained model to list

# one command a line; the tests run each of them
NEXT = """\
regard work three-tokens --scaled
regard masks "causal() & window(before=3) | global_tokens(1)" --queries 24
regard masks "documents([0, 0, 0, 1, 1]) & causal()" --json
regard explain --shape 1,8,8192,64 --mask "causal() & window(before=255)"
regard explain --scores softcap:30 --mask "causal()"
regard look digits-vit
regard generate text-gpt "The while statement" --temperature 0.7
regard translate number-words "three hundred forty one"
regard ask
regard listen
regard --help"""


def command(json: JsonOption = False) -> None:
    """Show attention by hand, masks, kernels and a trained model.

    Example: regard tour
    """
    from regard.work.solution import solve
    from regard.work.writing import text
    from regard.work.writing.document import build_document

    worked = solve(load_problem("three-tokens", {}, {"scaled": True}, None))
    shown, summaries = summarize_forms(POSITIONS)
    calls = explanations()
    report = look_inside()
    if json:
        show_json(
            {
                "three_tokens": to_json(worked),
                "masks": [asdict(each) for each in summaries],
                "kernels": [{"code": code, **explanation_json(answer)} for code, _, answer in calls],
                "trained": replace_nonfinite(report_as_json(report)),
            }
        )
        return
    show(
        *chapter(
            "1. Attention on three tokens, by hand",
            "Three tokens with four numbers each attend to one another. `regard.attend` gives the same output.",
        ),
        Text(text.write(build_document(worked, digits=3, every_step=False), digits=3)),
        *chapter("2. Masks: which keys a query sees", "Rows are queries, columns are keys, a filled cell is visible."),
        gallery(shown, summaries),
        *chapter(
            "3. Kernels: which code computes it", "A kernel computes the request exactly or refuses with its reasons."
        ),
        *kernels(calls),
        *chapter(
            f"4. A trained model: what its heads do on {report.prompt!r}",
            f"{TRAINED} has two layers of attention and no feed-forward network. It was trained on random strings "
            "written twice. An induction head attends to the token after the previous occurrence of the same token, "
            "and copies it.",
        ),
        heads_table(report, HEADS),
        "",
        *chosen_map(report, Console().width),
        *chapter("5. Commands to try next", "Copy any of these lines."),
        Text(NEXT),
    )


def chapter(title: str, words: str) -> tuple[RenderableType, ...]:
    """Return the heading and the introductory text of a chapter of the tour."""
    return "", Rule(title, align="left", characters="-"), Text(words), ""


def look_inside() -> "AttentionReport":
    """Build the attention report of a trained model on its example.

    The report shows the map of the head with the best induction score.
    """
    settings: dict[str, Any] = {"sort": "induction", "layers": None, "rows": None}
    loaded = load_model(TRAINED, "cpu")
    inputs = build_input(loaded, example_input(TRAINED, f"{TRAINED} is missing"), None, None, "cpu")
    best = build_report(loaded, inputs, layer=None, head=None, **settings).table[0]
    return build_report(loaded, inputs, layer=best.layer, head=best.head, **settings)


def explanations() -> "list[tuple[str, str, Explanation]]":
    """Return the example calls of the chapter on kernels: code, description, and explanation of the kernel choice."""
    import regard
    from regard import causal, softcap, window

    x, long = blank((1, 8, 1024, 64)), blank((1, 8, 8192, 64))
    local = causal() & window(before=255)
    return [
        (
            "attend(q, k, v)",
            "Everything is visible: nothing can be skipped, and a fused kernel needs no matrix of scores.",
            regard.explain(x, x, x),
        ),
        (
            "attend(q, k, v, mask=causal() & window(before=255))",
            "A long sequence in which most pairs are hidden: whole blocks need not be computed.",
            regard.explain(long, long, long, mask=local),
        ),
        (
            "attend(q, k, v, mask=causal(), scores=softcap(30))",
            "A softcap applies tanh to the scores. torch's fused kernels can only add to them.",
            regard.explain(x, x, x, mask=causal(), scores=softcap(30)),
        ),
        (
            "attend(q, k, v, beta=inf)",
            "Hard attention: only the key with the largest score counts. This is not a softmax.",
            regard.explain(x, x, x, beta=float("inf")),
        ),
        (
            "attend(q, k, v, mask=causal(), dropout=0.1)",
            "In training, a tenth of the weights is set to zero at random.",
            regard.explain(x, x, x, mask=causal(), dropout=0.1),
        ),
    ]


def kernels(calls: "list[tuple[str, str, Explanation]]") -> list[RenderableType]:
    """Format the chapter on kernels: each example call with the table of all kernels."""
    parts: list[RenderableType] = []
    for code, why, answer in calls:
        parts += [Text(code, style="bold"), Text(why), Padding(explanation_table(answer), (0, 0, 1, 2))]
    return parts
