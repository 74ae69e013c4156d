"""`regard translate`: translate sentences with a model of `regard train translation`."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError, DataError
from regard.cli.output import JsonOption, print_message, show_json
from regard.cli.pretrained import example_input
from regard.cli.text_input import check_argument, read_stdin

if TYPE_CHECKING:
    from regard.data.byte_pairs import BytePairTokenizer
    from regard.models.sampling import Strategy
    from regard.models.transformer import Transformer


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="model", help="A pretrained model, or the folder of a finished run of translation"),
    ] = Path("number-words"),
    text: Annotated[
        str | None,
        typer.Argument(
            help="A sentence; - reads one on each line of stdin [default: the example of a pretrained model]"
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file with a sentence on each line")] = None,
    num_beams: Annotated[int | None, typer.Option(help="Number of beams; 1 is greedy [default: as in the run]")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Alpha of log-probability / tokens ** alpha [default: as chosen in the run]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Translate sentences, one on each line; empty lines stay empty.

    Example: regard translate number-words 'two hundred seven'
    """
    if text is None and file is None:
        text = example_input(str(folder), "give one of: a sentence, - for lines from stdin, or --file")
        print_message(f"the text is {text!r}, the example of {folder}")
    origin, lines = read_sentences(text, file)
    run = load_run(folder)
    strategy = run.strategy(num_beams, length_penalty)
    translations = run.translate(lines, strategy, origin)
    for number, each in enumerate(translations, 1):
        if each.unknown:
            print_message(
                f"{origin}, line {number}: {each.unknown!r} is not in the vocabulary; the translation may be wrong"
            )
    if json:
        chosen = {"name": strategy.name, **asdict(strategy)}  # type: ignore[call-overload]
        show_json({"folder": str(folder), "strategy": chosen, "translations": [asdict(each) for each in translations]})
        return
    sys.stdout.write("".join(f"{each.text}\n" for each in translations))


def read_sentences(text: str | None, file: Path | None) -> tuple[str, list[str]]:
    """Read the lines to translate from the text, from stdin or from a file.

    Returns the name of the source, for error messages, and the lines.
    """
    from regard.data.plain_text import decode_text, read_bytes

    if text is not None and file is not None:
        raise ConfigError("give one of: a sentence, - for lines from stdin, or --file")
    if file is not None:
        origin, content = str(file), decode_text(file, read_bytes(file))
    elif text == "-":
        origin, content = "stdin", read_stdin()
    else:
        assert text is not None
        origin, content = "the text", check_argument("the text", text)
    found = split_lines(content)
    if not any(line.strip() for line in found):
        raise DataError("there is nothing to translate: every line is empty")
    return origin, found


def split_lines(text: str) -> list[str]:
    """Split a text at line feeds only.

    Other line separators do not split it, so that each line of the input gives one line of output.
    """
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


@dataclass(frozen=True)
class Translation:
    """A source line and its translation. An empty line is not translated and has no tokens.

    source           the source line
    text             the translation
    tokens           generated token ids
    log_probability  log-probability of the tokens
    finish_reason    why generation ended
    unknown          characters of the line that are not in the vocabulary, each once; the model reads <unk> instead
    """

    source: str
    text: str
    tokens: tuple[int, ...] = ()
    log_probability: float | None = None
    finish_reason: str | None = None
    unknown: str = ""


@dataclass(frozen=True)
class TranslationRun:
    """A finished training run of the recipe `translation`, for translating plain text.

    settings        settings of the run
    model           the trained model
    pairs           the byte-pair tokenizer
    length_penalty  length penalty of beam search that was chosen in the run
    """

    settings: Any
    model: "Transformer"
    pairs: "BytePairTokenizer"
    length_penalty: float  # chosen in the run

    def strategy(self, num_beams: int | None, length_penalty: float | None) -> "Strategy":
        """Return the decoding strategy: greedy decoding for one beam without a length penalty, else beam search.

        num_beams, length_penalty  options of the user; None for the value of the training run
        """
        from regard.models.beam_search import BeamSearch
        from regard.models.sampling import Greedy

        if num_beams == 1 and length_penalty is None:
            return Greedy()
        beams = self.settings.num_beams if num_beams is None else num_beams
        return BeamSearch(beams, self.length_penalty if length_penalty is None else length_penalty)

    def translate(self, lines: list[str], strategy: "Strategy", origin: str) -> list[Translation]:
        """Translate all lines. An error message names the origin and the number of the line.

        origin  where the lines are from, such as the name of a file
        """
        from regard.recipes.translation import generate_translations, postprocess, preprocess

        nonempty = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        ready = [preprocess(self.settings, line) for _, line in nonempty]
        names = [f"{origin}, line {number}" for number, _ in nonempty]
        answered = iter(generate_translations(self.model, self.pairs, ready, strategy, names=names))
        found = []
        sentences = iter(ready)
        for line in lines:
            if not line.strip():
                found.append(Translation(line, ""))
                continue
            text, unknown = next(answered), self.unknown(next(sentences))
            said = postprocess(self.settings, self.pairs.decode(text.body))
            found.append(Translation(line, said, text.tokens, text.log_probability, text.finish_reason, unknown))
        return found

    def unknown(self, sentence: str) -> str:
        """Return the characters of a preprocessed sentence that are not in the vocabulary, each once."""
        known = {*self.pairs.symbols, " "}
        return "".join(dict.fromkeys(each for each in "".join(sentence.split()) if each not in known))


def load_run(folder: Path) -> TranslationRun:
    """Load a finished run of the recipe `translation`, or a pretrained model."""
    from regard.models.transformer import Transformer
    from regard.recipes.recipe import load_finished_run, read_metrics
    from regard.recipes.translation import LENGTH_PENALTY

    recipe, settings, model, pairs = load_finished_run(folder)
    if recipe.name != "translation":
        raise ConfigError(f"{folder} has a run of {recipe.name}, which does not translate; give one of translation")
    assert isinstance(model, Transformer)
    return TranslationRun(settings, model, pairs, read_metrics(folder, LENGTH_PENALTY)[LENGTH_PENALTY])
