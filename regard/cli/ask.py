"""`regard ask`: answer a birthplace question with the model if it is confident, else from the fact store."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.base.errors import ConfigError
from regard.cli.output import JsonOption, print_message, show_json
from regard.cli.pretrained import example_input
from regard.cli.text_input import check_argument
from regard.cli.train import ignore, print_metrics, show_progress

if TYPE_CHECKING:
    from regard.recipes.question_answering import QuestionAnswerer

OWN_RUN, PRETRAINED = Path("runs/birthplaces"), Path("biographies-gpt")


def command(
    question: Annotated[str | None, typer.Argument(help='A question such as "Where was Ines Lufoman born?"')] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="A run [default: runs/birthplaces, else biographies-gpt]"),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="SQLite file of the facts [default: facts.sqlite]"),
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Minimum confidence of answers [default: calibrated]")] = None,
    answer: Annotated[str | None, typer.Option(help="Save this answer to the question in the fact store")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Train the model on the facts in the store")] = False,
    steps: Annotated[int | None, typer.Option(help="--learn: number of training steps [default: 300]")] = None,
    data: Annotated[Path | None, typer.Option(help="--learn: new path of the data, if it has moved")] = None,
    device: Annotated[str | None, typer.Option(help="--learn: cpu, cuda ... [default: a GPU if there is one]")] = None,
    json: JsonOption = False,
) -> None:
    """Answer a question, or save your answer. Exit code 1: the answer is unknown.

    Example: regard ask 'Where was Ines Lufoman born?'
    """
    if question is not None and learn:
        raise ConfigError("pass either a question or --learn")
    folder = folder or (OWN_RUN if OWN_RUN.exists() else PRETRAINED)
    if learn:
        return learn_facts(folder, store, data, device, steps, json)
    for name, value in (("--steps", steps), ("--data", data), ("--device", device)):
        if value is not None:
            raise ConfigError(f"{name} {value} needs --learn")
    if question is None:
        question = example_input(str(folder), "pass either a question or --learn")
        print_message(f"the question is {question!r}, the example of {folder}")
    from regard.data.fact_store import normalize_question
    from regard.recipes.question_answering import load_question_answerer, with_threshold

    question = check_argument("the question", question)
    if not normalize_question(question):
        raise ConfigError(f'the question {question!r} is empty; ask one such as "Where was Ada Lovelace born?"')
    answerer = load_question_answerer(folder, store)
    if threshold is not None:
        answerer = with_threshold(answerer, threshold)
    if answer is not None:
        return save_answer(answerer, question, check_argument("--answer", answer), json)
    reply = answerer.reply(question)
    if json:
        show_json(asdict(reply))
    elif reply.answer is not None:
        print(reply.answer)
        source = "the fact store" if reply.source == "store" else f"the model, confidence {percent(reply.confidence)}"
        print_message(f"from {source}")
    else:
        guess = f"the model's guess is {reply.guess!r}, confidence {percent(reply.confidence)}"
        unread = 'the model reads questions such as "Where was Ada Lovelace born?", in characters it was trained on'
        print_message(f"the answer is unknown; {unread if reply.guess is None else guess}")
        if sys.stdin.isatty():
            text = typer.prompt("The right answer? (empty to skip)", default="", show_default=False, err=True).strip()
            if text:
                answerer.store.save(question, text)
                print_message(f"saved in {answerer.store.file}; `regard ask --learn` trains the model on it")
                return None
    if reply.answer is None:
        raise typer.Exit(1)
    return None


def percent(confidence: float) -> str:
    """Format a confidence as an integer percentage, rounded down."""
    return f"{int(100 * confidence)}%"


def save_answer(answerer: "QuestionAnswerer", question: str, answer: str, json: bool) -> None:
    """Save an answer in the fact store and print a message.

    If the model is confident of another answer, the message says so, because `regard ask` prefers the model's
    answer.
    """
    answerer.store.save(question, answer)
    reply = answerer.reply(question)
    confident = f"; the model still answers {reply.answer!r}, confidence {percent(reply.confidence)}"
    conflict = "" if reply.answer == answer.strip() else f"{confident}, until `regard ask --learn`"
    print_message(f"saved in {answerer.store.file}{conflict}")
    if json:
        saved = {"question": question.strip(), "answer": answer.strip()}
        show_json({"saved": saved, "store": str(answerer.store.file), "reply": asdict(reply)})


def learn_facts(
    folder: Path, store: Path | None, data: Path | None, device: str | None, steps: int | None, json: bool
) -> None:
    """Train the model on the facts in the store (`regard ask --learn`), and print its metrics."""
    from regard.recipes.question_answering import LEARNING_STEPS, load_question_answerer
    from regard.recipes.recipe import RunLocation
    from regard.recipes.run_folder import find_data
    from regard.train.distributed import join_process_group

    answerer = load_question_answerer(folder, store)
    if answerer.folder != folder:
        raise ConfigError(
            f"{folder} is part of the package and is not trained further; train your own: `regard train birthplaces`"
        )
    data = find_data(folder, data)
    with join_process_group("ddp", device) as group, show_progress(group.is_main) as on_progress:
        location = RunLocation(
            data=data, group=group, on_message=print_message if group.is_main else ignore, on_progress=on_progress
        )  # fmt: skip
        new, metrics = answerer.learn(location, LEARNING_STEPS if steps is None else steps)
    if not group.is_main:
        return
    if json:
        show_json({"learned": [asdict(fact) for fact in new], "metrics": metrics})
    else:
        print(f"learned: {len(new)}")
        print_metrics(metrics)
