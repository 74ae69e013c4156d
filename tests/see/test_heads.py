"""The table of heads against the whole matrices."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.masks import causal, padding
from regard.core.scores import alibi, shaw, sink, softcap
from regard.see.heads import HeadSummary, HeadTable, measure_heads, weights_at
from regard.see.record import Record, Seen
from regard.see.watch import watch
from tests.see.model_cases import CASES, ids


def recorded(i: int = 9, j: int = 9, h: int = 6, **settings: object) -> Record:
    q, k, v = torch.randn(2, h, i, 8), torch.randn(2, 2, j, 8), torch.randn(2, 2, j, 5)
    with watch() as seen:
        attend(q * 3, k, v, **settings)  # type: ignore[arg-type]
    return seen["attention"]


def test_every_column_is_that_of_the_matrix() -> None:
    record = recorded(mask=causal() & padding([9, 6]), scores=[alibi(heads=6), softcap(4.0), shaw(torch.randn(5, 8))])
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2, 3], [5, 6, 5, 7, 6, 5, 5, 8, 9]])
    weights = record.weights()
    for head in measure_heads(record, tokens):
        w = weights[:, head.head]
        entropy = torch.special.entr(w).sum(-1)
        most = torch.tensor([[min(i + 1, n) for i in range(9)] for n in (9, 6)]).log()
        assert head.entropy == pytest.approx(float(entropy.mean()), rel=1e-4)
        assert head.spread == pytest.approx(float(torch.where(most > 0, entropy / most, 0).mean()), rel=1e-4)
        far = (torch.arange(9)[:, None] - torch.arange(9)).abs()
        assert head.distance == pytest.approx(float((w * far).sum(-1).mean()), rel=1e-4)
        previous = [float(w[b, i, i - 1]) for b in range(2) for i in range(1, 9)]
        assert head.previous == pytest.approx(sum(previous) / 16, rel=1e-4)
        first = [float(w[b, i, 0]) for b in range(2) for i in range(1, 9)]
        assert head.first == pytest.approx(sum(first) / 16, rel=1e-4)
        follows = [float(w[b, i, at + 1]) for b, i, at in repeats(tokens)]
        assert head.induction == pytest.approx(sum(follows) / len(follows), rel=1e-4)


def repeats(tokens: Tensor) -> list[tuple[int, int, int]]:
    """Sequence, position and latest earlier occurrence of each repeated token."""
    found = []
    for b, row in enumerate(tokens.tolist()):
        for i, token in enumerate(row):
            earlier = [at for at in range(i) if row[at] == token]
            found += [(b, i, earlier[-1])] if earlier else []
    return found


def test_constructed_heads_have_the_largest_score_of_their_column() -> None:
    n, period = 12, 4
    tokens = (torch.arange(n) % period)[None]
    scores = torch.full((1, 3, n, n), -20.0)
    for i in range(n):
        scores[0, 0, i, max(i - 1, 0)] = 20
        scores[0, 1, i, 0] = 20
        scores[0, 2, i, i - period + 1 if i >= period else i] = 20
    q = torch.zeros(1, 3, n, 5)
    with watch() as seen:
        functional.scaled_dot_product_attention(q, q, q, attn_mask=scores)
    table = seen.table(tokens)
    for column, head in (("previous", 0), ("first", 1), ("induction", 2)):
        best = table.sorted(column)[0]
        assert best.head == head
        assert getattr(best, column) > 0.99
    assert table.sorted("entropy", descending=False)[0].entropy < 1e-3


def test_no_matrix_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded(mask=causal())
    monkeypatch.setattr(Record, "weights", lambda self: pytest.fail("a matrix was built"))
    assert len(measure_heads(record, torch.zeros(2, 9, dtype=torch.long))) == 6


def test_a_sink_reduces_weights_and_empty_rows_do_not_count() -> None:
    record = recorded(mask=causal() & padding([9, 0]), scores=sink(torch.zeros(6)))
    weights = record.weights()
    for head in measure_heads(record):
        w = weights[0, head.head]  # the second sequence sees nothing
        assert head.previous == pytest.approx(float(w.diagonal(-1).mean()), rel=1e-4)
        assert head.induction is None


@pytest.mark.parametrize("beta", [0.0, 0.3, math.inf])
def test_weights_of_single_pairs_are_those_of_the_matrix(beta: float) -> None:
    record = recorded(i=5, j=7, beta=beta, mask=causal())
    rows, columns = torch.tensor([[4, 0, 2], [1, 1, 3]]), torch.tensor([[6, 2, 0], [3, 0, 5]])
    found = weights_at(record, rows, columns)
    for b in range(2):
        torch.testing.assert_close(found[b], record.weights()[b][:, rows[b], columns[b]])


def test_positions_of_a_cache_and_of_chosen_rows_are_respected() -> None:
    record = recorded(i=3, j=7, mask=causal(), positions=Positions(4))
    weights = record.weights()
    for head in measure_heads(record):
        assert head.previous == pytest.approx(float(weights[:, head.head, range(3), [3, 4, 5]].mean()), rel=1e-4)
    with watch(rows=[6, 2], heads=[4]) as seen:
        attend(torch.randn(2, 6, 9, 8), torch.randn(2, 6, 9, 8), torch.randn(2, 6, 9, 8), mask=causal())
    (head,) = seen.table()
    assert head.head == 4
    assert head.previous == pytest.approx(float(seen["attention"].weights()[:, 0, [0, 1], [5, 1]].mean()), rel=1e-4)


def test_cross_attention_to_other_tokens_has_no_induction_score_of_these() -> None:
    case = CASES["t5 eager"]()
    with torch.no_grad(), watch(case.model) as seen:
        case.run(case.model)
    table = seen.table(ids())
    assert len(table) == 6 * 3
    assert "EncDecAttention" in str(table)


def test_the_table_prints_and_sorts_by_any_column() -> None:
    table = HeadTable(
        (HeadSummary("a", 0, 1.0, 0.5, 2.0, None, 0.25, None), HeadSummary("bb", 1, 2.0, 0.5, 1.0, 0.125, 0.5, None))
    )
    assert str(table).splitlines() == [
        "layer  head  entropy  spread  distance  previous  first  induction",
        "a         0    1.000   0.500     2.000         -  0.250          -",
        "bb        1    2.000   0.500     1.000     0.125  0.500          -",
    ]
    assert [head.layer for head in table.sorted("previous")] == ["bb", "a"]
    assert [head.layer for head in table.sorted("distance", descending=False)] == ["bb", "a"]
    with pytest.raises(ConfigError, match=r"no column 'sink' to sort by; choose from layer, head, entropy"):
        table.sorted("sink")


def test_tokens_of_another_batch_are_an_error() -> None:
    with pytest.raises(ShapeError, match=r"tokens have b=3 \(batch\), but attention has b=2"):
        Seen([recorded()]).table(torch.zeros(3, 9, dtype=torch.long))
