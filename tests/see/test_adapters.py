"""Adapters: any attention becomes a function of q, k and v, and is not changed by that."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.vit.modeling_vit import ViTAttention

from regard.base.errors import ConfigError
from regard.core.attend import attend
from regard.core.masks import causal
from regard.core.positions import Rotary, rotary
from regard.core.scores import alibi
from regard.nn.attention import Attention
from regard.see.adapters import Probe, as_probe
from tests.peers import import_timm

sdpa = functional.scaled_dot_product_attention


def draw(probe: Probe, i: int = 5, j: int = 9, h: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    h, c = probe.heads or h, probe.width or 6
    g = probe.kv_heads or h
    e = probe.value_width or (c if probe.equal_widths else 7)
    j = i if probe.square else j
    shapes = (2, h, i, c), (2, g, j, c), (2, g, j, e)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def truth(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    return attend(q, k, v, kernel="reference", **settings)


def heads_third(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def heads_third_square(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.shape == k.shape == v.shape
    return heads_third(q, k, v)


def without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bij,bje->bie", (torch.einsum("bic,bjc->bij", q, k) * q.shape[-1] ** -0.5).softmax(-1), v)


def without_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("ij,je->ie", (torch.einsum("ic,jc->ij", q, k) * q.shape[-1] ** -0.5).softmax(-1), v)


def time_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("ibhc,jbhc->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,jbhe->ibhe", scores.softmax(-1), v)


def time_first_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return time_first(q, k, v).flatten(2)


def time_first_without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.ndim == 3
    return time_first(q[:, :, None], k[:, :, None], v[:, :, None])[:, :, 0]


def answers_heads_third(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    return sdpa(q, k, v).transpose(1, 2), None


def answers_merged(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [sdpa(q, k, v).transpose(1, 2).flatten(2)]


@pytest.mark.parametrize(
    ("fn", "layout", "square"),
    [
        (sdpa, "b h n c", False),
        (attend, "b h n c", False),
        (heads_third, "b n h c", False),
        (heads_third_square, "b n h c", True),
        (without_heads, "b n c", False),
        (without_batch, "n c", False),
        (time_first, "n b h c", False),
        (time_first_merged, "n b h c -> n b (h c)", False),
        (time_first_without_heads, "n b c", False),
        (answers_heads_third, "b h n c -> b n h c", False),
        (answers_merged, "b h n c -> b n (h c)", False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_layout_of_a_function_is_found_by_trying(fn: Any, layout: str, square: bool) -> None:
    probe = as_probe(fn)
    assert (probe.layout, probe.square, probe.equal_widths, probe.module) == (layout, square, square, None)
    q, k, v = draw(probe)
    torch.testing.assert_close(probe.call(q, k, v), truth(q, k, v))


def test_a_given_layout_is_used() -> None:
    assert as_probe(lambda q, k, v: v[:, :, : q.shape[2]], layout="b h n c").layout == "b h n c"
    with pytest.raises(ConfigError, match=r"layout is one of 'b h n c', 'b n h c', 'n b h c', .*, 'n c', not 'bhnc'"):
        as_probe(sdpa, layout="bhnc")
    with pytest.raises(ConfigError, match="raised ValueError: the layout 'b n c' has no axis for 3 heads"):
        as_probe(without_heads, layout="b n c", heads=3)


def test_free_and_required_sizes_of_a_function_are_found() -> None:
    assert as_probe(attend).grouped
    assert as_probe(functools.partial(sdpa, enable_gqa=True)).grouped
    assert not as_probe(sdpa).grouped
    free = as_probe(attend)
    assert (free.heads, free.kv_heads, free.width) == (None, None, None)
    assert as_probe(lambda q, k, v: attend(q, k, v, scores=alibi(heads=4))).heads == 4
    assert as_probe(lambda q, k, v: sdpa(q, k, v) + q * 0).equal_widths
    assert as_probe(lambda q, k, v: attend(q @ torch.ones(16, 16), k, v)).width == 16
    assert as_probe(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), heads=10, kv_heads=5).kv_heads == 5
    assert (as_probe(attend, kv_heads=5).heads, as_probe(attend, kv_heads=5).kv_heads) == (10, 5)


def test_further_arguments_are_listed_and_passed_on() -> None:
    assert as_probe(sdpa).parameters == ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    assert as_probe(attend).parameters == ("mask", "scores", "beta", "dropout", "kernel", "positions")

    def mine(q: Tensor, k: Tensor, v: Tensor, mask: Any, strength: float = 1.0) -> Tensor:
        return attend(q, k, v, mask=mask, beta=strength)

    probe = as_probe(mine)
    assert probe.parameters == ("mask", "strength")
    assert probe.name == "mine"
    q, k, v = draw(probe)
    torch.testing.assert_close(probe.call(q, k, v), truth(q, k, v, beta=1.0))  # a mask without a default is None
    torch.testing.assert_close(
        probe.call(q, k, v, mask=causal(), strength=0.3), truth(q, k, v, mask=causal(), beta=0.3)
    )
    torch.testing.assert_close(as_probe(mine, strength=0.3).call(q, k, v), truth(q, k, v, beta=0.3))
    assert as_probe(functools.partial(mine, strength=0.3)).name == "mine"


def test_a_function_that_ignores_strides_gets_contiguous_tensors() -> None:
    def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(*(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) for x in (q, k, v)))

    assert as_probe(flat).dtype == torch.float32


def test_a_probe_stays_what_it_is() -> None:
    probe = as_probe(sdpa)
    assert as_probe(probe) is probe


def test_a_function_that_mixes_everything_still_gets_a_probe() -> None:
    def leaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v).mean((0, 1), keepdim=True).expand(*q.shape[:3], -1)

    assert as_probe(leaking).layout == "b h n c"


class Causal(nn.Module):
    """As in nanoGPT: one product for q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.resid_dropout = heads, nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.resid_dropout(self.c_proj(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))


class Three(nn.Module):
    """Queries, keys and values from three sequences, positions first or sequences first."""

    def __init__(self, width: int, heads: int, time_first: bool) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.time_first = heads, time_first

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)
        if self.time_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        out = self.W_o(sdpa(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return out.transpose(0, 1) if self.time_first else out, None


class Listed(nn.Module):
    """As in The Annotated Transformer: one list of four projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.h, self.d_k = heads, width // heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.h, self.d_k)).transpose(1, 2)
            for project, x in zip(self.linears, (query, key, value), strict=False)
        )
        out: Tensor = self.linears[-1](sdpa(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return out


class Windowed(Causal):
    """As in Swin: made for one number of positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.zeros(9, x.shape[-1]))


def of_timm(width: int, heads: int, **settings: Any) -> nn.Module:
    import_timm()
    from timm.layers.attention import Attention as TimmAttention

    return TimmAttention(width, heads, **settings)


def of_llama(kind: str) -> nn.Module:
    config = LlamaConfig(hidden_size=30, num_attention_heads=6, num_key_value_heads=3, head_dim=10)
    config._attn_implementation = kind
    return LlamaAttention(config, 0)


def turned(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    turn = Rotary()
    return truth(turn(q), turn(k), v, **settings)


MODULES: dict[str, tuple[Any, Any]] = {
    "nn.MultiheadAttention": (lambda: nn.MultiheadAttention(15, 3), truth),
    "nn.MultiheadAttention, batch first": (lambda: nn.MultiheadAttention(15, 3, batch_first=True), truth),
    "nn.MultiheadAttention, other widths": (lambda: nn.MultiheadAttention(15, 3, kdim=11, vdim=7), truth),
    "nn.MultiheadAttention, no bias": (lambda: nn.MultiheadAttention(15, 3, bias=False), truth),
    "nn.TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(15, 5, 9), truth),
    "timm": (lambda: of_timm(21, 3, qkv_bias=True), truth),
    "gpt2 eager": (
        lambda: GPT2Attention(GPT2Config(n_embd=21, n_head=3, attn_implementation="eager"), layer_idx=0),
        truth,
    ),
    "gpt2 sdpa": (
        lambda: GPT2Attention(GPT2Config(n_embd=21, n_head=3, attn_implementation="sdpa"), layer_idx=0),
        functools.partial(truth, mask=causal()),
    ),
    "gpt2 cross": (
        lambda: GPT2Attention(
            GPT2Config(n_embd=21, n_head=3, attn_implementation="sdpa"), is_cross_attention=True, layer_idx=0
        ),
        truth,
    ),
    "bert": (
        lambda: BertAttention(BertConfig(hidden_size=21, num_attention_heads=3, attn_implementation="eager")),
        truth,
    ),
    "vit": (lambda: ViTAttention(ViTConfig(hidden_size=21, num_attention_heads=3, attn_implementation="sdpa")), truth),
    "llama eager": (lambda: of_llama("eager"), turned),
    "llama sdpa": (lambda: of_llama("sdpa"), functools.partial(turned, mask=causal())),
    "x-transformers": (
        lambda: pytest.importorskip("x_transformers.x_transformers").Attention(21, dim_head=5, heads=3, causal=True),
        functools.partial(truth, mask=causal()),
    ),
    "ours": (lambda: Attention(30, 6, kv_heads=2), truth),
    "ours, rotary": (lambda: Attention(36, 6, kv_heads=2, rotary=rotary()), turned),
    "ours, to a memory": (lambda: Attention(30, 6, kv_heads=2, memory_width=11), truth),
    "one product": (lambda: Causal(21, 3), functools.partial(truth, mask=causal())),
    "a list of projections": (lambda: Listed(21, 3), truth),
    "three sequences": (lambda: Three(21, 3, time_first=False), truth),
    "three sequences, positions first": (lambda: Three(21, 3, time_first=True), truth),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_becomes_a_function_of_q_k_and_v_and_stays_as_it_was(name: str) -> None:
    make, expected = MODULES[name]
    module = make().train()
    before = copy.deepcopy(module.state_dict())
    parts = [(path, type(part), part.training) for path, part in module.named_modules()]
    probe = as_probe(module)
    assert probe.module is not None
    assert probe.module is not module
    probe.module.eval()
    for dtype, near in ((torch.float32, 1e-5), (torch.float64, 1e-6)):
        q, k, v = (x.requires_grad_() for x in draw(probe, dtype=dtype))
        out = probe.call(q, k, v)
        # Hugging Face and x-transformers take the softmax in float32 in every dtype
        torch.testing.assert_close(out, expected(q, k, v), rtol=near, atol=near)
        assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert [(path, type(part), part.training) for path, part in module.named_modules()] == parts


def test_projections_packed_by_head_are_distinguished_from_blocks() -> None:
    config = GPTNeoXConfig(hidden_size=24, num_attention_heads=3, rotary_pct=1.0)
    config._attn_implementation = "sdpa"
    probe = as_probe(GPTNeoXAttention(config, 0).eval())
    q, k, v = draw(probe)
    torch.testing.assert_close(probe.call(q, k, v), turned(q, k, v, mask=causal()), rtol=1e-6, atol=1e-6)


def test_a_module_without_projections_is_a_function() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self.dropout(torch.ones(3)).mean() * without_heads(queries, keys, values)

    probe = as_probe(Plain().eval())
    assert (probe.layout, probe.heads) == ("b n c", 1)
    q, k, v = draw(probe)
    torch.testing.assert_close(probe.call(q, k, v), truth(q, k, v))
    assert probe.module is not None


def test_the_copy_is_switched_to_training_and_the_module_is_not() -> None:
    module = of_timm(21, 3, attn_drop=0.4).eval()
    probe = as_probe(module)
    q, k, v = draw(probe, dtype=torch.float32)
    exact = probe.call(q, k, v)
    assert probe.module is not None
    probe.module.train()
    assert not torch.equal(probe.call(q, k, v), exact)
    assert not module.training
    probe.module.eval()
    assert torch.equal(probe.call(q, k, v), exact)


def test_output_dropout_is_removed() -> None:
    probe = as_probe(Causal(21, 3).train())  # with a dropout of the output
    q, k, v = draw(probe)
    assert torch.equal(probe.call(q, k, v), probe.call(q, k, v))


def test_a_copy_in_another_dtype_is_made_from_the_module_itself() -> None:
    module = of_timm(24, 3, qk_norm=True, norm_layer=nn.RMSNorm).eval()
    nn.init.uniform_(module.q_norm.weight)
    probe = as_probe(module)
    q, k, v = draw(probe)
    probe.call(*(x.bfloat16() for x in (q, k, v)))
    twice = probe.call(q, k, v)
    assert torch.equal(twice, as_probe(module).call(q, k, v))
    assert twice.dtype == torch.float64
    assert as_probe(module.bfloat16()).dtype == torch.bfloat16


def test_the_module_inside_a_compiled_one_is_probed() -> None:
    module = nn.MultiheadAttention(15, 3).eval()
    assert as_probe(torch.compile(module)).name == "MultiheadAttention"


def test_trial_calls_leave_the_random_state_unchanged() -> None:
    module = Attention(30, 6, dropout=0.3).train()
    before = torch.get_rng_state()
    as_probe(module)
    as_probe(lambda q, k, v: functional.dropout(sdpa(q, k, v)))
    assert torch.equal(torch.get_rng_state(), before)


class Odd(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("never")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (3, r"an attention is a function of q, k and v or an nn.Module, not 3; wrap it in a function"),
        (lambda q: q, "<lambda> takes 1 positional arguments, but an attention takes q, k and v; wrap it"),
        (lambda q, k, v: q.nothing, r"with q \(2, 3, 5, 8\), k \(2, 3, 7, 8\), v \(2, 3, 7, 11\) it raised Attribute"),
        (lambda q, k, v: "text", "the result is str, not a tensor"),
        (
            lambda q, k, v: v[..., :2],
            r"the result is \(2, 3, 7, 2\), which is not \(b h i e\) = \(2, 3, 5, 11\) in any",
        ),
        (nn.Linear(3, 5), "no projections with known names: looked for q_proj k_proj v_proj; .* no submodules"),
        (nn.TransformerDecoderLayer(15, 3), r"has 2 attentions inside: self_attn, multihead_attn; pass one"),
        (
            nn.TransformerDecoderLayer(15, 3),
            r"\('multihead_attn'\), or check the whole model with kind='decoder' if it",
        ),
        (
            lambda q, k, v, sm_scale: (q @ k.mT * sm_scale).softmax(-1) @ v,
            r"None was passed for sm_scale, which has no default: pass sm_scale=..., or extra=\{'sm_scale': ...\} to",
        ),
        (
            lambda q, k, v, start, end: v[:, :, start + end :],
            "None was passed for start, end, which have no default: pass start=...",
        ),
        (Windowed(21, 3), r"Pass heads= and kv_heads= if these are wrong, or wrap it"),
        (
            Odd(qkv=nn.Linear(9, 27)),
            "the number of heads of Odd is unknown: looked for heads, num_heads, .* pass heads=",
        ),
        (Odd(qkv=nn.Identity()), r"Odd.qkv has no weight matrix to read its width from; wrap it"),
    ],
    ids=range(13),
)
def test_what_cannot_be_called_raises_with_advice(fn: object, words: str) -> None:
    sizes = {} if isinstance(fn, nn.Module) or fn == 3 else {"heads": 3, "width": 8}  # without them many are tried
    with pytest.raises(ConfigError, match=words):
        as_probe(fn, **sizes)


def test_passing_the_missing_argument_helps() -> None:
    scaled = as_probe(lambda q, k, v, sm_scale: (q @ k.mT * sm_scale).softmax(-1) @ v, sm_scale=0.3)
    assert scaled.filled_in == ()
    q, k, v = draw(scaled)
    torch.testing.assert_close(scaled.call(q, k, v), truth(q, k, v, beta=0.3))
    windowed = as_probe(Windowed(21, 3), queries=9)
    assert windowed.module is not None
    windowed.module.eval()
    q, k, v = draw(windowed, i=9)
    torch.testing.assert_close(windowed.call(q, k, v), truth(q, k, v, mask=causal()))


def test_sizes_that_do_not_match_the_projections_raise() -> None:
    with pytest.raises(
        ConfigError, match=r"width \[27\] \(qkv\), which do not match 2 heads of width 4 and 2 key heads"
    ):
        as_probe(Odd(qkv=nn.Linear(9, 27)), heads=2)
    with pytest.raises(
        ConfigError, match=r"by its qkv with 3 heads of width 3 and 3 key heads, but raised RuntimeError"
    ):
        as_probe(Odd(qkv=nn.Linear(9, 27)), heads=3)

    class Widening(Causal):
        def forward(self, x: Tensor) -> Tensor:
            return functional.pad(super().forward(x), (0, 1))

    with pytest.raises(
        ConfigError, match=r"returned \(2, 5, 22\) once its output projection was removed, not \(2, 5, 21\)"
    ):
        as_probe(Widening(21, 3))


def test_rotary_phases_without_a_rotary_class_have_to_be_passed() -> None:
    class Turning(Causal):
        def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:  # type: ignore[override]
            assert position_embeddings is not None
            return super().forward(x) * position_embeddings

    with pytest.raises(ConfigError, match=r"takes position_embeddings, but its file has 0 rotary classes .* pass"):
        as_probe(Turning(21, 3))
    assert as_probe(Turning(21, 3), position_embeddings=torch.ones(())).heads == 3
