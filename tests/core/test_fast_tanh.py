"""tanh as an operator: on a CPU it is torch's, with its gradient, under vmap and in compiled code."""

import torch

from regard.core.kernels.fast_tanh import is_available, tanh

X = torch.linspace(-6, 6, 31, dtype=torch.float64)


def test_values_and_gradients_are_those_of_tanh():
    assert torch.equal(tanh(X), X.tanh())
    assert torch.autograd.gradcheck(tanh, X.clone().requires_grad_())


def test_it_works_under_vmap_and_in_compiled_code():
    assert torch.equal(torch.func.vmap(tanh, in_dims=1)(X[None].expand(3, 31)), X.tanh()[:, None].expand(31, 3))
    assert is_available()
    compiled = torch.compile(tanh, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), X.tanh())
