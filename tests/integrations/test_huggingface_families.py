"""Models of Hugging Face on `attn_implementation="regard"` equal those on "eager": one case for each family."""

import copy
from typing import Any

import pytest
import torch

from regard.core.kernels import recording
from regard.integrations import huggingface
from tests.integrations.tiny_models import FAMILIES, TinyModel, exact, make
from tests.tolerance import GRADIENT, OUTPUT, too_far

pytestmark = pytest.mark.filterwarnings("ignore")


def generate(tiny: TinyModel, **settings: Any) -> torch.Tensor:
    inputs = {name: x for name, x in tiny.inputs.items() if name != "decoder_input_ids"}
    tokens: torch.Tensor = tiny.model.generate(**inputs, max_new_tokens=5, do_sample=False, **settings)
    return tokens


def join(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_generated_tokens_equal_eager(family: str) -> None:
    huggingface.register()
    tiny = make(family)
    truth_model = copy.deepcopy(tiny.model).double()
    with exact():
        truth, true_gradients = tiny.gradients(truth_model)
    naive, naive_gradients = tiny.gradients()
    tokens = generate(tiny) if family.endswith(("decoder", "seq2seq")) else None
    tiny.model.set_attn_implementation("regard")
    with recording() as kernels:
        out, gradients = tiny.gradients()
    assert kernels
    assert not too_far(out, naive, truth, OUTPUT)
    assert gradients.keys() == naive_gradients.keys() == true_gradients.keys()
    assert not too_far(join(gradients), join(naive_gradients), join(true_gradients), GRADIENT)
    largest = join(true_gradients).abs().max()
    for name, gradient in gradients.items():  # a small gradient is not hidden by a large one
        true = true_gradients[name]
        if not true.numel():
            continue
        assert (gradient - true).abs().max() <= 1e-3 * true.abs().max() + torch.finfo(torch.float32).eps * largest, name
    if tokens is not None:
        assert torch.equal(generate(tiny), tokens)
