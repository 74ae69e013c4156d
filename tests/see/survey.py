"""Small random models of many Hugging Face families and of timm, and what `watch` records of each.

    python -m tests.see.survey [huggingface|timm]

prints one line for each model and the counts that docs/see.md states.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.see.watch import watch
from tests.peers import import_timm, let_torchvision_load

SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "projection_dim"), 48),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "hidden_dim", "d_embed", "embedding_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim"), 40),
    **dict.fromkeys(("hidden_dim_ff", "dim_feedforward", "mlp_dim", "d_inner"), 40),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size", "v_head_dim", "qk_nope_head_dim"), 12),
    "qk_rope_head_dim": 12, "rotary_dim": 12, "kv_lora_rank": 16, "q_lora_rank": 16, "vocab_size": 99,
    "max_position_embeddings": 64, "n_positions": 64, "image_size": 32, "patch_size": 8, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 24,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What `watch` recorded of one model.

    kind  "recorded", "refused" (with reasons), "no attention", "silently missed", "wrong"
    """

    kind: str
    reason: str = ""


class SoftmaxCounter(TorchDispatchMode):
    """Counts softmaxes and fused attention operators below all of Python, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        if "_softmax" in name and "log" not in name:
            # scores are a matrix for each sequence and head, and not over two classes
            self.count += isinstance(out, Tensor) and out.ndim >= 3
        self.count += "scaled_dot_product" in name or "_native_multi_head_attention" in name
        self.count += "_transformer_encoder_layer_fwd" in name
        return out


def judge(model: nn.Module, run: Callable[[], Any]) -> Outcome:
    """Compare what is recorded with the number of softmaxes and with the attention weights that the model returns."""
    counter = SoftmaxCounter()
    with torch.no_grad(), counter:
        run()
    with torch.no_grad(), watch(model) as seen:
        out = run()
    # values are multiplied once by the sum of two softmaxes
    left_out = sum(count * (2 if "two softmaxes" in reason else 1) for reason, count in seen.left_out.items())
    if len(seen) + left_out < counter.count:
        return Outcome("silently missed", f"{counter.count} softmaxes, {len(seen)} recorded, {left_out} left out")
    keys = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    returned = [
        each for key in keys if isinstance(out, dict) for each in out.get(key) or () if isinstance(each, Tensor)
    ]
    for record in seen.records:
        weights = record.weights()
        truth = [each for each in returned if _comparable(each, weights)]
        if truth and not any(_same(each, weights) for each in truth):
            return Outcome("wrong", f"{record!r} differs from the weights that the model returns")
    if seen.left_out:
        return Outcome("refused", f"{len(seen)} recorded; {'; '.join(seen.left_out)}")
    return Outcome("recorded") if seen else Outcome("no attention")


def _comparable(truth: Tensor, found: Tensor) -> bool:
    """Whether a returned map may be the recorded one: of its shape, with blocks, or its last rows and keys."""
    if truth.ndim == 5:
        return truth.numel() == found.numel()
    return truth.shape[:2] == found.shape[:2] and truth.shape[2] <= found.shape[2] and truth.shape[3] <= found.shape[3]


def _same(truth: Tensor, found: Tensor) -> bool:
    """Whether the numbers agree. ProphetNet returns the scores, before the softmax."""
    truth = truth.reshape(found.shape).float() if truth.ndim == 5 else truth.float()
    found = found[..., -truth.shape[2] :, -truth.shape[3] :]
    known = found.sum(-1) > 0.5  # a row that sees nothing may be anything
    return any(bool(((each - found).abs().amax(-1)[known] < 1e-4).all()) for each in (truth, truth.softmax(-1)))


def shrink(config: Any, image: int = 32) -> None:
    """Make a configuration of transformers small, and those inside it."""
    for name in list(vars(config)):
        value = getattr(config, name)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, image)
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool) and value > SMALL[name]:
            setattr(config, name, image if name == "image_size" else SMALL[name])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "image_token_id"):
        if isinstance(value := getattr(config, name, None), int) and value >= 99:
            setattr(config, name, 1)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: getattr(config, "num_hidden_layers", 2)]


def huggingface_inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Inputs by the names that the model takes."""
    words = torch.arange(18).reshape(2, 9) * 7 % 90 + 5
    channels, side = getattr(config, "num_channels", 3), getattr(config, "image_size", 32)
    side = side[0] if isinstance(side, tuple | list) else side
    inputs: dict[str, Tensor] = {}
    kind = model.main_input_name
    if kind == "input_ids":
        inputs["input_ids"] = words
    elif kind == "pixel_values":
        inputs[kind] = torch.linspace(-1, 1, 2 * channels * side * side).reshape(2, channels, side, side).sin()
    elif kind == "input_values":
        inputs[kind] = torch.linspace(-9, 9, 2 * 4000).reshape(2, 4000).sin()
    elif kind == "input_features":
        mels = getattr(config, "num_mel_bins", 80)
        frames = 2 * getattr(config, "max_source_positions", 50)
        inputs[kind] = torch.linspace(-9, 9, 2 * mels * frames).reshape(2, mels, frames).sin()
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = words[:, :5]
    if kind == "pixel_values" and hasattr(config, "text_config"):
        inputs["input_ids"] = words
    return inputs


def build_huggingface(family: str, implementation: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small random model of a family."""
    import transformers

    config = transformers.CONFIG_MAPPING[family]()
    shrink(config)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.std() < 0.1:
                parameter.mul_(0.1 / float(parameter.std().clamp(min=1e-3)))  # so that no map is uniform
    return model, huggingface_inputs(model, config)


def huggingface_outcome(family: str, implementation: str = "eager") -> Outcome:
    """Build a family, run it and judge what was recorded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = build_huggingface(family, implementation)
        with torch.no_grad():
            try:
                model(**inputs, output_attentions=True)
            except (TypeError, ValueError):  # it returns no weights
                return judge(model, lambda: model(**inputs))
        return judge(model, lambda: model(**inputs, output_attentions=True))


def timm_outcome(name: str) -> Outcome:
    """Build a model of timm, run it on a small image and judge what was recorded."""
    timm = import_timm()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=5).eval()
        side = model.default_cfg["input_size"][1:]
        return judge(model, lambda: model(torch.rand(1, 3, *side)))


def main(kinds: list[str]) -> int:
    """Print the outcome of every model."""
    let_torchvision_load()  # as the tests do
    from tests.see.survey_models import HUGGINGFACE, TIMM

    surveys: dict[str, tuple[Callable[[str], Outcome], tuple[str, ...]]] = {
        "huggingface": (huggingface_outcome, HUGGINGFACE),
        "timm": (timm_outcome, TIMM),
    }
    failed = 0
    for kind in kinds or list(surveys):
        judge_one, names = surveys[kind]
        counts: Counter[str] = Counter()
        for name in names:
            outcome = judge_one(name)
            counts[outcome.kind] += 1
            failed += outcome.kind in ("silently missed", "wrong")
            print(f"{name}: {outcome.kind} {outcome.reason[:160]}", flush=True)
        print(kind, dict(counts), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
