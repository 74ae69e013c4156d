"""X-ray: conventions that are measured from outside are those inside, and faults are noted."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    T5Config,
    ViTConfig,
)
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.vit.modeling_vit import ViTAttention

from regard.base.errors import ConfigError
from regard.core.attend import attend
from regard.core.masks import blocks, causal, chunks, dilated, full, global_tokens, prefix, window
from regard.core.masks.algebra import Mask
from regard.core.positions import Interpolate, rotary
from regard.core.scores import alibi, alibi_slopes, shaw, sink, softcap, t5_buckets
from regard.nn.attention import Attention
from regard.see.adapters import as_probe
from regard.see.measure.mask_names import UNNAMED, describe_mask
from regard.see.xray import XRay, xray
from tests.peers import import_timm

sdpa = functional.scaled_dot_product_attention
Fn = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(**settings: Any) -> Fn:
    return lambda q, k, v: attend(q, k, v, **settings)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def later(q: Tensor, k: Tensor, first: int = 1) -> Tensor:
    """The keys from `first` places after a query on, both counted from the start."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(first)


def known(found: XRay, groups: list[int], **settings: Any) -> Tensor:
    """The weights by the definition."""
    j = found.k.shape[2]
    v = torch.eye(j, dtype=torch.float64).expand(len(found.k), len(groups), j, j)
    return attend(found.q, found.k[:, groups], v, kernel="reference", **settings)


def close(found: XRay, near: float = 1e-12, **settings: Any) -> bool:
    assert found.value_heads is not None
    return torch.allclose(found.weights, known(found, list(found.value_heads), **settings), rtol=0, atol=near)


def test_the_fused_attention_of_torch_is_read_whole() -> None:
    found = xray(sdpa)
    assert close(found)
    assert found.linear is True
    assert found.linearity_error is not None
    assert found.linearity_error < 1e-12
    assert (found.normalised, found.mask, found.alignment) == ("rows", "full()", None)
    assert found.row_sums == pytest.approx((1.0, 1.0))
    assert found.scale == pytest.approx(8**-0.5)
    assert found.residual is not None
    assert found.residual < 1e-12
    assert (found.scale_name, found.bias_name, found.sink, found.rotary) == ("1/sqrt(c)", "none", None, None)
    assert (found.value_heads, found.grouping) == ((0, 1, 2), "one to one")
    assert (found.mask_argument, found.mask_polarity, found.fully_masked_rows) == ("attn_mask", "keep", "zeros")
    assert (found.deterministic, found.dropout_in_eval, found.dropout) == (True, 0.0, None)
    assert found.notes == ()


def test_the_report_reads_as_text() -> None:
    text = str(xray(sdpa, is_causal=True, scale=0.7))
    assert text.splitlines() == [
        "scaled_dot_product_attention, with b=2 h=3 g=3 i=7 j=7 c=8 in float64 as (b h n c)",
        "  weights    sum to one over rows; rows sum to 1",
        *[line for line in text.splitlines() if line.startswith("  values     linear in v, off by ")],
        "  mask       causal(), aligned top-left",
        "  empty rows none seen",
        *[line for line in text.splitlines() if line.startswith("  scale      0.7 (residual ")],
        "  bias       none",
        "  sink       none",
        "  heads      read key heads [0, 1, 2]: one to one",
        "  rotary     none",
        "  dropout    none in eval",
    ]
    turning = str(xray(Attention(30, 3, rotary=rotary(), scores=sink(torch.ones(3)), dropout=0.3)))
    assert "rotary     half pairs, base 10000, 10 coordinates rotated" in turning
    assert "sink       logits 1, 1, 1" in turning
    assert "dropout    0.3 of the weights in training, none in eval" in turning
    assert "argument   mask=, True is visible" in turning
    assert "m = 0.0625, 0.003906, 0.25" in str(xray(ours(scores=alibi(heads=3)), heads=3))


def test_arguments_of_the_fused_attention_show() -> None:
    plain = xray(sdpa, is_causal=True, scale=0.31)
    assert (plain.mask, plain.alignment) == ("causal()", "top-left")
    assert plain.scale == pytest.approx(0.31)
    assert plain.scale_name is None
    assert close(plain, mask=causal(), beta=0.31)
    grouped = xray(sdpa, enable_gqa=True, heads=10, kv_heads=5)
    assert (grouped.value_heads, grouped.grouping) == ((0, 0, 1, 1, 2, 2, 3, 3, 4, 4), "repeat")
    assert close(grouped)
    mask = torch.rand(7, 7) < 0.6
    mask[4] = False
    masked = xray(sdpa, attn_mask=mask)
    assert torch.equal(masked.visible, mask.expand(2, 3, 7, 7))
    assert (masked.mask, masked.fully_masked_rows) == (UNNAMED, "zeros")
    added = torch.randn(7, 7)
    biased = xray(sdpa, attn_mask=added)
    assert biased.bias is not None
    torch.testing.assert_close(biased.bias, (added - added.mean(-1, keepdim=True)).double().expand(3, 7, 7))
    assert biased.bias_name == "other"


@pytest.mark.parametrize(
    "mask",
    [
        full(),
        causal(),
        causal() & window(before=2),
        window(before=1, after=3),
        window(before=None, after=1),
        window(before=2, after=None),
        causal() & ~window(),
        blocks(3),
        chunks(2, before=1),
        chunks(3, before=None),
        causal() & blocks(3),
        dilated(3),
        causal() & dilated(2),
        prefix(3),
        causal() | prefix(3),
        window(before=1, after=1) | global_tokens(2),
        causal() & window(before=1) | prefix(2),
    ],
    ids=repr,
)
def test_every_mask_is_named_in_our_words(mask: Mask) -> None:
    found = xray(ours(mask=mask))
    assert torch.equal(found.visible, mask.dense(7).expand(2, 6, 7, 7))
    assert mask.dense(7).equal(_named(found.mask).dense(7))
    assert found.mask == repr(mask)
    assert close(found, mask=mask)


def _named(words: str) -> Mask:
    names = (full, causal, window, blocks, chunks, dilated, prefix, global_tokens)
    mask = eval(words, {each.__name__: each for each in names})
    assert isinstance(mask, Mask)
    return mask


def test_the_alignment_shows_where_there_are_more_keys_than_queries() -> None:
    assert xray(ours(mask=causal())).alignment == "bottom-right"
    assert xray(ours(mask=causal() & window(before=2)), queries=5, keys=9).alignment == "bottom-right"
    first = xray(sdpa, is_causal=True, queries=5, keys=9)
    assert (first.mask, first.alignment) == ("causal()", "top-left")
    assert describe_mask(torch.ones(3, 5, dtype=torch.bool)) == ("full()", None)
    bound = xray(lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(7, 7).tril().bool()))
    assert bound.alignment is None


def test_masks_that_differ_between_heads_or_sequences_are_described() -> None:
    both = torch.stack([causal().dense(7), full().dense(7), window(before=1, after=1).dense(7)])
    found = xray(ours(mask=both), heads=3)
    assert found.mask == "head 0: causal(); head 1: full(); head 2: window(before=1, after=1)"
    lengths = torch.arange(7) < torch.tensor([[5], [3]])
    assert xray(ours(mask=lengths[:, None, None])).mask == f"{UNNAMED}, which differs between sequences"


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "blocked", "reference"])
def test_our_kernels_measure_the_same(kernel: str) -> None:
    found = xray(functools.partial(attend, mask=causal() & window(before=2), beta=0.6, kernel=kernel))
    assert found.scale == pytest.approx(0.6)
    assert (found.grouping, found.mask) == ("repeat", "causal() & window(before=2)")
    assert close(found, mask=causal() & window(before=2), beta=0.6)


@pytest.mark.parametrize(
    ("scale", "named"),
    [
        (11**-0.5, "1/sqrt(c)"),
        (1.0, "1 (none)"),
        (1 / 11, "1/c (applied twice)"),
        (11**0.5, "sqrt(c) (multiplied instead of divided)"),
        (33**-0.5, "1/sqrt(h c) (the width of all heads)"),
        (0.0, "0 (the mean of all visible values)"),
        (math.inf, "inf (the largest score takes all)"),
        (-0.2, None),
    ],
)
def test_a_scale_is_measured_and_named(scale: float, named: str | None) -> None:
    found = xray(ours(beta=scale), width=11, heads=3)
    assert found.scale == pytest.approx(scale)
    assert found.scale_name == named


def test_different_scales_of_heads_are_measured() -> None:
    own = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)[:, None, None]
    found = xray(lambda q, k, v: sdpa(q * own.to(q), k, v, scale=1.0), heads=3)
    assert found.scale is None
    assert found.scales == pytest.approx((0.2, 0.5, 0.9))
    assert "heads have different scales" in found.notes


def test_a_soft_cap_is_distinguished_from_a_scale() -> None:
    for cap in (2.0, 50.0):
        found = xray(ours(scores=softcap(cap), mask=causal(), beta=0.4))
        assert (found.softcap, found.scale) == (pytest.approx(cap), pytest.approx(0.4))
        assert close(found, scores=softcap(cap), mask=causal(), beta=0.4)
    assert xray(ours(beta=0.4)).softcap is None
    backwards = xray(lambda q, k, v: (3 * torch.tanh(-scores(q, k) / 3)).softmax(-1) @ v)
    assert (backwards.softcap, backwards.scale) == (pytest.approx(3), pytest.approx(-(8**-0.5)))


def test_a_bias_is_read_and_named() -> None:
    past = xray(ours(scores=alibi(heads=3), mask=causal()), heads=3)
    assert past.slopes == pytest.approx(tuple(alibi_slopes(3).tolist()))
    assert past.bias_name == "ALiBi, -m |i - j|"
    both = xray(ours(scores=alibi(heads=3)), heads=3)
    assert (both.bias_name, both.slopes) == ("ALiBi, -m |i - j|", pytest.approx(tuple(alibi_slopes(3).tolist())))
    rising = xray(lambda q, k, v: (scores(q, k) + 0.3 * torch.arange(k.shape[2])).softmax(-1) @ v)
    assert (rising.bias_name, rising.slopes) == ("ALiBi, +m j", pytest.approx((0.3,) * 3))
    table = torch.randn(8, 3)
    buckets = xray(ours(scores=t5_buckets(table, max_distance=6)), heads=3)
    assert (buckets.bias_name, buckets.slopes) == ("relative, a function of j - i", None)
    assert buckets.bias is not None
    assert buckets.bias.sum(-1).abs().max() < 1e-9
    assert buckets.scale_name == "1/sqrt(c)"
    gaps = xray(ours(scores=alibi(heads=3), mask=dilated(2)), heads=3)
    assert (gaps.bias_name, gaps.slopes) == ("ALiBi, -m |i - j|", pytest.approx(tuple(alibi_slopes(3).tolist())))
    relative = xray(ours(scores=shaw(torch.randn(9, 8))), width=8)
    assert relative.scale_name == "1/sqrt(c)"
    assert "queries change the weights at k = 0: scores have a term of q and position" in relative.notes


def test_the_logit_of_a_sink_is_what_rows_lack() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0])
    found = xray(ours(scores=sink(logits)), heads=3)
    assert found.sink == pytest.approx((0.5, -1.0, 2.0))
    assert found.normalised == "rows and a sink"
    assert found.row_sums[1] < 1
    with_bias = xray(ours(scores=[alibi(heads=3), sink(logits)], mask=causal()), heads=3)
    assert with_bias.sink == pytest.approx((0.5, -1.0, 2.0))
    assert close(with_bias, scores=[alibi(heads=3), sink(logits)], mask=causal())
    halved = xray(lambda q, k, v: 0.5 * sdpa(q, k, v))
    assert halved.sink is None
    assert any("a gate or a factor acts on the output" in note for note in halved.notes)

    def a_sink_in_each_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rising = torch.arange(q.shape[2]).to(q)[:, None].expand(*q.shape[:3], 1)
        return torch.cat([scores(q, k), rising], -1).softmax(-1)[..., :-1] @ v

    uneven = xray(a_sink_in_each_row)
    assert (uneven.sink, uneven.normalised) == (None, None)
    assert "rows sum to less than one, but not by one sink logit per head" in uneven.notes


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("base", [10000.0, 37.0])
def test_rotary_pairing_and_base_are_found(pairing: str, base: float) -> None:
    turn = rotary(pairing=pairing, base=base)
    for mask in (full(), causal(), causal() & window(before=2)):
        found = xray(lambda q, k, v, mask=mask: attend(turn(q), turn(k), v, mask=mask, beta=0.3))
        assert (found.rotary, found.rotary_width) == (pairing, 8)
        assert found.rotary_base == pytest.approx(base, rel=1e-3)
        assert found.scale == pytest.approx(0.3, rel=1e-5)
        assert found.frequencies == pytest.approx(turn.frequencies(8).tolist(), rel=1e-5)


def test_part_of_the_coordinates_may_turn() -> None:
    for pairing in ("half", "interleaved"):
        turn = rotary(pairing=pairing, width=6)
        found = xray(lambda q, k, v, turn=turn: attend(turn(q), turn(k), v), width=10)
        assert (found.rotary, found.rotary_width) == (pairing, 6)
        assert found.rotary_base == pytest.approx(10000, rel=1e-3)
    one = rotary(width=2)
    single = xray(lambda q, k, v: attend(one(q), one(k), v), width=10)
    assert (single.rotary, single.rotary_width, single.rotary_base) == ("half", 2, None)
    assert "one pair is rotated, so half and interleaved pairing are the same" in single.notes
    stretched = rotary(scaling=Interpolate(3.0))
    found = xray(lambda q, k, v: attend(stretched(q), stretched(k), v))
    assert (found.rotary, found.rotary_base) == ("half", None)
    assert found.frequencies == pytest.approx(stretched.frequencies(8).tolist(), rel=1e-5)
    longer = xray(lambda q, k, v: attend(one(q), one(k), v), queries=5, keys=9)
    assert longer.rotary is None
    assert "rotary was not measured: that needs as many keys as queries" in longer.notes


def implemented(config: Any, kind: str) -> Any:
    config._attn_implementation = kind
    return config


def of_timm(**settings: Any) -> nn.Module:
    import_timm()
    from timm.layers.attention import Attention as TimmAttention

    return TimmAttention(24, 3, **settings)


def test_the_layer_of_torch_is_read_through_its_projections() -> None:
    for batch_first in (False, True):
        found = xray(nn.MultiheadAttention(15, 3, dropout=0.25, batch_first=batch_first))
        assert close(found)
        assert found.scale == pytest.approx(5**-0.5)
        assert (found.mask_argument, found.mask_polarity, found.fully_masked_rows) == ("attn_mask", "drop", "nan")
        assert (found.dropout, found.dropout_in_eval) == (pytest.approx(0.25), 0.0)
    causal_mask = nn.Transformer.generate_square_subsequent_mask(7)
    given = xray(nn.MultiheadAttention(15, 3), attn_mask=causal_mask.double())
    assert given.mask == "causal()"
    more = xray(nn.MultiheadAttention(15, 3, add_zero_attn=True))
    assert more.sink == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    of_its_own = xray(nn.MultiheadAttention(15, 3, add_bias_kv=True))
    assert of_its_own.scale == pytest.approx(5**-0.5, rel=1e-4)
    assert any("a constant is added" in note for note in of_its_own.notes)


def test_timm_is_read() -> None:
    found = xray(of_timm(attn_drop=0.2, proj_drop=0.5))
    assert close(found)
    assert (found.dropout, found.mask_polarity, found.sizes[-11:]) == (pytest.approx(0.2), "keep", "(b n (h c))")
    layer = xray(of_timm(qk_norm=True, norm_layer=nn.LayerNorm))
    assert (layer.qk_norm, layer.scale_name) == ("layer", "1/sqrt(c)")
    assert "q and k are normalised: a vector of twice the length gives the same scores" in layer.notes
    learned = of_timm(qk_norm=True, norm_layer=nn.RMSNorm)
    for norm in (learned.q_norm, learned.k_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    weighing = xray(learned)
    mean = float((learned.q_norm.weight * learned.k_norm.weight).detach().mean()) * 8**-0.5
    assert (weighing.qk_norm, weighing.scale) == ("rms", pytest.approx(mean, rel=1e-5))
    gated = xray(of_timm(gated=True))
    assert gated.row_sums == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_hugging_face_layers_are_read(kind: str) -> None:
    gpt2 = xray(GPT2Attention(implemented(GPT2Config(n_embd=24, n_head=3, attn_pdrop=0.3), kind), layer_idx=0))
    # the eager function has no mask of its own: whoever calls the layer alone gets full attention
    assert gpt2.mask == ("full()" if kind == "eager" else "causal()")
    assert gpt2.dropout == pytest.approx(0.3)
    assert close(gpt2, mask=full() if kind == "eager" else causal())
    bert = xray(BertSelfAttention(implemented(BertConfig(hidden_size=24, num_attention_heads=3), kind)))
    assert close(bert)
    assert bert.mask_argument == "attention_mask"
    assert (bert.mask_polarity, bert.fully_masked_rows) == (
        ("additive", "nan") if kind == "eager" else ("keep", "zeros")
    )
    vit = xray(ViTAttention(implemented(ViTConfig(hidden_size=24, num_attention_heads=3), kind)))
    assert close(vit, 1e-6)
    phases = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=3, rope_parameters=phases)
    llama = xray(LlamaAttention(implemented(config, kind), 0))
    assert (llama.rotary, llama.rotary_width, llama.grouping) == ("half", 8, "repeat")
    assert llama.rotary_base == pytest.approx(500, rel=1e-3)
    assert llama.scale == pytest.approx(8**-0.5, rel=1e-5)


def test_softcap_norms_and_bias_of_hugging_face_layers_are_read() -> None:
    sizes = {"hidden_size": 48, "head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 2}
    gemma = xray(Gemma2Attention(implemented(Gemma2Config(**sizes), "eager"), 0))
    assert (gemma.softcap, gemma.rotary) == (pytest.approx(50, rel=1e-3), "half")
    assert gemma.scale == pytest.approx(256**-0.5, rel=1e-4)
    layer = Qwen3Attention(implemented(Qwen3Config(**sizes), "sdpa"), 0)
    plain = xray(layer)
    assert (plain.qk_norm, plain.rotary, plain.scale_name) == ("rms", "half", "1/sqrt(c)")
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    learned = xray(layer)
    assert (learned.qk_norm, learned.rotary) == ("rms", "half")
    assert learned.rotary_base == pytest.approx(10000, rel=1e-2)
    assert any("has a weight for each coordinate" in note for note in learned.notes)
    local = {**sizes, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    gemma3 = xray(Gemma3Attention(implemented(Gemma3TextConfig(**local), "eager"), 1))
    assert (gemma3.qk_norm, gemma3.rotary) == ("rms", "half")
    assert gemma3.rotary_base == pytest.approx(1e6, rel=1e-2)
    t5 = T5Attention(implemented(T5Config(d_model=24, d_kv=8, num_heads=3), "eager"), has_relative_attention_bias=True)
    found = xray(t5)
    assert (found.scale_name, found.bias_name) == ("1 (none)", "relative, a function of j - i")


def test_x_transformers_is_read() -> None:
    library = pytest.importorskip("x_transformers.x_transformers")
    found = xray(library.Attention(24, dim_head=8, heads=6, kv_heads=2, causal=True, max_attend_past=2))
    assert (found.value_heads, found.grouping) == ((0, 1, 0, 1, 0, 1), "tile")
    assert found.mask == "causal() & window(before=2)"
    assert close(found, 1e-6, mask=causal() & window(before=2))
    phases = library.RotaryEmbedding(8).forward_from_seq_len(7)
    turned = xray(library.Attention(24, dim_head=8, heads=3), rotary_pos_emb=phases)
    assert (turned.rotary, turned.rotary_base) == ("interleaved", pytest.approx(10000, rel=1e-3))
    cosine = xray(library.Attention(24, dim_head=8, heads=3, qk_norm=True))
    assert (cosine.qk_norm, cosine.scale_name) == ("rms", "10 on vectors of length one")
    few = xray(library.Attention(24, dim_head=8, heads=3, sparse_topk=3))
    assert any("only the best are kept" in note for note in few.notes)
    distance = xray(library.Attention(24, dim_head=8, heads=3, l2_distance=True))
    assert "keys change the weights at q = 0: scores have a term of k alone" in distance.notes
    memory = xray(library.Attention(24, dim_head=8, heads=3, num_mem_kv=2))
    assert memory.sink == pytest.approx((math.log(2),) * 3, abs=1e-6)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_our_own_layer_is_read(pairing: str) -> None:
    layer = Attention(48, 6, kv_heads=2, rotary=rotary(pairing=pairing), scores=softcap(9.0), beta=0.4, dropout=0.15)
    found = xray(layer, mask=causal())
    assert (found.rotary, found.value_heads, found.grouping) == (pairing, (0, 0, 0, 1, 1, 1), "repeat")
    assert (found.softcap, found.scale) == (pytest.approx(9, rel=1e-4), pytest.approx(0.4, rel=1e-4))
    assert (found.mask, found.dropout, found.deterministic) == ("causal()", pytest.approx(0.15), True)
    normed = xray(Attention(48, 6, qk_norm="rms", rotary=rotary(pairing=pairing), scores=alibi(heads=6)))
    assert (normed.qk_norm, normed.rotary, normed.scale_name) == ("rms", pairing, "1/sqrt(c)")
    assert normed.bias_name == "ALiBi, -m |i - j|"
    crossed = xray(Attention(48, 6, kv_heads=1, memory_width=11), queries=5, keys=9)
    assert (crossed.grouping, crossed.weights.shape) == ("shared", (2, 6, 5, 9))


def test_a_loop_in_python_is_read() -> None:
    def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype)
        for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
            weights = [math.exp(float(q[b, h, i] @ k[b, h, j]) * q.shape[-1] ** -0.5) for j in range(i + 1)]
            for j, weight in enumerate(weights):
                out[b, h, i] += weight / sum(weights) * v[b, h, j]
        return out

    found = xray(loop, queries=5, heads=2, width=3)
    assert (found.mask, found.scale_name, found.alignment) == ("causal()", "1/sqrt(c)", "top-left")
    assert close(found, mask=causal())


def test_tiled_heads_are_found_also_if_keys_and_values_differ() -> None:
    def tiled(q: Tensor, k: Tensor, v: Tensor, both: bool = True) -> Tensor:
        times = q.shape[1] // k.shape[1]
        keys = k.repeat(1, times, 1, 1) if both else k.repeat_interleave(times, 1)
        return scores(q, keys).softmax(-1) @ v.repeat(1, times, 1, 1)

    found = xray(tiled, heads=6, kv_heads=3)
    assert (found.value_heads, found.grouping) == ((0, 1, 2, 0, 1, 2), "tile")
    assert found.notes == ()
    assert close(found)
    half = xray(functools.partial(tiled, both=False), heads=6, kv_heads=3)
    assert (half.value_heads, half.key_heads) == ((0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2))
    assert "keys are used in another order than values: [0, 0, 1, 1, 2, 2]" in half.notes
    backwards = xray(lambda q, k, v: sdpa(q, k.flip(1), v.flip(1)), heads=3, kv_heads=3)
    assert (backwards.value_heads, backwards.grouping) == ((2, 1, 0), "other")


@pytest.mark.parametrize(("axis", "name"), [(-2, "columns"), (1, "heads"), (0, "batch")])
def test_a_softmax_over_another_axis_is_noted(axis: int, name: str) -> None:
    found = xray(lambda q, k, v: scores(q, k).softmax(axis) @ v)
    assert found.normalised == name
    assert f"the softmax is over {name}, not over the keys of a row" in found.notes
    assert found.scale is None
    assert found.bias is None


def test_a_causal_mask_that_is_off_by_one_is_named() -> None:
    seeing = xray(lambda q, k, v: scores(q, k).masked_fill(later(q, k, 2), -math.inf).softmax(-1) @ v)
    assert seeing.mask == "window(before=None, after=1)"
    blind = xray(lambda q, k, v: scores(q, k).masked_fill(later(q, k, 0), -math.inf).softmax(-1) @ v)
    assert (blind.mask, blind.fully_masked_rows) == ("causal() & ~window(before=0)", "nan")
    assert (blind.alignment, blind.scale_name) == ("top-left", "1/sqrt(c)")


def test_a_finite_mask_value_is_noted() -> None:
    finite = "hidden keys get weight when visible scores are very negative: the mask value is finite"
    found = xray(lambda q, k, v: scores(q, k).masked_fill(later(q, k), -1e9).softmax(-1) @ v)
    assert (found.mask, found.notes) == ("causal()", (finite,))
    closed = xray(lambda q, k, v: scores(q, k).masked_fill(later(q, k), -math.inf).softmax(-1) @ v)
    assert closed.notes == ()
    low = xray(lambda q, k, v: scores(q, k).masked_fill(later(q, k), -50.0).softmax(-1) @ v)
    assert low.mask == "causal()"
    assert any("hidden keys have a weight of up to 2e-22" in note for note in low.notes)


@pytest.mark.parametrize(("value", "gives"), [(-math.inf, "nan"), (-1e300, "mean"), (0.0, "zeros")])
def test_the_output_of_a_fully_masked_row_is_measured(value: float, gives: str) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if value == 0:
            return attend(q, k, v, mask=mask)
        hidden = torch.zeros(()).bool() if mask is None else ~mask
        return scores(q, k).masked_fill(hidden, value).softmax(-1) @ v

    found = xray(masked)
    assert (found.mask_argument, found.mask_polarity, found.fully_masked_rows) == ("mask", "keep", gives)

    def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return (scores(q, k) - (0 if mask is None else 1e4 * ~mask)).softmax(-1) @ v

    assert xray(added).fully_masked_rows == "unmasked"


def test_other_outputs_of_a_fully_masked_row_are_noted() -> None:
    def refusing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and not mask.any(-1).all():
            raise ValueError("a blind row")
        return sdpa(q, k, v, attn_mask=mask)

    assert "a fully masked row raises ValueError: a blind row" in xray(refusing).notes

    def first_key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = mask | (~mask.any(-1, keepdim=True) & (torch.arange(k.shape[2]) == 0))
        return sdpa(q, k, v, attn_mask=mask)

    found = xray(first_key)
    assert found.fully_masked_rows is None
    assert "a fully masked row gives neither zeros nor NaN nor a mean" in found.notes


def test_what_cannot_be_measured_is_noted() -> None:
    def short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[2] > 9:
            raise ValueError("too long")
        return sdpa(q, k, v, is_causal=True)

    assert xray(short).notes == ("the alignment is unknown: 7 queries and 11 keys raise ValueError: too long",)
    biased = xray(ours(scores=torch.randn(2, 1, 7, 7)))
    assert "the bias differs between sequences; this is the bias of the first" in biased.notes
    sinking = xray(ours(scores=[t5_buckets(torch.randn(8, 3), max_distance=6), sink(torch.ones(3))]), heads=3)
    assert sinking.sink is None
    assert any("the bias is known up to a constant per row only" in note for note in sinking.notes)
    bent = xray(lambda q, k, v: scores(q, k).square().softmax(-2) @ v)
    assert bent.scale is None
    assert any(note.startswith("the scale was not measured") for note in bent.notes)
    coarse = xray(lambda q, k, v: (scores(q, k).square().softmax(-1).bfloat16() @ v.bfloat16()).to(q))
    assert "rotary was not measured: that needs a higher precision" in coarse.notes


def test_an_attention_for_a_fixed_batch_size_is_measured_with_it() -> None:
    mask = causal().dense(7).expand(2, 1, 7, 7)
    found = xray(lambda q, k, v: attend(rotary()(q), rotary()(k), v, mask=mask))
    assert (found.rotary, found.rotary_base) == ("half", pytest.approx(10000, rel=1e-3))


def test_a_mask_after_the_softmax_is_noted() -> None:
    found = xray(lambda q, k, v: (scores(q, k).softmax(-1) * ~later(q, k)) @ v)
    assert found.mask == "causal()"
    assert "the mask is applied after the softmax, and weights are not normalised again" in found.notes


def test_dropout_in_eval_is_measured_and_removed() -> None:
    def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.dropout(scores(q, k).masked_fill(later(q, k), -math.inf).softmax(-1), 0.3) @ v

    found = xray(dropping)
    assert found.dropout_in_eval == pytest.approx(0.3)
    assert (found.deterministic, found.linear) == (False, None)
    assert (found.mask, found.scale_name) == ("causal()", "1/sqrt(c)")
    assert close(found, 1e-9, mask=causal())
    assert "0.3 ALSO IN EVAL" in str(found)
    behind = xray(lambda q, k, v: functional.dropout(sdpa(q, k, v), 0.3))
    assert "dropout acts on the output, not on the weights" in behind.notes
    unscaled = xray(lambda q, k, v: (scores(q, k).softmax(-1) * (torch.rand(7, k.shape[2]) > 0.3)) @ v, queries=7)
    assert 0.2 < unscaled.dropout_in_eval < 0.4
    assert any("which is not 1 / (1 - p)" in note for note in unscaled.notes)


def test_a_function_that_is_not_linear_in_v_is_reported() -> None:
    bent = xray(lambda q, k, v: sdpa(q, k, v).relu())
    assert bent.linear is False
    assert bent.linearity_error is not None
    assert bent.linearity_error > 0.1
    assert "NOT linear in v" in str(bent)
    unlike = xray(lambda q, k, v: (sdpa(q, k, v) * torch.linspace(0.2, 2.0, v.shape[-1], dtype=v.dtype)).relu())
    assert unlike.linear is False
    assert not any("columns" in note for note in unlike.notes)


class Gated(nn.Module):
    """A gate of the input on every coordinate of the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate = (nn.Linear(width, width) for _ in range(5))
        self.num_heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.o_proj(out * self.gate(x).sigmoid())


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor for each coordinate": lambda v: v * torch.linspace(0.2, 2.0, v.shape[-1], dtype=v.dtype),
    "coordinates in another order": lambda v: v.flip(-1),
    "coordinates mixed": lambda v: v.cumsum(-1),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_map_of_the_values_is_linear_in_v_and_leaves_the_scores_as_they_are(name: str) -> None:
    found = xray(lambda q, k, v: sdpa(q, k, UNLIKE[name](v), is_causal=True))
    assert (found.linear, found.equals_weights_at_v) == (True, False)
    assert (found.mask, found.scale_name, found.bias_name) == ("causal()", "1/sqrt(c)", "none")
    assert any("columns of v are treated differently" in note for note in found.notes)


def test_a_gate_of_the_output_is_linear_in_v_and_leaves_the_scores_as_they_are() -> None:
    module = Gated(24, 3)
    found = xray(module)
    assert (found.linear, found.equals_weights_at_v, found.normalised) == (True, False, None)
    assert (found.mask, found.scale_name, found.bias_name, found.sink) == ("causal()", "1/sqrt(c)", "none", None)
    assert "linear in v, but not weights @ v, off by" in str(found)
    assert any("columns of v are treated differently: a gate" in note for note in found.notes)
    assert any("a gate or a factor acts on the output" in note for note in found.notes)
    open_by = module.gate.bias.detach().double().sigmoid().unflatten(0, (3, 8)).mean(-1)  # x is zero
    expected = softmaxed_causally(found.q, found.k) * open_by[:, None, None]
    torch.testing.assert_close(found.weights, expected, atol=1e-6, rtol=1e-5)
    plain = xray(sdpa)
    assert (plain.linear, plain.equals_weights_at_v) == (True, True)
    assert not any("columns" in note for note in plain.notes)


def softmaxed_causally(q: Tensor, k: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
    return scores(q, k).masked_fill(hidden, -math.inf).softmax(-1)


def test_mixed_heads_and_sequences_are_noted() -> None:
    mixed = xray(lambda q, k, v: sdpa(q, k, v).transpose(1, 2).reshape(*q.shape[:3], -1))
    assert mixed.value_heads is None
    assert any("read the values of no key head or of several" in note for note in mixed.notes)
    talk = torch.randn(3, 3, dtype=torch.float64)
    talking = xray(lambda q, k, v: torch.einsum("hg,bgij->bhij", talk.to(q), scores(q, k).softmax(-1)) @ v, heads=3)
    assert "the weights of a query head depend on several key heads: heads are mixed" in talking.notes
    assert "some weights are negative" in talking.notes
    leaking = xray(lambda q, k, v: sdpa(q, k, v.mean(0, keepdim=True).expand_as(v)))
    assert any(note.startswith("sequences are mixed") for note in leaking.notes)


def test_scores_that_are_no_function_of_q_k_leave_a_residual() -> None:
    def kernelised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (functional.elu(q) + 1) @ (functional.elu(k) + 1).mT
        return weights / weights.sum(-1, keepdim=True) @ v

    found = xray(kernelised)
    assert found.scale is None
    assert found.residual is not None
    assert found.residual > 0.1
    assert any("scores are not a linear function of q . k" in note for note in found.notes)
    alone = xray(ours(mask=window()))
    assert alone.scale is None
    assert "no row sees two neighbouring keys, so the scale cannot be measured" in alone.notes


def test_an_attention_that_sees_no_key_is_noted() -> None:
    found = xray(ours(mask=~full()))
    assert (found.mask, found.fully_masked_rows, found.scale, found.value_heads) == ("~full()", "zeros", None, None)
    assert found.notes == ("no query sees any key: every output is zeros, so nothing can be measured",)
    assert "scale      unknown" in str(found)
    assert xray(lambda q, k, v: sdpa(q, k, v) * math.nan).fully_masked_rows == "nan"


def test_a_mask_is_read_from_random_q_and_k_if_zeros_give_nan() -> None:
    def cosine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, scale=7.0, is_causal=True)

    found = xray(cosine)
    assert found.scale is None
    assert (found.mask, found.value_heads, found.bias) == ("causal()", (0, 1, 2), None)
    assert any(note.startswith("q = 0 and k = 0 give NaN") for note in found.notes)


def test_time_before_the_batch_is_found_out_and_may_be_said() -> None:
    def time_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True).permute(2, 0, 1, 3)

    for found in (xray(time_first), xray(time_first, layout="n b h c")):
        assert found.sizes.endswith("as (n b h c)")
        assert (found.mask, found.scale_name, found.value_heads) == ("causal()", "1/sqrt(c)", (0, 1, 2))


@pytest.mark.parametrize("mask", [full(), causal()], ids=repr)
def test_the_mask_of_hard_attention_is_read_key_by_key(mask: Mask) -> None:
    def hard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        best = (q @ k.mT).masked_fill(~mask.dense(q.shape[2], k.shape[2]), -math.inf).argmax(-1)
        return functional.one_hot(best, k.shape[2]).to(v) @ v  # of equals the first, so q = 0 shows one key alone

    found = xray(hard)
    assert (found.mask, found.row_sums, found.normalised) == (repr(mask), (1.0, 1.0), "rows")
    assert torch.equal(found.visible[1, 2], mask.dense(7, 7))
    assert any("the mask is read one key at a time" in note for note in found.notes)


def test_noise_is_distinguished_from_dropout() -> None:
    found = xray(lambda q, k, v: sdpa(q + 0.1 * torch.randn_like(q), k, v))
    assert (found.deterministic, found.dropout_in_eval, found.scale) == (False, 0.0, None)
    assert len(found.notes) == 1
    assert found.notes[0].startswith("two equal calls differ, so the weights are the largest of many readings")
    assert "none in eval, but two equal calls differ" in str(found)


def test_a_constant_in_the_output_is_subtracted() -> None:
    found = xray(lambda q, k, v: sdpa(q, k, v) + 1)
    assert found.notes == ("v = 0 gives an output of up to 1: a constant is added, and subtracted here",)
    assert close(found)
    assert found.softcap is None


def test_scores_that_change_with_position_in_another_way_are_noted() -> None:
    found = xray(lambda q, k, v: sdpa(q, k, v.roll(1, 2)))
    assert "scores change with position, but not by a rotation of pairs of coordinates" in found.notes
    assert "rotary     unknown" in str(found)


def test_layer_norm_before_rotary_is_measured() -> None:
    found = xray(Attention(48, 6, qk_norm="layer", rotary=rotary(pairing="interleaved")))
    assert (found.rotary, found.rotary_base, found.qk_norm) == ("interleaved", 10000, "layer")
    assert found.scale_name == "1/sqrt(c)"


def test_a_function_that_raises_for_float64_is_measured_in_float32() -> None:
    def narrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype != torch.float32:
            raise TypeError("float32 only\nand nothing else")
        return sdpa(q, k, v)

    found = xray(narrow)
    assert found.notes == ("measured in torch.float32, since torch.float64 raises TypeError: float32 only",)
    assert found.scale_name == "1/sqrt(c)"
    coarse = xray(lambda q, k, v: sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q))
    assert coarse.scale == pytest.approx(8**-0.5, rel=1e-2)
    assert (coarse.normalised, coarse.sink, coarse.rotary) == ("rows", None, None)
    assert coarse.notes[0].startswith("low precision: outputs are rounded to a relative ")


def test_measuring_changes_nothing_and_depends_on_the_seed_alone() -> None:
    module = Attention(48, 6, dropout=0.3).train()
    modes = [part.training for part in module.modules()]
    before = torch.get_rng_state()
    first = xray(module, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(first.weights, xray(module, seed=5).weights)
    assert not torch.equal(first.weights, xray(module, seed=6).weights)
    probe = as_probe(module)
    assert torch.equal(xray(probe, seed=5).weights, first.weights)
    assert probe.module is not None
    assert probe.module.training
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.scale = 1.0  # type: ignore[misc]


def test_sizes_that_cannot_be_used_raise() -> None:
    with pytest.raises(
        ConfigError, match=r"Attention makes queries and keys from one sequence, so keys=9 cannot differ"
    ):
        xray(Attention(48, 6), queries=5, keys=9)
    with pytest.raises(ConfigError, match=r"MultiheadAttention has heads=3, so heads=5 cannot be used; leave"):
        xray(nn.MultiheadAttention(15, 3), heads=5)
    with pytest.raises(ConfigError, match=r"xray\(queries\) is 2, but must be at least 3: it counts query positions"):
        xray(sdpa, queries=2)
    with pytest.raises(ConfigError, match=r"xray\(keys\) takes a whole number, not 'a'"):
        xray(sdpa, keys="a")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"scaled_dot_product_attention raises for q \(2, 4, 7, 8\), k \(2, 3, 7, 8\)"
    ):
        xray(as_probe(sdpa), heads=4, kv_heads=3)


def test_an_argument_that_had_to_be_filled_in_is_noted() -> None:
    def scaled(query: Tensor, key: Tensor, value: Tensor, *, num: float | None) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, scale=num)

    found = xray(scaled)
    assert found.notes == ("num was not passed and is None; pass num= to choose it",)
    assert found.scale_name == "1/sqrt(c)"
    said = xray(scaled, num=0.7)
    assert said.notes == ()
    assert said.scale == pytest.approx(0.7)


def test_arguments_of_a_layer_that_had_to_be_filled_in_are_noted() -> None:
    config = LlamaConfig(hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    config._attn_implementation = "eager"
    layer = LlamaAttention(config, layer_idx=0).eval()
    phases = "position_embeddings was not passed and was computed from the config; pass position_embeddings= to"
    assert any(note.startswith(phases) for note in xray(layer).notes)
    angles = torch.zeros(1, 7, 8)
    still = xray(layer, position_embeddings=(angles.cos(), angles.sin()))
    assert not any("position_embeddings" in note for note in still.notes)
    assert still.rotary is None
