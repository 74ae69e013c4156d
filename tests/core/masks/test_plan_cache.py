"""A small memory: it makes things once, forgets the oldest and keeps what its keys are made of."""

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import Mask, attend, causal, documents, explain, padding, window
from regard.core.masks.plan_cache import Memo, joint_key


def counting(results):
    """A function that gives the next result each time it is called."""
    upcoming = iter(results)
    return lambda: next(upcoming)


def test_a_result_is_made_once_per_key():
    memo, make = Memo(3), counting("abc")
    assert [memo.get(key, causal(), make) for key in (1, 1, 2, 1, 2)] == ["a", "a", "b", "a", "b"]


def test_without_a_key_nothing_is_remembered():
    memo, make = Memo(3), counting("abc")
    assert [memo.get(None, causal(), make) for _ in range(3)] == ["a", "b", "c"]
    assert memo._kept == {}


def test_a_result_that_is_nothing_is_remembered_too():
    memo, make = Memo(3), counting([None, "again"])
    assert [memo.get(1, causal(), make), memo.get(1, causal(), make)] == [None, None]


def test_the_oldest_is_forgotten_first():
    memo, make = Memo(2), counting("abcdef")
    made = [memo.get(key, causal(), make) for key in (1, 2, 3, 2, 3, 1, 3, 2)]
    assert made == ["a", "b", "c", "b", "c", "d", "c", "e"]
    assert len(memo._kept) == 2


def test_what_is_not_worth_keeping_is_made_again():
    memo, make = Memo(2), counting("abcd")
    made = [memo.get(key, causal(), make, worth=lambda made: made != "a") for key in (1, 1, 1, 2, 2)]
    assert made == ["a", "b", "b", "c", "c"]


def test_a_failure_is_not_remembered():
    memo = Memo(2)
    memo.get(1, causal(), lambda: "a")
    with pytest.raises(ZeroDivisionError):
        memo.get(2, causal(), lambda: 1 / 0)
    assert memo.get(2, causal(), lambda: "b") == "b"
    assert memo.get(1, causal(), lambda: "c") == "a"


def test_a_key_is_that_of_the_mask_and_of_all_else_that_matters():
    assert joint_key(causal(), (3, 5)) == joint_key(causal(), (3, 5))
    keys = [joint_key(causal(), (3, 5)), joint_key(causal(), (5, 3)), joint_key(padding([3]), (3, 5))]
    assert len(set(keys)) == 3


def test_there_is_no_key_where_nothing_may_be_remembered():
    function = Mask.of("by a function", lambda i, j: i > j)
    assert joint_key(function, (3, 5)) is None
    assert joint_key(causal() & ~function, (3, 5)) is None
    assert joint_key(causal(), None) is None


@pytest.mark.parametrize(
    "make",
    [documents, lambda ids: ~documents(ids) | causal(), lambda ids: window(200) & documents(ids)],
)
@pytest.mark.parametrize("inference", [False, True])
def test_memory_that_other_code_changes_is_read_again(make, inference):
    """NumPy shares the memory of a tensor and does not raise its version."""
    shared = np.arange(300) // 100
    with torch.inference_mode(inference):
        mask = make(torch.from_numpy(shared))
        q, k, v = torch.randn(3, 1, 2, 300, 8)
        for _ in range(2):
            for kernel in ("blocked", None):
                out = attend(q, k, v, mask=mask, kernel=kernel)
                expected = attend(q, k, v, mask=mask.dense(300))
                assert torch.allclose(out, expected, atol=1e-5)
            assert mask.count(300) == int(mask.dense(300).sum())
            shared[:] = np.arange(300) % 3


def test_the_data_of_a_key_stays_alive_as_long_as_the_result():
    """A tensor that is freed would leave its identity to the next one, which would find the wrong result."""
    memo = Memo(1)
    mask = padding(torch.tensor([3, 5]))
    key, data = mask.key(), weakref.ref(mask.data)
    memo.get(key, mask, lambda: "a")
    del mask
    gc.collect()
    assert data() is not None
    memo.get("another", causal(), lambda: "b")
    gc.collect()
    assert data() is None


def test_what_is_worked_out_among_fake_tensors_is_real():
    """A memory estimate with fake tensors must not leave fake tables behind for the real run."""
    mask = window(before=61)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.randn(1, 1, 300, 8)
        explained = explain(q, q, q, mask=mask)
    assert "blocked" in [answer.kernel for answer in explained.answers if answer.able]
    real = torch.randn(1, 1, 300, 8)
    out = attend(real, real, real, mask=mask, kernel="blocked")
    assert torch.allclose(out, attend(real, real, real, mask=mask, kernel="eager"), atol=1e-6)


def test_threads_do_not_trip_over_each_other():
    """More masks than are remembered, from several threads at once."""
    errors = []
    q = torch.randn(1, 1, 130, 4)

    def work(start: int) -> None:
        try:
            for step in range(40):
                attend(q, q, q, mask=window(before=(start * 7 + step) % 30), kernel="blocked")
        except BaseException as error:
            errors.append(error)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert errors == []
