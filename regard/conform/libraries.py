"""Check the attentions of other libraries: `python -m regard.conform.libraries`.

Only installed libraries are checked. No option declares a convention, so each difference from the conventions of
`regard.attend` is reported.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from regard.conform.checker import check
from regard.conform.report import Report
from regard.integrations.torchvision import let_torchvision_load


@dataclass(frozen=True)
class LibraryAttention:
    """An attention layer or function of another library, to be checked.

    package  name of the library, such as "transformers"
    name     name of the attention in the table of results
    make     function that creates the attention
    extra    keyword arguments that are passed in every call
    """

    package: str
    name: str
    make: Callable[[], Any]
    extra: Mapping[str, Any] = field(default_factory=dict)  # arguments of every call


def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
        mask = None
        if is_causal:
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cpu", BLOCK_SIZE=16
            )
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=enable_gqa)
        assert isinstance(out, Tensor)
        return out

    return flex


def _hugging_face(model: str, name: str, config: str, kind: str, **settings: Any) -> nn.Module:
    """Create an attention layer of the transformers library, in eval mode.

    model     name of the model's module, such as "llama"
    name      name of the attention class in this module
    config    name of the configuration class in this module
    kind      attention implementation, such as "eager" or "sdpa"
    settings  arguments of the configuration
    """
    made = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
    configured = getattr(import_module("transformers"), config)(**settings)
    configured._attn_implementation = kind
    layer = {"layer_idx": 0} if "layer_idx" in inspect.signature(made).parameters else {}
    return _in_eval_mode(made(configured, **layer))


def _make(module: str, name: str, *sizes: int, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that creates an attention layer of another library, in eval mode.

    module           path of the Python module
    name             name of the class
    sizes, settings  arguments of the class
    """
    return lambda: _in_eval_mode(getattr(import_module(module), name)(*sizes, **settings))


def _in_eval_mode(made: Any) -> nn.Module:
    assert isinstance(made, nn.Module)
    return made.eval()


def _timm_without_fusion() -> nn.Module:
    made = _make("timm.layers", "Attention", 12, num_heads=3)()
    made.fused_attn = False  # type: ignore[assignment]
    return made


def _torchtune() -> nn.Module:
    names = {"q_proj": 24, "k_proj": 12, "v_proj": 12, "output_proj": 24}
    sizes = {"embed_dim": 24, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
    made = _make("torchtune.modules", "MultiHeadAttention", **sizes, **{x: nn.Linear(24, n) for x, n in names.items()})
    return made()


HIDDEN = ("layout", "untested arguments")  # conventions that the table does not show
_SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 24, "num_hidden_layers": 1}
_GPT = {"n_embd": 24, "n_head": 3, "n_layer": 1, "n_positions": 512}
_GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
_LATENT = {
    "num_key_value_heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_FAMILIES: tuple[tuple[str, str, str, dict[str, Any], tuple[str, ...]], ...] = (
    ("gpt2", "GPT2Attention", "GPT2Config", _GPT, ("eager", "sdpa")),
    ("bert", "BertSelfAttention", "BertConfig", _SMALL, ("eager", "sdpa")),
    ("vit", "ViTAttention", "ViTConfig", _SMALL, ("eager", "sdpa")),
    ("llama", "LlamaAttention", "LlamaConfig", {**_SMALL, **_GROUPED}, ("eager", "sdpa")),
    ("gptj", "GPTJAttention", "GPTJConfig", {**_GPT, "rotary_dim": 4}, ("eager",)),
    ("bloom", "BloomAttention", "BloomConfig", {"hidden_size": 24, "n_head": 3, "n_layer": 1}, ("eager",)),
    ("deberta_v2", "DisentangledSelfAttention", "DebertaV2Config", _SMALL, ("eager",)),
    ("deepseek_v3", "DeepseekV3Attention", "DeepseekV3Config", {**_SMALL, **_LATENT}, ("eager", "sdpa")),
)
_X = ("x_transformers.x_transformers", "Attention")

ABSENT = "Not installed, and so not checked:"
LIBRARIES = (
    LibraryAttention("torch", "scaled_dot_product_attention", lambda: nn.functional.scaled_dot_product_attention),
    *(
        LibraryAttention(
            "torch",
            f"nn.MultiheadAttention, need_weights={wanted}",
            lambda: nn.MultiheadAttention(12, 3, batch_first=True),
            {"need_weights": wanted},
        )
        for wanted in (True, False)
    ),
    LibraryAttention("torch", "flex_attention, not compiled", _flex),
    *(
        LibraryAttention(
            "transformers", f"{name} ({kind})", partial(_hugging_face, model, name, config, kind, **settings)
        )
        for model, name, config, settings, kinds in _FAMILIES
        for kind in kinds
    ),
    LibraryAttention("timm", "Attention, fused", _make("timm.layers", "Attention", 12, num_heads=3)),
    LibraryAttention("timm", "Attention, not fused", _timm_without_fusion),
    LibraryAttention("x_transformers", "Attention", _make(*_X, dim=24, dim_head=8, heads=3)),
    LibraryAttention("x_transformers", "Attention, flash", _make(*_X, dim=24, dim_head=8, heads=3, flash=True)),
    LibraryAttention("x_transformers", "Attention, 6 heads on 3", _make(*_X, dim=24, dim_head=8, heads=6, kv_heads=3)),
    LibraryAttention("labml_nn", "MultiHeadAttention", _make("labml_nn.transformers.mha", "MultiHeadAttention", 3, 12)),
    LibraryAttention("vit_pytorch", "Attention", _make("vit_pytorch.vit", "Attention", 24, heads=3, dim_head=8)),
    LibraryAttention(
        "diffusers", "Attention", _make("diffusers.models.attention", "Attention", 24, heads=3, dim_head=8)
    ),
    LibraryAttention("torchtune", "MultiHeadAttention", _torchtune),
    LibraryAttention(
        "xformers", "memory_efficient_attention", lambda: import_module("xformers.ops").memory_efficient_attention
    ),
    LibraryAttention("flash_attn", "flash_attn_func", lambda: import_module("flash_attn").flash_attn_func),
)


def installed_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed, "unknown" if it has no version."""
    if find_spec(package) is None:
        return None
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "unknown"


def reports(packages: tuple[str, ...] = ()) -> Iterator[tuple[LibraryAttention, Report | str]]:
    """Check every attention in LIBRARIES whose package is installed, and yield it with its report.

    For an attention that cannot be loaded, the error message is yielded in place of the report.

    packages  names of the packages to check; empty for all
    """
    let_torchvision_load()
    for library in LIBRARIES:
        if (not packages or library.package in packages) and installed_version(library.package) is not None:
            try:
                made = library.make()
            except (ImportError, RuntimeError) as error:  # installed, and not fit for this torch
                yield library, f"could not be loaded: {str(error).splitlines()[0]}"
                continue
            yield library, check(made, quick=True, extra=library.extra)


def rows(packages: tuple[str, ...] = ()) -> Iterator[str]:
    """Check the attentions of installed libraries and yield the results as lines of a Markdown table.

    packages  names of the packages to check; empty for all
    """
    yield from ("| attention | conventions | broken or inexact | differs from our policy |", "|---|---|---|---|")
    for library, report in reports(packages):
        name = f"{library.package} {re.sub(r'[+].*', '', installed_version(library.package) or '')}: {library.name}"
        if isinstance(report, str):
            yield f"| {name} | {report} | not checked | not checked |"
            continue
        conventions = "; ".join(f"{each.name}: {each.value}" for each in report.conventions if each.name not in HIDDEN)
        found = (
            ", ".join(f"`{result.name}`" for result in results) or "none"
            for results in (report.failures, report.policy_differences)
        )
        yield f"| {name} | {conventions} | {' | '.join(found)} |"
    wanted = dict.fromkeys(each.package for each in LIBRARIES if not packages or each.package in packages)
    absent = [package for package in wanted if installed_version(package) is None]
    if absent:
        yield f"\n{ABSENT} {', '.join(absent)}."


if __name__ == "__main__":
    for row in rows(tuple(sys.argv[1:])):
        print(row, flush=True)
