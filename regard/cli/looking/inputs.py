"""What a model is asked: its inputs, the names of their positions, and the Python that makes them again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.base.errors import CheckpointError, ConfigError
from regard.cli.generate import find_tokenizer, special_tokens
from regard.cli.looking.huggingface import ARGUMENTS, Theirs, load_theirs, model_type_of

if TYPE_CHECKING:
    from torch import Tensor

    from regard.data.tokenizers import Tokenizer
    from regard.models.model import Model
    from regard.see.record import Record
    from regard.see.report import Sides, TokenLabels

PREPROCESSOR = "preprocessor_config.json"  # where Hugging Face writes how pixels are scaled
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff")
LONGEST_TEXT = 4000  # letters that are repeated on a page as they are
KINDS = {"GPT": "text", "BERT": "text", "Transformer": "pair", "RNN": "pair", "ViT": "image", "DaViT": "image"}


@dataclass(frozen=True)
class Opened:
    """A model, and where it is from."""

    name: str
    model: "Model"
    random: bool
    code: str  # makes `model`
    imports: str
    theirs: Theirs | None = None  # where it is a model of transformers

    @property
    def kind(self) -> str:
        """What it reads: text, a pair of texts, or an image."""
        return KINDS[type(self.model).__name__] if self.theirs is None else self.theirs.kind

    @property
    def vocab(self) -> int:
        """How many tokens it knows."""
        config: Any = self.model.config
        return int(config.vocab) if self.theirs is None else self.theirs.vocab

    @property
    def most(self) -> int | None:
        """How many tokens it reads at most; None where there is no limit."""
        if self.theirs is not None:
            return self.theirs.most
        limits = (getattr(self.model.config, name, None) for name in ("context", "reach"))
        return min((limit for limit in limits if limit), default=None)

    @property
    def size(self) -> int:
        """How many numbers it has learned."""
        return self.model.parameter_count if self.theirs is None else self.theirs.model.num_parameters()

    def run(self, inputs: tuple["Tensor", ...]) -> None:
        """One pass."""
        if self.theirs is None:
            self.model(*inputs)
            return
        try:
            self.model(**dict(zip(ARGUMENTS, inputs, strict=False)))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # their ways to refuse an input
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{self.name} could not read that: {type(error).__name__}: {first}") from None

    @property
    def weights(self) -> str:
        """Where its numbers are from, in words."""
        if self.random:
            return "random, from seed 0: a preset has learned nothing"
        return "those of the folder"


@dataclass(frozen=True)
class ModelQuestion:
    """The inputs of one pass.

    code   makes what `call` hands to the model
    sides  whose positions a layer's queries and keys are
    """

    inputs: tuple["Tensor", ...]
    asked: str
    size: str
    imports: tuple[str, ...]
    code: str
    call: str
    sides: Callable[["Record"], "Sides"]
    pixels: "Tensor | None" = None
    notes: tuple[str, ...] = ()


def opened(name: str, device: str) -> Opened:
    """The model in a folder, or a fresh one by its name."""
    from regard.models.presets import PRESETS, build, model_class
    from regard.models.saving import load

    check_device(device)
    there = is_there(name)
    on = "" if device == "cpu" else f", device={device!r}"
    if there or (name not in PRESETS and ("/" in name or "\\" in name) and not get_close_matches(name, PRESETS, n=1)):
        if there and (kind := model_type_of(name)) is not None:
            theirs = load_theirs(name, kind, device)
            return Opened(name, theirs.model, False, theirs.code, theirs.imports, theirs)
        model = load(name, device=device)
        check_kind(name, type(model).__name__)
        return Opened(name, model, False, f"model = load({name!r}{on})", "from regard import load")
    check_kind(name, model_class(PRESETS[name]).__name__)
    code = f"model = build({name!r}, seed=0{on}).eval()"
    return Opened(name, build(name, seed=0, device=device).eval(), True, code, "from regard import build")


def check_kind(name: str, kind: str) -> None:
    """Raise where a model reads neither text nor images, or never attends."""
    from regard.models.presets import PRESETS, model_class

    if kind not in KINDS:
        able = ", ".join(each for each in PRESETS if model_class(PRESETS[each]).__name__ in KINDS)
        raise ConfigError(f"{name} is a {kind}, which does not attend over text or an image; these do: {able}")


def check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's ways to say that it is not there
        first = str(error).partition("\n")[0]
        raise ConfigError(f"--device {device} cannot be used here: {first}; cpu always can") from None


def is_there(path: str) -> bool:
    """Whether there is such a file or folder; a text too long to be the name of one is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def asked_of(opened: Opened, text: str, target: str | None, tokenizer: Path | None, device: str) -> ModelQuestion:
    """The question in the form that the model reads."""
    if target is not None and opened.kind != "pair":
        raise ConfigError(f"--target goes with encoder-decoders; {opened.name} reads one {opened.kind}")
    if opened.kind == "image":
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer goes with text; {opened.name} looks at images")
        return image_question(opened, text, device)
    if text.lower().endswith(IMAGE_ENDINGS) and is_there(text):
        raise ConfigError(
            f"{opened.name} reads text, but {text} is an image; a ViT looks at those, such as vit-ti/16, or a DaViT"
        )
    return text_question(opened, text, target, tokenizer, device)


def text_question(opened: Opened, text: str, target: str | None, tokenizer: Path | None, device: str) -> ModelQuestion:
    """A text, or a source and a target, as tokens."""
    import torch

    from regard.see.report import Sides, TokenLabels

    words = find_tokenizer(opened.name, opened.vocab, tokenizer)
    names = ("source", "target") if opened.kind == "pair" else ("tokens",)
    ids = {names[0]: words.encode(text)}
    lines = [*_encoding(words), f"{names[0]} = torch.tensor([words.encode({_quoted(text)})])"]
    if opened.kind == "pair":
        if target is None:
            raise ConfigError(
                f"{opened.name} is an encoder-decoder: give what it has written so far with --target 'text'"
            )
        start = special_tokens(opened.name, "decoder_start_token_id", opened.vocab)[:1]
        ids["target"] = start + words.encode(target, special=False)
        before = f"{start} + " if start else ""
        lines.append(f"target = torch.tensor([{before}words.encode({_quoted(target)}, special=False)])")
    for name, tokens in ids.items():
        check_tokens(opened, name, tokens)
    on = "" if device == "cpu" else f".to({device!r})"
    inputs = {name: torch.tensor([tokens], device=device) for name, tokens in ids.items()}
    named_words = {name: TokenLabels(labels_of(words, tokens), inputs[name], name) for name, tokens in ids.items()}

    def sides(record: "Record") -> Sides:
        if opened.theirs is not None:
            return sides_of_theirs(record, named_words)
        if opened.kind == "text":
            return Sides(named_words["tokens"], named_words["tokens"])
        if record.name.startswith("encoder"):
            return Sides(named_words["source"], named_words["source"])
        # an RNN attends to its source once; a decoder block does both
        crossing = record.name.partition(":")[0].endswith("cross") or type(opened.model).__name__ == "RNN"
        return Sides(named_words["target"], named_words["source" if crossing else "target"])

    handed = [f"{name}{on}" for name in ids]
    if opened.theirs is not None:
        handed = [f"{argument}={each}" for argument, each in zip(ARGUMENTS, handed, strict=False)]
    asked = text if target is None else f"{text}\n\n{target}"
    many = [
        f"{len(tokens)} {'' if name == 'tokens' else f'{name} '}token{'s' if len(tokens) > 1 else ''}"
        for name, tokens in ids.items()
    ]
    return ModelQuestion(
        inputs=tuple(inputs.values()),
        asked=asked if len(asked) <= LONGEST_TEXT else f"{asked[:LONGEST_TEXT]} ... ({len(asked):,} letters)",
        size=", ".join(many),
        imports=(
            "from regard.data.tokenizers import Bytes"
            if repr(words) == "Bytes()"
            else "from regard.data.tokenizers import load_tokenizer",
        ),
        code="\n".join(lines),
        call=f"model({', '.join(handed)})",
        sides=sides,
    )


def sides_of_theirs(record: "Record", words: Mapping[str, "TokenLabels"]) -> "Sides":
    """Whose positions a layer's are, by its name; numbers where it has others than the tokens."""
    from regard.see.relevance import attention_role
    from regard.see.report import Sides, TokenLabels

    first, last = next(iter(words.values())), list(words.values())[-1]
    sides = {"encoder": (first, first), "decoder": (last, last), "cross": (last, first)}
    queries, keys = sides[attention_role(record.name.partition(":")[0])]
    i = record.q.shape[2] if record.rows_kept is None else len(queries.labels)
    if (len(queries.labels), len(keys.labels)) == (i, record.k.shape[2]):
        return Sides(queries, keys)
    many = max(i, record.k.shape[2], *(record.rows_kept or (0,)))
    numbered = tuple(str(number) for number in range(many + 1))
    return Sides(
        TokenLabels(numbered[:i] if record.rows_kept is None else numbered), TokenLabels(numbered[: record.k.shape[2]])
    )


def check_tokens(opened: Opened, name: str, tokens: list[int]) -> None:
    """Raise where the model cannot take these."""
    what = "text" if name == "tokens" else name
    if not tokens:
        raise ConfigError(f"the {what} is empty; give at least one token to look at")
    most = opened.most or len(tokens)
    if len(tokens) > most:
        raise ConfigError(
            f"the {what} has {len(tokens)} tokens, but {opened.name} reads at most {most}; shorten it by "
            f"{len(tokens) - most}"
        )
    if max(tokens) >= opened.vocab:
        raise ConfigError(
            f"the tokenizer gives token {max(tokens)}, but {opened.name} knows {opened.vocab}; it is another model's: "
            "name the right one with --tokenizer"
        )


def _encoding(words: "Tokenizer") -> list[str]:
    file = getattr(words, "file", None)
    return ["words = Bytes()" if file is None else f"words = load_tokenizer({str(file)!r})"]


def _quoted(text: str) -> str:
    """The text as Python, or how to read it where it is long."""
    return repr(text) if len(text) <= LONGEST_TEXT else "open('text.txt').read()"


def labels_of(words: "Tokenizer", tokens: list[int]) -> tuple[str, ...]:
    """What each token is called: its text, or its name in the vocabulary where it has none of its own."""
    from regard.data.tokenizers import REPLACEMENT

    file: Path | None = getattr(words, "file", None)
    texts = [words.decode([token]) for token in tokens]
    if file is None:
        return tuple(
            text if text != REPLACEMENT else f"\\x{token:02x}" for token, text in zip(tokens, texts, strict=True)
        )
    if all(text and REPLACEMENT not in text for text in texts):
        return tuple(texts)
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(file))
    return tuple(
        text if text and REPLACEMENT not in text else library.id_to_token(token) or f"<{token}>"
        for token, text in zip(tokens, texts, strict=True)
    )


def image_question(opened: Opened, path: str, device: str) -> ModelQuestion:
    """An image as pixels of the size that the model was made for."""
    from regard.see.colormaps import normalise_pixels, read_image

    if not is_there(path):
        raise ConfigError(f"{opened.name} looks at images, but there is no file {path!r}; give a png or jpeg")
    model = opened.model
    (example,) = model.example_inputs()
    channels, side = example.shape[1], example.shape[2]
    mean, std, resample, source = scaling(opened)
    pixels = read_image(path, side, channels=channels, resample=resample)
    numbers = f"mean={mean[:channels]}, std={std[:channels]}"
    on = "" if device == "cpu" else f".to({device!r})"
    options = ("" if channels == 3 else f", channels={channels}") + ("" if resample == 2 else f", resample={resample}")
    dtype = next(model.parameters()).dtype
    return ModelQuestion(
        inputs=(normalise_pixels(pixels, mean, std).to(device, dtype),),
        asked=path,
        size=f"an image of {side} x {side} pixels",
        imports=("from regard.see.colormaps import normalise_pixels, read_image",),
        code=f"pixels = read_image({path!r}, {side}{options})\nimage = normalise_pixels(pixels, {numbers})",
        call=f"model(image{on})" if str(dtype) == "torch.float32" else f"model(image{on}.to({dtype}))",
        sides=patches_of(opened),
        pixels=pixels,
        notes=(f"Pixels from 0 to 1 were scaled with {numbers}, {source}.",),
    )


def scaling(opened: Opened) -> tuple[tuple[float, ...], tuple[float, ...], int, str]:
    """Mean and standard deviation of pixels, how images are resized, and who says so."""
    file = Path(opened.name) / PREPROCESSOR
    half = (0.5, 0.5, 0.5)
    if not file.is_file():
        return half, half, 2, f"as there is no {PREPROCESSOR} to say otherwise"
    try:
        about = loads(file.read_text(encoding="utf-8"))
        mean, std = (tuple(float(x) for x in about.get(name) or half) for name in ("image_mean", "image_std"))
        resample = int(about.get("resample", 2))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} does not say how pixels are scaled: {error}") from None
    if about.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return mean, std, resample, f"as {PREPROCESSOR} says"


def patches_of(opened: Opened) -> Callable[["Record"], "Sides"]:
    """The names of positions: patches by row and column, of the image or of a window, or channels."""
    from regard.see.report import Sides, TokenLabels

    def sides(record: "Record") -> Sides:
        n = record.k.shape[2]
        if record.name.partition(":")[0].endswith("channel.attention"):
            labels = tuple(f"channel {number}" for number in range(n))
        else:
            first: int = getattr(opened.model, "first", 0)
            side = round((n - first) ** 0.5)
            patches = tuple(f"{row},{column}" for row in range(side) for column in range(side))
            labels = ("class",) * first + patches
        positions = TokenLabels(labels)
        return Sides(positions, positions)

    return sides
