"""What is right is left alone: our own attention, and other libraries in their own conventions."""

import warnings

import pytest
import torch

from regard.conform import check
from regard.conform.libraries import LIBRARIES, Library, installed, table
from regard.core.attend import attend
from regard.core.masks import causal, window
from regard.core.scores import alibi
from regard.layers.attention import Attention
from regard.models.gpt import GPT, GPTConfig
from tests.conform import mutants


@pytest.mark.parametrize(
    ("fn", "declared"),
    [
        (mutants.right, {}),
        (mutants.right_causal, {"causal": True, "alignment": "bottom-right"}),
        (mutants.right_window, {"causal": True, "window_before": 4}),
        (mutants.right_rotary, {"causal": True, "rotary": "half"}),
        (attend, {"causal": False, "mask_polarity": "keep"}),
        (lambda q, k, v: attend(q, k, v, mask=causal() & window(before=4)), {"causal": True, "window_before": 4}),
        (lambda q, k, v: attend(q, k, v, mask=window(before=2, after=1)), {"window_before": 2, "window_after": 1}),
        (lambda q, k, v: attend(q, k, v, beta=1.0), {"scale": 1.0}),
        (Attention(24, 6, kv_heads=3), {}),
    ],
    ids=["right", "causal", "window", "rotary", "attend", "attend-window", "attend-both-ways", "attend-T5", "layer"],
)
def test_a_right_attention_breaks_nothing(fn: object, declared: dict[str, object]) -> None:
    report = check(fn, quick=True, **declared)
    assert report.ok, report


def real_width(kind: str) -> tuple[object, dict[str, object]]:
    """An attention as wide as people use it, and its own conventions."""
    functional, modeling = torch.nn.functional, "transformers.models.gpt2.modeling_gpt2"
    if kind.startswith("torch"):
        width = int(kind.split()[1])
        return functional.scaled_dot_product_attention, {"width": width, "poison": "reaches"}
    if kind == "layer of torch":
        layer = torch.nn.MultiheadAttention(768, 12, batch_first=True)
        return layer, {"poison": "reaches", "blind_rows": "nan", "mask_polarity": "drop"}
    if kind == "timm":
        return pytest.importorskip("timm.layers").Attention(768, num_heads=12), {"poison": "reaches"}
    if kind == "x-transformers":
        made = pytest.importorskip("x_transformers.x_transformers").Attention(dim=768, dim_head=64, heads=12)
        return made, {"poison": "reaches"}
    module = pytest.importorskip(modeling)
    config = module.GPT2Config(n_embd=768, n_head=12, n_layer=1, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = kind
    said = {"poison": "reaches", "mask_values": "additive"}
    return module.GPT2Attention(config, layer_idx=0), said | ({"blind_rows": "nan"} if kind == "eager" else {})


@pytest.mark.parametrize(
    "kind", ["torch 5", "torch 64", "torch 128", "layer of torch", "eager", "sdpa", "timm", "x-transformers"]
)
def test_a_right_attention_of_real_width_breaks_nothing(kind: str) -> None:
    fn, declared = real_width(kind)
    report = check(fn, quick=True, **declared)  # type: ignore[arg-type]
    assert report.ok, report
    assert report["finite-mask-value"].status == "passed"


@pytest.mark.parametrize("width", [6, 64])
@pytest.mark.parametrize("bias", ["none", "alibi"])
def test_causal_attention_of_any_width_breaks_nothing(width: int, bias: str) -> None:
    def causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, mask=causal(), scores=alibi(heads=q.shape[1]) if bias == "alibi" else None)

    report = check(causally, causal=True, quick=True, width=width, bias=bias)
    assert report.ok, report
    assert report["finite-mask-value"].status == "passed"


def test_widths_that_are_refused_are_named_and_no_fault() -> None:
    def for_kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.shape[-1] in (4, 8, 16, 32, 64)
        return attend(q, k, v)

    report = check(for_kernels, quick=True)
    assert report.ok, report
    assert {each.name: each.value for each in report.conventions}["widths of heads"] == "4, 8, 64 of 4, 8, 12, 64"


SLOW = "flex"  # each of its masks is traced anew


@pytest.mark.parametrize(
    "library",
    [pytest.param(each, marks=[pytest.mark.slow] * (SLOW in each.name)) for each in LIBRARIES],
    ids=[f"{each.package}: {each.name}" for each in LIBRARIES],
)
def test_a_library_breaks_nothing_in_its_own_conventions(library: Library) -> None:
    if installed(library.package) is None:
        pytest.skip(f"{library.package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn = library.make()
    report = check(fn, quick=True, extra=dict(library.extra), **dict(library.declared))
    assert report.ok, report


CONFIG = GPTConfig(vocab=19, context=32, width=12, depth=1, heads=3)


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary", "window": 3}, {"positions": "none"}])
def test_our_decoders_break_nothing(changes: dict[str, object]) -> None:
    from dataclasses import replace

    report = check(GPT(replace(CONFIG, **changes)))  # type: ignore[arg-type]
    assert report.ok, report
    assert {result.status for result in report.facts} <= {"passed", "not applicable"}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_decoders_of_hugging_face_break_nothing(family: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if family == "GPT2":
        config = transformers.GPT2Config(
            n_embd=24, n_head=3, n_layer=2, n_positions=32, vocab_size=19, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation=kind)
    else:
        config = transformers.LlamaConfig(
            vocab_size=19, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=3, head_dim=8,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=kind)
    report = check(model)
    assert report.ok, report
    assert report["cache"].status == report["left-padding"].status == "passed"


def test_a_function_that_gives_logits_is_a_decoder() -> None:
    def cumulative(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, 7).cumsum(1).float()

    report = check(cumulative, vocab=7)
    assert report.kind == "decoder"
    assert report.ok, report


def test_the_table_of_libraries_names_conventions_and_broken_facts() -> None:
    pytest.importorskip("timm")
    lines = table(("timm",)).splitlines()
    assert lines[0] == "| attention | conventions | broken facts |"
    assert len(lines) == 4
    assert "causal by: is_causal=True" in lines[2]
    assert lines[2].endswith("| `nan-in-masked-value`, `nan-in-masked-key` |")
    assert lines[3].endswith("| `blind-row-nan`, `nan-in-masked-value`, `nan-in-masked-key` |")
