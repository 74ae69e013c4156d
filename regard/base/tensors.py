"""What can be asked of a tensor without looking at its numbers."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_meta_or_fake(tensor: Tensor) -> bool:
    """Whether this is the shape of a tensor and no numbers: on the meta device, or fake while something is traced."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
