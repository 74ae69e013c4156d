"""Bad input gets an error that names the tensor, the axis, both sizes and what to do next."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from regard import (
    Mask,
    Positions,
    additive,
    alibi,
    attend,
    blocks,
    causal,
    chunks,
    dilated,
    documents,
    explain,
    global_tokens,
    padding,
    prefix,
    random_links,
    shaw,
    sink,
    softargmax,
    softcap,
    t5_buckets,
    window,
)
from regard.base.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    KernelRefusedError,
    RegardError,
    ShapeError,
    UnknownNameError,
)

Q, K, V = (2, 6, 7, 5), (2, 3, 11, 5), (2, 3, 11, 9)


def call(*, door=attend, q=Q, k=K, v=V, **rest):
    """`attend` on zeros of these shapes, or on the tensors themselves."""
    q, k, v = (torch.zeros(x) if isinstance(x, tuple) else x for x in (q, k, v))
    return door(q, k, v, **rest)


def visible(*shape):
    return torch.ones(shape, dtype=torch.bool)


def said(kind, thunk, *args, **kwargs):
    """The text of the error that is raised, which has to be one of regard's and of that kind."""
    with pytest.raises(kind) as caught:
        thunk(*args, **kwargs)
    assert isinstance(caught.value, RegardError)
    return str(caught.value)


WRONG_RANK = {
    "q without a batch": (
        {"q": (6, 7, 5)},
        "q has 3 axes, (6, 7, 5), but is read as (b h i c): batch, query heads, query positions, width per head of "
        "q and k; for one head write q[:, None], for one sequence q[None]",
    ),
    "a bare matrix for k": (
        {"k": (11, 5)},
        "k has 2 axes, (11, 5), but is read as (b g j c): batch, key/value heads, key positions, width per head of "
        "q and k; for one sequence and one head write k[None, None]",
    ),
    "v with five axes": (
        {"v": (1, 2, 3, 11, 9)},
        "v has 5 axes, (1, 2, 3, 11, 9), but is read as (b g j e): batch, key/value heads, key positions, "
        "width per head of v; reshape v to four axes",
    ),
}

MISMATCHES = {
    "widths of q and k": (
        {"k": (2, 3, 11, 4)},
        "k has c=4 (width per head of q and k), but q has c=5; k is (2, 3, 11, 4) read as (b g j c); "
        "project k and q to one width, for instance 5",
    ),
    "batch of k": (
        {"k": (3, 3, 11, 5)},
        "k has b=3 (batch), but q has b=2; k is (3, 3, 11, 5) read as (b g j c); repeat or slice k to 2 sequences",
    ),
    "batch of v": (
        {"v": (4, 3, 11, 9)},
        "v has b=4 (batch), but q has b=2; v is (4, 3, 11, 9) read as (b g j e); repeat or slice v to 2 sequences",
    ),
    "heads of k and v": (
        {"v": (2, 6, 11, 9)},
        "v has g=6 (key/value heads), but k has g=3; v is (2, 6, 11, 9) read as (b g j e); "
        "k and v come in pairs, so give both as many heads",
    ),
    "lengths of k and v": (
        {"v": (2, 3, 12, 9)},
        "v has j=12 (key positions), but k has j=11; v is (2, 3, 12, 9) read as (b g j e); "
        "k and v come in pairs, so give both as many positions",
    ),
    "heads that do not divide": (
        {"k": (2, 4, 11, 5), "v": (2, 4, 11, 9)},
        "q has h=6 (query heads), which is not a multiple of k's g=4 (key/value heads); "
        "q is (2, 6, 7, 5) read as (b h i c), k is (2, 4, 11, 5) read as (b g j c); choose g among the divisors of 6",
    ),
    "no query heads": (
        {"q": (2, 0, 7, 5)},
        "q has h=0 (query heads), but there must be at least one; q is (2, 0, 7, 5) read as (b h i c)",
    ),
    "no width": (
        {"q": (2, 6, 7, 0), "k": (2, 3, 11, 0)},
        "q has c=0 (width per head of q and k), but there must be at least one; q is (2, 6, 7, 0) read as (b h i c)",
    ),
    "no key heads": (
        {"k": (2, 0, 11, 5), "v": (2, 0, 11, 9)},
        "k has g=0 (key/value heads), but there must be at least one; k is (2, 0, 11, 5) read as (b g j c)",
    ),
}


@pytest.mark.parametrize("name", WRONG_RANK | MISMATCHES)
def test_a_shape_that_does_not_fit_is_explained(name):
    shapes, text = (WRONG_RANK | MISMATCHES)[name]
    assert said(ShapeError, call, **shapes) == text


@pytest.mark.parametrize("name", MISMATCHES)
def test_explain_refuses_what_attend_refuses(name):
    shapes, text = MISMATCHES[name]
    assert said(ShapeError, call, door=explain, **shapes) == text


def test_sequences_positions_and_widths_of_v_may_be_none_at_all():
    assert call(q=(0, 6, 7, 5), k=(0, 3, 11, 5), v=(0, 3, 11, 9)).shape == (0, 6, 7, 9)
    assert call(q=(2, 6, 0, 5)).shape == (2, 6, 0, 9)
    assert call(k=(2, 3, 0, 5), v=(2, 3, 0, 9)).shape == (2, 6, 7, 9)
    assert call(v=(2, 3, 11, 0)).shape == (2, 6, 7, 0)


def test_a_shape_error_is_a_value_error_too():
    with pytest.raises(ValueError, match="k has c=4"):
        call(k=(2, 3, 11, 4))


@pytest.mark.parametrize(("name", "dtype"), [("k", torch.float16), ("v", torch.float64)])
def test_mixed_dtypes_are_named_with_a_way_out(name, dtype):
    text = said(DtypeError, call, **{name: torch.zeros({"k": K, "v": V}[name], dtype=dtype)})
    assert text == f"{name} is {dtype}, but q is torch.float32; convert one of them, for instance {name}.to(q.dtype)"


@pytest.mark.parametrize("name", ["k", "v"])
def test_mixed_devices_are_named_with_a_way_out(name):
    text = said(DeviceError, call, **{name: torch.zeros({"k": K, "v": V}[name], device="meta")})
    assert text == f"{name} is on meta, but q is on cpu; move one of them, for instance {name}.to(q.device)"


@pytest.mark.parametrize(("name", "dtype"), [("q", torch.int64), ("k", torch.int32), ("v", torch.bool)])
def test_whole_numbers_are_refused(name, dtype):
    text = said(DtypeError, call, **{name: torch.ones({"q": Q, "k": K, "v": V}[name], dtype=dtype)})
    assert text == f"{name} is {dtype}, but attention needs floating numbers; call {name}.float() first"


@pytest.mark.parametrize(("name", "dtype"), [("q", torch.complex64), ("k", torch.complex128), ("v", torch.complex64)])
def test_complex_numbers_are_refused(name, dtype):
    text = said(DtypeError, call, **{name: torch.ones({"q": Q, "k": K, "v": V}[name], dtype=dtype)})
    assert text == f"{name} is {dtype}, but attention needs real numbers; take {name}.real or {name}.abs()"


@pytest.mark.parametrize(("name", "value"), [("q", [[1.0]]), ("k", np.zeros(K)), ("v", None)])
def test_what_is_no_tensor_is_refused(name, value):
    letters = {"q": "b h i c", "k": "b g j c", "v": "b g j e"}[name]
    text = said(DtypeError, call, **{name: value})
    assert text == (
        f"{name} must be a tensor read as ({letters}), not {type(value).__name__}; make it one with "
        f"torch.as_tensor({name})"
    )


TABLE = torch.zeros(8, 6)
TOO_SMALL = {
    "window(before) is -1, but must be at least 0: it counts neighbours": lambda: window(before=-1),
    "window(after) is -3, but must be at least 0: it counts neighbours": lambda: window(after=-3),
    "chunks(before) is -1, but must be at least 0: it counts whole chunks": lambda: chunks(4, before=-1),
    "chunks(after) is -2, but must be at least 0: it counts whole chunks": lambda: chunks(4, after=-2),
    "chunks(size) is 0, but must be at least 1: it counts positions": lambda: chunks(0),
    "blocks(size) is 0, but must be at least 1: it counts positions": lambda: blocks(0),
    "dilated(step) is 0, but must be at least 1: it counts positions": lambda: dilated(0),
    "prefix(n) is -1, but must be at least 0: it counts positions": lambda: prefix(-1),
    "global_tokens(n) is -2, but must be at least 0: it counts positions": lambda: global_tokens(-2),
    "random_links(count) is -1, but must be at least 0: it counts keys": lambda: random_links(-1),
    "padding(width) is -1, but must be at least 0: it counts positions": lambda: padding([3], side="left", width=-1),
    "alibi(heads) is 0, but must be at least 1: it counts query heads": lambda: alibi(0),
    "t5_buckets(max_distance) is 0, but must be at least 1: it counts positions": lambda: t5_buckets(
        TABLE, max_distance=0
    ),
}


@pytest.mark.parametrize("text", TOO_SMALL)
def test_what_counts_below_its_least_is_refused(text):
    assert said(ConfigError, TOO_SMALL[text]) == text


def test_a_seed_is_not_negative():
    text = said(ConfigError, random_links, 2, seed=-1)
    assert text.startswith("random_links(seed) is -1, but must be at least 0")


WHOLE = {
    "window(before)": lambda value: window(before=value),
    "window(after)": lambda value: window(after=value),
    "chunks(size)": lambda value: chunks(value),
    "chunks(before)": lambda value: chunks(4, before=value),
    "chunks(after)": lambda value: chunks(4, after=value),
    "blocks(size)": lambda value: blocks(value),
    "dilated(step)": lambda value: dilated(value),
    "prefix(n)": lambda value: prefix(value),
    "global_tokens(n)": lambda value: global_tokens(value),
    "random_links(count)": lambda value: random_links(value),
    "random_links(seed)": lambda value: random_links(2, seed=value),
    "padding(width)": lambda value: padding([1, 0], side="left", width=value),
    "alibi(heads)": lambda value: alibi(value),
    "t5_buckets(max_distance)": lambda value: t5_buckets(TABLE, max_distance=value),
}


@pytest.mark.parametrize("value", [8.0, True, "8", np.True_, np.float32(8), math.inf, torch.tensor(8.0)], ids=repr)
@pytest.mark.parametrize("what", WHOLE)
def test_what_counts_takes_whole_numbers(what, value):
    assert said(ConfigError, WHOLE[what], value) == f"{what} takes a whole number, not {value!r}"


# annotations say int and float, and tests check them; whoever does not may hand in what numpy has for these
NUMPY = {
    "window(np.int64(3))": "window(before=3)",
    "window(np.uint8(3), after=np.int32(2))": "window(before=3, after=2)",
    "chunks(np.int64(4), before=np.int16(1))": "chunks(4, before=1, after=0)",
    "chunks(np.int64(4), after=np.int16(1))": "chunks(4, before=0, after=1)",
    "blocks(np.int64(4))": "blocks(4)",
    "dilated(np.int64(2))": "dilated(2)",
    "prefix(np.int64(2))": "prefix(2)",
    "global_tokens(np.int64(2))": "global_tokens(2)",
    "random_links(np.int64(2), np.int64(5))": "random_links(2, seed=5)",
    "padding([3, 5], side='left', width=np.int64(7))": "padding([3, 5], side='left', width=7)",
    "torch.equal(alibi(np.int64(6)).slopes, alibi(6).slopes)": "True",
    "int(t5_buckets(torch.zeros(8, 6), max_distance=np.int64(9)).max_distance)": "9",
    "softcap(np.float32(0.5)).cap": "0.5",
    "softargmax(torch.tensor([0.0, 1.0]), np.float32(0)).tolist()": "[0.5, 0.5]",
    "softargmax(torch.tensor([0.0, 1.0]), np.float64('inf')).tolist()": "[0.0, 1.0]",
    "torch.equal(attend(x, x, x, beta=np.float32(0.5)), attend(x, x, x, beta=0.5))": "True",
    "torch.equal(attend(x, x, x, beta=np.int64(2)), attend(x, x, x, beta=2))": "True",
    "torch.equal(attend(x, x, x, dropout=np.float32(0)), attend(x, x, x))": "True",
    "type(window(np.int64(3)).before), type(chunks(np.int64(4)).size)": "(<class 'int'>, <class 'int'>)",
    "type(softcap(np.float32(0.5)).cap)": "<class 'float'>",
}


@pytest.fixture(scope="module")
def as_users_have_it(root):
    """What each line of NUMPY gives where no annotation is checked."""
    code = f"""
import json, numpy as np, torch
from regard import *
x = torch.randn(2, 6, 7, 5)
print(json.dumps([repr(eval(line)) for line in {list(NUMPY)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(NUMPY, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", NUMPY)
def test_numbers_of_numpy_are_welcome(line, as_users_have_it):
    assert as_users_have_it[line] == NUMPY[line]


MATRICES_OF_ANOTHER_SIZE = {
    (7, 12): "mask has j=12 (key positions), but k has j=11; mask is (7, 12) read as (i j); "
    "a boolean matrix must end in (7, 11), or 1 where all are alike",
    (8, 11): "mask has i=8 (query positions), but q has i=7; mask is (8, 11) read as (i j); "
    "a boolean matrix must end in (7, 11), or 1 where all are alike",
    (2, 1, 2, 11): "mask has i=2 (query positions), but q has i=7; mask is (2, 1, 2, 11) read as (b h i j); "
    "a boolean matrix must end in (7, 11), or 1 where all are alike",
    (3, 1, 7, 11): "mask has b=3 (batch), but q has b=2; mask is (3, 1, 7, 11) read as (b h i j); use 1 or 2 there",
    (3, 7, 11): "mask has h=3 (query heads), but q has h=6; mask is (3, 7, 11) read as (h i j); use 1 or 6 there",
    (2, 3, 7, 11): "mask has h=3 (query heads), but q has h=6; mask is (2, 3, 7, 11) read as (b h i j); "
    "use 1 or 6 there",
    (11, 7): "mask has i=11 (query positions), but q has i=7; mask is (11, 7) read as (i j); "
    "a boolean matrix must end in (7, 11), or 1 where all are alike; did you mean mask.mT?",
    (2, 1, 11, 7): "mask has i=11 (query positions), but q has i=7; mask is (2, 1, 11, 7) read as (b h i j); "
    "a boolean matrix must end in (7, 11), or 1 where all are alike; did you mean mask.mT?",
}


@pytest.mark.parametrize("shape", MATRICES_OF_ANOTHER_SIZE, ids=str)
def test_a_matrix_of_another_size_is_explained(shape):
    text = MATRICES_OF_ANOTHER_SIZE[shape]
    assert said(ShapeError, call, mask=visible(*shape)) == text
    assert said(ShapeError, call, mask=causal() & visible(*shape)) == text, "a part of a combined mask is not checked"


@pytest.mark.parametrize("shape", [(), (11,), (1, 2, 6, 7, 11)], ids=str)
def test_a_matrix_has_two_to_four_axes(shape):
    text = said(ShapeError, call, mask=visible(*shape))
    assert text.startswith(f"mask is {shape}, but a boolean matrix is (i j), (h i j) or (b h i j)")


def test_one_row_of_keys_is_told_how_to_become_a_mask():
    text = said(ShapeError, call, mask=visible(11))
    assert text.endswith("; for one row of keys write mask[None].expand(i, -1)")


def test_the_transpose_that_is_suggested_fits():
    assert call(mask=visible(11, 7).mT).shape == (2, 6, 7, 9)


def test_the_row_that_is_suggested_fits():
    assert call(mask=visible(11)[None].expand(7, -1)).shape == (2, 6, 7, 9)
    assert call(scores=torch.zeros(11)[None]).shape == (2, 6, 7, 9)


def test_a_mask_and_a_boolean_tensor_combine():
    at = torch.arange(5)
    seen, odd = at[:, None] >= at, (at % 2 == 1).expand(5, 5)
    assert torch.equal((causal() & odd).dense(5), seen & odd)
    assert torch.equal((causal() | odd).dense(5), seen | odd)
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 9)
    torch.testing.assert_close(attend(q, k, v, mask=causal() & odd), attend(q, k, v, mask=seen & odd))
    torch.testing.assert_close(attend(q, k, v, mask=causal() | odd), attend(q, k, v, mask=seen | odd))


def test_a_boolean_tensor_may_come_first():
    at = torch.arange(5)
    seen, odd = at[:, None] >= at, (at % 2 == 1).expand(5, 5)
    both, either = odd & causal(), odd | causal()
    assert isinstance(both, Mask)
    assert isinstance(either, Mask)
    assert torch.equal(both.dense(5), seen & odd)
    assert torch.equal(either.dense(5), seen | odd)
    assert repr(both) == "matrix(5, 5) & causal()"
    assert repr(either | window(before=1)) == "matrix(5, 5) | causal() | window(before=1)"


COMBINATIONS = [
    lambda other: causal() & other,
    lambda other: causal() | other,
    lambda other: other & causal(),
    lambda other: other | causal(),
]


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (3, "mask must be a mask such as regard.causal() or a boolean tensor, not int"),
        ("window", "mask must be a mask such as regard.causal() or a boolean tensor, not str"),
        (torch.zeros(7, 11), "mask is torch.float32, but a mask is boolean with True meaning visible"),
        (visible(11), "mask is (11,), but a boolean matrix is (i j), (h i j) or (b h i j)"),
    ],
    ids=["a number", "a word", "a floating tensor", "one axis"],
)
def test_what_is_no_mask_combines_with_none(other, part):
    for combine in COMBINATIONS:
        assert said(RegardError, combine, other).startswith(part)


def test_nothing_at_all_combines_with_no_mask():
    for combine in COMBINATIONS:
        assert said(DtypeError, combine, None) == (
            "a mask combines with masks and boolean tensors, not with None; leave it out, or write full()"
        )
    assert call(mask=None).shape == (2, 6, 7, 9)


@pytest.mark.parametrize("fn", [3, None, torch.ones(5, 5, dtype=torch.bool)], ids=["a number", "nothing", "a matrix"])
def test_a_rule_of_ones_own_is_a_function(fn):
    text = said(ConfigError, Mask.of, "mine", fn)
    assert text == f"Mask.of takes a function of query and key positions, not {fn!r}"


def test_a_name_and_a_function_in_the_wrong_order_are_told_apart():
    text = said(ConfigError, Mask.of, lambda i, j: i > j, "later")
    assert text == "Mask.of takes a function of query and key positions, not 'later'"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_mask_that_is_not_boolean_is_sent_to_scores(dtype):
    assert said(DtypeError, call, mask=torch.zeros(7, 11, dtype=dtype)) == (
        f"mask is {dtype}, but a mask is boolean with True meaning visible; pass values to add to the scores as scores="
    )


@pytest.mark.parametrize("mask", ["causal", causal, 3])
def test_what_is_no_mask_is_refused(mask):
    text = said(DtypeError, call, mask=mask)
    assert text == f"mask must be a mask such as regard.causal() or a boolean tensor, not {type(mask).__name__}"


def test_masks_have_no_truth_value():
    with pytest.raises(TypeError) as caught:
        causal() and window(before=3)
    assert str(caught.value) == "a mask has no truth value; combine masks with & | ~ instead of and, or, not"


DATA_OF_ANOTHER_SIZE = {
    "a length too many": (
        padding([3, 4, 5]),
        "padding([3, 4, 5]) has 3 lengths, but q has b=2 (batch); give one length per sequence",
    ),
    "an id too few": (
        documents([0] * 10),
        "documents([0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) covers n=10 (positions), but this call reaches position 10 with "
        "i=7 and j=11; give an id for every position",
    ),
    "a row of ids too many": (
        documents(torch.zeros(3, 11, dtype=torch.long)),
        "documents(<3 x 11>) has ids for 3 sequences, but q has b=2 (batch); give one row each",
    ),
}


@pytest.mark.parametrize("name", DATA_OF_ANOTHER_SIZE)
def test_lengths_and_ids_for_another_batch_are_explained(name):
    mask, text = DATA_OF_ANOTHER_SIZE[name]
    assert said(ShapeError, call, mask=mask) == text


REACHES = {
    "keys beyond": (Positions(4, torch.arange(2, 13)), 12),
    "one key beyond": (Positions(4, torch.tensor([0, 1, 2, 11, 4, 5, 6, 7, 8, 9, 10])), 11),
    "keys before": (Positions(4, torch.arange(-3, 8)), -3),
    "a run of keys beyond": (Positions(4, 3), 13),
    "a run of keys before": (Positions(4, -2), -2),
    "queries beyond": (Positions(9), 15),
    "queries before": (Positions(-2), -2),
}


@pytest.mark.parametrize("name", REACHES)
def test_positions_that_have_no_id_are_explained(name):
    positions, position = REACHES[name]
    text = said(ShapeError, call, mask=causal() & documents([0] * 11), positions=positions)
    assert text.startswith(
        f"documents([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) covers n=11 (positions), but this call reaches position "
        f"{position} with i=7 and j=11"
    )
    assert text == said(ShapeError, documents([0] * 11).dense, 7, 11, positions=positions)
    assert text == said(ShapeError, documents([0] * 11).count, 7, 11, positions=positions)


def test_key_positions_that_have_ids_are_fine():
    for keys in (torch.arange(11), torch.arange(10, -1, -1), torch.zeros(11, dtype=torch.int32)):
        assert call(mask=documents([0] * 11), positions=Positions(4, keys)).shape == (2, 6, 7, 9)


def test_the_check_reaches_into_a_combined_mask():
    assert "3 lengths, but q has b=2" in said(ShapeError, call, mask=causal() & ~padding([3, 4, 5]))


def test_padding_is_checked_where_it_is_made():
    for shape in ((2, 2), (0,), ()):
        text = said(ShapeError, padding, torch.ones(shape, dtype=torch.long))
        assert text == f"lengths must be one number per sequence (b,) and not empty, but have shape {shape}"
    for lengths in ([-3, 2], torch.tensor([4, -3])):
        text = said(ConfigError, padding, lengths)
        assert text == "padding(lengths) counts real keys, so -3 cannot be one of the lengths"
    assert said(DtypeError, padding, [1.5]) == "padding(lengths) takes whole numbers, not torch.float32"
    assert said(ConfigError, padding, [1], side="both") == "side must be 'right' or 'left', not 'both'"
    for settings in ({"side": "left"}, {"width": 4}):
        assert "side='left' and width= go together" in said(ConfigError, padding, [1], **settings)


@pytest.mark.parametrize("lengths", [[3, 5], [5], torch.tensor([2, 5, 4])], ids=str)
def test_a_width_that_cannot_hold_the_lengths_is_refused(lengths):
    text = said(ConfigError, padding, lengths, side="left", width=4)
    assert text == "padding(width) is 4, but a sequence has 5 real keys; they must fit in it"
    assert repr(padding(lengths, side="left", width=5)).endswith(", side='left', width=5)")


def test_documents_are_checked_where_they_are_made():
    for shape in ((1, 2, 3), (0,), ()):
        text = said(ShapeError, documents, torch.zeros(shape, dtype=torch.long))
        assert text == f"ids must be (n,) or (b, n) and not empty, but have shape {shape}"
    assert said(DtypeError, documents, torch.zeros(3)) == "documents(ids) takes whole numbers, not torch.float32"
    assert said(DtypeError, documents, [True]) == "documents(ids) takes whole numbers, not torch.bool"


@pytest.mark.parametrize("ids", [[[0, 1], [0]], [0, [1]], "001", [None], {"a": 0}], ids=str)
def test_ids_come_in_rows_of_one_length(ids):
    text = said(DtypeError, documents, ids)
    assert text == f"documents(ids) takes whole numbers in rows of one length, not {ids!r}"


MEANING_OF_BETA = "the inverse temperature: 0 for the mean of what is visible, inf for hard attention"


@pytest.mark.parametrize("beta", [math.nan, "sharp", True, 1j, [0.5]], ids=str)
def test_a_beta_that_is_no_number_is_refused(beta):
    text = f"beta is {beta!r}, but takes one real number, {MEANING_OF_BETA}"
    assert said(ConfigError, call, beta=beta) == text
    assert said(ConfigError, call, door=explain, beta=beta) == text
    assert said(ConfigError, softargmax, torch.zeros(3), beta) == text


@pytest.mark.parametrize("beta", [torch.tensor(0.5), torch.tensor(2), np.array(0.5)], ids=repr)
def test_a_beta_in_a_tensor_is_told_to_come_out(beta):
    text = f"beta is {beta!r}, but takes one real number, {MEANING_OF_BETA}; call .item() on it"
    assert said(ConfigError, call, beta=beta) == text
    assert said(ConfigError, softargmax, torch.zeros(3), beta) == text
    assert call(beta=beta.item()).shape == (2, 6, 7, 9)


def test_several_betas_are_refused():
    beta = torch.tensor([1.0, 2.0])
    text = f"beta is {beta!r}, but takes one real number, {MEANING_OF_BETA}"
    assert said(ConfigError, call, beta=beta).startswith(text)


def test_the_least_beta_is_refused():
    text = "beta is -inf, but takes a finite number or inf; to choose the smallest scores, negate q"
    assert said(ConfigError, call, beta=-math.inf) == text
    assert said(ConfigError, softargmax, torch.zeros(3), -math.inf) == text


def test_attend_chooses_a_beta_and_softargmax_does_not():
    assert call(beta=None).shape == (2, 6, 7, 9)
    assert said(ConfigError, softargmax, torch.zeros(3), None).startswith("beta is None, but takes one real number, ")


@pytest.mark.parametrize("dropout", [1.0, 1, 1.5, -0.1, math.inf, -math.inf])
def test_dropout_is_a_share(dropout):
    text = f"dropout is the probability of dropping a weight: at least 0, less than 1, not {dropout!r}"
    assert said(ConfigError, call, dropout=dropout) == text


@pytest.mark.parametrize("dropout", [math.nan, "none", None, True])
def test_dropout_is_a_number(dropout):
    text = f"dropout is {dropout!r}, but takes one real number, the probability of dropping a weight"
    assert said(ConfigError, call, dropout=dropout) == text


def test_dropout_in_a_tensor_is_told_to_come_out():
    text = said(ConfigError, call, dropout=torch.tensor(0.5))
    assert text == (
        "dropout is tensor(0.5000), but takes one real number, the probability of dropping a weight; call .item() on it"
    )


def test_softargmax_takes_floating_numbers():
    text = said(DtypeError, softargmax, torch.ones(3, dtype=torch.long))
    assert text == "scores are torch.int64; softargmax takes floating numbers, so call scores.float() first"


def test_an_unknown_kernel_gets_a_suggestion_or_the_list():
    assert said(UnknownNameError, call, kernel="eagr") == "unknown kernel 'eagr'; did you mean 'eager'?"
    text = said(UnknownNameError, call, kernel="quick")
    assert "did you mean" not in text
    assert all(name in text for name in ("flex", "sdpa", "blocked", "eager", "reference"))


@pytest.mark.parametrize("kernel", [3, ["sdpa"]])
def test_a_kernel_goes_by_its_name(kernel):
    text = said(ConfigError, call, kernel=kernel)
    assert text == f"kernel must be a name such as 'sdpa', or None to choose one, not {kernel!r}"


def test_a_kernel_that_refuses_lists_all_its_reasons():
    with pytest.raises(KernelRefusedError) as refusal:
        call(kernel="blocked", beta=math.inf, scores=softcap(3.0))
    assert refusal.value.kernel == "blocked"
    assert refusal.value.reasons == [
        "beta=inf is hard attention, and the fused kernels know only softmax",
        "softcap does more than add to the scores, which is all the fused kernels allow",
        "the mask hides nothing, so no block can be skipped",
    ]
    listed = "".join(f"\n  - {reason}" for reason in refusal.value.reasons)
    assert str(refusal.value) == f"kernel 'blocked' refuses this call:{listed}\nno other kernel can serve it either"


def test_a_kernel_that_refuses_says_which_would_run():
    text = said(KernelRefusedError, call, kernel="sdpa", scores=softcap(3.0))
    assert text == (
        "kernel 'sdpa' refuses this call:\n"
        "  - softcap does more than add to the scores, which is all the fused kernels allow\n"
        "kernel=None would run 'eager'"
    )


def test_the_kernel_that_would_run_is_the_one_that_is_chosen():
    sizes = {"q": (1, 2, 512, 8), "k": (1, 2, 512, 8), "v": (1, 2, 512, 8), "mask": causal() & window(before=7)}
    chosen = call(door=explain, **sizes).chosen
    assert chosen == "blocked", "no case that tells the chosen from the first that could run"
    assert said(KernelRefusedError, call, kernel="flex", **sizes).endswith("\nkernel=None would run 'blocked'")


@pytest.mark.parametrize(
    ("terms", "names"), [(alibi(heads=6), "alibi"), ([alibi(heads=6), softcap(2.0)], "alibi, softcap")]
)
def test_hard_attention_with_a_term_is_served_by_no_kernel(terms, names):
    reason = f"at beta=inf only the largest q . k counts, so {names} would be lost; drop the terms"
    with pytest.raises(KernelRefusedError) as refusal:
        call(beta=math.inf, scores=terms)
    assert refusal.value.kernel is None
    assert refusal.value.reasons == [reason]
    assert str(refusal.value) == f"no kernel can serve this call:\n  - {reason}"
    assert call(door=explain, beta=math.inf, scores=terms).chosen is None


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (alibi(heads=3), "alibi has h=3 (query heads), but q has h=6; make the term for 6 heads"),
        (sink(torch.zeros(3)), "sink has h=3 (query heads), but q has h=6; make the term for 6 heads"),
        (t5_buckets(torch.zeros(8, 3)), "t5_buckets has h=3 (query heads), but q has h=6; make the term for 6 heads"),
        (
            shaw(torch.zeros(5, 4)),
            "shaw keys have c=4 (width per head of q and k), but q has c=5; make the relative keys 5 wide",
        ),
    ],
)
def test_a_term_for_another_model_is_explained(term, text):
    assert said(ShapeError, call, scores=term) == text
    assert said(ShapeError, call, scores=[softcap(2.0), term]) == text, "only the first of several terms is checked"


SCORES_OF_ANOTHER_SIZE = {
    (7, 12): "scores have j=12 (key positions), but k has j=11; scores are (7, 12) read as (i j)",
    (3, 7, 11): "scores have h=3 (query heads), but q has h=6; scores are (3, 7, 11) read as (h i j)",
    (3, 1, 7, 11): "scores have b=3 (batch), but q has b=2; scores are (3, 1, 7, 11) read as (b h i j)",
    (11, 7): "scores have i=11 (query positions), but q has i=7; scores are (11, 7) read as (i j)",
}


@pytest.mark.parametrize("shape", SCORES_OF_ANOTHER_SIZE, ids=str)
def test_added_scores_have_to_broadcast(shape):
    text = said(ShapeError, call, scores=torch.zeros(shape))
    assert text.startswith(f"{SCORES_OF_ANOTHER_SIZE[shape]}; each axis must be 1 or that of (b h i j) = (2, 6, 7, 11)")


@pytest.mark.parametrize("shape", [(), (11,), (1, 2, 6, 7, 11)], ids=str)
def test_added_scores_have_two_to_four_axes(shape):
    text = said(ShapeError, call, scores=torch.zeros(shape))
    assert text.startswith(f"additive scores are {shape}, but are read as (i j), (h i j) or (b h i j)")


def test_one_row_of_added_scores_is_told_how_to_become_a_matrix():
    assert said(ShapeError, call, scores=torch.zeros(11)).endswith("; for one row of keys write scores[None]")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_added_scores_of_whole_numbers_are_refused(dtype):
    text = said(DtypeError, call, scores=torch.zeros(7, 11, dtype=dtype))
    assert text == f"additive scores are {dtype}, but scores are floating numbers; call .float() first"


def test_a_boolean_matrix_is_sent_from_scores_to_mask():
    text = said(DtypeError, call, scores=visible(7, 11))
    assert text == "additive scores are boolean; a boolean matrix goes in mask=, True meaning visible"


def test_a_list_of_numbers_is_no_tensor_to_add():
    text = said(DtypeError, additive, [[1.0]])
    assert text == "additive takes a floating tensor, not list; make it one with torch.tensor(...)"


def test_added_scores_on_another_device_are_refused():
    text = said(ValueError, call, scores=torch.zeros(7, 11, device="meta"))
    assert text == "additive scores lie on meta, but q on cpu; move them with .to(q.device)"


@pytest.mark.parametrize("scores", ["alibi", alibi, 1.0, [alibi(heads=6), 3.0]])
def test_what_is_no_term_is_refused(scores):
    wrong = scores[1] if isinstance(scores, list) else scores
    text = said(DtypeError, call, scores=scores)
    assert text == f"scores takes terms such as alibi(heads=8) or a tensor to add, not {type(wrong).__name__}"


@pytest.mark.parametrize(
    ("kind", "make", "part"),
    [
        (ConfigError, lambda: alibi(), "alibi takes either heads= (the paper's slopes) or slopes= (your own)"),
        (ConfigError, lambda: alibi(3, slopes=torch.zeros(3)), "one of the two"),
        (ShapeError, lambda: alibi(slopes=torch.zeros(3, 3)), "(3, 3)"),
        (DtypeError, lambda: alibi(slopes=[0.5]), "alibi(slopes) takes a floating tensor, not list"),
        (DtypeError, lambda: sink(torch.ones(3, dtype=torch.long)), "sink(logits) takes a floating tensor, not torch"),
        (ShapeError, lambda: sink(torch.zeros(3, 1)), "(3, 1)"),
        (ConfigError, lambda: t5_buckets(torch.zeros(7, 6)), "an even number of buckets, not 7; try 8"),
        (ConfigError, lambda: t5_buckets(torch.zeros(2, 6)), "at least 2 buckets a side, not 1; make the table longer"),
        (
            ConfigError,
            lambda: t5_buckets(TABLE, max_distance=2),
            "t5_buckets has 2 near buckets a side, so max_distance=2 is too short; use at least 3",
        ),
        (
            ConfigError,
            lambda: t5_buckets(TABLE, max_distance=4, bidirectional=False),
            "t5_buckets has 4 near buckets, so max_distance=4 is too short; use at least 5",
        ),
        (ShapeError, lambda: t5_buckets(torch.zeros(8)), "(8,)"),
        (
            ConfigError,
            lambda: shaw(torch.zeros(4, 5)),
            "an odd number of relative keys (-max_distance .. max_distance), not 4",
        ),
        (ShapeError, lambda: shaw(torch.zeros(5)), "(5,)"),
        (ConfigError, lambda: softcap(0.0), "softcap(0.0) needs a positive finite cap"),
        (ConfigError, lambda: softcap(math.inf), "softcap(inf) needs a positive finite cap"),
        (ConfigError, lambda: softcap(-1.5), "softcap(-1.5) needs a positive finite cap"),
        (ConfigError, lambda: softcap("1"), "softcap(cap) is '1', but takes one real number"),
        (ConfigError, lambda: softcap(True), "softcap(cap) is True, but takes one real number"),
        (ConfigError, lambda: softcap(math.nan), "softcap(cap) is nan, but takes one real number"),
        (
            ConfigError,
            lambda: softcap(torch.tensor(2.0)),
            "tensor(2.), but takes one real number; call .item() on it",
        ),
    ],
)
def test_a_term_is_checked_where_it_is_made(kind, make, part):
    assert part in said(kind, make)


def test_the_shortest_reaches_and_the_smallest_counts_are_fine():
    assert t5_buckets(TABLE, max_distance=3).max_distance == 3
    assert t5_buckets(TABLE, max_distance=5, bidirectional=False).max_distance == 5
    assert len(alibi(1).slopes) == 1
    assert repr(window(0)) == "window(before=0)"
    assert repr(random_links(0, seed=0)) == "random_links(0, seed=0)"
    assert repr(prefix(0) | global_tokens(0)) == "prefix(0) | global_tokens(0)"
    assert repr(chunks(1) & dilated(1)) == "blocks(1) & dilated(1)"
    assert repr(padding([0], side="left", width=0)) == "padding([0], side='left', width=0)"


@pytest.mark.parametrize("size", [0, 1, 10, 12])
def test_key_positions_have_to_be_as_many_as_keys(size):
    text = said(ShapeError, call, positions=Positions(4, torch.arange(size)))
    assert text == f"positions.keys is ({size},), but k has j=11 (key positions); give one position per key"


@pytest.mark.parametrize("value", [4.0, True, "4", None, torch.tensor(4), torch.arange(4)], ids=repr)
def test_the_first_query_stands_at_a_whole_number(value):
    assert (
        said(ConfigError, Positions, value)
        == f"Positions.queries takes the first query's position, a whole number, not {value!r}"
    )


@pytest.mark.parametrize("value", [4.0, True, "4", None, [0, 1], np.arange(3)], ids=repr)
def test_keys_stand_at_whole_numbers(value):
    text = said(ConfigError, Positions, 0, value)
    assert text.startswith("Positions.keys takes ")
    assert f", not {value!r}" in text


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (11,)),
        (torch.bool, (11,)),
        (torch.complex64, (11,)),
        (torch.int64, (2, 11)),
        (torch.int64, ()),
        (torch.float32, ()),
    ],
    ids=str,
)
def test_every_key_stands_at_a_whole_number(dtype, shape):
    text = said(ConfigError, Positions, 0, torch.zeros(shape, dtype=dtype))
    assert text == (
        f"Positions.keys is {dtype} of shape {shape}, but takes the first key's position, a whole number, "
        "or a row of whole numbers, one for each key"
    )


def test_places_may_lie_before_the_beginning():
    assert Positions(-3, -2) == Positions(queries=-3, keys=-2)
    assert call(mask=causal(), positions=Positions(-3, -9)).shape == (2, 6, 7, 9)
    for dtype in (torch.int64, torch.int32):
        assert call(mask=causal(), positions=Positions(4, torch.arange(11, dtype=dtype))).shape == (2, 6, 7, 9)


@pytest.mark.parametrize("positions", [4, (4, 0), "last"])
def test_what_is_no_places_is_refused(positions):
    text = said(ConfigError, call, positions=positions)
    assert text == f"positions must be regard.Positions(queries, keys), not {positions!r}; cache.extend returns them"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_refused(layout):
    x = torch.randn(2, 3, 5, 4)
    nested = torch.nested.nested_tensor([torch.randn(3, 5, 4), torch.randn(2, 5, 4)], layout=layout)
    for tensors in ((nested, x, x), (x, nested, x), (x, x, nested)):
        with pytest.raises(DtypeError, match=r"is a nested tensor; call [qkv].to_padded_tensor\(0\)"):
            attend(*tensors)
