"""Blocks: what is added to what, in which order, whole and as a stream, and gradients made again."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from regard import DynamicCache, alibi, causal, chunks, padding, rotary, window
from regard.base.errors import ConfigError
from regard.nn.attention import Attention
from regard.nn.blocks import Block, Residual, run_blocks
from regard.nn.feedforward import FeedForward
from regard.nn.linear_attention import LinearAttention, LinearCache
from regard.nn.synthesizer import Synthesizer

B, N, WIDTH, HEADS = 2, 7, 12, 3


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: nn.Module) -> nn.Module:
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.4)
    return module.double().eval()


def block(mixer: nn.Module | None = None, **settings: object) -> Block:
    mixer = Attention(WIDTH, HEADS, rotary=rotary()) if mixer is None else mixer
    made = drawn(Block(WIDTH, mixer, FeedForward(WIDTH, 17), **settings))
    assert isinstance(made, Block)
    return made


def test_pre_normalises_what_goes_in():
    one, x = block(), noise(B, N, WIDTH)
    truth = x + one.attention(one.attention_norm(x), mask=causal())
    truth = truth + one.feedforward(one.feedforward_norm(truth))
    assert torch.equal(one(x, mask=causal()), truth)


def test_post_normalises_what_comes_out():
    one, x = block(order="post"), noise(B, N, WIDTH)
    truth = one.attention_norm(x + one.attention(x, mask=causal()))
    truth = one.feedforward_norm(truth + one.feedforward(truth))
    assert torch.equal(one(x, mask=causal()), truth)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_an_attention_only_block_has_no_feed_forward_network(order):
    one = drawn(Block(WIDTH, Attention(WIDTH, HEADS), None, order=order))
    x = noise(B, N, WIDTH)
    mixed = one.attention(one.attention_norm(x) if order == "pre" else x, mask=causal())
    truth = x + mixed if order == "pre" else one.attention_norm(x + mixed)
    assert torch.equal(one(x, mask=causal()), truth)
    assert not [name for name, _ in one.named_parameters() if "feedforward" in name]
    stream = one.stream(causal())
    parts = [stream.push(piece) for piece in x.split(2, dim=1)] + [stream.finish()]
    assert torch.allclose(torch.cat(parts, 1), truth, atol=1e-12)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_block_may_look_at_a_memory(order):
    one = block(cross=Attention(WIDTH, HEADS, memory_width=5), order=order)
    x, memory, real = noise(B, N, WIDTH), noise(B, 9, 5, seed=2), padding([9, 4])
    if order == "pre":
        truth = x + one.attention(one.attention_norm(x), mask=causal())
        truth = truth + one.cross(one.cross_norm(truth), memory, mask=real)
        truth = truth + one.feedforward(one.feedforward_norm(truth))
    else:
        truth = one.attention_norm(x + one.attention(x, mask=causal()))
        truth = one.cross_norm(truth + one.cross(truth, memory, mask=real))
        truth = one.feedforward_norm(truth + one.feedforward(truth))
    assert torch.equal(one(x, memory, mask=causal(), memory_mask=real), truth)
    assert torch.equal(one(x, one.cross.keys_values(memory), mask=causal(), memory_mask=real), truth)


def test_a_memory_that_nobody_reads_or_that_is_missing_is_refused():
    x = noise(B, N, WIDTH)
    with pytest.raises(ConfigError, match="this block has cross-attention; pass a memory"):
        block(cross=Attention(WIDTH, HEADS))(x)
    with pytest.raises(ConfigError, match="this block has no cross-attention for the memory; build it with cross="):
        block()(x, x)


MIXERS = {
    "attention": lambda: Attention(WIDTH, HEADS, rotary=rotary()),
    "synthesizer": lambda: Synthesizer(WIDTH, HEADS, N, parts=("dense", "random")),
    "linear": lambda: LinearAttention(WIDTH, HEADS, rotary=rotary()),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_any_mixer_goes_through_its_cache(mixer):
    one, x = block(MIXERS[mixer]()), noise(B, N, WIDTH)
    whole = one(x, mask=causal())
    cache = LinearCache() if mixer == "linear" else DynamicCache()
    parts = [one(part, mask=causal(), cache=cache) for part in x.split([3, 1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6)


def test_positions_reach_the_attention():
    one, x = block(), noise(B, N, WIDTH)
    assert torch.equal(one(x, positions=torch.arange(N)), one(x))
    assert (one(x, positions=torch.arange(N) * 3) - one(x)).abs().max() > 1e-3


def test_names_are_stable():
    parts = {name.rpartition(".")[0] for name in block(cross=Attention(WIDTH, HEADS)).state_dict()}
    projections = [f"{kind}.{part}" for kind in ("attention", "cross") for part in ("query_key_value", "out")]
    norms = ["attention_norm", "cross_norm", "feedforward_norm"]
    assert parts == {*projections, *norms, "feedforward.up", "feedforward.down"}


def splits(n: int) -> list[list[int]]:
    ways = []
    for cuts in product([False, True], repeat=n - 1):
        parts = [1]
        for cut in cuts:
            parts = [*parts, 1] if cut else [*parts[:-1], parts[-1] + 1]
        ways.append(parts)
    return ways


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("mask", [causal(), chunks(2, before=1), chunks(2, before=0, after=1)], ids=repr)
def test_every_chunking_of_a_stream_of_blocks_is_one_pass(mask, order):
    blocks, x = (
        [block(order=order), block(Attention(WIDTH, HEADS, scores=alibi(HEADS)), order=order)],
        noise(B, 5, WIDTH),
    )
    with torch.no_grad():
        whole = run_blocks(blocks, x, mask=mask)
        for parts in splits(5):
            streams = [one.stream(mask) for one in blocks]
            out = [run_blocks([stream.push for stream in streams], part) for part in x.split(parts, 1)]
            rest = streams[0].finish()
            out += [streams[1].push(rest), streams[1].finish()]
            torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-6, atol=1e-6, msg=f"split {parts}")


def test_a_stream_gives_out_rows_as_soon_as_they_are_complete():
    stream, x = block().stream(chunks(3, after=1)), noise(B, 10, WIDTH)
    with torch.no_grad():
        counts = [stream.push(x[:, [n]]).shape[1] for n in range(10)]
        assert counts == [0, 0, 0, 0, 0, 3, 0, 0, 3, 0]
        assert stream.finish().shape[1] == 4


def test_a_stream_forgets_what_no_later_row_can_see():
    stream, sizes = block().stream(chunks(3, before=2)), []
    with torch.no_grad():
        for n in range(60):
            stream.push(noise(B, 1, WIDTH, seed=n))
            sizes.append(sum(tensor.numel() for tensor in stream.tensors()))
    # keys and values of 2 + 1 chunks; queries and inputs of the one that is not complete
    assert max(sizes) <= B * WIDTH * (2 * 9 + 2 * 3)
    assert max(sizes[-9:]) == max(sizes[9:18])


def test_streams_run_through_self_attention_only():
    with pytest.raises(ConfigError, match="a stream needs a block with self-attention only"):
        block(cross=Attention(WIDTH, HEADS)).stream(causal())
    with pytest.raises(ConfigError, match="a stream needs a block with self-attention"):
        block(MIXERS["synthesizer"]()).stream(causal())
    with pytest.raises(ConfigError, match="a stream needs a block with self-attention"):
        block(MIXERS["linear"]()).stream(causal())
    with pytest.raises(ConfigError, match="nothing was pushed into this stream"):
        block().stream(causal()).finish()


def test_a_block_in_training_has_no_exact_stream():
    with pytest.raises(ConfigError, match=r"dropout is active in training; call eval\(\) before streaming"):
        block(dropout=0.1).train().stream(causal())
    with pytest.raises(ConfigError, match=r"call eval\(\) before streaming"):
        block(drop_path=0.1).train().stream(causal())
    dropping = Block(WIDTH, Attention(WIDTH, HEADS), FeedForward(WIDTH, 17, dropout=0.1))
    with pytest.raises(ConfigError, match=r"call eval\(\) before streaming"):
        dropping.stream(causal())
    assert dropping.eval().stream(causal()).tensors() == ()


def test_residual_keeps_the_mean():
    x = noise(1, 3, 5).expand(20000, 3, 5)
    for settings in ({"dropout": 0.3}, {"drop_path": 0.4}, {"dropout": 0.3, "drop_path": 0.4}):
        residual = Residual(**settings)
        mean = residual(x).mean(0)
        torch.testing.assert_close(mean, x[0], rtol=0.05, atol=0.02)
        assert torch.equal(residual.eval()(x), x)


def test_drop_path_drops_whole_sequences_and_dropout_single_numbers():
    ones = torch.ones(1000, 3, 5)
    rows = Residual(drop_path=0.25)(ones).flatten(1)
    assert torch.equal(rows.amin(1), rows.amax(1))
    torch.testing.assert_close(rows.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert 0.2 < (rows[:, 0] == 0).float().mean() < 0.3
    numbers = Residual(dropout=0.25)(ones).flatten(1)
    assert (numbers.amin(1) < numbers.amax(1)).float().mean() > 0.9


def test_drop_path_keeps_the_dtype_and_any_rank():
    x = torch.ones(64, 2, 3, 4, 5, dtype=torch.bfloat16)
    assert Residual(drop_path=0.5)(x[:, :, 0, 0]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"order": "between"}, "order is one of pre, post, where the norm is applied, not 'between'"),
        ({"dropout": 1.0}, "dropout is a share, at least 0 and less than 1"),
        ({"drop_path": -0.5}, "drop_path is a share, at least 0 and less than 1"),
        ({"eps": 0.0}, "eps is between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        block(**settings)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recomputing_gives_the_same_rows_and_gradients(dropout):
    blocks = nn.ModuleList([block(dropout=dropout), block(order="post", drop_path=dropout)]).train()
    x = noise(B, N, WIDTH).requires_grad_()
    found = []
    for recompute in (False, True):
        torch.manual_seed(7)
        blocks.zero_grad()
        x.grad = None
        out = run_blocks(blocks, x, recompute=recompute, mask=causal())
        out.square().sum().backward()
        found.append([out, x.grad, *(parameter.grad for parameter in blocks.parameters())])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_recomputing_keeps_less_for_the_backward_pass():
    blocks, x, kept = [block() for _ in range(3)], noise(B, N, WIDTH).requires_grad_(), {}
    for recompute in (False, True):
        seen: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t.numel()) or t, lambda t: t):
            run_blocks(blocks, x, recompute=recompute, mask=causal())
        kept[recompute] = sum(seen)
    assert kept[True] <= 3 * x.numel() < kept[False] / 4


def test_nothing_is_recomputed_without_gradients():
    calls = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        return x

    with torch.no_grad():
        run_blocks([once], noise(1, 2, 3), recompute=True)
    assert calls == [1]


def test_blocks_compile_whole_and_recompute():
    blocks = nn.ModuleList([block()])
    x = noise(B, N, WIDTH).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return run_blocks(blocks, x, recompute=True, mask=causal() & window(before=3))

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), run(x))
    (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(run(x).square().sum(), x)[0])


def test_dropping_compiles_too():
    residual = Residual(0.2, 0.2)
    torch._dynamo.reset()
    compiled = torch.compile(residual, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(noise(B, N, WIDTH)), compiled(noise(B, N, WIDTH)))
