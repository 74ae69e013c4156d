"""`regard generate`: continue a prompt, printing each token as soon as it is known."""

from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import CheckpointError, ConfigError, DataError
from regard.base.files import read_json
from regard.base.validation import check_integer
from regard.cli.help_panels import panel_option
from regard.cli.output import JsonOption, print_message, show_json, write_text
from regard.cli.pretrained import example_input, is_untrained
from regard.cli.text_input import check_argument, read_stdin

if TYPE_CHECKING:
    from regard.data.tokenizers import Tokenizer
    from regard.models.generation_adapters import GenerationAdapter
    from regard.models.generation_types import GeneratedText
    from regard.models.gpt import GPT
    from regard.models.sampling import Strategy
    from regard.models.transformer import Transformer

RUN, RESULT = "run.json", "result.json"  # files of a run: from its start, and at its end
# commands for finished runs whose model does not continue a text, by recipe
OTHER_COMMANDS = {
    "translation": "`regard translate {0} TEXT` translates",
    "speech": "`regard listen {0} FILE` transcribes speech",
}
CONFIG_FILES = ("generation_config.json", "config.json")  # files of Hugging Face with special tokens; the first wins


EarlyStopping = StrEnum("EarlyStopping", ["true", "false", "never"])

search_option = panel_option("Beam search")
other_option = panel_option("Other")


def command(
    model: Annotated[
        str,
        typer.Argument(help="A pretrained model, a folder, a run or a preset"),
    ] = "text-gpt",
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; - is stdin [default: the model's example]"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Sample: divide the logits by this [default: 1.0]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the nucleus with this probability")] = None,
    seed: Annotated[int | None, typer.Option(help="Sample: seed of the random numbers [default: 0]")] = None,
    num_beams: Annotated[int | None, search_option(help="Number of beams [default: 1]")] = None,
    length_penalty: Annotated[
        float | None, search_option(help="Alpha of log-probability / tokens ** alpha [default: 0]")
    ] = None,
    early_stopping: Annotated[
        EarlyStopping | None, search_option(help="End once enough texts are finished [default: false]")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated")] = None,
    num_return_sequences: Annotated[int, other_option(help="Sample: number of independent texts")] = 1,
    no_cache: Annotated[
        bool, other_option("--no-cache", help="Do not use a KV cache: run a whole pass for every token")
    ] = False,
    tokenizer: Annotated[
        Path | None, other_option(help="A tokenizer.json [default: the folder's own, else bytes]")
    ] = None,
    int8: Annotated[
        bool, other_option("--int8", help="Round the weights of the blocks to int8, which a CPU reads faster")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Continue a prompt, or answer it with an encoder-decoder.

    Example: regard generate text-gpt 'The for statement' --temperature 0.8
    """
    from regard.nn.int8 import quantize_int8

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    early = None if early_stopping is None else {"true": True, "false": False}.get(early_stopping, "never")
    beam = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early}
    strategies = make_strategies(num_return_sequences, **sampling, **beam)
    text = read_prompt(prompt, model)
    folder = find_model(model)
    untrained = is_untrained(folder)
    network = quantize_int8(load_model(folder)) if int8 else load_model(folder)
    words = find_tokenizer(folder, network.config.vocab, tokenizer)
    tokens = encode("the prompt", text, words)
    if not tokens:
        raise ConfigError("the prompt is empty; it needs at least one token")
    generator, first = prepare_model(folder, network, tokens)
    stops = [encode("--stop", check_argument("--stop", each), words, special=False) for each in stop or ()]
    stops += [[token] for token in special_tokens(folder, "eos_token_id", network.config.vocab)]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stops, "use_cache": not no_cache}
    if untrained and not json:
        write_text(f"{model} is a preset without trained weights, so the text is random:\n")
    generated = [generate_text(generator, first, words, each, options, show=not json) for each in strategies]
    if json:
        chosen = {"name": strategies[0].name, **asdict(strategies[0])}  # type: ignore[call-overload]
        texts = [{"text": words.decode(each.body), **asdict(each)} for each in generated]
        weights = "random" if untrained else "trained"
        about = {"model": model, "weights": weights, "prompt": text, "strategy": chosen}
        show_json({**about, "max_new_tokens": max_new_tokens, "texts": texts})


def make_strategies(count: int, **settings: float | int | str | None) -> "list[Strategy]":
    """Return one decoding strategy for each text to generate.

    More than one text is possible for sampling only. Each text has its own stream of random numbers.

    count     number of texts
    settings  the settings of the strategy, as keyword arguments of `regard.generate`
    """
    from regard.models.generation_types import make_strategy
    from regard.models.sampling import Sample

    made = make_strategy(**settings)  # type: ignore[arg-type]
    if check_integer("--num-return-sequences", count, 1) == 1:
        return [made]
    if not isinstance(made, Sample):
        raise ConfigError(f"--num-return-sequences {count} is for sampling; set --temperature, --top-k or --top-p too")
    return [replace(made, stream=number) for number in range(count)]


def read_prompt(prompt: str | None, model: str, kind: str = "prompt") -> str:
    """Return the prompt: the argument, the text on stdin if it is "-", or the model's example if it is None.

    kind  what the model takes as its input, for the error message if there is no prompt
    """
    if prompt is None:
        prompt = example_input(model, f"there is no {kind}; give one after the model, or - to read it from stdin")
        print_message(f"the prompt is {prompt!r}, the example of {model}")
    return (
        read_stdin().replace("\r\n", "\n").removesuffix("\n") if prompt == "-" else check_argument("the prompt", prompt)
    )


def encode(origin: str, text: str, words: "Tokenizer", special: bool = True) -> list[int]:
    """Tokenise a text and return the token ids. Raises DataError that names all characters missing from the vocabulary.

    origin   what the text is, for the error message, such as "the prompt"
    words    the tokenizer
    special  whether to add special tokens such as [CLS]
    """

    def is_known(character: str) -> bool:
        try:
            words.encode(character)
        except DataError:
            return False
        return True

    try:
        return words.encode(text, special=special)
    except DataError:
        unknown = "".join(each for each in dict.fromkeys(text) if not is_known(each))
        raise DataError(f"{origin} has {unknown!r}, which is not in the model's vocabulary; leave it out") from None


def find_model(name: str) -> str:
    """Return the folder of a model, given the path of a folder or finished run, or the name of a pretrained model.

    Returns `name` unchanged if it is none of these, such as the name of a preset. Raises ConfigError if a run is
    not finished or its model does not continue a text.
    """
    from regard.models.gpt import GPT
    from regard.models.presets import find_pretrained
    from regard.models.saving import find_folder, load_config

    folder = Path(name) if Path(name).exists() else find_pretrained(name) or Path(name)
    if (folder / "config.json").is_file() or not any((folder / file).is_file() for file in (RUN, RESULT)):
        return str(find_folder(name) or name)

    if not (folder / RESULT).is_file():
        recipe = read_json(folder / RUN, CheckpointError, "recipe")["recipe"]
        raise ConfigError(
            f"{name} has a run of {recipe} that is not finished; `regard train {recipe} --resume --folder {name}` "
            "resumes it"
        )
    recipe = read_json(folder / RESULT, CheckpointError, "recipe")["recipe"]
    if not isinstance(load_config(folder / "model"), GPT.Config):
        other = OTHER_COMMANDS.get(recipe, "`regard eval {0}` evaluates it").format(name)
        raise ConfigError(f"{name} has a run of {recipe}, whose model does not continue a text; {other}")
    return str(folder / "model")


def load_model(name: str) -> "GPT | Transformer":
    """Load the model of a folder, or build a preset with random weights.

    Raise ConfigError if the model cannot generate text.
    """
    from regard.models.gpt import GPT
    from regard.models.presets import PRESETS, build
    from regard.models.saving import load
    from regard.models.transformer import Transformer

    if not is_untrained(name):
        model = load(name)
    elif isinstance(PRESETS[name], GPT.Config):
        model = build(name).eval()
    else:
        model = build(name, device="meta")
    if not isinstance(model, GPT | Transformer):
        able = ", ".join(each for each in PRESETS if isinstance(PRESETS[each], GPT.Config))
        raise ConfigError(f"{name} is a {type(model).__name__}, which does not generate text; a GPT does: {able}")
    return model


def prepare_model(
    name: str, model: "GPT | Transformer", tokens: list[int]
) -> "tuple[GPT | GenerationAdapter, list[int]]":
    """Return the model to generate with, and the token ids of its prompt.

    A GPT is returned with `tokens`. An encoder-decoder is returned as an adapter, which encodes `tokens` as the source
    and generates like a GPT; its prompt is the start token.

    name    folder of the model, for the start token
    tokens  token ids of the text that the user gave
    """
    import torch

    from regard.models.generation_adapters import EncoderDecoderAdapter
    from regard.models.gpt import GPT

    if isinstance(model, GPT):
        return model, tokens
    start = special_tokens(name, "decoder_start_token_id", model.config.vocab)
    if not start:
        raise ConfigError(
            f"{name} is a Transformer, which needs a start token, but it has no config.json with a "
            "decoder_start_token_id; in Python use model.generate(source, start_token=...)"
        )
    return EncoderDecoderAdapter(model, torch.tensor([tokens])), start[:1]


def find_tokenizer(name: str, vocab: int, path: Path | None) -> "Tokenizer":
    """Load the tokenizer of a model: the one at `path`, else the one in its folder, else a byte tokenizer.

    name   folder of the model
    vocab  size of the model's vocabulary
    path   file that the user chose with `--tokenizer`; None for none
    """
    from regard.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, load_tokenizer

    if path is not None:
        return load_tokenizer(path)
    if (Path(name) / TOKENIZER_FILE).is_file():
        return load_tokenizer(name)
    if vocab < ByteTokenizer.vocab:
        raise ConfigError(
            f"{name} has no {TOKENIZER_FILE}, and its vocabulary of {vocab} is too small for bytes, which need "
            f"{ByteTokenizer.vocab}; give a tokenizer with --tokenizer"
        )
    return ByteTokenizer()


def special_tokens(name: str, key: str, vocab: int) -> list[int]:
    """Return the ids of a special token such as eos_token_id, from the Hugging Face config files of a folder.

    The list is empty if the files do not name the token, or if its ids are not in the vocabulary.

    name   folder of the model
    key    name of the special token in the files
    vocab  size of the model's vocabulary
    """
    for file in (Path(name) / each for each in CONFIG_FILES):
        if file.is_file():
            about = read_json(file, CheckpointError)
            found = about.get(key) if isinstance(about, dict) else None
            tokens = found if isinstance(found, list) else [found]
            if known := [token for token in tokens if isinstance(token, int) and 0 <= token < vocab]:
                return known
    return []


def generate_text(
    model: "GPT | GenerationAdapter",
    prompt: list[int],
    words: "Tokenizer",
    strategy: "Strategy",
    options: dict[str, Any],
    *,
    show: bool,
) -> "GeneratedText":
    """Generate one text.

    words    the tokenizer
    options  further keyword arguments of `stream_tokens`, among them the stop sequences "stop"
    show     whether to print each token as soon as it is known, without the stop sequence
    """
    from regard.data.tokenizers import TextStreamer
    from regard.models.generation import collect_tokens, stream_tokens

    decoder = TextStreamer(words)
    # the last tokens may be the beginning of a stop sequence
    delay = max((len(stop) for stop in options["stop"]), default=1) - 1
    tokens, printed = [], 0
    for token in stream_tokens(model, [prompt], strategy=strategy, **options):
        tokens.append(token)
        if show and token.finish_reason is None:
            safe = max(printed, len(tokens) - delay)
            for each in tokens[printed:safe]:
                write_text(decoder.push(each.token))
            printed = safe
    text = collect_tokens(prompt, tokens, options["stop"])
    if show:
        for rest in text.body[printed:]:
            write_text(decoder.push(rest))
        write_text(decoder.finish() + "\n")
    return text
