"""Linear attention as a layer: the sums are the formula's, and a cache of sums gives every split."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu

from regard import DynamicCache, causal, padding, rotary, window
from regard.base.errors import ConfigError, RegardError
from regard.core.linear import performer, relu
from regard.nn.linear_attention import LinearAttention, LinearCache

B, N, WIDTH, HEADS = 2, 6, 12, 6


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(**settings: object) -> LinearAttention:
    made = LinearAttention(WIDTH, HEADS, **{"kv_heads": 3, **settings})
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.7)
    return made.double().eval()


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula(masked):
    one, x = layer(), noise(B, N, WIDTH)
    into = (x @ one.query_key_value.weight.T + one.query_key_value.bias).reshape(B, N, 12, 2)
    q, k, v = into.split((6, 3, 3), 2)
    rows = torch.empty(B, N, HEADS, 2, dtype=torch.float64)
    for b, i, h in product(range(B), range(N), range(HEADS)):
        top, total = torch.zeros(2, dtype=torch.float64), 0.0
        for j in range(i + 1 if masked else N):
            weight = ((elu(q[b, i, h]) + 1) * (elu(k[b, j, h // 2]) + 1)).sum()
            top, total = top + weight * v[b, j, h // 2], total + weight
        rows[b, i, h] = top / total
    truth = rows.flatten(2) @ one.out.weight.T + one.out.bias
    torch.testing.assert_close(one(x, mask=causal() if masked else None), truth, rtol=1e-10, atol=1e-10)


FEATURES = {"elu": None, "relu": relu(), "performer": performer(2, 8, seed=1)}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("turn", [None, rotary()], ids=["plain", "rotary"])
def test_every_split_through_sums_is_one_pass(features, turn):
    one, x = layer(rotary=turn, features=FEATURES[features]), noise(B, 5, WIDTH)
    with torch.no_grad():
        whole = one(x, mask=causal())
        for cuts in product([False, True], repeat=4):
            sizes = [1]
            for cut in cuts:
                sizes = [*sizes, 1] if cut else [*sizes[:-1], sizes[-1] + 1]
            cache = LinearCache()
            out = torch.cat([one(part, mask=causal(), cache=cache) for part in x.split(sizes, 1)], 1)
            torch.testing.assert_close(out, whole, rtol=1e-6, atol=1e-6, msg=f"split {sizes}")
            assert cache.length == cache.state.length == 5


def test_the_cache_does_not_grow():
    one, cache, sizes = layer(), LinearCache(), []
    assert cache.nbytes == 0
    with torch.no_grad():
        for n in range(20):
            one(noise(B, 3, WIDTH, seed=n), mask=causal(), cache=cache)
            sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1
    assert sizes[0] == 8 * B * HEADS * (2 * 2 + 2 + 2)


def test_sequences_of_a_cache_can_branch():
    one, x = layer(), noise(B, N, WIDTH)
    cache, rows = LinearCache(), torch.tensor([1, 0, 1])
    cache.reorder(rows)  # of nothing
    with torch.no_grad():
        one(x[:, :4], mask=causal(), cache=cache)
        cache.reorder(rows)
        out = one(x[rows, 4:], mask=causal(), cache=cache)
        torch.testing.assert_close(out, one(x, mask=causal())[rows, 4:], rtol=1e-12, atol=1e-12)
    assert cache.length == N


def test_padding_is_not_seen():
    one, x = layer(), noise(B, N, WIDTH)
    out = one(x, mask=padding([N, 4]))
    torch.testing.assert_close(out[1:, :4], one(x[1:, :4]), rtol=1e-12, atol=1e-12)


def test_a_memory_is_read_through_sums():
    one, x, memory = layer(), noise(B, N, WIDTH), noise(B, N, WIDTH, seed=2)
    assert torch.equal(one(x, one.keys_values(memory)), one(x, memory))
    assert (one(x, memory) - one(x)).abs().max() > 0.1


def test_what_it_cannot_do_is_refused():
    one, x = layer(), noise(B, N, WIDTH)
    with pytest.raises(ConfigError, match=r"the cache of linear attention is LinearCache\(\), not DynamicCache\(\)"):
        one(x, mask=causal(), cache=DynamicCache())
    with pytest.raises(ConfigError, match=r"takes full, causal and padding masks, and cache=LinearCache\(\)"):
        one(x, mask=causal().dense(N))
    with pytest.raises(RegardError, match="window"):
        one(x, mask=window(before=2))
    cache = LinearCache()
    with pytest.raises(RegardError):
        one(x, mask=window(before=2), cache=cache)
    assert cache.length == 0  # a refusal leaves it as it was


def test_a_stream_is_refused_where_it_is_asked_for():
    with pytest.raises(ConfigError, match="linear attention has no stream"):
        layer().stream(causal())


def test_it_compiles_and_exports():
    one, x = layer().float(), noise(B, N, WIDTH).float()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(one, fullgraph=True, backend="aot_eager")(x), one(x))
    torch.testing.assert_close(torch.export.export(one, (x,)).module()(x), one(x))
