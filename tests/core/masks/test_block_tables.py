"""Block tables: what is certain of whole blocks, worked out without the matrix and remembered."""

import pytest
import torch

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
from regard.base.errors import ConfigError, ShapeError
from regard.core.masks import algebra, as_mask, block_tables
from regard.core.masks.block_tables import (
    ALL,
    NONE,
    SOME,
    BlockTable,
    Spans,
    block_table,
    find_hidden_keys_and_empty_rows,
)


def drawn(state: torch.Tensor) -> str:
    """A table as it is drawn: a dot for none, - for some, # for all."""
    return " ".join("".join(".-#"[cell] for cell in row) for row in state.tolist())


TABLES = {  # eleven positions in blocks of three: the last block holds two
    "full": (full(), "#### #### #### ####"),
    "nothing": (~full(), ".... .... .... ...."),
    "causal": (causal(), "-... #-.. ##-. ###-"),
    "not causal": (~causal(), "-### .-## ..-# ...-"),
    "window before": (window(before=3), "-... --.. .--. ..--"),
    "wide window": (window(before=5), "-... #-.. -#-. .-#-"),
    "window after": (window(after=4), "---. .--- ..-# ...-"),
    "own blocks of the same size": (blocks(3), "#... .#.. ..#. ...#"),
    "own blocks of another size": (blocks(4), "#-.. ---. .--- ..-#"),
    "chunks": (chunks(3, before=1), "#... ##.. .##. ..##"),
    "prefix": (prefix(4), "#-.. #-.. #-.. #-.."),
    "global tokens": (global_tokens(3), "#### #... #... #..."),
    "some global tokens": (global_tokens(2), "---- -... -... -..."),
    "every key": (dilated(1), "#### #### #### ####"),
    "dilated": (dilated(2), "---- ---- ---- ----"),
    "dilated so far that blocks fall between": (dilated(6), "-.-. .-.- -.-. .-.-"),
    "dilated between blocks that are not in step": (dilated(5), "---- ---- ---. --.-"),
    "documents": (documents([4, 4, 4, 1, 1, 1, 1, 1, 7, 7, 7]), "#.-. .#-. ---- ..-#"),
    "documents apart by their ids": (documents([0, 0, 0, 2, 2, 2, 1, 1, 1, 0, 0]), "#..# .#.. ..#. #..#"),
    "documents that overlap in their ids": (documents([0, 2, 0, 1, 1, 1, 5, 5, 5, 5, 5]), "--.. -#.. ..## ..##"),
    "both": (causal() & window(before=5), "-... #-.. -#-. .-#-"),
    "either": (window(before=3) | prefix(3), "#... #-.. #--. #.--"),
    "sinks": (causal() & (window(before=3) | prefix(3)), "-... #-.. #--. #.--"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_is_certain_of_each_block(name):
    mask, expected = TABLES[name]
    table = mask.block_table(11, size=3)
    assert drawn(table.state) == expected
    assert table.state.dtype == torch.int8
    assert table.size == 3
    assert (NONE, SOME, ALL) == (0, 1, 2)


def test_tables_of_a_batch_tell_sequences_apart():
    right, left = padding([7, 0, 11]), padding([7, 0, 11], side="left", width=11)
    assert [drawn(state) for state in right.block_table(4, 11, 3).state] == ["##-. ##-.", ".... ....", "#### ####"]
    assert [drawn(state) for state in left.block_table(4, 11, 3).state] == [".-## .-##", ".... ....", "#### ####"]
    ids = [[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]
    assert [drawn(state) for state in documents(ids).block_table(5, size=3).state] == ["#. .#", "## ##"]
    both = (documents(ids) & padding([2, 5])).block_table(5, size=3)
    assert [drawn(state) for state in both.state] == ["-. ..", "## ##"]


def test_queries_are_the_last_rows():
    assert drawn(causal().block_table(4, 11, 3).state) == "##-- ####"
    assert drawn(causal().block_table(5, 11, 4).state) == "#-- ###"


def test_places_move_the_blocks():
    assert drawn(causal().block_table(4, 6, 3, positions=Positions(7, 4)).state) == "#- ##"
    assert drawn(causal().block_table(4, 6, 3, positions=Positions(0, 4)).state) == ".. .."


def test_keys_in_any_order_are_judged_by_the_range_they_span():
    at = torch.tensor([9, 8, 7, 0, 1, 2, 12, 0])
    state = (causal() & window(before=4)).block_table(3, 8, 3, positions=Positions(8, at)).state
    assert drawn(state) == "-.-"
    assert drawn(causal().block_table(3, 8, 3, positions=Positions(9, at)).state) == "##-"
    assert drawn(documents([0] * 7 + [5] * 6).block_table(3, 8, 3, positions=Positions(8, at)).state) == "#.-"
    assert drawn(padding([8]).block_table(3, 8, 3, positions=Positions(8, at)).state[0]) == "-#-"


@pytest.mark.parametrize(
    "positions", [Positions(0), Positions(7, 3), Positions(2, 5), Positions(9, torch.tensor([9, 0, 4] * 4 + [7]))]
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 14])
def test_random_links_are_found_block_by_block(positions, size):
    """The table knows exactly which blocks hold a link."""
    mask = random_links(2, seed=4)
    dense = mask.dense(11, 13, positions=positions)
    state = mask.block_table(11, 13, size, positions=positions).state
    for q, rows in enumerate(dense.split(size)):
        for k, block in enumerate(rows.split(size, 1)):
            assert (state[q, k] != NONE) == block.any()
            assert state[q, k] != ALL or block.all()


def test_random_links_out_of_reach_leave_blocks_empty():
    assert drawn(random_links(3).block_table(4, 6, 3, positions=Positions(2, 9)).state) == ".. .."
    assert drawn(random_links(3).block_table(4, 6, 3, positions=Positions(90, 95)).state) in (".. ..", ".. -.")


@pytest.mark.parametrize("size", [1, 3, 4, 20])
def test_what_only_evaluation_tells_is_looked_at(size):
    """Predicates and matrices get exact tables, the last, shorter blocks too."""
    dense = torch.rand(11, 7) < 0.7
    dense[3:6, 3:6] = dense[6:, 6:] = True
    dense[:3, 3:] = False
    masks = Mask.of("given", lambda i, j: dense[i, j]), as_mask(dense[None, None]), as_mask(dense)
    for mask in masks:
        state = mask.block_table(11, 7, size, positions=Positions(0)).state
        for q, rows in enumerate(dense.split(size)):
            for k, block in enumerate(rows.split(size, 1)):
                assert state[q, k] == (ALL if block.all() else SOME if block.any() else NONE)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 3, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_a_boolean_matrix_of_many_heads_is_certain_where_all_agree(shape):
    data = torch.zeros(shape, dtype=torch.bool)
    data[..., :3, :3] = True
    data.flatten(0, -3)[-1, 4, 6] = True
    assert drawn(as_mask(data).block_table(5, 7, 3).union()) == "#.. ..-"


def test_a_predicate_is_asked_one_block_of_queries_at_a_time():
    asked = []

    def late(i, j):
        asked.append((tuple(i.shape), tuple(j.shape)))
        return i + j > 9

    assert drawn(Mask.of("late", late).block_table(11, 7, 5, positions=Positions(0)).state) == ".- -# ##"
    assert asked == [((5, 1), (1, 10))] * 3


def test_blocks_hold_at_least_one_position():
    with pytest.raises(ConfigError, match=r"block_table\(size\) is 0, but must be at least 1"):
        causal().block_table(5, size=0)


def test_a_table_is_checked_as_the_matrix_is():
    with pytest.raises(ShapeError, match="covers n=3"):
        documents([0, 1, 1]).block_table(4)


@pytest.mark.parametrize(
    "mask", [causal(), random_links(2), padding([1, 2]), dilated(3), Mask.of("x", torch.eq), global_tokens(1)], ids=repr
)
def test_nothing_has_no_blocks(mask):
    for i, j, shape in ((0, 5, (0, 2)), (5, 0, (2, 0)), (0, 0, (0, 0))):
        table = mask.block_table(i, j, 3)
        assert table.state.shape[-2:] == shape
        assert table.visited == 0
        assert table.density == 0.0
        unseen, blind = find_hidden_keys_and_empty_rows(mask, Positions.last_rows(i, j), i, j, table)
        assert (unseen is None) == (j == 0)
        assert (blind is None) == (i == 0)
        assert unseen is None or unseen.all()
        assert blind is None or blind.all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 5), (2, 3, 0, 5)])
def test_an_empty_matrix_has_no_blocks(shape):
    i, j = shape[-2:]
    assert as_mask(torch.ones(shape, dtype=torch.bool)).block_table(i, j, 3).visited == 0


def test_what_has_to_be_looked_at_is_counted():
    table = causal().block_table(11, size=3)
    assert table.visited == table.visited_by_any == 10
    assert table.density == 10 / 16
    batch = padding([3, 0]).block_table(5, 7, 2)
    assert batch.visited == 2 * 3
    assert batch.visited_by_any == 2 * 3
    assert batch.density == 6 / 24


def test_one_state_for_all_sequences():
    state = torch.tensor([[[0, 1, 2], [0, 2, 2]], [[0, 1, 2], [2, 2, 1]], [[0, 1, 2], [0, 2, 2]]], dtype=torch.int8)
    assert BlockTable(3, state).union().tolist() == [[0, 1, 2], [1, 2, 1]]
    assert BlockTable(3, state).visited_by_any == 5
    assert BlockTable(3, state).visited == 4 + 5 + 4
    assert torch.equal(BlockTable(3, state[0]).union(), state[0])


def test_a_million_positions_have_a_table_in_no_time(monkeypatch):
    """From ranges alone: nothing of the size of the matrix is looked at."""
    monkeypatch.setattr(algebra, "whole_grid", None)
    monkeypatch.setattr(Spans, "evaluate", None)
    n, size = 1_000_003, 4096
    q = -(-n // size)
    table = (causal() & window(before=4095) | global_tokens(4)).block_table(n, size=size)
    assert table.state.shape == (q, q)
    assert table.visited == q + 2 + 3 * (q - 2)  # the row of global tokens, then the column of them and the window
    assert random_links(2).block_table(n, size=size).visited <= q * (q + 1) // 2
    assert (table.state == ALL).sum() == 0


@pytest.fixture
def forgetful(monkeypatch):
    """An empty memory, and a list of what is made."""
    made = []
    make = block_tables._build_table
    monkeypatch.setattr(block_tables, "_tables", block_tables.Memo(3))
    monkeypatch.setattr(block_tables, "_build_table", lambda mask, spans: made.append(mask) or make(mask, spans))
    return made


def test_a_table_is_made_once_for_equal_rules(forgetful):
    first = (causal() & window(before=3)).block_table(11, size=3)
    assert (causal() & window(before=3)).block_table(11, 11, 3) is first
    assert len(forgetful) == 1


def test_another_mask_length_size_or_place_is_another_table(forgetful):
    calls = [
        lambda: causal().block_table(11, size=3),
        lambda: (~causal()).block_table(11, size=3),
        lambda: causal().block_table(10, 11, size=3),
        lambda: causal().block_table(11, 12, size=3),
        lambda: causal().block_table(11, size=4),
        lambda: causal().block_table(11, size=3, positions=Positions(2)),
        lambda: causal().block_table(11, size=3, positions=Positions(0, 2)),
    ]
    for call in calls:
        call()
    assert len(forgetful) == len(calls)


def test_data_that_changes_in_place_gets_another_table(forgetful):
    lengths = torch.tensor([3, 5])
    mask = padding(lengths) & causal()
    before = mask.block_table(5, size=3)
    assert mask.block_table(5, size=3) is before
    lengths[1] = 0
    assert drawn(mask.block_table(5, size=3).state[1]) == ".. .."
    assert drawn(before.state[1]) == "-. #-"


def test_data_from_inference_mode_is_looked_at_every_time(forgetful):
    with torch.inference_mode():
        lengths = torch.tensor([3, 5])
        mask = padding(lengths)
        assert drawn(mask.block_table(5, size=3).state[1]) == "## ##"
        lengths[1] = 3
        assert drawn(mask.block_table(5, size=3).state[1]) == "#. #."


def test_what_cannot_be_remembered_pushes_nothing_out(forgetful):
    kept = causal().block_table(11, size=3)
    with torch.inference_mode():
        mask = padding(torch.tensor([3, 5]))
    for _ in range(5):
        mask.block_table(5, size=3)
    assert causal().block_table(11, size=3) is kept


def test_a_rule_of_ones_own_is_asked_every_time(forgetful):
    seen = torch.tensor([True, False])
    mask = Mask.of("given", lambda i, j: seen[i - i] & (j >= 0))
    assert drawn(mask.block_table(2, size=2).state) == "#"
    seen[0] = False
    assert drawn(mask.block_table(2, size=2).state) == "."


def test_keys_in_a_list_are_looked_at_every_time(forgetful):
    at = torch.tensor([4, 0, 2])
    assert drawn(causal().block_table(2, 3, 3, positions=Positions(1, at)).state) == "-"
    at += 7
    assert drawn(causal().block_table(2, 3, 3, positions=Positions(1, at)).state) == "."
    assert len(forgetful) == 2


@pytest.mark.parametrize(("size", "at_once"), [(1, 1 << 22), (3, 1), (3, 20), (4, 1 << 22), (16, 1 << 22)])
def test_unseen_keys_and_blind_queries_are_found(monkeypatch, size, at_once):
    monkeypatch.setattr(block_tables, "_PAIRS_AT_ONCE", at_once)
    mask = causal() & window(before=2) & padding([9, 3, 0], side="left", width=11)
    table = mask.block_table(5, 11, size)
    unseen, blind = find_hidden_keys_and_empty_rows(mask, Positions(6), 5, 11, table)
    assert [row.nonzero().flatten().tolist() for row in unseen] == [[0, 1, 2, 3], list(range(8)), list(range(11))]
    assert [row.nonzero().flatten().tolist() for row in blind] == [[], [0, 1], [0, 1, 2, 3, 4]]


def test_where_all_is_seen_nothing_is_listed():
    for mask in (full(), causal(), window(before=2), blocks(3)):
        assert find_hidden_keys_and_empty_rows(mask, Positions(0), 11, 11, mask.block_table(11, size=3)) == (None, None)
    unseen, blind = find_hidden_keys_and_empty_rows(
        causal(), Positions(2), 3, 7, causal().block_table(3, 7, 3, positions=Positions(2))
    )
    assert unseen.tolist() == [[False] * 5 + [True] * 2]
    assert blind is None


def test_the_last_block_counts_its_rows_once():
    """Blocks are filled up by repeating the last position, which must not count as seen from there."""
    mask = Mask.of("last key, but not for the last query", lambda i, j: (j == 4) & (i < 4))
    table = mask.block_table(5, size=3)
    unseen, blind = find_hidden_keys_and_empty_rows(mask, Positions(0), 5, 5, table)
    assert unseen.tolist() == [[True] * 4 + [False]]
    assert blind.tolist() == [[False] * 4 + [True]]


def test_spans_know_the_ends_of_every_block():
    spans = Spans(Positions(20, 3), 5, 7, 3)
    assert spans.shape == (2, 3)
    assert spans.rows.tolist() == [[0, 1, 2], [3, 4, 4]]
    assert spans.columns.tolist() == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert spans.first.tolist() == [[20], [23]]
    assert spans.last.tolist() == [[22], [24]]
    assert spans.start.tolist() == [[3, 6, 9]]
    assert spans.stop.tolist() == [[5, 8, 9]]


def test_blocks_of_one_position_are_certain_of_a_dilation():
    assert drawn(dilated(3).block_table(4, size=1).state) == "#..# .#.. ..#. #..#"
    assert (
        drawn(dilated(3).block_table(2, 4, 1, positions=Positions(-4, torch.tensor([5, 0, -1, 7]))).state)
        == "#.#. .#.."
    )


def test_spans_by_remainders_leave_no_block_to_two_that_do_not_fit():
    spans = Spans(Positions(20, 3), 5, 9, 2, (3,))
    assert spans.shape == (3, 6)
    assert spans.query_positions().tolist() == [[21, 24], [22, 22], [20, 23]]
    assert spans.rows.tolist() == [[1, 4], [2, 2], [0, 3]]
    assert spans.row_blocks.slots.tolist() == [4, 0, 2, 5, 1]
    assert spans.key_positions().tolist() == [[3, 6], [9, 9], [4, 7], [10, 10], [5, 8], [11, 11]]
    assert drawn(block_tables._build_table(dilated(3), spans).state) == "##.... ..##.. ....##"
    assert drawn(block_tables._build_table(dilated(3) & window(before=14), spans).state) == ".-.... ...#.. ....-#"


def test_the_function_and_the_method_are_one():
    assert block_table(causal(), 11, size=3) is causal().block_table(11, size=3)
    assert causal().block_table(300).size == 128
