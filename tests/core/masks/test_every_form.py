"""Every mask form, found by its file: one definition of the visible pairs holds wherever the mask is used.

For each example of a form, alone and combined with others, `see` on single pairs is the truth. The boxes, the block
tables, the counts, the matrix, a saved copy, FlexAttention's forms, statistics and attention in every kernel, with its
gradients, must agree with it.
"""

import doctest
import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard import Mask, Positions, SlidingWindowCache, Stream, attend, causal, padding, window
from regard.base.errors import KernelRefusedError
from regard.core.absolute_positions import Grid
from regard.core.kernels import KERNELS, blocked
from regard.core.masks.algebra import BoxVisibility
from regard.core.masks.block_tables import ALL, NONE
from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS, candidates, constructor, examples
from regard.core.masks.plan_cache import Memo
from regard.see.row_statistics import statistics
from regard.see.serialization import load
from regard.see.watch import watch
from tests.properties import draw

N = 13
WHERE = {  # queries, keys, positions
    "square": (N, N, None),
    "last rows": (4, N, None),
    "in the middle": (5, 4, Positions(6, 3)),
    "scattered keys": (5, 6, Positions(4, torch.tensor([0, 2, 3, 7, 8, 12]))),
    "more queries than keys": (7, 3, Positions(2, 0)),
}


def variants(name: str) -> list[Mask]:
    """The examples of a form, alone and in expressions."""
    found = [parse_mask(text) for text in examples(name, N)]
    return [*found, ~found[0], causal() & found[0], found[-1] | window(1, 1)]


def pairs(mask: Mask, i: int, j: int, positions: Positions | None) -> Tensor:
    """The visible pairs (b, i, j), by asking for each one."""
    positions = positions or Positions(j - i)
    at = positions.keys if isinstance(positions.keys, Tensor) else torch.arange(j) + positions.keys
    b, zero = mask.batch() or 1, torch.tensor(0)
    seen = [
        mask.see(
            Grid(
                torch.tensor(sequence),
                zero,
                torch.tensor(row),
                torch.tensor(column),
                row + torch.tensor(positions.queries),
                at[column],
            )
        )
        for sequence in range(b)
        for row in range(i)
        for column in range(j)
    ]
    return torch.stack([flag.reshape(()) for flag in seen]).view(b, i, j)


def assert_agrees(mask: Mask, i: int, j: int, positions: Positions | None, truth: Tensor) -> None:
    """The matrix, the count, all boxes and block tables of a mask are those of its visible pairs."""
    where = positions or Positions(j - i)
    rows, columns = torch.arange(i) + where.queries, torch.arange(j)
    columns = where.keys if isinstance(where.keys, Tensor) else columns + where.keys
    dense = mask.dense(i, j, positions=positions)
    assert torch.equal(dense.reshape(-1, i, j).expand_as(truth), truth), f"dense of {mask!r} is not what see shows"
    assert mask.count(i, j, positions=positions) == int(truth.sum()), f"count of {mask!r} is not what see shows"
    if mask.sees_itself():
        own = rows[:, None] == columns
        assert truth[:, own].all(), f"sees_itself of {mask!r} is not what see shows"
    for first in range(i):
        for last in range(first, i, 2):
            for start in range(j):
                for stop in range(start, j, 3):
                    block = truth[:, first : last + 1, start : stop + 1]
                    ends = (int(rows[first]), int(rows[last]), int(columns[start]), int(columns[stop]))
                    none, every = (bool(torch.as_tensor(flag).all()) for flag in mask.box(*ends))
                    assert not (none and block.any()), f"box of {mask!r} says that {ends} shows nothing"
                    assert not (every and not block.all()), f"box of {mask!r} says that {ends} shows everything"
    for size in (3, 5):
        table = mask.block_table(i, j, size, positions=positions)
        state = table.state if table.state.ndim == 3 else table.state.expand(len(truth), -1, -1)
        for q, part in enumerate(truth.split(size, 1)):
            for k, block in enumerate(part.split(size, 2)):
                cell, flat = state[:, q, k], block.flatten(1)
                assert not ((cell == NONE) & flat.any(1)).any(), f"the table of {mask!r} hides a visible pair"
                assert not ((cell == ALL) & ~flat.all(1)).any(), f"the table of {mask!r} shows a hidden pair"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", FORMS)
def test_matrix_count_boxes_and_tables_show_what_see_shows(name: str, where: str) -> None:
    i, j, positions = WHERE[where]
    for mask in variants(name):
        assert_agrees(mask, i, j, positions, pairs(mask, i, j, positions))


@pytest.mark.parametrize("name", FORMS)
def test_attention_in_every_kernel_is_that_of_the_boolean_matrix(name: str) -> None:
    ran = set()
    for mask in variants(name):
        for i in (N, 4):
            q, k, v = draw(i, N, b=mask.batch() or 2, dtype=torch.float64)
            truth = attend(q, k, v, mask=mask.dense(i, N), kernel="reference")
            for kernel in set(KERNELS) - {"flex"}:  # flex compiles each mask; tests/core/test_flex.py runs it
                try:
                    out = attend(q, k, v, mask=mask, kernel=kernel)
                except KernelRefusedError:
                    continue
                torch.testing.assert_close(out, truth, atol=1e-12, rtol=1e-12, msg=f"{kernel} with {mask!r}")
                ran.add(kernel)
    assert ran >= {"eager", "reference", "sdpa"}


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("name", FORMS)
def test_the_blocked_kernel_in_its_sparsest_order(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "SIZE", size)
    monkeypatch.setattr(blocked, "_plans", Memo(16))
    for mask in variants(name):
        q, k, v = draw(N, N, b=mask.batch() or 2, dtype=torch.float64)
        truth = attend(q, k, v, mask=mask.dense(N), kernel="reference")
        try:
            out = attend(q, k, v, mask=mask, kernel="blocked")
        except KernelRefusedError:
            continue
        torch.testing.assert_close(out, truth, atol=1e-12, rtol=1e-12, msg=f"blocked with {mask!r}")


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_the_boolean_matrix(name: str) -> None:
    for mask in variants(name):
        inputs = [x.requires_grad_() for x in draw(N, N, b=mask.batch() or 2, dtype=torch.float64)]
        truth = attend(*inputs, mask=mask.dense(N), kernel="reference")
        above = torch.randn_like(truth)
        expected = torch.autograd.grad(truth, inputs, above)
        for found, right in zip(torch.autograd.grad(attend(*inputs, mask=mask), inputs, above), expected, strict=True):
            torch.testing.assert_close(found, right, atol=1e-10, rtol=1e-10, msg=f"a gradient with {mask!r}")


@pytest.mark.parametrize("name", FORMS)
def test_statistics_are_those_of_the_boolean_matrix(name: str) -> None:
    for mask in variants(name):
        q, k, _ = draw(N, N, b=mask.batch() or 2, dtype=torch.float64)
        found, truth = statistics(q, k, mask=mask), statistics(q, k, mask=mask.dense(N))
        for statistic in ("lse", "entropy", "largest", "distance", "received"):
            torch.testing.assert_close(
                getattr(found, statistic), getattr(truth, statistic), msg=f"{statistic} with {mask!r}"
            )


@pytest.mark.parametrize("name", FORMS)
def test_a_mask_mod_and_a_block_mask_show_what_see_shows(name: str) -> None:
    for mask in variants(name):
        truth = pairs(mask, N, N, None)
        for again in (
            Mask.from_mask_mod(mask.mask_mod, batch=mask.batch()),
            Mask.from_block_mask(mask.to_block_mask(N)),
        ):
            dense = again.dense(N).reshape(-1, N, N)
            assert torch.equal(dense.expand_as(truth), truth), f"{again!r} made from {mask!r}"


@pytest.mark.parametrize("name", FORMS)
def test_the_cache_and_the_stream_keep_every_visible_key(name: str) -> None:
    for mask in variants(name):
        q, k, v = draw(N, N, b=mask.batch() or 2, h=3, g=3, dtype=torch.float64)
        whole = attend(q, k, v, mask=mask.dense(N), kernel="reference")
        stream = Stream(mask)
        rows = [stream.push(*(x[:, :, at : at + 4] for x in (q, k, v))) for at in range(0, N, 4)]
        torch.testing.assert_close(torch.cat([*rows, stream.finish()], 2), whole, msg=f"a stream with {mask!r}")
        cache, past = SlidingWindowCache(mask), mask & causal()
        for at in range(0, N, 3):
            keys, values, positions = cache.extend(k[:, :, at : at + 3], v[:, :, at : at + 3])
            out = attend(q[:, :, at : at + 3], keys, values, mask=past, positions=positions)
            expected = attend(
                q[:, :, at : at + 3],
                k[:, :, : at + 3],
                v[:, :, : at + 3],
                mask=past.dense(N)[..., at : at + 3, : at + 3],
            )
            torch.testing.assert_close(out, expected, msg=f"a cache with {mask!r}")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_written_parsed_and_drawn(name: str) -> None:
    for text in examples(name, N):
        mask = parse_mask(text)
        if mask.batch() is None and mask.length() is None:
            assert parse_mask(repr(mask)) == mask
        assert len(mask.draw(N).splitlines()) == N
        assert mask.to(torch.device("cpu")) == mask
        assert mask == parse_mask(text)
        assert hash(mask) == hash(parse_mask(text))


@pytest.mark.parametrize("name", FORMS)
def test_a_saved_mask_is_loaded_again(name: str, tmp_path: Path) -> None:
    for number, mask in enumerate(variants(name)):
        q, k, v = draw(N, N, b=mask.batch() or 2)
        with watch() as seen:
            attend(q, k, v, mask=mask)
        seen.save(tmp_path / str(number))
        recorded, copy = seen.records[0].mask, load(tmp_path / str(number)).records[0].mask
        assert copy == recorded
        assert type(copy) is type(recorded)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_documented(name: str) -> None:
    make = constructor(name)
    text = inspect.getdoc(make) or ""
    assert getattr(regard, name) is make
    assert ">>>" in text, f"the docstring of {name} has no example"
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(
        make, name, globs={"torch": torch} | {each: constructor(each) for each in FORMS}
    ):
        assert runner.run(test, out=lambda text: None).failed == 0, f"the example of {name} prints something else"
    page = Path(regard.__file__).parents[1] / "docs" / "masks.md"
    assert f"`{name}(" in page.read_text(), f"docs/masks.md has no line for {name}"


def test_candidates_are_named_by_themselves() -> None:
    """`candidates` only yields masks that can be written down."""
    for mask in candidates(5):
        assert parse_mask(repr(mask)) == mask


class OnlySee(Mask):
    """A form that defines nothing but the visible pairs."""

    def see(self, grid: Grid) -> Tensor:
        return (grid.i * 3 + grid.j) % 4 < 2


class FalseBox(OnlySee):
    def box(self, first: object, last: object, start: object, stop: object) -> BoxVisibility:
        return BoxVisibility(none=start > last, all=False)


class FalseSelf(Mask):
    def see(self, grid: Grid) -> Tensor:
        return grid.i != grid.j

    def sees_itself(self) -> bool:
        return True


class FalseRange(OnlySee):
    def key_range(self, i: Tensor, sequence: int) -> tuple[Tensor, None]:
        return i, None


@pytest.mark.parametrize("where", WHERE)
def test_a_form_that_only_defines_see_is_correct_everywhere(where: str) -> None:
    i, j, positions = WHERE[where]
    for mask in (OnlySee(), ~OnlySee(), causal() & OnlySee(), OnlySee() | window(1, 1) | padding([3, 9])):
        assert_agrees(mask, i, j, positions, pairs(mask, i, j, positions))
    q, k, v = draw(N, N, dtype=torch.float64)
    truth = attend(q, k, v, mask=OnlySee().dense(N), kernel="reference")
    for kernel in set(KERNELS) - {"flex"}:
        torch.testing.assert_close(attend(q, k, v, mask=OnlySee(), kernel=kernel), truth, atol=1e-12, rtol=1e-12)


def test_a_form_that_only_defines_see_is_saved_as_a_matrix(tmp_path: Path) -> None:
    q, k, v = draw(N, N)
    with watch() as seen:
        attend(q, k, v, mask=OnlySee())
    seen.save(tmp_path / "seen")
    copy = load(tmp_path / "seen").records[0].mask
    assert torch.equal(copy.dense(N).reshape(N, N), OnlySee().dense(N))


@pytest.mark.parametrize("lie", [FalseBox(), FalseRange(), FalseSelf()], ids=["box", "count", "itself"])
def test_a_form_that_contradicts_see_is_caught(lie: Mask) -> None:
    with pytest.raises(AssertionError, match=r"of <.*(FalseBox|FalseRange|FalseSelf)"):
        assert_agrees(lie, N, N, None, pairs(lie, N, N, None))
