"""The float64 reference implementation as a kernel."""

from torch import Tensor

from regard.core.kernels import eager
from regard.core.kernels.request import Request

SUMMARY = "the definition of attention in float64; slow"
RANK = 5

refusals = eager.refusals


def work(request: Request) -> float:
    return 25 * eager.work(request)


def memory(request: Request) -> int:
    b, h, _, i, j, _, _ = request.sizes
    return 9 * b * h * i * j * 8 // 2


def run(request: Request) -> Tensor:
    from regard.core.reference import reference  # it uses the products of this package

    return reference(request)
