"""`regard translate`: sentences in the other language, by a model that `regard train translation` left."""

import sys
from dataclasses import asdict, dataclass
from json import loads as json_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError, DataError
from regard.cli.output import show_json, tell
from regard.cli.text_input import from_stdin, typed

if TYPE_CHECKING:
    from regard.data.byte_pairs import BytePairs
    from regard.models.sampling import Strategy
    from regard.models.transformer import Transformer


def command(
    folder: Annotated[Path, typer.Argument(help="What a run of the recipe left: regard train translation")],
    text: Annotated[str | None, typer.Argument(help="A sentence; - reads one from each line of stdin")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with a sentence on each line")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token at every step, and no search")] = False,
    beams: Annotated[int | None, typer.Option(help="Texts searched side by side [as in the run]")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="alpha of log-probability / tokens ** alpha [as chosen in the run]")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="With tokens and log-probabilities")] = False,
) -> None:
    """Translate sentences, one for each line; an empty line stays one."""
    if greedy and (beams is not None or length_penalty is not None):
        raise ConfigError("--beams and --length-penalty belong to a search, which --greedy does without")
    origin, lines = sentences(text, file)
    run = opened(folder)
    strategy = run.strategy(greedy, beams, length_penalty)
    told = run.translations(lines, strategy, origin)
    for number, each in enumerate(told, 1):
        if each.unknown:
            tell(f"{origin}, line {number}: training never had {each.unknown!r}; what it says there may be nonsense")
    if json:
        chosen = {"name": type(strategy).__name__.lower(), **asdict(strategy)}  # type: ignore[call-overload]
        show_json({"folder": str(folder), "strategy": chosen, "translations": [asdict(each) for each in told]})
        return
    sys.stdout.write("".join(f"{each.text}\n" for each in told))


def sentences(text: str | None, file: Path | None) -> tuple[str, list[str]]:
    """Where that comes from which is to be translated, and its lines."""
    from regard.data.plain_text import decode_text, read_bytes

    if (text is None) == (file is None):
        raise ConfigError("say what to translate in one way: a sentence, - for lines from stdin, or --file")
    if file is not None:
        origin, given = str(file), decode_text(file, read_bytes(file))
    elif text == "-":
        origin, given = "stdin", from_stdin()
    else:
        assert text is not None
        origin, given = "the text", typed("the text", text)
    found = lines_in(given)
    if not any(line.strip() for line in found):
        raise DataError("there is nothing to translate: every line is empty")
    return origin, found


def lines_in(text: str) -> list[str]:
    """Lines end at a line feed alone, so that what comes out lines up with what went in."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


@dataclass(frozen=True)
class Translation:
    """One line, and what became of it; an empty line has no tokens.

    unknown  its characters that training never had, each once: one that stands for all of them is read in their place
    """

    source: str
    text: str
    tokens: tuple[int, ...] = ()
    log_probability: float | None = None
    ended: str | None = None
    unknown: str = ""


@dataclass(frozen=True)
class Run:
    """A finished run of the recipe."""

    settings: Any
    model: "Transformer"
    pairs: "BytePairs"
    length_penalty: float  # that was chosen in it

    def strategy(self, greedily: bool, beams: int | None, length_penalty: float | None) -> "Strategy":
        """The way to search that was asked for, and in the rest that of the run."""
        from regard.models.sampling import beam, greedy

        if greedily:
            return greedy()
        width = self.settings.beams if beams is None else beams
        return beam(width, self.length_penalty if length_penalty is None else length_penalty)

    def translations(self, lines: list[str], strategy: "Strategy", origin: str) -> list[Translation]:
        """All lines, those with words in one go; errors name the line by its number and origin."""
        from regard.recipes.translation import answers, plain, prepared

        filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        ready = [prepared(self.settings, line) for _, line in filled]
        names = [f"{origin}, line {number}" for number, _ in filled]
        answered = iter(answers(self.model, self.pairs, ready, strategy, names=names))
        found = []
        sentences = iter(ready)
        for line in lines:
            if not line.strip():
                found.append(Translation(line, ""))
                continue
            text, unknown = next(answered), self.unknown(next(sentences))
            said = plain(self.settings, self.pairs.decode(text.body))
            found.append(Translation(line, said, text.tokens, text.log_probability, text.ended, unknown))
        return found

    def unknown(self, sentence: str) -> str:
        """The characters of a prepared sentence that training never had, each once."""
        known = {*self.pairs.symbols, " "}
        return "".join(dict.fromkeys(each for each in "".join(sentence.split()) if each not in known))


def opened(folder: Path) -> Run:
    """The run in a folder, if it was one of this recipe."""
    from regard.models.transformer import Transformer
    from regard.recipes.recipe import RESULT, load_finished_run
    from regard.recipes.translation import PENALTY

    recipe, settings, model, pairs = load_finished_run(folder)
    if recipe.name != "translation":
        raise ConfigError(f"{folder} holds a run of {recipe.name}, which does not translate; name one of translation")
    assert isinstance(model, Transformer)
    figures = json_of((folder / RESULT).read_text(encoding="utf-8"))["figures"]
    return Run(settings, model, pairs, figures[PENALTY])
