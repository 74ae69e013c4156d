import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.base.tracing import is_meta_or_fake


def test_meta_and_fake_tensors_are_recognized() -> None:
    assert not is_meta_or_fake(torch.zeros(3))
    assert is_meta_or_fake(torch.zeros(3, device="meta"))
    with FakeTensorMode():
        assert is_meta_or_fake(torch.zeros(3))
