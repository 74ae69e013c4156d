"""`regard ask`: where was somebody born? The model answers where it is sure, else a store of facts, else you do."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.base.errors import ConfigError
from regard.cli.output import show_json, tell
from regard.cli.text_input import check_argument
from regard.cli.train import Json, ignore, print_metrics, show_progress

if TYPE_CHECKING:
    from regard.recipes.question_answering import QuestionAnswerer


def command(
    question: Annotated[str | None, typer.Argument(help='Such as "Where was Ada Lovelace born?"')] = None,
    folder: Annotated[Path, typer.Option(help="A finished run of birthplaces")] = Path("runs/birthplaces"),
    store: Annotated[Path | None, typer.Option(help="The SQLite file of facts [facts.sqlite in the folder]")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="The least confidence [what the run found for its precision]")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="The right answer, to be kept; asks nobody")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Train on with the answers that were kept")] = False,
    steps: Annotated[int | None, typer.Option(help="--learn: steps of training [300]")] = None,
    data: Annotated[
        Path | None, typer.Option(help="--learn: the data, where the run does not find them any more")
    ] = None,
    device: Annotated[str | None, typer.Option(help="--learn: cpu, cuda ... [a GPU where there is one]")] = None,
    json: Json = False,
) -> None:
    """Answer a question, look it up, or ask for the answer and keep it. Exit code 1: nobody knows."""
    if (question is None) != learn:
        raise ConfigError("ask a question, or give --learn: one of the two")
    if learn:
        return learn_facts(folder, store, data, device, steps, json)
    for name, value in (("--steps", steps), ("--data", data), ("--device", device)):
        if value is not None:
            raise ConfigError(f"{name} {value} is for --learn; a question is answered without")
    assert question is not None
    from regard.data.fact_store import normalize_name
    from regard.recipes.question_answering import load_question_answerer, stricter

    question = check_argument("the question", question)
    if not normalize_name(question):
        raise ConfigError(f'the question {question!r} is empty; ask one such as "Where was Ada Lovelace born?"')
    asking = load_question_answerer(folder, store)
    if threshold is not None:
        asking = stricter(asking, threshold)
    if answer is not None:
        return keep(asking, question, check_argument("--answer", answer), json)
    reply = asking.reply(question)
    if json:
        show_json(asdict(reply))
    elif reply.answer is not None:
        print(reply.answer)
        said = "the store of facts" if reply.source == "store" else f"the model, {percent(reply.confidence)} sure"
        tell(f"from {said}")
    else:
        guess = f"the model's guess is {reply.guess!r}, {percent(reply.confidence)} sure"
        unread = 'the model reads questions such as "Where was Ada Lovelace born?", in letters it has learned'
        tell(f"nobody knows; {unread if reply.guess is None else guess}")
        if sys.stdin.isatty():
            told = typer.prompt("What is right? (nothing to skip)", default="", show_default=False, err=True).strip()
            if told:
                asking.store.keep(question, told)
                tell(f"kept in {asking.store.file}; `regard ask --learn` teaches it to the model")
                return None
    if reply.answer is None:
        raise typer.Exit(1)
    return None


def percent(confidence: float) -> str:
    """In whole percents, never rounded up: 99.6 % is not everything."""
    return f"{int(100 * confidence)}%"


def keep(asking: "QuestionAnswerer", question: str, answer: str, json: bool) -> None:
    """Put an answer into the store, and say so where the model is sure of another, which goes before the store's."""
    asking.store.keep(question, answer)
    reply = asking.reply(question)
    sure = f"; the model is {percent(reply.confidence)} sure of {reply.answer!r}"
    still = "" if reply.answer == answer.strip() else f"{sure} and will say so until `regard ask --learn`"
    tell(f"kept in {asking.store.file}{still}")
    if json:
        kept = {"question": question.strip(), "answer": answer.strip()}
        show_json({"kept": kept, "store": str(asking.store.file), "reply": asdict(reply)})


def learn_facts(
    folder: Path, store: Path | None, data: Path | None, device: str | None, steps: int | None, json: bool
) -> None:
    from regard.recipes.question_answering import STEPS, load_question_answerer
    from regard.recipes.recipe import RunLocation
    from regard.recipes.run_folder import find_data
    from regard.train.distributed import join_process_group

    asking = load_question_answerer(folder, store)
    data = find_data(folder, data)
    with join_process_group("ddp", device) as group, show_progress(group.is_main) as on_progress:
        place = RunLocation(
            data=data, group=group, on_message=tell if group.is_main else ignore, on_progress=on_progress
        )  # fmt: skip
        new, figures = asking.learn(place, STEPS if steps is None else steps)
    if not group.is_main:
        return
    if json:
        show_json({"learned": [asdict(fact) for fact in new], "figures": figures})
    else:
        print(f"learned: {len(new)}")
        print_metrics(figures)
