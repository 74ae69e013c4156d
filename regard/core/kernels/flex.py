"""torch's flex_attention on a GPU, with a block mask built from the algebra instead of by trying every pair."""

import math
from regard.core.kernels.call import Call
from torch import Tensor
SUMMARY = "x"
def refusals(call: Call) -> list[str]:
    return ["it runs on CUDA only"]
def work(call: Call) -> float: return 0.
def memory(call: Call) -> int: return 0
def run(call: Call) -> Tensor: raise AssertionError
