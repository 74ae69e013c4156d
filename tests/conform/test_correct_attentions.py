"""Correct attentions break no fact: our own, and those of other libraries in their own conventions."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from regard.conform import check
from regard.conform.libraries import LIBRARIES, LibraryAttention, installed_version, rows
from regard.core.attend import attend
from regard.core.masks import causal, window
from regard.core.positions import Rotary
from regard.core.scores import alibi
from regard.models.gpt import GPT, GPTConfig
from regard.nn.attention import Attention
from tests.conform import mutants


@pytest.mark.parametrize(
    ("fn", "declared"),
    [
        (attend, {"causal": False, "mask_polarity": "keep"}),
        (lambda q, k, v: attend(q, k, v, mask=causal() & window(before=4)), {"causal": True, "window_before": 4}),
        (lambda q, k, v: attend(q, k, v, mask=window(before=2, after=1)), {"window_before": 2, "window_after": 1}),
        (lambda q, k, v: attend(q, k, v, beta=1.0), {"scale": 1.0}),
        (Attention(24, 6, kv_heads=3), {}),
    ],
    ids=["attend", "window", "both ways", "T5", "layer"],
)
def test_a_right_attention_breaks_nothing(fn: object, declared: dict[str, object]) -> None:
    report = check(fn, quick=True, **declared)
    assert report.ok, report


def real_width(kind: str) -> tuple[object, dict[str, object]]:
    """An attention as wide as people use it, and its own conventions."""
    functional, modeling = torch.nn.functional, "transformers.models.gpt2.modeling_gpt2"
    if kind.startswith("torch"):
        width = int(kind.split()[1])
        return functional.scaled_dot_product_attention, {"width": width, "masked_nan": "propagates"}
    if kind == "layer of torch":
        layer = torch.nn.MultiheadAttention(768, 12, batch_first=True)
        return layer, {"masked_nan": "propagates", "fully_masked_rows": "nan", "mask_polarity": "drop"}
    if kind == "timm":
        return pytest.importorskip("timm.layers").Attention(768, num_heads=12), {"masked_nan": "propagates"}
    if kind == "x-transformers":
        made = pytest.importorskip("x_transformers.x_transformers").Attention(dim=768, dim_head=64, heads=12)
        return made, {"masked_nan": "propagates"}
    module = pytest.importorskip(modeling)
    config = module.GPT2Config(n_embd=768, n_head=12, n_layer=1, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = kind
    said = {"masked_nan": "propagates", "mask_values": "additive"}
    return module.GPT2Attention(config, layer_idx=0), said | ({"fully_masked_rows": "nan"} if kind == "eager" else {})


@pytest.mark.parametrize("kind", ["torch 5", "torch 128", "layer of torch", "sdpa", "timm", "x-transformers"])
def test_a_right_attention_of_real_width_breaks_nothing(kind: str) -> None:
    fn, declared = real_width(kind)
    report = check(fn, quick=True, **declared)  # type: ignore[arg-type]
    # x-transformers multiplies q and k in float16 before it scales them
    assert {result.name for result in report.failures} <= ({"overflow"} if kind == "x-transformers" else set()), report
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
    assert {each.name: each.value for each in report.conventions}["head widths"] == "4, 8, 64 of 4, 8, 12, 64"


def of_a_tokenizer(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """A mask of (b j), as tokenizers give it; one of more axes is spread over others without an error."""
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, -math.inf)
    return scores.softmax(-1) @ v


def ones_keep(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Numbers that are 1 and 0, where 1 keeps, as in BERT."""
    hidden = 0.0 if attention_mask is None else (1.0 - attention_mask) * torch.finfo(q.dtype).min
    return (q * q.shape[-1] ** -0.5 @ k.mT + hidden).softmax(-1) @ v


def time_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*(x.permute(1, 2, 0, 3) for x in (q, k, v))).permute(2, 0, 1, 3)


class Causally(nn.Module):
    """A module around the attention of torch, which hands it the mask."""

    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(12, 3, **settings)  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1 if self.attn.batch_first else 0]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = self.norm(x)
        out: Tensor = x + self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return out


class Relative(nn.Module):
    """An attention with a learned bias by distance, which is an embedding, and no decoder for that."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.relative = 3, nn.Embedding(32, 3)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (3, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        apart = torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]
        bias = self.relative(apart.clamp(-16, 15) + 16).permute(2, 0, 1)
        out: Tensor = self.o_proj(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def in_another_order(key: Tensor, value: Tensor, *, is_causal: bool = False, query: Tensor) -> Tensor:
    return attend(query, key, value, mask=causal() if is_causal else None)


class InAnotherOrder(nn.Module):
    def forward(self, query: Tensor, value: Tensor, key: Tensor) -> Tensor:
        return attend(query, key, value)


NAN = {"fully_masked_rows": "nan", "masked_nan": "propagates"}


@pytest.mark.parametrize(
    ("fn", "declared", "expected"),
    [
        (of_a_tokenizer, NAN, {"mask": "attention_mask (b j), True keeps"}),
        (
            ones_keep,
            {"fully_masked_rows": "mean", "masked_nan": "propagates"},
            {"mask": "attention_mask (b h i j), 1 keeps"},
        ),
        (time_first, {}, {"layout": "n b h c"}),
        (time_first, {"layout": "n b h c"}, {"layout": "n b h c"}),
        (Causally(batch_first=True), {"causal": True}, {"visible keys": "causal", "layout": "b n c"}),
        (Causally(), {"causal": True, "layout": "n b c"}, {"visible keys": "causal", "layout": "n b c"}),
        (nn.TransformerEncoderLayer(12, 3, 8), {}, {"layout": "n b c"}),
        (Relative(), {"scale": 1.0, "bias": "any"}, {"bias": "relative, a function of j - i"}),
        (mutants.RightCross(), {}, {"memory argument": "context"}),
        (in_another_order, {"alignment": "bottom-right"}, {"causal argument": "is_causal=True"}),
    ],
)  # fmt: skip
def test_other_layouts_masks_and_argument_orders_break_nothing(
    fn: object, declared: dict[str, object], expected: dict[str, str]
) -> None:
    report = check(fn, quick=True, **declared)  # type: ignore[arg-type]
    assert report.ok, report
    found = {each.name: each.value for each in report.conventions}
    assert {name: found[name] for name in expected} == expected


def test_q_k_and_v_are_passed_by_name_and_swapped_names_are_detected() -> None:
    facts = ["runs", "input-ignored", "k-and-v-swapped", "q-and-k-swapped", "scale"]
    for fn in (in_another_order, InAnotherOrder()):
        assert check(fn, only=facts).ok
    report = check(lambda value, query, key: attend(key, query, value), only=facts)  # one that lies
    assert [result.name for result in report.failures] == ["q-and-k-swapped"]
    assert report.failures[0].failure is not None
    assert "attend = as_probe(f).call" in report.failures[0].failure.example


def test_dropout_of_a_module_that_makes_up_for_it_is_right() -> None:
    report = check(mutants.RightDropping().train(), only=["dropout"])
    assert report["dropout"].status == "passed"
    still = mutants.RightDropping()
    still.dropped = nn.Dropout(0.0)
    reason = "it has no dropout argument, and drops no weight in training"
    assert check(still, only=["dropout"])["dropout"].reason == reason


def test_a_module_that_cannot_be_called_is_said_to_be_left_out() -> None:
    class Picture(nn.Module):
        """Takes pixels, so that x of (b n c) is refused."""

        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, pixels: Tensor) -> Tensor:
            b, c, height, width = pixels.shape
            x = pixels.reshape(b, c, height * width).mT
            out: Tensor = self.attn(x, x, x)[0]
            return out

    report = check(Picture(), quick=True, **NAN)  # type: ignore[arg-type]
    assert report.ok, report
    assert report.subject == "Picture.attn"
    assert report.conventions[0].name == "note"
    expected = "only attn: Picture cannot be called with x (b n c), it raises ValueError"
    assert report.conventions[0].value.startswith(expected)


SLOW = "flex"  # each of its masks is traced again


@pytest.mark.parametrize(
    "library",
    [pytest.param(each, marks=[pytest.mark.slow] * (SLOW in each.name)) for each in LIBRARIES],
    ids=[f"{each.package}: {each.name}" for each in LIBRARIES],
)
def test_a_library_breaks_nothing(library: LibraryAttention) -> None:
    if installed_version(library.package) is None:
        pytest.skip(f"{library.package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn = library.make()
    report = check(fn, quick=True, extra=library.extra)
    names = [result.name for result in report.failures]
    # with flash=True its causal argument has no effect; others multiply q and k in float16 before they scale
    assert names == (["causality"] if library.name == "Attention, flash" else names[:1])
    assert set(names) <= {"causality", "overflow"}, report
    assert "overflow" not in names or "eager" in library.name or library.package == "x_transformers"


CONFIG = GPTConfig(vocab=19, context=32, width=12, depth=1, heads=3)


@pytest.mark.parametrize("changes", [{}, {"positions": Rotary(), "window": 3}, {"positions": None}])
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


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (mutants.ReturnsItsCache, "past_key_values, entry 1 of the output"),
        (mutants.KeepsItsCacheInside, "start_pos"),
        (mutants.KeepsSlotsInside, "start_pos"),
    ],
)
def test_a_cache_that_is_returned_or_kept_inside_is_found(kind: type[nn.Module], words: str) -> None:
    report = check(kind(), quick=True)
    assert report.ok, report
    assert report["cache"].status == "passed"
    assert {each.name: each.value for each in report.conventions}["cache argument"] == words


class PlacesFirst(nn.Module):
    """A decoder whose first embedding is that of positions, and which gives all logits with targets only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.words, self.head = nn.Embedding(256, 8), nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, None]:
        logits = self.head((self.words(x) + self.positions(torch.arange(x.shape[1]))).cumsum(1))
        return logits if targets is not None else logits[:, -1:], None


def test_the_vocabulary_is_that_of_the_token_embedding_and_extra_is_passed() -> None:
    report = check(PlacesFirst(), quick=True)
    assert report.kind == "decoder"
    assert report.conventions[0].value == "13"
    assert [result.name for result in report.failures] == ["output-shape"]
    assert "pass extra={'targets': lambda tokens: tokens}" in report.failures[0].reason
    report = check(PlacesFirst(), quick=True, extra={"targets": lambda tokens: tokens})
    assert report.ok, report


def test_a_function_that_gives_logits_is_a_decoder() -> None:
    def cumulative(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, 7).cumsum(1).float()

    report = check(cumulative, vocab=7)
    assert report.kind == "decoder"
    assert report.ok, report


def test_the_table_of_libraries_names_conventions_and_broken_facts() -> None:
    pytest.importorskip("timm")
    lines = list(rows(("timm",)))
    assert lines[0] == "| attention | conventions | broken or inexact | differs from our policy |"
    assert len(lines) == 4
    assert "causal argument: is_causal=True" in lines[2]
    assert lines[2].endswith("| none | `nan-in-masked-input` |")
    assert lines[3].endswith("| none | `fully-masked-row`, `nan-in-masked-input` |")


class Growing(nn.Module):
    """What it keeps of a longer call is right for a shorter one, and so is no fault."""

    kept: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = q.shape[2], k.shape[2]
        if self.kept is None or len(self.kept) < j:
            self.kept = torch.ones(j, j, dtype=torch.bool).tril()
        return attend(q, k, v, mask=self.kept[j - i : j, :j])


def test_what_is_kept_between_calls_and_right_is_no_fault() -> None:
    report = check(Growing(), quick=True, causal=True)
    assert report.ok, report


def test_an_object_that_counts_its_calls_is_right_and_keeps_what_it_holds() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls, self.inner = 0, nn.Linear(3, 5)

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.calls += 1
            return attend(q, k, v)

    counting = Counting()
    inner = counting.inner
    assert check(counting, quick=True).ok
    assert counting.inner is inner


def test_the_rows_of_the_table_come_one_by_one() -> None:
    lines = rows(("torch",))
    assert next(lines).startswith("| attention | conventions |")
    assert next(lines) == "|---|---|---|---|"
    assert "scaled_dot_product_attention" in next(lines)
