"""Synthesized weights: the explicit formula, shares that sum to one, and every split through a cache."""

from itertools import product

import pytest
import torch
from torch import Tensor

from regard import DynamicCache, SlidingWindowCache, StaticCache, causal, padding, window
from regard.base.errors import ConfigError, ShapeError
from regard.nn.synthesizer import Synthesizer

B, N, WIDTH, HEADS, CONTEXT = 2, 6, 12, 3, 9
PARTS = [("dense",), ("random",), ("dot",), ("dense", "dot"), ("random", "dense"), ("dot", "random", "dense")]


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(parts: tuple[str, ...], **settings: object) -> Synthesizer:
    made = Synthesizer(WIDTH, HEADS, CONTEXT, parts=parts, **settings)
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.7)
    return made.double().eval()


def by_formula(one: Synthesizer, x: Tensor, visible: Tensor) -> Tensor:
    """softmax of relu(x W1 + b1) W2 + b2 and its kin, head by head, as the paper writes it."""
    n, c = x.shape[1], WIDTH // HEADS
    shares = one.shares.softmax(0) if len(one.parts) > 1 else torch.ones(1, dtype=torch.float64)
    heads = []
    for h in range(HEADS):
        own = slice(h * c, h * c + c)
        scores = torch.zeros(B, n, n, dtype=torch.float64)
        for share, part in zip(shares, one.parts, strict=True):
            if part == "dense":
                hidden = torch.relu(x @ one.proposal.weight.T + one.proposal.bias)[..., own]
                scores = scores + share * (hidden @ one.dense_keys.T + one.dense_bias)[..., :n]
            elif part == "random":
                scores = scores + share * one.random_scores[h, :n, :n]
            else:
                q, k = (x @ part.weight.T + part.bias for part in (one.query, one.key))
                scores = scores + share * q[..., own] @ k[..., own].mT / c**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        heads.append(weights @ (x @ one.value.weight.T + one.value.bias)[..., own])
    return torch.cat(heads, -1) @ one.out.weight.T + one.out.bias


@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_it_is_the_formula(parts):
    one, x = layer(parts), noise(B, N, WIDTH)
    truth = by_formula(one, x, causal().dense(N))
    torch.testing.assert_close(one(x, mask=causal()), truth, rtol=1e-12, atol=1e-12)


def test_dense_weights_do_not_compare_tokens():
    one, x = layer(("dense",)), noise(B, N, WIDTH)
    changed = x.clone()
    changed[:, 3] += 1.0
    # weights come from each row alone: the difference that one value makes is the same whatever it is compared with
    one.value.weight.data.zero_()
    assert torch.equal(one(changed)[:, :3], one(x)[:, :3])
    random = layer(("random",))
    difference = random(changed) - random(x)
    twice = x.clone()
    twice[:, 3] += 2.0
    torch.testing.assert_close(random(twice) - random(x), 2 * difference)


def test_shares_sum_to_one_and_are_learned():
    one = layer(("dense", "random", "dot"))
    shares = [one._share(part) for part in one.parts]
    assert sum(shares).item() == pytest.approx(1.0)
    assert len({round(share.item(), 6) for share in shares}) == 3
    one(noise(B, N, WIDTH)).square().sum().backward()
    assert one.shares.grad.abs().max() > 0
    assert "shares" not in dict(layer(("dense",)).named_parameters())


CACHES = {
    "growing": (causal(), DynamicCache),
    "static": (causal(), lambda: StaticCache(CONTEXT)),
    "rolling": (window(before=2), lambda: SlidingWindowCache(window(before=2))),
}


@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_every_split_through_a_cache_is_one_pass(parts, cached):
    one, x, (mask, cache_of) = layer(parts), noise(B, 5, WIDTH), CACHES[cached]
    with torch.no_grad():
        whole = one(x, mask=mask)
        for cuts in product([False, True], repeat=4):
            sizes = [1]
            for cut in cuts:
                sizes = [*sizes, 1] if cut else [*sizes[:-1], sizes[-1] + 1]
            cache = cache_of()
            out = torch.cat([one(part, mask=mask, cache=cache) for part in x.split(sizes, 1)], 1)
            torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12, msg=f"split {sizes}")


def test_padding_is_not_seen():
    one, x = layer(("dense", "random")), noise(B, N, WIDTH)
    out = one(x, mask=padding([N, 4]))
    torch.testing.assert_close(out[1:, :4], one(x[1:, :4]), rtol=1e-12, atol=1e-12)


def test_a_table_that_is_too_short_says_so():
    one = layer(("dense",))
    assert one(noise(B, CONTEXT, WIDTH)).shape == (B, CONTEXT, WIDTH)
    with pytest.raises(ShapeError, match=r"the synthesizer has a table for n=9 \(positions\), but 10 came"):
        one(noise(B, CONTEXT + 1, WIDTH))
    cache = DynamicCache()
    one(noise(B, 7, WIDTH), mask=causal(), cache=cache)
    with pytest.raises(ShapeError, match="but 10 came"):
        one(noise(B, 3, WIDTH), mask=causal(), cache=cache)
    assert cache.length == 7


def test_dropout_acts_in_training_only():
    one, x = layer(("dense",), dropout=0.5), noise(B, N, WIDTH)
    assert torch.equal(one(x), one(x))
    assert not torch.equal(one.train()(x), one(x))


@pytest.mark.parametrize("parts", [(), ("dense", "dense"), ("sparse",)])
def test_bad_parts_are_refused(parts):
    with pytest.raises(ConfigError, match="parts takes one or more of dense, random, dot, each once, not"):
        Synthesizer(WIDTH, HEADS, CONTEXT, parts=parts)


def test_what_it_cannot_do_is_refused():
    one, x = layer(("dense",)), noise(B, N, WIDTH)
    with pytest.raises(ConfigError, match="takes no memory and no stream"):
        one(x, x)
    with pytest.raises(ConfigError, match="context is 0, but must be at least 1"):
        Synthesizer(WIDTH, HEADS, 0)
    with pytest.raises(ConfigError, match="width must be a multiple of heads: width=12, heads=5; try heads=4"):
        Synthesizer(WIDTH, 5, CONTEXT)
    with pytest.raises(ShapeError, match=r"x is \(2, 6, 11\), but is read as \(b n d\) with d=12"):
        one(noise(B, N, 11))


def test_names_are_stable():
    linear = [f"{part}.{kind}" for part in ("proposal", "query", "key", "value", "out") for kind in ("weight", "bias")]
    names = {*linear, "dense_keys", "dense_bias", "random_scores", "shares"}
    assert set(layer(("dense", "random", "dot")).state_dict()) == names


@pytest.mark.parametrize("parts", [("random",), ("dot", "random", "dense")], ids="+".join)
def test_it_compiles_exports_and_autocasts(parts):
    one, x = layer(parts).float(), noise(B, N, WIDTH).float()
    whole = one(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(one, fullgraph=True, backend="aot_eager")(x), whole)
    torch.testing.assert_close(torch.export.export(one, (x,)).module()(x), whole)
    with torch.autocast("cpu", torch.bfloat16):
        low, cache = one(x, mask=causal()), DynamicCache()
        parts_of_it = torch.cat([one(part, mask=causal(), cache=cache) for part in x.split([2, 4], 1)], 1)
    assert low.dtype == torch.bfloat16
    truth = one(x, mask=causal())
    for out in (low, parts_of_it):
        assert (out - truth).abs().max() < 0.03 * truth.abs().max()
