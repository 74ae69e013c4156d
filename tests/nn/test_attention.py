"""Attention with projections: held against a loop over single numbers, through caches, streams and memories."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from regard import DynamicCache, SlidingWindowCache, StaticCache, alibi, causal, chunks, padding, rotary, window
from regard.base.errors import CacheError, ConfigError, ShapeError, UnknownNameError
from regard.nn.attention import Attention, KeysValues, check_heads, check_probability, check_width
from regard.nn.learned_scores import LearnedBuckets, LearnedDistances, LearnedSinks

B, N, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH = 2, 7, 10, 6, 3, 4


def drawn(layer: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The layer with all its parameters drawn: nothing is zero, so nothing can hide."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.5)
    return layer.to(dtype).eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(**settings: object) -> Attention:
    defaults: dict[str, object] = {"kv_heads": KV_HEADS, "head_width": HEAD_WIDTH}
    made = drawn(Attention(WIDTH, HEADS, **{**defaults, **settings}))
    assert isinstance(made, Attention)
    return made


def turned(x: list[float], position: int) -> list[float]:
    """Rotary of one head by the book: coordinate p turns with p + c/2, by position / 10000^(2p/c)."""
    half, out = len(x) // 2, list(x)
    for p in range(half):
        angle = position / 10000 ** (2 * p / len(x))
        out[p] = x[p] * math.cos(angle) - x[p + half] * math.sin(angle)
        out[p + half] = x[p + half] * math.cos(angle) + x[p] * math.sin(angle)
    return out


def normed(x: list[float], gain: list[float], eps: float) -> list[float]:
    size = math.sqrt(sum(number * number for number in x) / len(x) + eps)
    return [number / size * scale for number, scale in zip(x, gain, strict=True)]


def by_hand(attention: Attention, x: Tensor, memory: Tensor, visible, *, turning: bool = False) -> Tensor:
    """The layer one number at a time: no tensor product, no softmax of a library."""

    def affine(linear: nn.Linear, row: list[float], rows: slice = slice(None)) -> list[float]:
        weight = linear.weight[rows].tolist()
        bias = [0.0] * len(weight) if linear.bias is None else linear.bias[rows].tolist()
        return [sum(w * a for w, a in zip(weight[o], row, strict=True)) + bias[o] for o in range(len(bias))]

    h, g, c = attention.heads, attention.kv_heads, attention.head_width
    out = torch.empty(x.shape[0], x.shape[1], attention.out.out_features, dtype=torch.float64)
    for b in range(x.shape[0]):
        if hasattr(attention, "query"):
            into = (attention.query, slice(None)), (attention.key_value, slice(None))
        else:
            into = (attention.query_key_value, slice(h * c)), (attention.query_key_value, slice(h * c, None))
        (first, own), (second, others) = into
        queries = [affine(first, row, own) for row in x[b].tolist()]
        both = [affine(second, row, others) for row in memory[b].tolist()]
        for i in range(x.shape[1]):
            mixed: list[float] = []
            for head in range(h):
                own = head // (h // g)
                q = queries[i][head * c : head * c + c]
                keys = [row[own * c : own * c + c] for row in both]
                values = [row[(g + own) * c : (g + own) * c + c] for row in both]
                if attention.query_norm is not None:
                    q = normed(q, attention.query_norm.weight.tolist(), 1e-6)
                    keys = [normed(k, attention.key_norm.weight.tolist(), 1e-6) for k in keys]
                if turning:
                    q, keys = turned(q, i), [turned(k, j) for j, k in enumerate(keys)]
                beta = c**-0.5 if attention.beta is None else attention.beta
                seen = [j for j in range(memory.shape[1]) if visible(i, j)]
                scores = {j: beta * sum(a * k for a, k in zip(q, keys[j], strict=True)) for j in seen}
                total = sum(math.exp(score) for score in scores.values())
                mixed += [sum(math.exp(scores[j]) / total * values[j][e] for j in seen) for e in range(c)]
            out[b, i] = torch.tensor(
                affine(attention.out, torch.tensor(mixed, dtype=torch.float64)), dtype=torch.float64
            )
    return out


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_loop_written_out(kv_heads, bias):
    attention, x = layer(kv_heads=kv_heads, bias=bias), noise(B, N, WIDTH)
    truth = by_hand(attention, x, x, lambda i, j: j <= i)
    torch.testing.assert_close(attention(x, mask=causal()), truth, rtol=1e-12, atol=1e-12)


def test_rotary_turns_queries_and_keys_and_leaves_values():
    attention, x = layer(rotary=rotary()), noise(B, N, WIDTH)
    truth = by_hand(attention, x, x, lambda i, j: True, turning=True)
    # phases are float32 everywhere: that is all the difference there is
    torch.testing.assert_close(attention(x), truth, rtol=1e-6, atol=1e-6)
    assert (attention(x) - by_hand(attention, x, x, lambda i, j: True)).abs().max() > 0.01


def test_qk_norm_normalises_each_head():
    attention, x = layer(qk_norm="rms"), noise(B, N, WIDTH)
    truth = by_hand(attention, x, x, lambda i, j: True)
    torch.testing.assert_close(attention(x), truth, rtol=1e-12, atol=1e-12)


def test_beta_is_the_inverse_temperature():
    attention, x = layer(beta=0.7), noise(B, N, WIDTH)
    torch.testing.assert_close(attention(x), by_hand(attention, x, x, lambda i, j: True), rtol=1e-12, atol=1e-12)
    uniform = layer(beta=0.0)
    rows = uniform(x)
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows), rtol=1e-12, atol=1e-12)


def test_a_memory_of_another_width_gives_keys_and_values():
    attention, x, memory = layer(memory_width=5), noise(B, N, WIDTH), noise(B, 9, 5, seed=2)
    truth = by_hand(attention, x, memory, lambda i, j: True)
    torch.testing.assert_close(attention(x, memory), truth, rtol=1e-12, atol=1e-12)
    kept = attention.keys_values(memory)
    assert isinstance(kept, KeysValues)
    assert kept.k.shape == kept.v.shape == (B, KV_HEADS, 9, HEAD_WIDTH)
    assert torch.equal(attention(x, kept), attention(x, memory))


def test_a_memory_can_be_padded():
    attention, x, memory = layer(memory_width=5), noise(B, N, WIDTH), noise(B, 9, 5, seed=2)
    out = attention(x, memory, mask=padding([9, 4]))
    memory[1, 4:] = torch.nan
    assert torch.equal(attention(x, memory, mask=padding([9, 4])), out)
    torch.testing.assert_close(out[1:], attention(x[1:], memory[1:, :4]), rtol=1e-12, atol=1e-12)


def test_positions_say_where_tokens_stand():
    attention, x = layer(rotary=rotary()), noise(B, N, WIDTH)
    whole = attention(x)
    assert torch.equal(attention(x, positions=torch.arange(N)), whole)
    # only distances matter, so a shift of all changes nothing; a shift of one sequence changes nothing either
    moved = torch.stack([torch.arange(N), torch.arange(N) + 5])
    torch.testing.assert_close(attention(x, positions=moved), whole, rtol=1e-5, atol=1e-5)
    # other distances matter, and of the sequence alone whose they are
    moved[1] = torch.arange(N) * 3
    spread = attention(x, positions=moved)
    torch.testing.assert_close(spread[0], whole[0], rtol=1e-12, atol=1e-12)
    assert (spread[1] - whole[1]).abs().max() > 0.01


def test_one_head_sees_what_another_does_not():
    attention, x = layer(), noise(B, N, WIDTH)
    visible = torch.ones(HEADS, N, N, dtype=torch.bool)
    visible[2] = torch.eye(N, dtype=torch.bool)
    heads = attention.mix(
        *(noise(B, heads, N, HEAD_WIDTH, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS)), visible, None, None
    )
    torch.testing.assert_close(heads[:, 2], noise(B, KV_HEADS, N, HEAD_WIDTH, seed=KV_HEADS)[:, 1])
    assert attention(x, mask=visible).shape == x.shape


TERMS = {
    "alibi": lambda: alibi(heads=HEADS),
    "buckets": lambda: LearnedBuckets(HEADS, buckets=8, max_distance=9),
    "distances": lambda: LearnedDistances(HEAD_WIDTH, 3),
    "sinks": lambda: LearnedSinks(HEADS),
}


def splits(n: int) -> list[list[int]]:
    """All ways to cut n positions into parts: 2^(n - 1)."""
    ways = []
    for cuts in product([False, True], repeat=n - 1):
        parts = [1]
        for cut in cuts:
            if cut:
                parts.append(1)
            else:
                parts[-1] += 1
        ways.append(parts)
    return ways


CACHES = {
    "growing": (causal(), DynamicCache),
    "static": (causal(), lambda: StaticCache(N)),
    "rolling": (window(before=2), lambda: SlidingWindowCache(window(before=2))),
}


@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("term", [None, *TERMS])
def test_every_split_through_a_cache_is_one_pass(cached, term):
    mask, cache_of = CACHES[cached]
    n = 5 if term else 6
    attention = layer(rotary=rotary(), scores=TERMS[term]() if term else None)
    x = noise(B, n, WIDTH)
    with torch.no_grad():
        whole = attention(x, mask=mask)
        for parts in splits(n):
            cache = cache_of()
            out = torch.cat([attention(part, mask=mask, cache=cache) for part in x.split(parts, 1)], 1)
            torch.testing.assert_close(out, whole, rtol=1e-6, atol=1e-6, msg=f"split {parts}")


@pytest.mark.parametrize("mask", [causal(), chunks(2, before=1), window(before=2, after=1)], ids=repr)
@pytest.mark.parametrize("term", [None, "buckets", "sinks"])
def test_every_chunking_of_a_stream_is_one_pass(mask, term):
    attention = layer(rotary=rotary(), scores=TERMS[term]() if term else None)
    x = noise(B, 5, WIDTH)
    with torch.no_grad():
        whole = attention(x, mask=mask)
        for parts in splits(5):
            stream = attention.stream(mask)
            out = [attention(part, stream=stream) for part in x.split(parts, 1)]
            out.append(attention.project(stream.finish()))
            torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-6, atol=1e-6)


def test_a_stream_has_a_mask_of_its_own():
    attention, x = layer(), noise(B, N, WIDTH)
    with pytest.raises(ConfigError, match=r"the stream has its own, attention\.stream\(mask\)"):
        attention(x, mask=causal(), stream=attention.stream(causal()))
    with pytest.raises(ConfigError, match="pass no memory and no cache"):
        attention(x, cache=DynamicCache(), stream=attention.stream(causal()))
    with pytest.raises(ConfigError, match="pass no memory and no cache"):
        attention(x, x, stream=attention.stream(causal()))


@pytest.mark.parametrize("term", ["buckets", "distances", "sinks"])
def test_a_learned_term_changes_the_rows_and_learns(term):
    attention, plain, x = layer(scores=TERMS[term]()), layer(), noise(B, N, WIDTH)
    for name, parameter in plain.named_parameters():
        parameter.data.copy_(attention.get_parameter(name))
    out = attention(x)
    assert (out - plain(x)).abs().max() > 1e-3
    out.square().sum().backward()
    gradient = attention.scores.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0
    # today's parameters count, not those of the first call
    with torch.no_grad():
        attention.scores.weight.mul_(2.0)
        assert (attention(x) - out).abs().max() > 1e-4


def test_dropout_acts_in_training_only():
    attention, x = layer(dropout=0.5), noise(B, N, WIDTH)
    exact = attention(x)
    assert torch.equal(attention(x), exact)
    torch.testing.assert_close(exact, by_hand(attention, x, x, lambda i, j: True), rtol=1e-12, atol=1e-12)
    attention.train()
    assert not torch.equal(attention(x), attention(x))
    with torch.no_grad():
        mean = torch.stack([attention(x) for _ in range(400)]).mean(0)
    assert (mean - exact).abs().max() < 1.0
    assert (mean - exact).abs().mean() < 0.15
    assert torch.equal(attention.eval()(x), exact)


def test_a_stream_of_a_layer_in_training_would_drop_weights_and_is_refused():
    attention = layer(dropout=0.5).train()
    with pytest.raises(ConfigError, match=r"dropout=0\.5 is active in training; call eval\(\) before streaming"):
        attention.stream(causal())
    assert attention.eval().stream(causal()).received == 0
    assert layer().train().stream(causal()).received == 0


def test_nothing_is_stored_but_parameters():
    attention = Attention(WIDTH, 5, scores=LearnedSinks(5), qk_norm="layer")
    assert sorted(attention.state_dict()) == [
        "key_norm.bias",
        "key_norm.weight",
        "out.bias",
        "out.weight",
        "query_key_value.bias",
        "query_key_value.weight",
        "query_norm.bias",
        "query_norm.weight",
        "scores.weight",
    ]
    assert sorted(Attention(WIDTH, 5, bias=False, out_bias=True).state_dict()) == [
        "out.bias",
        "out.weight",
        "query_key_value.weight",
    ]
    assert sorted(Attention(WIDTH, 5, bias=False, memory_width=3).state_dict()) == [
        "key_value.weight",
        "out.weight",
        "query.weight",
    ]


def test_a_memory_of_the_same_width_shares_the_one_projection():
    attention, x, memory = layer(), noise(B, N, WIDTH), noise(B, 9, WIDTH, seed=2)
    truth = by_hand(attention, x, memory, lambda i, j: True)
    torch.testing.assert_close(attention(x, memory), truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention(x, attention.keys_values(memory)), truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention(x, x), attention(x), rtol=1e-12, atol=1e-12)


def test_it_compiles_and_exports():
    attention = layer(rotary=rotary(), scores=TERMS["buckets"]()).float()
    x = noise(B, N, WIDTH).float()
    whole = attention(x, mask=causal())
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=causal()), whole)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, mask=causal())

    exported = torch.export.export(Masked(), (x,)).module()
    torch.testing.assert_close(exported(x), whole)


@pytest.mark.parametrize("qk_norm", [None, "layer", "rms"])
@pytest.mark.parametrize("term", [None, *TERMS])
def test_autocast_gives_bfloat16_near_the_truth(term, qk_norm):
    attention = layer(rotary=rotary(), qk_norm=qk_norm, scores=TERMS[term]() if term else None)
    x = noise(B, N, WIDTH)
    truth = attention(x, mask=causal())
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.float()(x.float(), mask=causal())
    assert out.dtype == torch.bfloat16
    assert (out.double() - truth).abs().max() < 0.03 * truth.abs().max()


def test_gradients_are_those_of_finite_differences():
    attention = layer(rotary=rotary(width=2), qk_norm="rms", scores=LearnedSinks(HEADS))
    x = noise(1, 3, WIDTH).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, mask=causal()), (x,))


def test_a_mask_may_be_boolean_and_a_blind_row_gives_the_bias_of_out():
    attention, x = layer(), noise(B, N, WIDTH)
    visible = causal().dense(N)
    torch.testing.assert_close(attention(x, mask=visible), attention(x, mask=causal()), rtol=1e-12, atol=1e-12)
    visible[3] = False
    torch.testing.assert_close(attention(x, mask=visible)[:, 3], attention.out.bias.expand(B, -1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heads": 4}, "width must be a multiple of heads: width=10, heads=4; try heads=5"),
        ({"heads": 0}, "heads is 0, but must be at least 1"),
        ({"heads": 2.5}, r"heads takes a whole number, not 2\.5"),
        ({"heads": 5, "kv_heads": 2}, "heads must be a multiple of kv_heads: heads=5, kv_heads=2"),
        ({"heads": 5, "kv_heads": 0}, "kv_heads is 0, but must be at least 1"),
        ({"heads": 4, "head_width": 0}, "head_width is 0"),
        ({"heads": 5, "dropout": 1.0}, r"dropout is a share, at least 0 and less than 1: dropout=1\.0"),
        ({"heads": 5, "dropout": -0.1}, "dropout is a share"),
        ({"heads": 5, "memory_width": 0}, "memory_width is 0, but must be at least 1"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Attention(WIDTH, **settings)


def test_unknown_norms_are_refused():
    with pytest.raises(UnknownNameError, match=r"unknown norm 'rsm'; did you mean 'rms'\?"):
        Attention(WIDTH, 5, qk_norm="rsm")


def test_the_checks_stand_alone():
    check_heads(12, 5, head_width=3)
    check_probability("dropout", 0)
    with pytest.raises(ConfigError, match="heads=7; try heads=6"):
        check_heads(12, 7)
    check_width(noise(2, 3, 4), 4)
    with pytest.raises(ShapeError, match=r"x is \(2, 3, 4\), but is read as \(b n d\) with d=5 \(model width\)"):
        check_width(noise(2, 3, 4), 5)
    with pytest.raises(ShapeError, match=r"memory is \(3, 4\), but is read as \(b n d\)"):
        check_width(noise(3, 4), 4, "memory")


def test_inputs_of_another_width_are_refused():
    attention = layer(memory_width=5)
    with pytest.raises(ShapeError, match=r"x is \(2, 7, 9\), but is read as \(b n d\) with d=10 \(model width\)"):
        attention(noise(B, N, 9))
    with pytest.raises(ShapeError, match=r"memory is \(2, 9, 10\), but is read as \(b n d\) with d=5 \(model width\)"):
        attention(noise(B, N, WIDTH), noise(B, 9, WIDTH))


def test_a_cache_of_another_batch_is_refused():
    attention, cache = layer(), DynamicCache()
    attention(noise(B, N, WIDTH), mask=causal(), cache=cache)
    with pytest.raises(CacheError, match="does not continue the cache"):
        attention(noise(3, 1, WIDTH), mask=causal(), cache=cache)
