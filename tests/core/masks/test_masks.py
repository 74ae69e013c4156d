"""What each mask means, on matrices written by hand, and how masks stand, read, compare and simplify."""

import operator
from functools import reduce
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import regard
from regard import (
    Mask,
    Positions,
    blocks,
    causal,
    chunks,
    dilated,
    documents,
    full,
    global_tokens,
    padding,
    prefix,
    random_links,
    window,
)
from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.core.absolute_positions import Grid, whole_grid
from regard.core.masks import as_mask
from regard.core.masks.algebra import FAR, NOTHING, And, Not, Or
from regard.core.masks.data import DenseMask
from regard.core.masks.forms.global_tokens import FirstRows
from regard.core.masks.forms.random_links import RandomLinks

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


def picture(rows: str) -> Tensor:
    """A matrix as it is drawn: x is visible, a dot is not."""
    return torch.tensor([[cell == "x" for cell in row] for row in rows.split()])


def same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == torch.bool and actual.shape == expected.shape and torch.equal(actual, expected)


MEANINGS = {
    "full": (full(), "xxxxx xxxxx xxxxx xxxxx xxxxx"),
    "causal": (causal(), "x.... xx... xxx.. xxxx. xxxxx"),
    "nobody but itself": (window(), "x.... .x... ..x.. ...x. ....x"),
    "two before": (window(before=2), "x...... xx..... xxx.... .xxx... ..xxx.. ...xxx. ....xxx"),
    "one after": (window(after=1), "xx... .xx.. ..xx. ...xx ....x"),
    "two before, one after": (window(before=2, after=1), "xx.... xxx... xxxx.. .xxxx. ..xxxx ...xxx"),
    "all before, one after": (window(before=None, after=1), "xx... xxx.. xxxx. xxxxx xxxxx"),
    "one before, all after": (window(before=1, after=None), "xxxxx xxxxx .xxxx ..xxx ...xx"),
    "no limit": (window(before=None, after=None), "xxx xxx xxx"),
    "every third, from itself": (dilated(3), "x..x..x .x..x.. ..x..x. x..x..x .x..x.. ..x..x. x..x..x"),
    "every key": (dilated(1), "xxx xxx xxx"),
    "own block": (blocks(3), "xxx.... xxx.... xxx.... ...xxx. ...xxx. ...xxx. ......x"),
    "own chunk and one before": (
        chunks(3, before=1),
        "xxx..... xxx..... xxx..... xxxxxx.. xxxxxx.. xxxxxx.. ...xxxxx ...xxxxx",
    ),
    "own chunk and one after": (chunks(2, after=1), "xxxx... xxxx... ..xxxx. ..xxxx. ....xxx ....xxx ......x"),
    "one chunk each way": (
        chunks(2, before=1, after=1),
        "xxxx... xxxx... xxxxxx. xxxxxx. ..xxxxx ..xxxxx ....xxx",
    ),
    "all chunks before": (chunks(3, before=None), "xxx.... xxx.... xxx.... xxxxxx. xxxxxx. xxxxxx. xxxxxxx"),
    "all chunks after": (chunks(3, after=None), "xxxxxxx xxxxxxx xxxxxxx ...xxxx ...xxxx ...xxxx ......x"),
    "two that see all and are seen by all": (global_tokens(2), "xxxxx xxxxx xx... xx... xx..."),
    "two that are seen by all": (prefix(2), "xx... xx... xx... xx... xx..."),
    "nothing": (prefix(0), "... ... ..."),
    "nothing either": (global_tokens(0), "... ... ..."),
    "documents": (documents([4, 4, 4, 1, 1]), "xxx.. xxx.. xxx.. ...xx ...xx"),
    "a document that comes again": (documents([7, 7, -2, 7, -2]), "xx.x. xx.x. ..x.x xx.x. ..x.x"),
    "not": (~causal(), ".xxxx ..xxx ...xx ....x ....."),
    "and": (causal() & window(before=1), "x.... xx... .xx.. ..xx. ...xx"),
    "or": (window(before=1) | prefix(2), "xx... xx... xxx.. xxxx. xx.xx"),
    "attention sinks": (causal() & (window(before=1) | prefix(1)), "x.... xx... xxx.. x.xx. x..xx"),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_mask_shows_what_it_says(name):
    mask, rows = MEANINGS[name]
    expected = picture(rows)
    assert same(mask.dense(len(expected)), expected)


def test_padding_on_the_right_shows_the_first_keys_of_each_sequence():
    shown = padding([3, 0, 5]).dense(2, 5)
    assert shown.shape == (3, 1, 2, 5)
    assert same(shown[:, 0, 0], picture("xxx.. ..... xxxxx"))
    assert same(shown[:, 0, 1], shown[:, 0, 0])


def test_padding_on_the_left_shows_the_last_keys_and_all_that_are_appended():
    shown = padding([3, 0, 5], side="left", width=5).dense(2, 7)
    assert shown.shape == (3, 1, 2, 7)
    assert same(shown[:, 0, 0], picture("..xxxxx .....xx xxxxxxx"))
    assert same(shown[:, 0, 1], shown[:, 0, 0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_lengths_and_ids_may_be_narrow_numbers(dtype):
    lengths = torch.tensor([100, 3], dtype=dtype)
    right, left = padding(lengths), padding(lengths, side="left", width=301)
    assert right.dense(1, 301).sum((1, 2, 3)).tolist() == [100, 3]
    assert left.dense(1, 301).sum((1, 2, 3)).tolist() == [100, 3]
    assert left.count(1, 301) == right.count(1, 301) == 103
    assert left.block_table(1, 301, 43).state[:, 0].tolist() == [[0, 0, 0, 0, 1, 2, 2], [0] * 6 + [1]]
    assert same(documents(torch.tensor([9, 9, 100], dtype=dtype)).dense(3), picture("xx. xx. ..x"))


def test_documents_of_a_batch_stay_apart_in_each_sequence():
    shown = documents([[0, 0, 1, 1, 1], [5, 3, 3, 3, 5]]).dense(5)
    assert shown.shape == (2, 1, 5, 5)
    assert same(shown[0, 0], picture("xx... xx... ..xxx ..xxx ..xxx"))
    assert same(shown[1, 0], picture("x...x .xxx. .xxx. .xxx. x...x"))


def test_masks_for_different_sequences_combine():
    shown = (padding([2, 5]) & documents([[0, 0, 1, 1, 1], [5, 3, 3, 3, 5]]) & causal()).dense(5)
    assert same(shown[0, 0], picture("x.... xx... ..... ..... ....."))
    assert same(shown[1, 0], picture("x.... .x... .xx.. .xxx. x...x"))


@pytest.mark.parametrize("other", [padding([3, 2]), documents([[0, 1, 1], [0, 0, 0]])])
@pytest.mark.parametrize("look", [lambda mask: mask.dense(3), lambda mask: mask.count(3), lambda mask: mask.draw(3)])
def test_parts_made_for_different_batches_are_refused(other, look):
    for mask in (padding([3]) & other, other | padding([1, 2, 3]), causal() & ~(other | padding([1, 2, 3]))):
        with pytest.raises(ShapeError):
            look(mask)


def test_random_links_show_so_many_keys_of_the_past_and_itself():
    for count in (1, 3, 4, 7):
        shown = random_links(count, seed=5).dense(31)
        assert shown.sum(1).tolist() == [min(count, row + 1) for row in range(31)]
        assert not shown.triu(1).any()


def test_random_links_take_one_key_from_each_equal_stretch_of_the_past():
    shown = random_links(3).dense(29)
    for row in range(2, 29):
        edges = [(row + 1) * part // 3 for part in range(4)]
        assert [int(shown[row, low:high].sum()) for low, high in pairwise(edges)] == [1, 1, 1]


def test_random_links_fall_anywhere_in_their_stretch():
    i = torch.arange(300, 2300)
    key, exists = random_links(5, seed=3).link(i, 2)
    low, high = (i + 1) * 2 // 5, (i + 1) * 3 // 5
    share = (key - low) / (high - low)
    assert exists.all()
    assert share.min() >= 0
    assert share.max() < 1
    tenths = torch.histc(share, 10, 0, 1)
    chi_square = ((tenths - 200) ** 2 / 200).sum().item()
    assert chi_square < 27.9  # what chance exceeds once in a thousand draws


def test_random_links_are_the_same_for_every_length_and_offset():
    mask = random_links(3, seed=2)
    whole = mask.dense(37)
    for n in (1, 2, 9, 23):
        assert same(mask.dense(n), whole[:n, :n])
    assert same(mask.dense(5, 7, positions=Positions(29, 11)), whole[29:34, 11:18])
    assert same(
        mask.dense(5, positions=Positions(29, torch.tensor([31, 2, 30, 17, 0]))), whole[29:34, [31, 2, 30, 17, 0]]
    )


def test_random_links_of_another_seed_are_others():
    drawn = [random_links(2, seed=seed).dense(41) for seed in range(5)]
    for which, one in enumerate(drawn):
        for other in drawn[:which]:
            assert (one & other).sum() < 41


def test_random_links_never_change():
    """A model trained with them has to find them again, with every version and on every machine."""
    expected = picture("x........ xx....... xx....... x..x..... .x..x.... .x.x..... .x....x.. ...xx.... ..x..x...")
    assert same(random_links(2, seed=11).dense(9), expected)


def test_no_random_links_show_nothing():
    assert same(random_links(0).dense(3), picture("... ... ..."))


def test_before_the_first_position_there_is_no_past_to_link_to():
    assert random_links(2).dense(5, 3)[:2].sum() == 0


def test_a_rule_of_ones_own_is_asked_with_absolute_positions():
    asked = []

    def both_odd(i, j):
        asked.append((i.flatten().tolist(), j.flatten().tolist(), i.dtype, j.dtype))
        return (i % 2 == 1) & (j % 2 == 1)

    mask = Mask.of("both odd", both_odd)
    assert same(mask.dense(4), picture(".... .x.x .... .x.x"))
    assert same(mask.dense(2, 3, positions=Positions(3, 5)), picture("x.x ..."))
    assert asked[-1] == ([3, 4], [5, 6, 7], torch.long, torch.long)


@pytest.mark.parametrize("wrong", [lambda i, j: (i == j).float(), lambda i, j: i - j, lambda i, j: True])
def test_a_rule_of_ones_own_gives_booleans(wrong):
    with pytest.raises(ConfigError, match=r"Mask.of\('wrong'\) must return a boolean tensor"):
        Mask.of("wrong", wrong).dense(3)


def test_a_rule_of_ones_own_may_ignore_queries_or_keys():
    assert same(Mask.of("late rows", lambda i, j: i > 2).dense(2, 4), picture(".... xxxx"))
    assert same(Mask.of("late keys", lambda i, j: j > 2).dense(2, 4), picture("...x ...x"))


def test_a_rule_of_ones_own_combines_with_the_others():
    odd = Mask.of("odd", lambda i, j: j % 2 == 1)
    assert same((causal() & ~odd).dense(4), picture("x... x... x.x. x.x."))


@pytest.mark.parametrize(
    "shape", [(3, 5), (1, 3, 5), (7, 3, 5), (1, 1, 3, 5), (2, 1, 3, 5), (1, 7, 3, 5), (2, 7, 3, 5)]
)
def test_a_boolean_matrix_is_a_mask_of_its_own_shape(shape):
    data = torch.rand(shape) < 0.4
    mask = as_mask(data)
    b, h = (1, 1, *shape[:-2])[-2:]
    assert isinstance(mask, DenseMask)
    assert same(mask.dense(3, 5), data)
    assert (mask.batch(), mask.heads()) == (b if b > 1 else None, h if h > 1 else None)
    assert mask.opaque()
    # any other grid than the whole picks pairs one by one
    whole = whole_grid(Positions(2), b, h, 3, 5)
    picked = mask.see(Grid(whole.batch, whole.head, whole.row, whole.column, whole.i, whole.j))
    assert torch.equal(picked.expand(b, h, 3, 5), data.expand(b, h, 3, 5))


def test_a_boolean_matrix_goes_by_row_and_column_not_by_position():
    data = picture("x..x xx..")
    assert same(as_mask(data).dense(2, 4, positions=Positions(17, torch.tensor([5, 3, 90, 2]))), data)


def test_a_boolean_matrix_combines_with_rules_from_either_side():
    data = picture("x.x xx. xxx")
    assert same((causal() & data).dense(3), picture("x.. xx. xxx"))
    assert same((data & causal()).dense(3), picture("x.. xx. xxx"))
    assert same((window() | data).dense(3), picture("x.x xx. xxx"))
    assert same((data | window(after=1)).dense(3), picture("xxx xxx xxx"))
    assert same((~(causal() & data)).dense(3), picture(".xx ..x ..."))


def test_nothing_given_is_everything_seen():
    assert as_mask(None) == full()
    assert as_mask(causal()) == causal()


@pytest.mark.parametrize("other", [3, "causal", torch.ones(3, 3), torch.ones(3, 3).long()])
def test_what_is_neither_mask_nor_boolean_is_no_mask(other):
    with pytest.raises(DtypeError):
        as_mask(other)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1, 3, 3)])
def test_a_boolean_matrix_has_two_to_four_axes(shape):
    with pytest.raises(ShapeError):
        as_mask(torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("other", [3, "causal", None])
def test_a_mask_combines_with_masks_and_matrices_only(other):
    for combine in (operator.and_, operator.or_):
        with pytest.raises((DtypeError, TypeError)):
            combine(causal(), other)


@pytest.mark.parametrize(("shape", "fits"), [((2, 1, 3, 5), True), ((1, 6, 3, 5), True), ((2, 6, 3, 5), True)])
def test_a_boolean_matrix_is_checked_against_the_call(shape, fits):
    mask = as_mask(torch.ones(shape, dtype=torch.bool))
    mask.check(Positions(2), 3, 5, 2, 6)
    for i, j, b, h in ((4, 5, 2, 6), (3, 6, 2, 6), (5, 3, 2, 6), (3, 5, 3, 6) if shape[0] > 1 else (3, 5, 2, 5)):
        with pytest.raises(ShapeError):
            mask.check(Positions(2), i, j, b, h)


RULES = [mask for mask, _ in MEANINGS.values()] + [random_links(2), random_links(3, seed=4)]
N = 7
DATA = [
    documents([3, 3, 0, 3, 1, 1, 0]),
    documents([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 0, 0, 5, 5]]),
    padding([5, 2]),
    padding([5, 2], side="left", width=6),
    padding([5, 2]) & causal() | ~documents([3, 3, 0, 3, 1, 1, 0]),
]
ANY = [mask for mask in RULES if not mask.tensors()] + DATA + [Mask.of("i + j", lambda i, j: (i + j) % 3 == 1)]


@pytest.mark.parametrize("mask", ANY, ids=repr)
def test_queries_are_the_last_rows(mask):
    whole = mask.dense(N)
    for rows in (0, 1, 2, 5):
        assert same(mask.dense(rows, N), whole[..., N - rows :, :])


@pytest.mark.parametrize("mask", ANY, ids=repr)
def test_places_put_queries_and_keys_anywhere(mask):
    whole = mask.dense(N)
    order = torch.tensor([6, 1, 4, 4, 0])
    assert same(mask.dense(2, 3, positions=Positions(4, 2)), whole[..., 4:6, 2:5])
    assert same(mask.dense(4, 3, positions=Positions(1, 4)), whole[..., 1:5, 4:7])
    assert same(mask.dense(3, 5, positions=Positions(3, order)), whole[..., 3:6, :][..., order])
    assert same(mask.dense(3, positions=Positions(3)), whole[..., 3:6, :3])


@pytest.mark.parametrize("mask", [mask for mask in ANY if not any(map(len, mask.tensors()))], ids=repr)
def test_more_queries_than_keys_begin_before_the_first_position(mask):
    shown = mask.dense(5, 3)
    assert shown.shape == (5, 3)
    assert same(shown[2:], mask.dense(3))


def test_causal_queries_before_the_first_position_are_blind():
    assert same(causal().dense(5, 3), picture("... ... x.. xx. xxx"))


@pytest.mark.parametrize("look", [Mask.dense, Mask.count, Mask.block_table, Mask.draw])
@pytest.mark.parametrize(("queries", "keys"), [(-1, None), (2, -3)])
def test_lengths_are_not_negative(look, queries, keys):
    with pytest.raises(ConfigError, match=f"is {queries if keys is None else keys}, but must be at least 0"):
        look(causal(), queries, keys)


def test_the_matrix_may_be_made_elsewhere():
    assert (causal() & padding([2, 1])).dense(3, device="meta").device == ELSEWHERE
    assert causal().dense(3).device == CPU


def test_documents_cover_every_position_that_is_asked_for():
    mask = documents([0, 0, 1, 1, 1])
    assert mask.dense(5).shape == (5, 5)
    assert mask.dense(0, 5).shape == (0, 5)
    for positions, i, j in ((Positions(0), 6, 5), (Positions(4), 2, 3), (Positions(0, 3), 2, 3), (Positions(-1), 2, 3)):
        with pytest.raises(ShapeError, match="covers n=5"):
            mask.dense(i, j, positions=positions)
    with pytest.raises(ShapeError, match="reaches position 9"):
        mask.dense(1, 3, positions=Positions(0, torch.tensor([1, 9, 2])))


def test_data_is_checked_against_the_batch():
    for mask in (padding([3, 4]), documents(torch.zeros(2, 5, dtype=torch.long)), causal() & ~padding([1, 2])):
        mask.check(Positions(0), 5, 5, 2, 3)
        with pytest.raises(ShapeError, match="b=3"):
            mask.check(Positions(0), 5, 5, 3, 3)
    documents([0, 0, 1]).check(Positions(0), 3, 3, 7, 3)


@pytest.mark.parametrize("lengths", [[], [[1, 2]], 3])
def test_padding_takes_one_length_per_sequence(lengths):
    with pytest.raises(ShapeError):
        padding(lengths)


def test_padding_takes_lengths_that_count():
    for lengths in ([3, -1], torch.tensor([-2])):
        with pytest.raises(ConfigError):
            padding(lengths)
    for lengths in ([1.5], [True], [1j], ["a"]):
        with pytest.raises(DtypeError):
            padding(lengths)


def test_a_sequence_padded_on_the_left_fits_into_the_width():
    padding([5, 2], side="left", width=5)
    with pytest.raises(ConfigError):
        padding([5, 2], side="left", width=4)


def test_padding_knows_two_sides_and_the_width_of_the_left_one():
    for wrong in ({"side": "both"}, {"side": "left"}, {"width": 7}, {"side": "right", "width": 7}):
        with pytest.raises(ConfigError):
            padding([1, 2], **wrong)


@pytest.mark.parametrize("ids", [[], torch.zeros(2, 2, 2, dtype=torch.long), 5])
def test_documents_take_ids_for_one_sequence_or_a_batch(ids):
    with pytest.raises(ShapeError):
        documents(ids)


WRITTEN = [
    "full()",
    "causal()",
    "window(before=3)",
    "window(before=3, after=2)",
    "window(before=0, after=2)",
    "window(before=None)",
    "window(before=2, after=None)",
    "dilated(3)",
    "blocks(5)",
    "chunks(5, before=1, after=0)",
    "chunks(5, before=None, after=2)",
    "global_tokens(2)",
    "prefix(2)",
    "random_links(3, seed=7)",
    "padding([3, 5])",
    "padding([3, 5], side='left', width=7)",
    "documents([0, 0, 1])",
    "documents([[0, 0, 1], [2, 1, 1]])",
    "~causal()",
    "causal() & window(before=3)",
    "causal() & window(before=3) & prefix(2)",
    "causal() | window(before=3) | prefix(2)",
    "causal() & window(before=3) | global_tokens(2)",
    "global_tokens(2) | causal() & window(before=3)",
    "causal() & (window(before=3) | global_tokens(2))",
    "(causal() | prefix(1)) & (blocks(2) | prefix(3))",
    "~(causal() & window(before=3))",
    "~(causal() | prefix(2)) & blocks(3)",
    "~(~causal() | prefix(2)) | ~blocks(3)",
    "causal() & ~(blocks(3) & (prefix(1) | prefix(2)))",
    "padding([3, 5]) & causal() | ~documents([0, 0, 1])",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_mask_reads_as_the_expression_that_makes_it(text):
    mask = eval(text, vars(regard))
    assert repr(mask) == text
    assert eval(repr(mask), vars(regard)) == mask


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (window(3), "window(before=3)"),
        (window(3, 0), "window(before=3)"),
        (chunks(5), "blocks(5)"),
        (chunks(5, 1), "chunks(5, before=1, after=0)"),
        (random_links(3), "random_links(3, seed=0)"),
        ((causal() & prefix(1)) & (blocks(2) & prefix(3)), "causal() & prefix(1) & blocks(2) & prefix(3)"),
        (~~causal(), "causal()"),
        (NOTHING, "~full()"),
        (documents(torch.zeros(13, dtype=torch.long)), "documents(<13>)"),
        (documents(torch.zeros(2, 7, dtype=torch.long)), "documents(<2 x 7>)"),
        (padding([1] * 13), "padding(<13>)"),
        (as_mask(torch.ones(2, 1, 3, 5, dtype=torch.bool)), "matrix(2, 1, 3, 5)"),
        (Mask.of("near", lambda i, j: i == j), "Mask.of('near')"),
        (global_tokens(3).within(2, 5, 3, 5), "first_rows(3)"),
    ],
)
def test_a_mask_reads_in_its_shortest_form(mask, text):
    assert repr(mask) == text


def test_masks_are_equal_by_structure():
    assert window(before=3) == window(3, 0)
    assert blocks(4) == chunks(4)
    assert causal() & window(2) | prefix(1) == (causal() & window(2)) | prefix(1)
    different = [
        full(), causal(), window(before=4), window(after=4), window(before=4, after=1), chunks(4), chunks(4, before=1),
        prefix(4), global_tokens(4), dilated(4), random_links(4), random_links(4, seed=1), causal() & prefix(4),
        prefix(4) & causal(), causal() | prefix(4), ~prefix(4), padding([4]), padding([5]), padding([4, 4]),
        padding([4], side="left", width=9), padding([4], side="left", width=8), documents([4]), documents([[4]]),
    ]  # fmt: skip
    assert [mask for which, mask in enumerate(different) if mask in different[:which]] == []
    assert len(set(different)) == len(different)


def test_equal_masks_have_one_hash():
    def make():
        return (
            causal() & window(3) | ~prefix(2),
            padding([3, 5]) & causal(),
            documents([[0, 1], [1, 1]]),
            padding([3], side="left", width=5),
            as_mask(picture("x. xx")),
        )

    for one, other in zip(make(), make(), strict=True):
        assert one == other
        assert hash(one) == hash(other)
        assert one is not other


def test_masks_of_data_are_equal_by_content():
    lengths = torch.tensor([3, 5])
    assert padding(lengths) == padding(lengths) == padding([3, 5])
    assert padding(lengths) == padding(lengths.int())
    assert padding([3, 5]) != padding([5, 3])
    assert padding([3, 5]) != documents([3, 5])
    assert documents([[0, 1]]) != documents([0, 1])
    assert padding([3]) != "padding([3])"
    assert as_mask(picture("x. xx")) == as_mask(picture("x. xx")) != as_mask(picture("x. x."))


def test_rules_of_ones_own_are_equal_by_name_and_function():
    def near(i, j):
        return i == j

    assert Mask.of("near", near) == Mask.of("near", near)
    assert Mask.of("near", near) != Mask.of("close", near)
    assert Mask.of("near", near) != Mask.of("near", lambda i, j: i == j)


def test_not_not_is_the_mask_itself():
    for mask in (causal(), ~causal(), causal() & prefix(2), padding([3])):
        assert ~~mask == mask
    inner = padding([3])
    assert ~~inner is inner


def test_and_and_or_are_flat_whatever_the_brackets():
    a, b, c, d = causal(), window(3), prefix(2), blocks(3)
    for combine, kind in ((operator.and_, And), (operator.or_, Or)):
        left = reduce(combine, (a, b, c, d))
        right = combine(a, combine(b, combine(c, d)))
        pairs = combine(combine(a, b), combine(c, d))
        assert left == right == pairs == kind((a, b, c, d))
    assert (a & b | c).parts == (a & b, c)
    assert ((a | b) & c).parts == (a | b, c)


def test_a_mask_has_no_truth_value():
    for ask in (bool, operator.not_, lambda mask: mask and mask, lambda mask: 1 if mask else 2):
        with pytest.raises(TypeError, match=r"combine masks with & \| ~ instead"):
            ask(causal())


def test_what_is_no_function_is_no_rule():
    with pytest.raises(ConfigError):
        Mask.of("near", 3)


BOXES = [(first, last) for first in range(5) for last in range(first, 5)]


@pytest.mark.parametrize("mask", [mask for mask in ANY if not mask.batch()], ids=repr)
def test_within_agrees_on_every_box(mask):
    whole = mask.dense(N)
    for first, last in BOXES:
        for start, stop in BOXES:
            simpler = mask.within(first, last, start, stop)
            box = simpler.dense(last - first + 1, stop - start + 1, positions=Positions(first, start))
            assert torch.equal(box, whole[first : last + 1, start : stop + 1]), (simpler, first, last, start, stop)


@pytest.mark.parametrize(
    ("mask", "box", "simpler"),
    [
        (causal(), (5, 7, 0, 5), full()),
        (causal(), (5, 7, 0, 6), causal()),
        (causal(), (0, 3, 4, 9), NOTHING),
        (~causal(), (5, 7, 0, 5), NOTHING),
        (~causal(), (0, 3, 4, 9), full()),
        (window(before=3), (8, 9, 0, 4), NOTHING),
        (window(before=3), (3, 9, 0, 9), window(before=3)),
        (causal() & window(9, None), (0, 5, 0, 5), causal()),
        (causal() & window(9, None) & prefix(6), (0, 5, 0, 6), causal() & prefix(6)),
        (causal() & window(before=2), (6, 9, 0, 3), NOTHING),
        (causal() & window(before=9), (5, 6, 0, 5), full()),
        (causal() & window(before=9) & padding([2]), (5, 6, 0, 5), padding([2])),
        (window(before=2) | prefix(3), (6, 9, 0, 2), full()),
        (window(before=2) | prefix(3), (6, 9, 3, 9), window(before=2)),
        (window(before=2) | prefix(3), (9, 9, 3, 6), NOTHING),
        (window(before=2) | prefix(3) | dilated(2), (6, 9, 3, 9), window(before=2) | dilated(2)),
        (~(causal() & window(9, None)), (0, 5, 0, 5), ~causal()),
        (~(~causal() & window(None, 9)), (0, 5, 0, 5), causal()),
        (global_tokens(2), (0, 1, 0, 9), full()),
        (global_tokens(2), (3, 5, 0, 9), prefix(2)),
        (global_tokens(2), (1, 5, 2, 9), FirstRows(2)),
        (global_tokens(2), (1, 5, 0, 9), global_tokens(2)),
        (global_tokens(2), (2, 5, 2, 9), NOTHING),
        (dilated(4), (8, 9, 6, 7), NOTHING),
        (dilated(4), (8, 9, 5, 7), dilated(4)),
        (dilated(1), (0, 9, 0, 9), full()),
        (random_links(2), (3, 5, 6, 9), NOTHING),
        (blocks(4), (4, 6, 4, 7), full()),
        (blocks(4), (4, 7, 0, 3), NOTHING),
        (window(None, None), (0, 9, 0, 9), full()),
    ],
)
def test_within_keeps_only_the_parts_that_matter(mask, box, simpler):
    assert mask.within(*box) == simpler


EXACT = [
    full(), causal(), window(before=2), window(after=3), window(before=1, after=2), window(None, 2), window(2, None),
    blocks(3), chunks(2, before=1), chunks(2, before=None, after=1), chunks(3, after=None), prefix(3), prefix(0),
    FirstRows(3), global_tokens(2), ~causal(), ~window(before=2), causal() & prefix(3), causal() | prefix(3),
]  # fmt: skip


@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_a_box_is_judged_exactly_where_one_run_of_keys_is_seen(mask):
    whole = mask.dense(N)
    for first, last in BOXES:
        for start, stop in BOXES:
            verdict = mask.box(first, last, start, stop)
            seen = whole[first : last + 1, start : stop + 1]
            expected = (not seen.any(), bool(seen.all()))
            if not isinstance(mask, And | Or) and mask != global_tokens(2):
                assert verdict == expected, (first, last, start, stop)
            assert verdict.none <= expected[0]
            assert verdict.all <= expected[1]


def test_a_box_of_dilated_keys_is_empty_between_two_of_them():
    for step in (2, 3, 5):
        whole = dilated(step).dense(N)
        for first, last in BOXES:
            for start, stop in BOXES:
                seen = whole[first : last + 1, start : stop + 1]
                assert dilated(step).box(first, last, start, stop) == (not seen.any(), False)


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (causal(), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (window(before=2), [4, 5, 6, 7, 8]),
        (window(after=2), [6, 7, 8]),
        (prefix(3), [0, 1, 2]),
        (global_tokens(1), [0]),
        (chunks(4, before=1), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (blocks(4), [4, 5, 6, 7, 8]),
        (causal() & (window(before=1) | prefix(1)), [0, 5, 6, 7, 8]),
        (~causal(), [7, 8]),
        (documents([0] * 9), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (FirstRows(6), []),
    ],
    ids=repr,
)
def test_a_box_reaches_to_the_end_of_time(mask, keys):
    """What queries from position 6 on may see of nine keys, each asked about alone."""
    at = torch.arange(9)
    none = torch.as_tensor(mask.box(6, FAR, at, at).none).expand(9)
    assert (~none).nonzero().flatten().tolist() == keys


def test_what_holds_no_data_moves_nowhere():
    for mask in (full(), causal() & ~window(3) | global_tokens(2), random_links(2), Mask.of("x", operator.eq)):
        assert mask.to(ELSEWHERE) is mask
        assert mask.tensors() == ()
        assert mask.batch() is None
        assert mask.heads() is None


def test_data_moves_to_another_device_and_the_rules_stay():
    lengths, ids, data = torch.tensor([3, 2]), torch.zeros(2, 5, dtype=torch.long), picture("x.. xx.")
    mask = causal() & padding(lengths, side="left", width=4) | ~(documents(ids) & prefix(1)) & data
    moved = mask.to(ELSEWHERE)
    assert [tensor.device for tensor in moved.tensors()] == [ELSEWHERE] * 3
    assert [tensor.shape for tensor in moved.tensors()] == [(2,), (2, 5), (2, 3)]
    assert all(old is new for old, new in zip(mask.tensors(), (lengths, ids, data), strict=True))
    left, right = moved.parts
    assert left.parts[0] == causal()
    assert (left.parts[1].side, left.parts[1].width) == ("left", 4)
    assert isinstance(right.parts[0], Not)
    assert right.parts[0].part.parts[1] == prefix(1)


def test_data_that_lies_there_already_is_not_copied():
    mask = causal() & padding([3, 2])
    assert mask.to(CPU).tensors()[0] is mask.tensors()[0]
    assert mask.to(CPU).key() == mask.key()


def test_data_is_moved_once_for_each_device_and_version():
    """What a kernel remembers about a mask is found again only if the moved tensor is the same one."""
    for lengths, make in (
        (torch.tensor([3, 2]), padding),
        (torch.tensor([3, 2]), documents),
        (torch.ones(2, 2, dtype=torch.bool), as_mask),
    ):
        mask = causal() & make(lengths)
        moved = mask.to(ELSEWHERE).tensors()[0]
        assert mask.to(ELSEWHERE).tensors()[0] is moved
        lengths.copy_(lengths.logical_not())
        assert mask.to(ELSEWHERE).tensors()[0] is not moved


def test_data_made_in_inference_mode_is_moved_again_after_a_change():
    with torch.inference_mode():
        lengths = torch.tensor([3, 2])
        mask = padding(lengths)
        moved = mask.to(ELSEWHERE).tensors()[0]
        assert mask.to(ELSEWHERE).tensors()[0] is moved
        lengths[0] = 1
        assert mask.to(ELSEWHERE).tensors()[0] is not moved


@pytest.mark.parametrize(
    ("mask", "batch"),
    [
        (causal(), None),
        (padding([3]), 1),
        (padding([3, 2, 1]), 3),
        (documents([0, 0, 1]), None),
        (documents([[0, 0, 1]]), 1),
        (causal() & ~padding([3, 2]), 2),
        (documents([0, 0, 1]) | padding([3, 2]), 2),
    ],
    ids=repr,
)
def test_a_mask_knows_how_many_sequences_it_tells_apart(mask, batch):
    assert mask.batch() == batch


def test_a_mask_knows_how_many_heads_it_tells_apart():
    data = torch.ones(2, 5, 3, 3, dtype=torch.bool)
    assert (causal() & ~as_mask(data)).heads() == 5
    assert (causal() & data).batch() == 2


def test_only_predicates_and_matrices_are_opaque():
    odd, data = Mask.of("odd", lambda i, j: j % 2 == 1), torch.ones(3, 3, dtype=torch.bool)
    assert [mask.opaque() for mask in (causal() & padding([2]), documents([1]), ~causal())] == [False] * 3
    assert [mask.opaque() for mask in (odd, as_mask(data), causal() & ~odd, causal() | data)] == [True] * 4
    assert [mask.by_pair() for mask in (odd, causal() & padding([2]))] == [""] * 2
    assert [mask.by_pair() for mask in (as_mask(data), ~(causal() & data))] == ["a boolean matrix"] * 2


def test_rules_are_remembered_by_structure():
    assert (causal() & window(3)).key() == (causal() & window(3)).key()
    assert (causal() & window(3)).key() != (causal() & window(2)).key()
    assert (causal() & window(3)).key() != (causal() | window(3)).key()


@pytest.mark.parametrize("around", [lambda mask: mask, lambda mask: causal() & ~mask | prefix(1)])
def test_data_is_memoised_by_contents(around):
    lengths = torch.tensor([3, 2])
    mask = around(padding(lengths))
    before = mask.key()
    assert hash(before) == hash(mask.key())
    assert around(padding(lengths)).key() == before
    assert around(padding(lengths.clone())).key() == before
    assert around(padding(lengths + 1)).key() != before
    assert around(padding(lengths, side="left", width=9)).key() != before
    lengths[0] = 1
    assert mask.key() != before


def test_combinations_of_one_mask_are_told_apart():
    data = padding([3, 2])
    masks = [data, ~data, data & causal(), data | causal(), causal() & data, data & prefix(1), documents(data.data)]
    assert len({mask.key() for mask in masks}) == len(masks)


def test_rules_of_ones_own_are_never_remembered():
    """What the function reads may change unseen."""
    odd = Mask.of("odd", lambda i, j: j % 2 == 1)
    assert odd.key() is None
    assert (causal() & ~odd).key() is None


def test_data_made_in_inference_mode_is_memoised_by_contents():
    with torch.inference_mode():
        lengths = torch.tensor([3, 2])
        mask = causal() & padding(lengths)
        before = mask.key()
        lengths[0] = 1
    assert mask.key() != before


def test_the_key_of_a_large_matrix_is_a_hash_that_depends_on_every_entry():
    data = torch.ones(100, 100, dtype=torch.bool)
    before = as_mask(data).key()
    assert before == as_mask(data.clone()).key()
    *_, digest = before[-1]
    assert len(digest) == 64
    data[99, 99] = False
    assert as_mask(data).key() != before


def test_a_link_comes_with_whether_it_exists():
    rule = RandomLinks(4, seed=0)
    exists = torch.stack([rule.link(torch.arange(-2, 7), which)[1] for which in range(4)])
    assert exists.sum(0).tolist() == [0, 0, 1, 2, 3, 4, 4, 4, 4]


def test_a_square_call_has_queries_and_keys_at_the_same_positions():
    assert Positions(0).square(5, 5)
    assert Positions(3, 3).square(5, 5)
    assert not Positions(3).square(5, 5)
    assert not Positions(0).square(4, 5)
    assert not Positions(0, torch.arange(5)).square(5, 5)


def test_queries_without_places_stand_last():
    assert Positions.last_rows(2, 7) == Positions(5, 0)
    assert Positions.last_rows(7, 2) == Positions(-5, 0)


@pytest.mark.parametrize("wrong", [(1.0,), (True,), ("0",), (0, 2.0), (0, False)])
def test_places_are_whole_numbers(wrong):
    with pytest.raises(ConfigError):
        Positions(*wrong)


@pytest.mark.parametrize(
    "keys", [torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.long), torch.tensor(3)]
)
def test_positions_of_keys_are_a_row_of_whole_numbers(keys):
    with pytest.raises(ConfigError):
        Positions(0, keys)
