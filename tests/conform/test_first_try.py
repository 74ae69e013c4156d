"""Attentions of other projects are called at the first try, without any option."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from regard.base.errors import ConfigError
from regard.conform import check
from regard.conform.report import Report
from regard.integrations.torchvision import let_torchvision_load
from regard.see.measure.probes.attention_interface import NOTE
from regard.see.xray import xray
from tests.conform import mutants


class LikeTorchtune(nn.Module):
    """Keys and values come from a second sequence, which is required although its default is None."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 6, 3, 4
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (nn.Linear(24, n) for n in (24, 12, 12, 24))

    def forward(self, x: Tensor, y: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        if y is None:
            raise ValueError("y is needed, or a cache")
        q, k, v = (
            project(z).unflatten(-1, (-1, 4)).transpose(1, 2)
            for project, z in ((self.q_proj, x), (self.k_proj, y), (self.v_proj, y))
        )
        seen = None if mask is None else mask[:, None]
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=mask is None, enable_gqa=True)
        joined: Tensor = self.output_proj(out.transpose(1, 2).flatten(2))
        return joined


class SplitsHeads(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.linear, self.heads = nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        split: Tensor = self.linear(x).unflatten(-1, (self.heads, -1))
        return split


class LikeLabml(nn.Module):
    """Time comes first, arguments are passed by name, projections split heads, and masks are (i j b)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.d_k = 3, 4
        self.query, self.key, self.value = (SplitsHeads(12, 3) for _ in range(3))
        self.output = nn.Linear(12, 12)

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = torch.einsum("ibhd,jbhd->ijbh", q / math.sqrt(self.d_k), k)
        if mask is not None:
            assert mask.shape == scores.shape[:3]
            scores = scores.masked_fill(~mask.bool()[..., None], -math.inf)
        out: Tensor = self.output(torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v).flatten(2))
        return out


class OneHead(nn.Module):
    """The first attention of every course: no number of heads, no output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(24, 8, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(512, 512).tril())

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        k, q = self.key(x), self.query(x)
        scores = (q * 8**-0.5 @ k.mT).masked_fill(self.tril[:n, :n] == 0, -math.inf)  # type: ignore[index]
        out: Tensor = scores.softmax(-1) @ self.value(x)
        return out


class UnnamedHeads(nn.Module):
    """The number of heads is in no attribute with a known name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = 3
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.parts, 4)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(mutants.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class BareWeights(nn.Module):
    """One head whose weights are parameters, (in, out) or, with a bias, (out, in)."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        shape = (8, 24) if transposed else (24, 8)
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(shape)) for _ in range(3))
        self.b_Q = nn.Parameter(torch.randn(8)) if transposed else 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ (weight if len(weight) == 24 else weight.T) for weight in (self.W_Q, self.W_K, self.W_V))
        return ((q + self.b_Q) * 8**-0.5 @ k.mT).softmax(-1) @ v


class BareHeads(nn.Module):
    """Weights with an axis for heads and products by einsum, as in TransformerLens."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(3, 12, 4)) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(3, 4, 12))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,hdc->bnhc", x, weight) for weight in (self.W_Q, self.W_K, self.W_V))
        scores = torch.einsum("bihc,bjhc->bhij", q * 4**-0.5, k)
        visible = mutants.triangle(x.shape[1], x.shape[1])
        heads = torch.einsum("bhij,bjhc->bihc", scores.masked_fill(~visible, -math.inf).softmax(-1), v)
        return torch.einsum("bihc,hcd->bid", heads, self.W_O)


class BarePacked(nn.Module):
    """One weight (3 d, d) for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.in_proj_weight, self.out = nn.Parameter(torch.randn(36, 12)), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        packed = functional.linear(x, self.in_proj_weight)
        q, k, v = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in packed.chunk(3, -1))
        out: Tensor = self.out(mutants.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class LikeLlama(nn.Module):
    """Meta's layer: rotary phases are complex numbers, as a buffer or as the argument freqs_cis, cut to the length."""

    def __init__(self, given: bool = False) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.given = 4, 2, given
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, n, bias=False) for n in (32, 16, 16, 32))
        angles = torch.outer(torch.arange(512), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("phases", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        phases = freqs_cis if self.given else self.phases[: x.shape[1]]

        def turned(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * phases[:, None]).flatten(-2).type_as(y)

        q, k, v = (project(x).unflatten(-1, (-1, 8)) for project in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (turned(q), turned(k), v))
        out: Tensor = self.wo(
            functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        )
        return out


class LikeDiffusers(nn.Module):
    """The output projection and its dropout are a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.to_q, self.to_k, self.to_v = (nn.Linear(12, 12, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(12, 12), nn.Dropout(0.0)])

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        other = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = self.to_q(hidden_states), self.to_k(other), self.to_v(other)
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        for part in self.to_out:
            out = part(out)
        return out


class LikeGptFast(nn.Module):
    """One projection `wqkv`, with fewer key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.head_dim = 6, 4
        self.wqkv, self.wo = nn.Linear(24, 40, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.wqkv(x).split([24, 8, 8], -1))
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        out: Tensor = self.wo(functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (LikeLlama, {"rotary pairing": "interleaved, base 10000", "grouped heads": "repeat"}),
        (LikeDiffusers, {"visible keys": "every key", "scale": "1/sqrt(c)"}),
        (LikeGptFast, {"grouped heads": "repeat", "mask": "mask (b h i j), True keeps"}),
        (partial(BareWeights, False), {"visible keys": "every key", "scale": "1/sqrt(c)"}),
        (partial(BareWeights, True), {"visible keys": "every key", "scale": "1/sqrt(c)"}),
        (BareHeads, {"visible keys": "causal", "scale": "1/sqrt(c)"}),
        (BarePacked, {"visible keys": "every key", "scale": "1/sqrt(c)"}),
        (LikeTorchtune, {"visible keys": "causal", "mask": "mask (b i j), True keeps", "grouped heads": "repeat"}),
        (LikeLabml, {"layout": "n b (h c)", "mask": "mask (i j b), True keeps"}),
        (OneHead, {"visible keys": "causal", "scale": "1/sqrt(c)"}),
        (UnnamedHeads, {"visible keys": "every key", "scale": "1/sqrt(c)"}),
    ],
)
def test_layers_are_called_at_the_first_try(kind: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    report = check(kind(), quick=True)
    assert [result.name for result in report.failures] == [], report
    found = {each.name: each.value for each in report.conventions}
    assert {name: found.get(name) for name in expected} == expected


LATENT = {
    "num_key_value_heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 24, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("model", "name", "config", "settings", "expected"),
    [
        (
            *("gptj", "GPTJAttention", "GPTJConfig", {"n_embd": 24, "n_head": 3, "n_layer": 1, "rotary_dim": 4}),
            {
                "rotary pairing": "interleaved, base 10000, 50% of the coordinates",
                "filled in": "position_ids = 0, 1, 2, ...",
            },
        ),
        (
            *("bloom", "BloomAttention", "BloomConfig", {"hidden_size": 24, "n_head": 3, "n_layer": 1}),
            {"bias": "ALiBi, +m j"},
        ),
        (
            *("deberta", "DisentangledSelfAttention", "DebertaConfig", SMALL),
            {"mask": "attention_mask (b h i j), True keeps", "filled in": "attention_mask = True everywhere"},
        ),
        (
            *("deepseek_v3", "DeepseekV3Attention", "DeepseekV3Config"),
            {**SMALL, **LATENT},
            {"scale": "1/sqrt(c)", "note": NOTE},
        ),
    ],
    ids=["GPT-J", "Bloom", "DeBERTa", "DeepSeek"],
)  # fmt: skip
def test_layers_of_hugging_face_are_called_at_the_first_try(
    model: str, name: str, config: str, settings: dict[str, Any], expected: dict[str, str]
) -> None:
    let_torchvision_load()
    transformers = pytest.importorskip("transformers")
    made = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    configured = getattr(transformers, config)(**settings)
    configured._attn_implementation = "eager"
    kind = getattr(made, name)
    layer = kind(configured) if model == "deberta" else kind(configured, layer_idx=0)
    report = check(layer, quick=True)
    assert [result.name for result in report.failures if result.name != "overflow"] == [], report
    found = {each.name: each.value for each in report.conventions}
    assert {each: found.get(each) for each in expected} == expected


def rotated(frequencies: Any, factor: float = 1.0) -> Any:
    """A causal attention with these rotary frequencies, given as a function of the width."""

    def rotate(x: Tensor, start: int) -> Tensor:
        phases = (torch.arange(x.shape[2]) + start).double()[:, None] * frequencies(x.shape[-1])
        cos, sin = (factor * each.repeat(1, 2).to(x.dtype) for each in (phases.cos(), phases.sin()))
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = q.shape[2], k.shape[2]
        return mutants.attend(rotate(q, j - i), rotate(k, 0), v, mutants.triangle(i, j))

    return attention


def stretched(name: str, base: float, *sizes: float) -> Any:
    from regard.core import positions

    stretch = getattr(positions, name)(*sizes)
    return lambda c: stretch.frequencies(base, c).double()


@pytest.mark.parametrize(
    ("fn", "rotary", "scale"),
    [
        (rotated(stretched("Interpolate", 1e4, 4.0)), "half, base 10000, linear scaling by 4", "1/sqrt(c)"),
        (rotated(stretched("Llama3", 5e5)), "half, base 500000, Llama 3 by 8", "1/sqrt(c)"),
        (
            rotated(stretched("YaRN", 1e4, 4.0, 4096), 0.1 * math.log(4.0) + 1),
            "half, base 10000, YaRN by 4",
            "1.296/sqrt(c), the scale of YaRN",
        ),
        (
            rotated(lambda c: torch.linspace(1.0, 0.1, c // 2).double()),
            "half, frequencies of no known scheme",
            "1/sqrt(c)",
        ),
    ],
    ids=["linear", "Llama 3", "YaRN", "others"],
)
def test_scaled_rotary_is_named_and_no_fault(fn: Any, rotary: str, scale: str) -> None:
    report = check(fn, quick=True, causal=True, rotary="half")
    assert report.ok, report
    found = {each.name: each.value for each in report.conventions}
    assert (found["rotary pairing"], found["scale"]) == (rotary, scale)


def test_a_scale_that_only_looks_like_that_of_yarn_is_a_fault() -> None:
    fn = rotated(stretched("Interpolate", 1e4, 4.0), 0.1 * math.log(4.0) + 1)
    assert [result.name for result in check(fn, only=["scale"], causal=True).failures] == ["scale"]


def failed(report: Report) -> list[str]:
    return [result.name for result in report.failures]


def test_reentrant_checkpointing_has_right_gradients_and_leaves_those_of_parameters_alone() -> None:
    weight = nn.Parameter(torch.ones(()))

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = checkpoint(mutants.attend, q, k, v, use_reentrant=True)
        return out

    def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mutants.attend(q, k, v * weight)

    assert failed(check(checkpointed, quick=True)) == []
    assert failed(check(weighted, only=["gradients"])) == []
    assert weight.grad is None


def test_dropout_is_tried_in_training_before_it_is_said_to_change_nothing() -> None:
    def trained(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, training: bool = False) -> Tensor:
        def drop(scores: Tensor, seen: Tensor) -> Tensor:
            return functional.dropout(mutants.weigh(scores, seen), dropout_p, training)

        return mutants.attend(q, k, v, weigh=drop)

    report = check(trained, quick=True)
    assert report["dropout"].status == "passed", report
    assert "untested arguments" not in {each.name for each in report.conventions}

    class Trained(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
            return trained(q, k, v, dropout_p, self.training)

    report = check(Trained(), quick=True)
    assert report["dropout"].status == "not applicable", report
    assert "acts in training mode only" in report["dropout"].reason


def test_a_lacking_argument_is_named_with_the_call_to_write() -> None:
    def lacking(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if q.shape[2] == 6:  # the size that is tested first
            raise TypeError(f"scale is {scale}")
        return mutants.attend(q, k, v)

    report = check(lacking, quick=True)
    assert failed(report) == ["runs"]
    assert "check(lacking, extra={'scale': ...})" in report.failures[0].reason
    assert {each.name: each.value for each in report.conventions} == {"filled in": "scale = None"}


def test_an_argument_of_a_layer_may_be_computed_from_its_input() -> None:
    layer = LikeLlama(given=True)
    with pytest.raises(ConfigError) as raised:
        check(layer, quick=True)
    assert "None was passed for freqs_cis, which has no default" in str(raised.value)
    assert "check(layer, extra={'freqs_cis': ...}); a value may be a function of the input" in str(raised.value)
    report = check(layer, quick=True, extra={"freqs_cis": lambda x: layer.phases[: x.shape[1]]})
    assert failed(report) == [], report
    assert {each.name: each.value for each in report.conventions}["rotary pairing"] == "interleaved, base 10000"


def test_a_layer_of_one_length_is_referred_to_xray() -> None:
    class Window(LikeGptFast):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, torch.ones(4, 4, dtype=torch.bool))

    with pytest.raises(ConfigError, match=r"can be measured by regard\.see\.xray\(layer, queries=\.\.\.\)"):
        check(Window(), quick=True)
    assert xray(Window(), queries=4).scale_name == "1/sqrt(c)"


@pytest.mark.parametrize(
    "name", ["drops_the_mask_beyond_64_keys", "turns_in_half_precision", "is_wrong_for_wide_heads"]
)
def test_an_example_never_prints_256_numbers(name: str) -> None:
    mutant = mutants.MUTANTS[name]
    report = check(mutant.fn, only=mutant.breaks, **mutant.declared)
    failure = report.failures[0].failure
    assert failure is not None
    assert failure.example
    assert len(re.findall(r"[-\d.]+(?:e-?\d+)?|True|False", failure.example)) < 256
