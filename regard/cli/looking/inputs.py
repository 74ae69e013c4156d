"""The input of `regard look`: tensors, labels of positions, and Python code that builds the tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.base.errors import CheckpointError, ConfigError
from regard.base.files import read_json
from regard.cli.generate import find_tokenizer, special_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from regard.cli.looking.models import LoadedModel
    from regard.data.tokenizers import Tokenizer
    from regard.see.record import Record
    from regard.see.report import Sides, TokenLabels

PREPROCESSOR = "preprocessor_config.json"  # how Hugging Face scales pixels
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff")
LONGEST_TEXT = 4000  # characters of a prompt that a report repeats


@dataclass(frozen=True)
class ModelInput:
    """The inputs of one forward pass, and the Python code that builds them.

    inputs   the tensors to pass to the model
    prompt   the text or the path of the image file
    size     description of the input, such as "12 tokens"
    imports  import lines that `code` needs
    code     Python code that builds the arguments of `call`
    call     Python code that calls the model
    sides    function from an attention record to the labels of its queries and keys
    pixels   the image before normalisation; None for text
    notes    notes for the report
    """

    inputs: tuple["Tensor", ...]
    prompt: str
    size: str
    imports: tuple[str, ...]
    code: str
    call: str
    sides: Callable[["Record"], "Sides"]
    pixels: "Tensor | None" = None
    notes: tuple[str, ...] = ()


def path_exists(path: str) -> bool:
    """Return whether a file or folder exists at this path; False for a text that cannot be a path."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def build_input(
    loaded: "LoadedModel", text: str, target: str | None, tokenizer: Path | None, device: str
) -> ModelInput:
    """Build the input of the model from a text or an image file.

    text       the text, or the path of an image
    target     the target text of an encoder-decoder; None for all other models
    tokenizer  a tokenizer.json; None uses that of the model
    """
    if target is not None and loaded.kind != "pair":
        raise ConfigError(f"--target is for encoder-decoders; {loaded.name} takes one {loaded.kind}")
    if loaded.kind == "image":
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer is for text; {loaded.name} takes an image")
        return build_image_input(loaded, text, device)
    if text.lower().endswith(IMAGE_ENDINGS) and path_exists(text):
        raise ConfigError(f"{loaded.name} takes text, but {text} is an image; use a ViT, such as vit-ti/16, or a DaViT")
    return build_text_input(loaded, text, target, tokenizer, device)


def build_text_input(
    loaded: "LoadedModel", text: str, target: str | None, tokenizer: Path | None, device: str
) -> ModelInput:
    """Build the input of a text model: tokenise the text, and for an encoder-decoder the target too."""
    import torch

    from regard.data.tokenizers import special_index
    from regard.see.report import TokenLabels

    words: Any = find_tokenizer(loaded.name if loaded.folder is None else str(loaded.folder), loaded.vocab, tokenizer)
    names = ("source", "target") if loaded.kind == "pair" else ("tokens",)
    ids = {names[0]: words.encode(text)}
    imports, maker = tokenizer_code(loaded, tokenizer)
    lines = [
        f"words = {maker}",
        f"{names[0]} = torch.tensor([words.encode({_quote_text(text)})])",
    ]
    if loaded.kind == "pair":
        if target is None:
            raise ConfigError(f"{loaded.name} is an encoder-decoder: give the target text with --target")
        start = special_tokens(str(loaded.folder or ""), "decoder_start_token_id", loaded.vocab)[:1]
        if not start and "start" in getattr(words, "special", ()):  # the start token of the recipe `translation`
            start = [special_index(words.special, "start")]
        ids["target"] = start + words.encode(target, special=False)
        before = f"{start} + " if start else ""
        lines.append(f"target = torch.tensor([{before}words.encode({_quote_text(target)}, special=False)])")
    for name, tokens in ids.items():
        check_tokens(loaded, name, tokens)
    on = "" if device == "cpu" else f".to({device!r})"
    inputs = {name: torch.tensor([tokens], device=device) for name, tokens in ids.items()}
    named_words = {name: TokenLabels(token_labels(words, tokens), inputs[name], name) for name, tokens in ids.items()}

    arguments = [f"{name}{on}" for name in ids]
    if loaded.input_names:
        arguments = [f"{name}={each}" for name, each in zip(loaded.input_names, arguments, strict=False)]
    prompt = text if target is None else f"{text}\n\n{target}"
    sizes = [
        f"{len(tokens)} {'' if name == 'tokens' else f'{name} '}token{'s' if len(tokens) > 1 else ''}"
        for name, tokens in ids.items()
    ]
    return ModelInput(
        inputs=tuple(inputs.values()),
        prompt=prompt if len(prompt) <= LONGEST_TEXT else f"{prompt[:LONGEST_TEXT]} ... ({len(prompt):,} characters)",
        size=", ".join(sizes),
        imports=imports,
        code="\n".join(lines),
        call=f"model({', '.join(arguments)})",
        sides=lambda record: token_sides(record, named_words),
    )


def tokenizer_code(loaded: "LoadedModel", tokenizer: Path | None) -> tuple[tuple[str, ...], str]:
    """Return Python code that builds the tokenizer that `find_tokenizer` returns: import lines and an expression."""
    from regard.data.tokenizers import TOKENIZER_FILE
    from regard.models.presets import find_pretrained

    module = "from regard.data.tokenizers import"
    if tokenizer is not None:
        return (f"{module} load_tokenizer",), f"load_tokenizer({str(tokenizer)!r})"
    if loaded.folder is None or not (loaded.folder / TOKENIZER_FILE).is_file():
        return (f"{module} ByteTokenizer",), "ByteTokenizer()"
    if loaded.folder.parent == find_pretrained(loaded.name):
        imports = (f"{module} load_tokenizer", "from regard.models.saving import pretrained_folder")
        return imports, f"load_tokenizer(pretrained_folder({loaded.name!r}))"
    return (f"{module} load_tokenizer",), f"load_tokenizer({str(loaded.folder / TOKENIZER_FILE)!r})"


def token_sides(record: "Record", words: Mapping[str, "TokenLabels"]) -> "Sides":
    """Return the labels of the queries and keys of an attention record, such as the texts of the tokens.

    If there are not as many positions as tokens, the labels are the numbers of the positions.

    words  by name, the labels of the source tokens and of the target tokens, or of the tokens of the only text
    """
    from regard.see.record import attention_role
    from regard.see.report import Sides, TokenLabels

    first, last = next(iter(words.values())), list(words.values())[-1]
    sides = {"encoder": (first, first), "decoder": (last, last), "cross": (last, first)}
    queries, keys = sides[attention_role(record.name.partition(":")[0])]
    i = record.q.shape[2] if record.rows_kept is None else len(queries.labels)
    j = record.k.shape[2]
    if (len(queries.labels), len(keys.labels)) == (i, j):
        return Sides(queries, keys)
    count = max(i, j, *(row + 1 for row in record.rows_kept or (0,)))
    numbered = TokenLabels(tuple(str(number) for number in range(count)))
    return Sides(numbered, TokenLabels(numbered.labels[:j]))


def check_tokens(loaded: "LoadedModel", name: str, tokens: list[int]) -> None:
    """Raise ConfigError if there are no tokens, too many tokens, or tokens that are not in the vocabulary.

    name  what the tokens are, for the error message, such as "target"
    """
    what = "text" if name == "tokens" else name
    if not tokens:
        raise ConfigError(f"the {what} is empty; give at least one token")
    most = loaded.max_length or len(tokens)
    if len(tokens) > most:
        raise ConfigError(
            f"the {what} has {len(tokens)} tokens, but {loaded.name} takes at most {most}; shorten it by "
            f"{len(tokens) - most}"
        )
    if max(tokens) >= loaded.vocab:
        raise ConfigError(
            f"the tokenizer returns token {max(tokens)}, but the vocabulary of {loaded.name} has {loaded.vocab}; "
            "give the tokenizer of this model with --tokenizer"
        )


def _quote_text(text: str) -> str:
    """Return Python code for a text: a string literal, or code that reads a file if the text is long."""
    return repr(text) if len(text) <= LONGEST_TEXT else "open('text.txt').read()"


def token_labels(words: "Tokenizer", tokens: list[int]) -> tuple[str, ...]:
    """Return the label of each token: its text, or its name in the vocabulary if it is not valid text."""
    from regard.data.tokenizers import REPLACEMENT

    file: Path | None = getattr(words, "file", None)
    texts = [words.decode([token]) for token in tokens]
    if file is None:
        return tuple(
            (text if text != REPLACEMENT else f"\\x{token:02x}") or f"<{token}>"
            for token, text in zip(tokens, texts, strict=True)
        )
    if all(text and REPLACEMENT not in text for text in texts):
        return tuple(texts)
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(file))
    return tuple(
        text if text and REPLACEMENT not in text else library.id_to_token(token) or f"<{token}>"
        for token, text in zip(tokens, texts, strict=True)
    )


def build_image_input(loaded: "LoadedModel", path: str, device: str) -> ModelInput:
    """Read an image file at the size of the model's input and normalise its pixels."""
    from regard.see.images import normalise_pixels, read_image

    if not path_exists(path):
        raise ConfigError(f"{loaded.name} takes an image, but there is no file {path!r}; give a png or jpeg")
    model = loaded.model
    (example,) = model.example_inputs()
    channels, side = example.shape[1], example.shape[2]
    mean, std, resample, source = pixel_scaling(loaded)
    pixels = read_image(path, side, channels=channels, resample=resample)
    numbers = f"mean={mean[:channels]}, std={std[:channels]}"
    on = "" if device == "cpu" else f".to({device!r})"
    options = ("" if channels == 3 else f", channels={channels}") + ("" if resample == 2 else f", resample={resample}")
    dtype = next(model.parameters()).dtype
    return ModelInput(
        inputs=(normalise_pixels(pixels, mean, std).to(device, dtype),),
        prompt=path,
        size=f"an image of {side} x {side} pixels",
        imports=("from regard.see.images import normalise_pixels, read_image",),
        code=f"pixels = read_image({path!r}, {side}{options})\nimage = normalise_pixels(pixels, {numbers})",
        call=f"model(image{on})" if str(dtype) == "torch.float32" else f"model(image{on}.to({dtype}))",
        sides=patch_sides(loaded),
        pixels=pixels,
        notes=(f"Pixels from 0 to 1 were normalised with {numbers} ({source}).",),
    )


def pixel_scaling(loaded: "LoadedModel") -> tuple[tuple[float, ...], tuple[float, ...], int, str]:
    """Return how the pixels of an image are normalised: mean, standard deviation, resampling filter, and source.

    The values are read from preprocessor_config.json in the model's folder; without this file, defaults are used.
    The source is a phrase such as "from preprocessor_config.json".
    """
    half = (0.5, 0.5, 0.5)
    file = None if loaded.folder is None else loaded.folder / PREPROCESSOR
    if file is None or not file.is_file():
        return half, half, 2, f"the default, without {PREPROCESSOR}"
    try:
        about = read_json(file, CheckpointError)
        mean, std = (tuple(float(x) for x in about.get(name) or half) for name in ("image_mean", "image_std"))
        resample = int(about.get("resample", 2))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has no valid scaling of pixels: {error}") from None
    if about.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return mean, std, resample, f"from {PREPROCESSOR}"


def patch_sides(loaded: "LoadedModel") -> Callable[["Record"], "Sides"]:
    """Return a function that maps an attention record of an image model to the labels of its queries and keys.

    Patches are labelled by row and column in the image or the window, channels by number.
    """
    from regard.see.report import Sides, TokenLabels

    def sides(record: "Record") -> Sides:
        n = record.k.shape[2]
        if record.name.partition(":")[0].endswith("channel.attention"):
            labels = tuple(f"channel {number}" for number in range(n))
        else:
            first: int = getattr(loaded.model, "prefix_tokens", 0)
            side = round((n - first) ** 0.5)
            patches = tuple(f"{row},{column}" for row in range(side) for column in range(side))
            labels = ("class",) * first + patches
        positions = TokenLabels(labels)
        return Sides(positions, positions)

    return sides
