"""`regard generate`: a prompt goes on, token by token as they come."""

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError
from regard.cli.output import show_json, tell

if TYPE_CHECKING:
    from regard.data.tokenizers import Tokenizer
    from regard.models.generation import Text
    from regard.models.gpt import GPT
    from regard.models.strategies import Strategy


class Way(StrEnum):
    """The strategies there are."""

    greedy = "greedy"
    sample = "sample"
    kth = "kth"
    beam = "beam"


# which options belong to which strategy: any other combination would be ignored, so it is refused
SETTINGS = {
    Way.greedy: (),
    Way.sample: ("temperature", "top_k", "top_p", "seed", "count"),
    Way.kth: ("kth",),
    Way.beam: ("beams", "length_penalty"),
}


def command(
    model: Annotated[str, typer.Argument(help="A saved folder, ours or Hugging Face's, or a preset such as gpt2")],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from; - reads it from stdin, less its last line break")
    ] = None,
    strategy: Annotated[Way, typer.Option(help="How each token is taken")] = Way.greedy,
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
    """Write on from a prompt."""
    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "count": count}
    given |= {"kth": kth, "beams": beams, "length_penalty": length_penalty}
    settings = fitting(strategy, {name: value for name, value in given.items() if value is not None})
    texts = settings.pop("count", 1)
    if texts < 1:
        raise ConfigError(f"--count is {texts}, but at least 1 text is written")
    values = [strategy_of(strategy, settings, number) for number in range(texts)]
    text = read_prompt(prompt)
    network = opened(model)
    words = words_of(model, network.config.vocab, tokenizer)
    tokens = words.encode(text)
    if not tokens:
        raise ConfigError("the prompt is empty; a text needs a first token to go on from")
    stops = [words.encode(each, special=False) for each in stop or ()] + endings(model, network.config.vocab)
    written = [
        write(network, tokens, words, value, length=length, stops=stops, cache=not no_cache, shown=not json)
        for value in values
    ]
    if json:
        chosen = {"name": strategy.value, **asdict(values[0])}  # type: ignore[call-overload]
        told = [{"text": words.decode(each.body), **asdict(each)} for each in written]
        show_json({"model": model, "prompt": text, "strategy": chosen, "length": length, "texts": told})


def fitting(strategy: Way, given: dict[str, Any]) -> dict[str, Any]:
    """The settings, if they all belong to this strategy."""
    for name in given:
        if name not in SETTINGS[strategy]:
            (owner,) = (way for way, names in SETTINGS.items() if name in names)
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} goes with --strategy {owner}, not with {strategy}")
    return given


def strategy_of(strategy: Way, settings: dict[str, Any], number: int = 0) -> "Strategy":
    """The strategy of text number so and so."""
    from regard.models.strategies import beam, greedy, kth, sample

    match strategy:
        case Way.sample:
            return sample(**{**settings, "seed": settings.get("seed", 0) + number})
        case Way.kth:
            return kth(settings.get("kth", 2))
        case Way.beam:
            return beam(settings.get("beams", 4), settings.get("length_penalty", 0.0))
    return greedy()


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or from stdin."""
    if prompt is None:
        raise ConfigError("there is no prompt; write one after the model, or - to read it from stdin")
    return sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt


def opened(name: str) -> "GPT":
    """The model in a folder, or a fresh one by its name."""
    from regard.models.files import load
    from regard.models.gpt import GPT
    from regard.models.presets import PRESETS, build

    if Path(name).exists() or "/" in name or "\\" in name:
        model = load(name)
    elif isinstance(PRESETS[name], GPT.Config):
        model = build(name).eval()
        tell(f"{name} is a preset: its weights are random, and so is what it writes; a saved folder has learned ones")
    else:
        model = build(name, device="meta")
    if not isinstance(model, GPT):
        able = ", ".join(each for each in PRESETS if isinstance(PRESETS[each], GPT.Config))
        raise ConfigError(f"{name} is a {type(model).__name__}, which does not go on from a prompt; a GPT does: {able}")
    return model


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
    from regard.models.files import read_config

    named = read_config(Path(name)).get("eos_token_id") if Path(name).is_dir() else None
    tokens = named if isinstance(named, list) else [named]
    return [[token] for token in tokens if isinstance(token, int) and 0 <= token < vocab]


def write(
    model: "GPT",
    prompt: list[int],
    words: "Tokenizer",
    strategy: "Strategy",
    *,
    length: int,
    stops: list[list[int]],
    cache: bool,
    shown: bool,
) -> "Text":
    """One text, shown as it comes without the stop that ends it."""
    from regard.data.tokenizers import Unfolding
    from regard.models.generation import gathered, stream

    unfolding = Unfolding(words)
    held = max((len(stop) for stop in stops), default=1) - 1  # so many tokens may turn out to begin a stop
    tokens, printed = [], 0
    for token in stream(model, [prompt], strategy=strategy, length=length, stops=stops, cache=cache):
        tokens.append(token)
        if shown and token.ended is None:
            for each in tokens[printed : len(tokens) - held]:
                say(unfolding.push(each.token))
            printed = max(printed, len(tokens) - held)
    text = gathered(prompt, tokens, stops)
    if shown:
        for rest in text.body[printed:]:
            say(unfolding.push(rest))
        say(unfolding.finish() + "\n")
    return text


def say(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()
