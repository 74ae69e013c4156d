"""The models and background computations that `regard explore` offers on its web page."""

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from regard import models
from regard.base.errors import ConfigError
from regard.cli.looking.inputs import build_input, path_exists
from regard.cli.looking.models import load_model
from regard.cli.pretrained import is_untrained

if TYPE_CHECKING:
    from regard.cli.looking.inputs import ModelInput
    from regard.cli.looking.models import LoadedModel
    from regard.explorer.views.models import OpenedModel
    from regard.explorer.worker import Task

RUNS = Path("runs")  # default folder of the runs of `regard train`
ZOO = Path(models.__file__).parent / "zoo"  # the same as in regard.models.presets, which imports torch
MOST_TOKENS = 32_768
NOT_SHOWN = ("number-words", "tone-digits")  # an encoder-decoder and a speech model: regard translate, regard listen


def list_offered(own: str | None) -> list[dict[str, str]]:
    """Return the models that the explorer offers: the user's own, those of the package, then training runs in runs/.

    own  name or folder of the user's model
    """
    from regard.models.cards import read_card
    from regard.models.presets import list_models

    found = [{"name": own, "what": "yours", "example": ""}] if own else []
    for name in list_models(pretrained=True):
        card = read_card(name)
        if name == own:
            found[0]["example"] = card.example
        elif name not in NOT_SHOWN:
            found.append({"name": name, "what": card.about.partition(";")[0], "example": card.example})
    runs = sorted(path.parent for path in RUNS.glob("*/model")) if RUNS.is_dir() else []
    return found + [{"name": str(run / "model"), "what": "a run"} for run in runs]


def check_model(name: str) -> None:
    """Check that there is a model of this name or folder, else raise CheckpointError that suggests similar names.

    torch, which takes seconds to import, is not imported for folders, pretrained and downloaded models.
    """
    from regard.models.hub_cache import find_cached

    if path_exists(name) or (ZOO / name / "model").is_dir() or find_cached(name) is not None:
        return
    from regard.models.saving import find_folder, unknown_model_error

    if not is_untrained(name) and find_folder(name) is None:
        raise unknown_model_error(name)


def tasks() -> "dict[str, Task]":
    """Return the functions that the explorer runs in a separate process, by name.

    "claim" runs a claim of the lab, "model" analyses a model. The separate process itself calls `tasks`.
    """
    from regard.explorer.views.claims import run_claim
    from regard.explorer.views.models import analyse

    return {"claim": run_claim, "model": partial(analyse, open_model=open_model)}


@cache
def _load_shown_model(name: str) -> "LoadedModel":
    return load_model(name, "cpu")


def open_model(name: str, text: str) -> "OpenedModel":
    """Load a model and build its input from a text or an image, as `regard look` does.

    text  the input text; for an image model a data: URL of an uploaded image, or "" for the example image of the model
    """
    from regard.explorer.views.models import OpenedModel

    loaded = _load_shown_model(name)
    if loaded.kind == "pair":
        raise ConfigError(
            f"{name} is an encoder-decoder; the page shows models of one text or image: regard look {name}"
        )
    if loaded.kind == "image":
        return _open_image(loaded, text)
    if not text.strip():
        raise ConfigError("write a text for the model to read")
    given = build_input(loaded, text, None, None, "cpu")
    tokens = given.inputs[0]
    if tokens.shape[-1] > MOST_TOKENS:
        raise ConfigError(f"the text has {tokens.shape[-1]} tokens; the page takes at most {MOST_TOKENS}")
    from regard.cli.generate import find_tokenizer
    from regard.cli.looking.inputs import token_labels

    words = find_tokenizer(str(loaded.folder or name), loaded.vocab, None)
    return OpenedModel(
        name=name,
        model=loaded.model,
        run=lambda: _run(loaded, given.inputs),
        tokens=token_labels(words, tokens[0].tolist()),
        ids=tokens,
        label=lambda at: token_labels(words, [at])[0],
        setup=_setup(loaded, given),
        call=given.call,
    )


def _open_image(loaded: "LoadedModel", text: str) -> "OpenedModel":
    from regard.explorer.views.models import OpenedModel
    from regard.explorer.views.pictures import pixels_address, read_upload
    from regard.models.cards import read_card
    from regard.models.presets import find_pretrained

    folder = find_pretrained(loaded.name)
    with TemporaryDirectory() as place:
        if text.startswith("data:"):
            path, shown = read_upload(text, Path(place)), "'picture.png'"
        elif folder is not None and text in ("", read_card(loaded.name).example):
            path = folder / read_card(loaded.name).example
            shown = f"find_pretrained({loaded.name!r}) / {path.name!r}"
        else:
            raise ConfigError(f"{loaded.name} takes an image: choose a file")
        try:
            given = build_input(loaded, str(path), None, None, "cpu")
        except ConfigError as error:  # the client sent a picture, not a path
            raise ConfigError(str(error).replace(str(path), "the picture")) from None
    setup = _setup(loaded, given).replace(repr(str(path)), shown)
    if "find_pretrained(" in setup:
        setup = setup.replace("\n\n", "\nfrom regard.models.presets import find_pretrained\n\n", 1)
    patch = loaded.model.config.patch
    height, width = (size // patch for size in given.inputs[0].shape[-2:])
    image = {"rows": height, "columns": width, "address": pixels_address(given.inputs[0][0])}
    labels = [f"{row + 1},{column + 1}" for row in range(height) for column in range(width)]
    return OpenedModel(
        name=loaded.name,
        model=loaded.model,
        run=lambda: _run(loaded, given.inputs),
        tokens=labels,
        ids=None,
        label=str,
        setup=setup,
        call=given.call,
        image=image,
    )


def _setup(loaded: "LoadedModel", given: "ModelInput") -> str:
    """Return Python code that loads the model and builds its input, to be shown on the page."""
    imports = ["import torch", "import regard", loaded.imports, *given.imports]
    return "\n".join([*dict.fromkeys(imports), "", loaded.code, given.code])


def _run(loaded: "LoadedModel", inputs: tuple[Any, ...]) -> Any:
    if loaded.input_names:
        return loaded.model(**dict(zip(loaded.input_names, inputs, strict=False)))
    return loaded.model(*inputs)
