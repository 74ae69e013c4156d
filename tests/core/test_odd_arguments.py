"""Arguments of the wrong kind: every public function answers with its own error, which names the argument."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from regard import (
    DynamicCache,
    Mask,
    Positions,
    SlidingWindowCache,
    StaticCache,
    Stream,
    alibi,
    attend,
    causal,
    channel_attend,
    dilated,
    documents,
    explain,
    grid_positions,
    key_padding,
    linear_attend,
    padding,
    rotary,
    shaw,
    sink,
    sinusoidal,
    softargmax,
    t5_buckets,
)
from regard.base.errors import CacheError, ConfigError, DeviceError, DtypeError, RegardError, ShapeError
from regard.core.linear import elu_plus_one, performer, relu, squared_relu
from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS, examples
from regard.core.positions import NTK

x = torch.zeros(1, 1, 3, 4)

ODD: dict[str, tuple[Callable[[], object], str]] = {
    "sinusoidal by halves": (lambda: sinusoidal(2.5, 4), r"positions takes a whole number, not 2\.5"),
    "sinusoidal backwards": (lambda: sinusoidal(-1, 4), "positions is -1, but must be at least 0: it counts tokens"),
    "sinusoidal half wide": (lambda: sinusoidal(2, 4.0), r"width takes a whole number, not 4\.0"),
    "sinusoidal no base": (lambda: sinusoidal(2, 4, base="a"), "base is 'a', but takes one real number"),
    "rotary no base": (lambda: rotary(base="a"), "base is 'a', but takes one real number"),
    "rotary half wide": (lambda: rotary(width=4.0), r"width takes a whole number, not 4\.0"),
    "rotary without axes": (lambda: rotary(axes=0), "axes is 0, but must be at least 1: it counts the coordinates"),
    "rotary from nowhere": (lambda: rotary()(x, "a"), "positions is 'a', but rotary takes None, a whole number or"),
    "scaled by a word": (lambda: NTK("a"), r"NTK\(factor\) is 'a', but takes one real number"),
    "a grid of -1 rows": (lambda: grid_positions(-1, 2), "rows is -1, but must be at least 0: it counts patches"),
    "a grid of half columns": (lambda: grid_positions(1, 0.5), r"columns takes a whole number, not 0\.5"),
    "performer half wide": (lambda: performer(4.5, 3), r"performer\(width\) takes a whole number, not 4\.5"),
    "performer of nothing": (lambda: performer(4, 0), r"performer\(count\) is 0, but must be at least 1"),
    "performer by a word": (lambda: performer(4, 3, beta="a"), r"performer\(beta\) is 'a', but takes one real"),
    "count of a word": (lambda: causal().count("5"), "queries takes a whole number, not '5'"),
    "count of halves": (lambda: causal().count(5, 2.5), r"keys takes a whole number, not 2\.5"),
    "dense of halves": (lambda: causal().dense(4.0), r"queries takes a whole number, not 4\.0"),
    "a negative length": (lambda: causal().dense(-1), "queries is -1, but must be at least 0"),
    "half blocks": (lambda: causal().block_table(8, size=2.5), r"block_table\(size\) takes a whole number, not 2\.5"),
    "empty blocks": (lambda: causal().block_table(8, size=0), r"block_table\(size\) is 0, but must be at least 1"),
    "positions of another length": (
        lambda: causal().count(2, 3, positions=Positions(0, torch.arange(4))),
        r"positions.keys is \(4,\), but k has j=3 \(key positions\); give one position per key",
    ),
    "positions that are none": (
        lambda: causal().dense(2, positions=3),
        r"positions must be regard.Positions\(queries, keys\)",
    ),
    "softargmax of a list": (lambda: softargmax([1.0, 2.0]), "scores must be a tensor, not list"),
    "channels of a list": (lambda: channel_attend([1], x, x), r"q must be a tensor read as \(b h n c\), not list"),
    "channels without heads": (
        lambda: channel_attend(*[torch.zeros(3, 4)] * 3),
        r"q has 2 axes, \(3, 4\), but",
    ),
    "no channels": (lambda: channel_attend(*[torch.zeros(1, 1, 3, 0)] * 3), "there must be at least one channel"),
    "softargmax over no axis": (lambda: softargmax(x, axis=5), "axis is 5, but scores have 4 axes"),
    "softargmax over a word": (lambda: softargmax(x, axis="j"), "axis is 'j', but scores have 4 axes"),
    "a cache of lists": (lambda: DynamicCache().extend([1], [2]), r"k must be a tensor read as \(b g n c\), not list"),
    "a stream of lists": (lambda: Stream(causal()).push([1], [2], [3]), r"k must be a tensor read as \(b g n c\)"),
    "rotary of a list": (lambda: rotary()([1]), "x must be a tensor of heads"),
    "eight bits": (lambda: attend(*[x.to(torch.float8_e4m3fn)] * 3), "q is torch.float8_e4m3fn, but attention takes"),
    "sparse": (lambda: attend(*[x.to_sparse()] * 3), r"q is torch.sparse_coo.*call q.to_dense\(\) first"),
    "beyond counting": (lambda: dilated(2**64), r"dilated\(step\) is 18446744073709551616, which is too large"),
    "linear from a number": (lambda: linear_attend(x, x, x, state=3), "state takes the .state of an earlier"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_argument_is_named(name: str) -> None:
    call, message = ODD[name]
    with pytest.raises(RegardError, match=message):
        call()


NO_ROWS = {
    "a list of sequences": (DtypeError, r"reorder takes a tensor of whole numbers.*not \[0, 1\]", [0, 1]),
    "fractions of sequences": (
        DtypeError,
        r"reorder takes a tensor of whole numbers.*not torch.float32",
        torch.ones(2),
    ),
    "sequences in rows": (ShapeError, r"reorder takes one axis of sequences", torch.zeros(1, 2, dtype=torch.long)),
    "a sequence too many": (CacheError, r"reorder takes sequences 0 to 1.*not \[0, 2\]", torch.tensor([0, 2])),
    "a negative sequence": (CacheError, r"reorder takes sequences 0 to 1", torch.tensor([-1])),
}


@pytest.mark.parametrize("case", NO_ROWS)
@pytest.mark.parametrize("make", [DynamicCache, lambda: StaticCache(5), lambda: SlidingWindowCache(causal())])
def test_reordering_by_what_is_no_sequence_is_refused(case, make):
    error, message, rows = NO_ROWS[case]
    cache = make()
    cache.extend(torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 5))
    before = cache.tensors()
    with pytest.raises(error, match=message):
        cache.reorder(rows)
    assert cache.tensors() is before


@pytest.mark.parametrize(
    ("features", "other"),
    [(relu(), squared_relu()), (performer(4, 8), performer(4, 8, seed=1)), (elu_plus_one(), performer(4, 4))],
    ids=str,
)
def test_a_state_of_other_features_is_not_continued(features, other):
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    state = linear_attend(q, k, v, mask=causal(), features=features).state
    with pytest.raises(ConfigError, match=r"state was made with features=.*continue with the same features"):
        linear_attend(q, k, v, mask=causal(), features=other, state=state)
    again = type(features)(**{f.name: getattr(features, f.name) for f in fields(features) if f.init})
    assert linear_attend(q, k, v, mask=causal(), features=again, state=state).state.length == 10


def test_left_padding_wider_than_the_keys_is_refused_but_a_cache_may_begin():
    q, k, v = torch.randn(3, 2, 3, 6, 4)
    mask = padding([4, 6], side="left", width=60)
    with pytest.raises(ShapeError, match=r"padded to 60 keys, but k has j=6; use width=6, or pass positions="):
        attend(q, k, v, mask=causal() & mask)
    mask = causal() & padding([4, 6], side="left", width=7)
    chunks = [attend(q[:, :, :3], k[:, :, :3], v[:, :, :3], mask=mask, positions=Positions(0))]
    assert torch.equal(chunks[0][0], torch.zeros(3, 3, 4)), "the first three keys of a width of seven are padding"


def test_sparse_nested_and_meta_masks_are_refused():
    q, k, v = torch.randn(3, 2, 1, 3, 4)
    flags = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(DtypeError, match=r"mask is a torch.sparse_coo tensor, but takes an ordinary one"):
        attend(q, k, v, mask=flags.to_sparse())
    with pytest.raises(DtypeError, match=r"scores are torch.sparse_coo, but every pair needs a number"):
        attend(q, k, v, scores=flags.to(q.dtype).to_sparse())
    with pytest.raises(DtypeError, match=r"padding\(lengths\) is a torch.sparse_coo tensor"):
        padding(torch.tensor([1, 2]).to_sparse())
    with pytest.raises(DtypeError, match=r"key_padding\(real\) is a torch.sparse_coo tensor"):
        key_padding(torch.ones(2, 3, dtype=torch.bool).to_sparse())
    with pytest.raises(DtypeError, match=r"documents\(ids\) is a torch.sparse_coo tensor"):
        documents(torch.ones(3, dtype=torch.long).to_sparse())
    with pytest.raises(DeviceError, match=r"on the meta device, which has no values, but q is on cpu"):
        attend(q, k, v, mask=flags.to("meta"))
    with pytest.raises(DeviceError, match=r"on the meta device, which has no values"):
        attend(q, k, v, mask=causal() & padding(torch.tensor([1, 2], device="meta")))


@pytest.mark.parametrize("make", [lambda i, j: i.new_ones(5, dtype=torch.bool), lambda i, j: (i > j)[None, None, None]])
def test_a_function_that_returns_another_shape_is_refused(make):
    q, k, v = torch.randn(3, 2, 1, 3, 4)
    with pytest.raises(ShapeError, match=r"Mask.of\('odd'\) returned shape .* return one value for each pair"):
        attend(q, k, v, mask=Mask.of("odd", make))


@pytest.mark.parametrize("name", FORMS)
def test_a_default_device_for_new_tensors_does_not_matter(name):
    """As after `torch.set_default_device("cuda")` with tensors on the CPU: no plan may lie on the default device."""
    mask = parse_mask(examples(name, 331)[-1])
    b = mask.batch() or 1
    inputs = [torch.randn(b, 2, 331, 8).requires_grad_() for _ in range(3)]
    expected, visible = attend(*inputs, mask=mask, kernel="eager"), mask.count(331)
    cache = SlidingWindowCache(mask)
    with torch.device("meta"):
        for kernel in (None, None, "sdpa", "eager"):
            out = attend(*inputs, mask=mask, kernel=kernel)
            assert torch.allclose(out, expected, atol=1e-5)
            torch.autograd.grad(out.sum(), inputs)
        assert explain(*inputs, mask=mask).visible == 2 * visible * (b if mask.batch() is None else 1)
        assert mask.to_block_mask(331).shape[-2:] == (331, 331)
        held = cache.extend(inputs[1].detach(), inputs[2].detach())
        out = attend(inputs[0], held.k, held.v, mask=mask, positions=held.positions)
        assert torch.allclose(out, expected, atol=1e-5)


def test_sparse_and_meta_tensors_of_positions_and_terms_are_refused():
    q = torch.randn(3, 2, 4, 8)
    whole, number = torch.tensor([1, 2, 3]), torch.ones(2)
    for name in ("keys", "offsets"):
        with pytest.raises(DtypeError, match=rf"Positions\.{name} is torch.sparse_coo; call .to_dense\(\) first"):
            Positions(0, **{name: whole.to_sparse()})
        x = q[:, :, :3]
        with pytest.raises(DeviceError, match=rf"positions\.{name} is on the meta device and has no values"):
            attend(x, x, x, mask=causal(), positions=Positions(0, **{name: whole.to("meta")}))
    terms = {
        "alibi": (lambda x: alibi(slopes=x), number),
        "sink": (sink, number),
        "t5_buckets": (t5_buckets, torch.ones(8, 2)),
        "shaw": (shaw, torch.ones(3, 8)),
    }
    for name, (make, values) in terms.items():
        with pytest.raises(DtypeError, match=rf"{name}\(\w+\) is torch.sparse_coo, but every number is needed"):
            make(values.to_sparse())
        with pytest.raises(DeviceError, match=rf"{name} is on the meta device and has no values"):
            attend(q, q, q, scores=make(values.to("meta")))
    with pytest.raises(DtypeError, match=r"scores are torch.sparse_coo, but softargmax needs all of them"):
        softargmax(torch.eye(3).to_sparse())
