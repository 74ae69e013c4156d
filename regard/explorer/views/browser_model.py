"""A small attention-only GPT as JSON, so that it runs in the page: `static/gpt.js` computes the same numbers."""

import base64
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from regard.models.gpt import GPT

MOST_PARAMETERS = 150_000
BROWSER_MODEL = "induction-gpt"


def export_model(model: "GPT", name: str, vocabulary: Sequence[str]) -> dict[str, Any]:
    """Convert a GPT to JSON data, so that the web page can run it.

    Only attention-only GPTs with learned positions, layer norm and at most MOST_PARAMETERS parameters are
    supported.
    """
    from regard.models.gpt import Learned

    config, count = model.config, sum(part.numel() for part in model.parameters())
    fits = config.ff_width == 0 and isinstance(config.positions, Learned) and config.norm == "layer"
    if not fits or count > MOST_PARAMETERS or config.window is not None:
        raise ConfigError(
            "the page runs attention-only GPTs with learned positions and layer norm, "
            f"of at most {MOST_PARAMETERS} parameters; {name} has {count} and other parts"
        )
    state = model.state_dict()
    return {
        "name": name,
        "vocabulary": list(vocabulary),
        "heads": config.heads,
        "context": config.context,
        "eps": config.eps,
        "tokens": _tensor(state["tokens.weight"]),
        "positions": _tensor(state["positions.weight"]),
        "unembedding": _tensor(state["tokens.weight" if config.tied else "head.weight"]),
        "norm": _parts(model.norm),
        "layers": [_layer(f"blocks.{at}.attention", block) for at, block in enumerate(model.blocks)],
    }


@cache
def load_browser_model(name: str = BROWSER_MODEL) -> dict[str, Any]:
    """Load a pretrained GPT of the package as JSON data that the web page can run."""
    from regard.data.tokenizers import load_tokenizer
    from regard.models.gpt import GPT
    from regard.models.presets import find_pretrained
    from regard.models.saving import load

    model = load(name)
    if not isinstance(model, GPT):
        raise ConfigError(f"{name} is a {type(model).__name__}; the page runs a GPT")
    folder = find_pretrained(name)
    if folder is None:
        raise ConfigError(f"there is no pretrained model {name!r}")
    words = load_tokenizer(folder / "model")
    return export_model(model, name, [words.decode([token]) for token in range(model.config.vocab)])


def _layer(name: str, block: Any) -> dict[str, Any]:
    fused = block.attention.query_key_value
    bias = (None,) * 3 if fused.bias is None else fused.bias.chunk(3)
    parts = {
        key: {"weight": _tensor(weight), "bias": None if own is None else _tensor(own)}
        for key, weight, own in zip("qkv", fused.weight.chunk(3), bias, strict=True)
    }
    return {"name": name, "norm": _parts(block.attention_norm), **parts, "o": _parts(block.attention.out)}


def _parts(module: "nn.Module") -> dict[str, Any]:
    """Return the weight and the bias of a linear layer or a norm as JSON data; the bias is None if there is none."""
    weight, bias = (getattr(module, part, None) for part in ("weight", "bias"))
    if weight is None:
        raise ConfigError(f"{type(module).__name__} has no weight")
    return {"weight": _tensor(weight), "bias": None if bias is None else _tensor(bias)}


def _tensor(value: "Tensor") -> dict[str, Any]:
    numbers = value.detach().float().cpu().numpy().astype(np.dtype("<f4"))
    return {"shape": list(numbers.shape), "data": base64.b64encode(numbers.tobytes()).decode()}
