"""`regard generate`: a prompt goes on, token by token as they come."""

import sys
from dataclasses import asdict
from enum import StrEnum
from json import loads as json_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import CheckpointError, ConfigError, DataError
from regard.cli.output import show_json, tell
from regard.cli.text_input import from_stdin, typed

if TYPE_CHECKING:
    from regard.data.tokenizers import Tokenizer
    from regard.models.generation import GeneratedText
    from regard.models.generation_adapters import GenerationAdapter
    from regard.models.gpt import GPT
    from regard.models.sampling import Strategy
    from regard.models.transformer import Transformer

RUN, RESULT = "run.json", "result.json"  # what a run leaves from its first moment on, and at its end
# what the model of a finished run is for that does not go on with a text, by the recipe
INSTEAD = {
    "translation": "`regard translate {0} TEXT` translates",
    "speech": "`regard listen {0} FILE` writes down what it hears",
}

# where Hugging Face writes tokens that matter for writing; what the first says goes before the second
NAMING = ("generation_config.json", "config.json")


class SamplingMethod(StrEnum):
    """The strategies there are."""

    greedy = "greedy"
    sample = "sample"
    kth = "kth"
    beam = "beam"


# which options belong to which strategy: any other combination would be ignored, so it is refused
SETTINGS = {
    SamplingMethod.greedy: (),
    SamplingMethod.sample: ("temperature", "top_k", "top_p", "seed", "count"),
    SamplingMethod.kth: ("kth",),
    SamplingMethod.beam: ("beams", "length_penalty"),
}


def command(
    model: Annotated[str, typer.Argument(help="A saved folder, ours or Hugging Face's, a finished run, or a preset")],
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to go on from, or to answer; - reads it from stdin, less its last line break"),
    ] = None,
    strategy: Annotated[SamplingMethod, typer.Option(help="How each token is taken")] = SamplingMethod.greedy,
    temperature: Annotated[float | None, typer.Option(help="sample: divides the logits [1.0]")] = None,
    top_k: Annotated[int | None, typer.Option(help="sample: only the k likeliest tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="sample: only the likeliest tokens that reach this share")] = None,
    seed: Annotated[int | None, typer.Option(help="sample: where chance begins [0]")] = None,
    count: Annotated[int | None, typer.Option(help="sample: so many texts; number r draws with seed + r [1]")] = None,
    kth: Annotated[int | None, typer.Option(help="kth: which token in order of likelihood [2]")] = None,
    beams: Annotated[int | None, typer.Option(help="beam: texts searched side by side [4]")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="beam: alpha of log-probability / tokens ** alpha [0]")
    ] = None,
    length: Annotated[int, typer.Option(help="The most new tokens")] = 64,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends it, matched as tokens; give it again for several")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run a whole pass for every token")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; the folder's own unless given, else bytes")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The texts with their tokens and log-probabilities")] = False,
) -> None:
    """Write on from a prompt, or answer it with an encoder-decoder."""
    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "count": count}
    given |= {"kth": kth, "beams": beams, "length_penalty": length_penalty}
    settings = fitting(strategy, {name: value for name, value in given.items() if value is not None})
    texts = settings.pop("count", 1)
    if texts < 1:
        raise ConfigError(f"--count is {texts}, but at least 1 text is written")
    values = [strategy_of(strategy, settings, number) for number in range(texts)]
    text = read_prompt(prompt)
    place = model_in(model)
    network = opened(place)
    words = words_of(place, network.config.vocab, tokenizer)
    tokens = read_as("the prompt", text, words)
    if not tokens:
        raise ConfigError("the prompt is empty; a text needs a first token to go on from")
    writer, begun = started(place, network, tokens)
    stops = [read_as("--stop", typed("--stop", each), words, special=False) for each in stop or ()]
    stops += endings(place, network.config.vocab)
    written = [
        write(writer, begun, words, value, length=length, stops=stops, cache=not no_cache, shown=not json)
        for value in values
    ]
    if json:
        chosen = {"name": strategy.value, **asdict(values[0])}  # type: ignore[call-overload]
        told = [{"text": words.decode(each.body), **asdict(each)} for each in written]
        show_json({"model": model, "prompt": text, "strategy": chosen, "length": length, "texts": told})


def fitting(strategy: SamplingMethod, given: dict[str, Any]) -> dict[str, Any]:
    """The settings, if they all belong to this strategy."""
    for name in given:
        if name not in SETTINGS[strategy]:
            (owner,) = (way for way, names in SETTINGS.items() if name in names)
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} goes with --strategy {owner}, not with {strategy}")
    return given


def strategy_of(strategy: SamplingMethod, settings: dict[str, Any], number: int = 0) -> "Strategy":
    """The strategy of text number so and so."""
    from regard.models.sampling import beam, greedy, kth_largest, sample

    match strategy:
        case SamplingMethod.sample:
            return sample(**{**settings, "seed": settings.get("seed", 0) + number})
        case SamplingMethod.kth:
            return kth_largest(settings.get("kth", 2))
        case SamplingMethod.beam:
            return beam(settings.get("beams", 4), settings.get("length_penalty", 0.0))
    return greedy()


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or from stdin."""
    if prompt is None:
        raise ConfigError("there is no prompt; write one after the model, or - to read it from stdin")
    return from_stdin().replace("\r\n", "\n").removesuffix("\n") if prompt == "-" else typed("the prompt", prompt)


def read_as(origin: str, text: str, words: "Tokenizer", special: bool = True) -> list[int]:
    """The tokens of a text, or an error that names all of its characters that have none."""

    def readable(character: str) -> bool:
        try:
            words.encode(character)
        except DataError:
            return False
        return True

    try:
        return words.encode(text, special=special)
    except DataError:
        unknown = "".join(each for each in dict.fromkeys(text) if not readable(each))
        raise DataError(f"{origin} has {unknown!r}, which the model's training text never had; leave it out") from None


def model_in(name: str) -> str:
    """The folder of the model, where a finished run is named whose model writes text; else what was named."""
    folder = Path(name)
    if (folder / "config.json").is_file() or not any((folder / file).is_file() for file in (RUN, RESULT)):
        return name
    from regard.models.gpt import GPT
    from regard.models.saving import load_config
    from regard.recipes.run_folder import read_json_fields

    if not (folder / RESULT).is_file():
        recipe = read_json_fields(folder / RUN, "recipe")["recipe"]
        raise ConfigError(
            f"{name} holds a run of {recipe} that is not finished; `regard train {recipe} --resume --folder {name}` "
            "goes on with it"
        )
    recipe = read_json_fields(folder / RESULT, "recipe")["recipe"]
    if not isinstance(load_config(folder / "model"), GPT.Config):
        instead = INSTEAD.get(recipe, "`regard eval {0}` shows what it can do").format(name)
        raise ConfigError(f"{name} holds a run of {recipe}, whose model does not go on with a text; {instead}")
    return str(folder / "model")


def opened(name: str) -> "GPT | Transformer":
    """The model in a folder, or a fresh one by its name."""
    from regard.models.gpt import GPT
    from regard.models.presets import PRESETS, build
    from regard.models.saving import load
    from regard.models.transformer import Transformer

    if Path(name).exists() or (name not in PRESETS and ("/" in name or "\\" in name)):
        model = load(name)
    elif isinstance(PRESETS[name], GPT.Config):
        model = build(name).eval()
        tell(f"{name} is a preset: its weights are random, and so is what it writes; a saved folder has learned ones")
    else:
        model = build(name, device="meta")
    if not isinstance(model, GPT | Transformer):
        able = ", ".join(each for each in PRESETS if isinstance(PRESETS[each], GPT.Config))
        raise ConfigError(f"{name} is a {type(model).__name__}, which does not write text; a GPT does: {able}")
    return model


def started(name: str, model: "GPT | Transformer", tokens: list[int]) -> "tuple[GPT | GenerationAdapter, list[int]]":
    """What writes, and what its text begins with: the prompt, or the token with which an answer to it starts."""
    import torch

    from regard.models.generation_adapters import make_adapter
    from regard.models.gpt import GPT

    if isinstance(model, GPT):
        return model, tokens
    start = named(name, "decoder_start_token_id", model.config.vocab)
    if not start:
        raise ConfigError(
            f"{name} is a Transformer, whose answer starts with a token of its own, but no config.json names that as "
            "decoder_start_token_id; in Python use generate(make_adapter(model, source), [[start]])"
        )
    return make_adapter(model, torch.tensor([tokens])), start[:1]


def words_of(name: str, vocab: int, given: Path | None) -> "Tokenizer":
    """The tokenizer that was asked for, or the folder's own, or bytes where the vocabulary has room for them."""
    from regard.data.tokenizers import FILE, Bytes, load_tokenizer

    if given is not None:
        return load_tokenizer(given)
    if (Path(name) / FILE).is_file():
        return load_tokenizer(name)
    if vocab < Bytes.vocab:
        raise ConfigError(
            f"{name} has no {FILE}, and its vocabulary of {vocab} is too small for bytes, which need {Bytes.vocab}; "
            "name a tokenizer with --tokenizer"
        )
    return Bytes()


def endings(name: str, vocab: int) -> list[list[int]]:
    """The tokens that end every text, where a folder names them as Hugging Face does."""
    return [[token] for token in named(name, "eos_token_id", vocab)]


def named(name: str, key: str, vocab: int) -> list[int]:
    """The tokens that a folder's files name so, one or several; none if no file does, or if it is no folder."""
    for file in (Path(name) / each for each in NAMING):
        if file.is_file():
            try:
                about = json_of(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise CheckpointError(f"{file} is not JSON: {error}") from None
            found = about.get(key) if isinstance(about, dict) else None
            tokens = found if isinstance(found, list) else [found]
            if known := [token for token in tokens if isinstance(token, int) and 0 <= token < vocab]:
                return known
    return []


def write(
    model: "GPT | GenerationAdapter",
    prompt: list[int],
    words: "Tokenizer",
    strategy: "Strategy",
    *,
    length: int,
    stops: list[list[int]],
    cache: bool,
    shown: bool,
) -> "GeneratedText":
    """One text, shown as it comes without the stop that ends it."""
    from regard.data.tokenizers import Unfolding
    from regard.models.generation import collect_tokens, stream

    unfolding = Unfolding(words)
    held = max((len(stop) for stop in stops), default=1) - 1  # so many tokens may turn out to begin a stop
    tokens, printed = [], 0
    for token in stream(model, [prompt], strategy=strategy, length=length, stops=stops, cache=cache):
        tokens.append(token)
        if shown and token.ended is None:
            safe = max(printed, len(tokens) - held)
            for each in tokens[printed:safe]:
                say(unfolding.push(each.token))
            printed = safe
    text = collect_tokens(prompt, tokens, stops)
    if shown:
        for rest in text.body[printed:]:
            say(unfolding.push(rest))
        say(unfolding.finish() + "\n")
    return text


def say(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()
