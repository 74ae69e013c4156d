"""Load the model of `regard look`: a preset, a folder of regard, or a folder of Hugging Face."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.base.errors import ConfigError
from regard.cli.looking.inputs import path_exists
from regard.cli.pretrained import is_untrained

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {"GPT": "text", "BERT": "text", "Transformer": "pair", "RNN": "pair", "ViT": "image", "DaViT": "image"}


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, the kind of input it takes, and the Python code that loads it.

    name         name or folder of the model
    folder       folder of its files; None for a preset
    model        the model
    weights      text that says where the weights are from
    code         Python code that loads the model, after `imports`
    imports      import lines that `code` needs
    kind         the kind of input: "text", "pair" (source and target text) or "image"
    vocab        size of the vocabulary; 0 for a model of images
    max_length   the largest number of tokens; None if there is no limit
    input_names  names of the keyword arguments, if transformers loaded the model; otherwise empty
    """

    name: str
    folder: Path | None
    model: Any
    weights: str
    code: str
    imports: str
    kind: str
    vocab: int
    max_length: int | None
    input_names: tuple[str, ...] = ()

    def run(self, inputs: tuple["Tensor", ...]) -> None:
        """Run one forward pass. Raises ConfigError if a model of transformers rejects the input."""
        if not self.input_names:
            self.model(*inputs)
            return
        try:
            self.model(**dict(zip(self.input_names, inputs, strict=False)))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # errors of models of transformers
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{self.name} rejected the input: {type(error).__name__}: {first}") from None


def load_model(name: str, device: str) -> LoadedModel:
    """Load a model from a folder or by its name, or build a preset with random weights."""
    from regard.cli.looking.huggingface import foreign_model_type, load_transformers_model
    from regard.models.presets import PRESETS, build, find_pretrained, model_class
    from regard.models.saving import load, pretrained_folder
    from regard.see.arguments import check_device

    check_device("--device", device)
    folder = None if not path_exists(name) and is_untrained(name) else pretrained_folder(name)
    on = "" if device == "cpu" else f", device={device!r}"
    if folder is not None:
        if (kind := foreign_model_type(str(folder))) is not None:
            return load_transformers_model(str(folder), kind, device)
        model: Any = load(name, device=device)
        code = f"model = load({name!r}{on})"
        origin = "trained, from the package" if folder.parent == find_pretrained(name) else "from the folder"
        check_kind(name, type(model).__name__)
    else:
        check_kind(name, model_class(PRESETS[name]).__name__)
        model = build(name, seed=0, device=device).eval()
        code, origin = f"model = build({name!r}, seed=0{on}).eval()", "random, from seed 0 (an untrained preset)"
    limits = [getattr(model.config, limit, None) for limit in ("max_length", "context")]
    return LoadedModel(
        name=name,
        folder=folder,
        model=model,
        weights=origin,
        code=code,
        imports=f"from regard import {'build' if folder is None else 'load'}",
        kind=KINDS[type(model).__name__],
        vocab=getattr(model.config, "vocab", 0),
        max_length=min((limit for limit in limits if limit), default=None),
    )


def check_kind(name: str, kind: str) -> None:
    """Check that a model has attention over text or an image, else raise ConfigError.

    kind  name of the model class
    """
    from regard.models.presets import PRESETS, model_class

    if kind not in KINDS:
        able = ", ".join(each for each in PRESETS if model_class(PRESETS[each]).__name__ in KINDS)
        raise ConfigError(f"{name} is a {kind}, which has no attention over text or an image; these have: {able}")
