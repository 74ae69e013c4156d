"""The attentions of other libraries, and what the checker finds in them: `python -m regard.conform.libraries`.

Only what is installed is run. Nothing is declared, so every convention that is not this project's own shows up.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    """One attention of one library, and how it is made."""

    package: str
    name: str
    make: Callable[[], Any]
    declared: tuple[tuple[str, Any], ...] = ()  # its own conventions, under which it is correct
    extra: tuple[tuple[str, Any], ...] = ()


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


def _hugging_face(
    model: str, attention: str, config: str, kind: str, settings: dict[str, Any]
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        configured = getattr(import_module("transformers"), config)(**settings)
        configured._attn_implementation = kind
        module = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), attention)
        made = module(configured, layer_idx=0) if model in ("gpt2", "llama", "bert") else module(configured)
        assert isinstance(made, nn.Module)
        return made.eval()

    return make


def _timm(**settings: Any) -> nn.Module:
    made = import_module("timm.layers").Attention(12, num_heads=3, **settings)
    assert isinstance(made, nn.Module)
    return made.eval()


def _x_transformers(**settings: Any) -> nn.Module:
    made = import_module("x_transformers.x_transformers").Attention(dim=24, dim_head=8, **settings)
    assert isinstance(made, nn.Module)
    return made.eval()


HIDDEN = ("layout", "untested arguments")  # in the table
_SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 24, "num_hidden_layers": 1}
_GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 1, "n_positions": 512, "vocab_size": 11}
_POISON = (("masked_nan", "propagates"),)
_ADDITIVE = (*_POISON, ("mask_values", "additive"), ("fully_masked_rows", "nan"))

LIBRARIES = (
    LibraryAttention(
        "torch", "scaled_dot_product_attention", lambda: nn.functional.scaled_dot_product_attention, _POISON
    ),
    *(
        LibraryAttention(
            "torch",
            f"nn.MultiheadAttention, need_weights={wanted}",
            lambda: nn.MultiheadAttention(12, 3, batch_first=True),
            (*_POISON, ("fully_masked_rows", "nan" if wanted else "zeros"), ("mask_polarity", "drop")),
            (("need_weights", wanted),),
        )
        for wanted in (True, False)
    ),
    LibraryAttention("torch", "flex_attention, not compiled", _flex),
    *(
        LibraryAttention("transformers", f"{name} ({kind})", _hugging_face(*spec, kind, settings), _ADDITIVE)
        for name, spec, settings in (
            ("GPT2Attention", ("gpt2", "GPT2Attention", "GPT2Config"), _GPT2),
            ("BertSelfAttention", ("bert", "BertSelfAttention", "BertConfig"), _SMALL),
            (
                "LlamaAttention",
                ("llama", "LlamaAttention", "LlamaConfig"),
                {**_SMALL, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            ),
            ("ViTAttention", ("vit", "ViTAttention", "ViTConfig"), _SMALL),
        )
        for kind in ("eager", "sdpa")
    ),
    LibraryAttention("timm", "Attention, fused", lambda: _timm(), _POISON),
    LibraryAttention(
        "timm", "Attention, not fused", lambda: _set_fused(_timm(), False), (*_POISON, ("fully_masked_rows", "nan"))
    ),
    LibraryAttention("x_transformers", "Attention", lambda: _x_transformers(heads=3), _POISON),
    LibraryAttention(
        "x_transformers",
        "Attention, flash",
        lambda: _x_transformers(heads=3, flash=True),
        (*_POISON, ("causal", False)),
    ),
    LibraryAttention(
        "x_transformers",
        "Attention, 6 heads on 3",
        lambda: _x_transformers(heads=6, kv_heads=3),
        (*_POISON, ("grouping", "tile")),
    ),
)


def _set_fused(module: nn.Module, fused: bool) -> nn.Module:
    module.fused_attn = fused  # type: ignore[assignment]
    return module


def installed_version(package: str) -> str | None:
    """The version of a package, or None where it is not there."""
    if find_spec(package) is None:
        return None
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "unknown"


def reports(
    packages: tuple[str, ...] = (), as_declared: bool = False
) -> Iterator[tuple[LibraryAttention, Report | str]]:
    """Every attention of every library that is here, checked with nothing declared, or as its owners mean it."""
    let_torchvision_load()
    for library in LIBRARIES:
        if (not packages or library.package in packages) and installed_version(library.package) is not None:
            declared = dict(library.declared) if as_declared else {}
            try:
                made = library.make()
            except (ImportError, RuntimeError) as error:  # installed, and not fit for this torch
                yield library, f"could not be loaded: {str(error).splitlines()[0]}"
                continue
            yield library, check(made, quick=True, extra=dict(library.extra), **declared)


def rows(packages: tuple[str, ...] = ()) -> Iterator[str]:
    """What was found, as the lines of a table in Markdown, each as soon as it is known."""
    yield from ("| attention | conventions | broken facts |", "|---|---|---|")
    for library, report in reports(packages):
        package = f"{library.package} {re.sub(r'[+].*', '', installed_version(library.package) or '')}"
        if isinstance(report, str):
            yield f"| {package}: {library.name} | {report} | not checked |"
            continue
        conventions = "; ".join(f"{each.name}: {each.value}" for each in report.conventions if each.name not in HIDDEN)
        broken = ", ".join(f"`{result.name}`" for result in report.failures) or "none"
        yield f"| {package}: {library.name} | {conventions} | {broken} |"


def table(packages: tuple[str, ...] = ()) -> str:
    """The whole table."""
    return "\n".join(rows(packages))


if __name__ == "__main__":
    for row in rows(tuple(sys.argv[1:])):
        print(row, flush=True)
