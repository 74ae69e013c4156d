"""Normalisation layers."""

from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.registry import Registry
from regard.base.validation import check_integer, check_number


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm that first casts x to the dtype of its weight.

    The cast is needed because torch has no fused kernel for an input and a weight of different dtypes.
    >>> regard.nn.RMSNorm(4)(torch.tensor([2.0, 2.0, -2.0, 2.0])).tolist()
    [1.0, 1.0, -1.0, 1.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


NORMS: Registry[type[nn.LayerNorm] | type[nn.RMSNorm]] = Registry("norm")
NORMS.add("layer")(nn.LayerNorm)  # mean 0, variance 1, then a learned gain and shift. Ba et al. 2016, arXiv:1607.06450
NORMS.add("rms")(RMSNorm)  # root mean square 1, then a learned gain. Zhang and Sennrich 2019, arXiv:1910.07467


def norm(kind: str, width: int, eps: float = 1e-5) -> nn.Module:
    """Return a normalisation layer over the last axis: torch.nn.LayerNorm or RMSNorm.

    kind   "layer" or "rms"
    width  size of the last axis
    """
    if not 0 < check_number("eps", eps) < 1:
        raise ConfigError(f"eps is between 0 and 1: eps={eps}")
    return NORMS[kind](check_integer("width", width, 1), eps=eps)
