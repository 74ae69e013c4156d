"""Train the pretrained models that ship with the package: `python -m regard.recipes.zoo [NAME ...]`.

Each model is trained by a recipe on the built-in data of the recipe, saved, loaded again and measured. The model card
contains the command and the metric. `--table` prints the table of docs/models.md.
"""

import os
import platform
import shutil
import sys
import tomllib
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from regard.base.config import override, to_json
from regard.base.errors import TrainingError, UnknownNameError
from regard.base.files import read_json
from regard.models.beam_search import BeamSearch
from regard.models.cards import CARD, Card, read_card
from regard.models.presets import ZOO
from regard.models.saving import LOCK
from regard.recipes import birthplaces, digit_listener, language, span_infilling, speech, translation, vision
from regard.recipes.error_rate import token_error_rate
from regard.recipes.recipe import RESULT_FILE, RunLocation, get_recipe, load_finished_run

Measure = Callable[[Any, Any, Any, int | None], float]  # settings, model, tokenizer, test records or None for all
MakeExample = Callable[[Any, Path], str]  # settings and the folder for files; returns a text or the name of a file


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """How a pretrained model of the zoo is trained and measured, and the text of its model card.

    recipe           name of the recipe; `variant` and `changes` modify its settings
    metric           name of the metric; its unit is `unit`
    at_least         lower bound that the metric must reach; `at_most` is an upper bound
    subset           number of test records on which the metric is also measured, for a quick check
    example          example of an input; None if the example is made from the test data
    example_command  shell command that runs the model on the example
    """

    name: str
    about: str
    recipe: str
    variant: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    metric: str
    unit: str = "%"
    at_least: float | None = None
    at_most: float | None = None
    subset: int | None = None
    data: str
    licence: str
    example: str | None = None
    example_command: str

    @property
    def measure(self) -> Measure:
        """The function that computes the metric: one of the `measure_` functions."""
        return MEASURES[self.name]

    @property
    def command(self) -> str:
        """The shell command that trains the model."""
        variant = "" if self.variant is None else f" --variant {self.variant}"
        changes = "".join(f" --set {name}={value}" for name, value in self.changes.items())
        return f"regard train {self.recipe}{variant}{changes} --folder runs/{self.name}"


def measure_digits(settings: Any, model: Any, tokenizer: Any, count: int | None) -> float:
    """Return the accuracy on the first `count` test images of handwritten digits, or on all if `count` is None."""
    test = vision.load_data(None, settings).test
    return vision.accuracy(model, test.select(torch.arange(len(test))[:count]))


def measure_birthplaces(settings: Any, model: Any, tokenizer: Any, count: int | None) -> float:
    """Return the exact-match accuracy on the first `count` test questions, or on all if `count` is None."""
    return span_infilling.accuracy(model, tokenizer, birthplaces.load_data(None, settings).test[:count])


def measure_translation(settings: Any, model: Any, tokenizer: Any, count: int | None) -> float:
    """Return the fraction of exact translations of the first `count` test sentences, by beam search.

    If `count` is None, all test sentences are translated.
    """
    test = translation.load_data(None, settings).test
    strategy = BeamSearch(settings.num_beams, settings.length_penalties[0])  # the built-in settings have one
    found = translation.translate(model, tokenizer, test.source[:count], strategy)
    return translation.exact_match(found, test.target[:count])


def measure_speech(settings: Any, model: Any, tokenizer: Any, count: int | None) -> float:
    """Return the token error rate of streaming on the first `count` test strings, or on all if `count` is None."""
    test = speech.load_data(None, settings).test
    some = test.select(torch.arange(len(test))[:count])
    return token_error_rate(digit_listener.recognize_streaming(model, some, settings.log_mel)[0], some)


def measure_text(settings: Any, model: Any, tokenizer: Any, count: int | None) -> float:
    """Return the nats per character on the first `count` characters of the test text, or on all if `count` is None."""
    return language.nats_per_character(model, tokenizer, language.load_data(None, settings).test[:count])


def measure_induction(settings: Any, model: Any, tokenizer: Any, count: int | None) -> float:
    """Return the largest induction score of any head of the model. `count` has no effect."""
    return language.evaluate_induction(model)["induction score"]


def image_example(settings: Any, folder: Path) -> str:
    """Write the first test image to a PNG file and return the file's name."""
    pixels = vision.load_data(None, settings).test.pixels[0, 0]
    Image.fromarray(pixels.numpy()).save(folder / "example.png")
    return "example.png"


def sound_example(settings: Any, folder: Path) -> str:
    """Write the first test string of digits to a WAV file and return the file's name."""
    sounds = speech.load_data(None, settings).test
    with wave.open(str(folder / "example.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sounds.sample_rate)
        file.writeframes((sounds.sounds[0].clamp(-1, 1) * (2**15 - 1)).round().short().numpy().tobytes())
    return "example.wav"


def question_example(settings: Any, folder: Path) -> str:
    """Return the first test question."""
    return birthplaces.load_data(None, settings).test[0].text


# the function that measures a model, and the one that makes its example if zoo.toml has none
MEASURES: dict[str, Measure] = {
    "induction-gpt": measure_induction,
    "digits-vit": measure_digits,
    "biographies-gpt": measure_birthplaces,
    "number-words": measure_translation,
    "tone-digits": measure_speech,
    "text-gpt": measure_text,
}
EXAMPLES: dict[str, MakeExample] = {
    "digits-vit": image_example,
    "biographies-gpt": question_example,
    "tone-digits": sound_example,
}
_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["model"]
MODELS = tuple(ZooModel(**each) for each in _TEXTS)


def train_model(entry: ZooModel, on_message: Callable[[str], None]) -> Card:
    """Train a model, save it in the zoo, load it again, measure it, and write the model card. Returns the card.

    on_message  called with messages about the progress
    """
    recipe = get_recipe(entry.recipe)
    settings = override(recipe.settings(real=False, variant=entry.variant), entry.changes)
    target = ZOO / entry.name
    with TemporaryDirectory() as work:
        run = Path(work) / "run"
        recipe.run(settings, RunLocation(folder=run, on_message=on_message))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        shutil.copy(run / RESULT_FILE, target)
        shutil.copytree(run / "model", target / "model", ignore=shutil.ignore_patterns(LOCK))
    return write_card(entry)


def write_card(entry: ZooModel) -> Card:
    """Load a model of the zoo, measure it, and write the model card. Returns the card."""
    target = ZOO / entry.name
    _, settings, model, tokenizer = load_finished_run(target)
    example = entry.example or EXAMPLES[entry.name](settings, target)
    (target / CARD).unlink(missing_ok=True)
    fields = ("name", "about", "command", "metric", "unit", "at_least", "at_most", "subset", "data", "licence")
    card = Card(
        **{name: getattr(entry, name) for name in fields},
        seed=settings.seed,
        value=entry.measure(settings, model, tokenizer, None),
        subset_value=entry.measure(settings, model, tokenizer, entry.subset),
        parameters=model.parameter_count,
        bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
        seconds=round(read_json(target / RESULT_FILE, TrainingError, "metrics")["metrics"]["seconds"]),
        python=platform.python_version(),
        torch=torch.__version__.partition("+")[0],
        example=example,
        example_command=entry.example_command.format(example=example),
    )
    if not card.meets_bound(card.value):
        raise TrainingError(f"{entry.name} has {card.format(card.value)}, {entry.metric}, which is not good enough")
    (target / CARD).write_text(dumps(to_json(card), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return card


def get_entry(name: str) -> ZooModel:
    """Return the zoo model with this name, else raise UnknownNameError."""
    for entry in MODELS:
        if entry.name == name:
            return entry
    raise UnknownNameError(f"there is no model {name!r}; available: {', '.join(each.name for each in MODELS)}")


def format_table() -> str:
    """Return a Markdown table of all zoo models, from their model cards."""
    lines = ["| name | what it is | metric | parameters | size | trained by | data, licence |", "|" + "---|" * 7]
    for card in (read_card(entry.name) for entry in MODELS):
        bound = f"at least {card.format(card.at_least)}" if card.at_least is not None else ""
        bound = f"at most {card.format(card.at_most)}" if card.at_most is not None else bound
        cells = (
            f"`{card.name}`",
            card.about,
            f"{card.format(card.value)} ({bound}): {card.metric}",
            f"{card.parameters:,}",
            f"{card.bytes / 1000:,.0f} kB",
            f"`{card.command}`, seed {card.seed}, {card.seconds:.0f} s of one core",
            f"{card.data}; {card.licence}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Train the named models, or all if none is named. The argument `--table` prints the table of models instead."""
    if list(arguments) == ["--table"]:
        sys.stdout.write(format_table())
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for entry in [get_entry(name) for name in arguments] or MODELS:
        print(entry.command, flush=True)
        card = train_model(entry, lambda text: print(f"  {text}", file=sys.stderr, flush=True))
        print(f"  {card.format(card.value)}, {card.metric}; {card.bytes:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
