import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.base.tensors import is_hollow


def test_a_tensor_without_numbers_is_hollow() -> None:
    assert not is_hollow(torch.zeros(3))
    assert is_hollow(torch.zeros(3, device="meta"))
    with FakeTensorMode():
        assert is_hollow(torch.zeros(3))
