"""Models of Hugging Face on `attn_implementation="regard"` on a GPU: equal to "eager" there, also compiled."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from regard.core.kernels import recording
from regard.integrations import huggingface
from tests.integrations.test_huggingface_families import generate, join
from tests.integrations.tiny_models import TinyModel, exact, make
from tests.tolerance import GRADIENT, OUTPUT, too_far

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]

# heads 16 wide, the least that flex_attention takes on a GPU
WIDE: dict[str, Any] = {"head_dim": 16, "hidden_size": 64, "embed_dim": 64}
FAMILIES = [
    "llama decoder", "mistral decoder", "gemma2 decoder", "gemma3_text decoder", "gpt_oss decoder", "gpt2 decoder",
    "qwen3 decoder", "llama4_text decoder", "modernbert encoder", "bert encoder", "t5 seq2seq", "bart seq2seq",
    "vit image",
]  # fmt: skip


def make_on_gpu(family: str, dtype: torch.dtype, attention: str = "eager") -> TinyModel:
    tiny = make(family, attention, **(WIDE if family.split()[0] in ("llama", "mistral", "gemma2") else {}))
    inputs = {name: x.cuda() for name, x in tiny.inputs.items()}
    return TinyModel(tiny.model.to("cuda", dtype), inputs, tiny.real.cuda())


def set_regard(model: PreTrainedModel) -> None:
    """Set the attention of a model and of the models in it, which T5 of transformers 5.17 does not pass on to them."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation("regard")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_eager(family: str, dtype: torch.dtype) -> None:
    huggingface.register()
    tiny = make_on_gpu(family, dtype)
    with exact():
        truth, true_gradients = tiny.gradients(copy.deepcopy(tiny.model).double())
    naive, naive_gradients = tiny.gradients()
    set_regard(tiny.model)
    with recording() as kernels:
        out, gradients = tiny.gradients()
    assert kernels
    assert gradients.keys() == naive_gradients.keys() == true_gradients.keys()
    results = (out, naive, truth), tuple(join(x) for x in (gradients, naive_gradients, true_gradients))
    for (own, other, right), factor in zip(results, (OUTPUT, GRADIENT), strict=True):
        if dtype == torch.float32:
            assert not too_far(own, other, right, factor)
        else:  # the roundings of all layers add up: of a single number they are a matter of luck
            assert (own.double() - right).norm() <= factor * (other.double() - right).norm()


@pytest.mark.parametrize("family", [x for x in FAMILIES if x.endswith(("decoder", "seq2seq"))])
def test_generated_tokens_equal_eager(family: str) -> None:
    huggingface.register()
    tiny = make_on_gpu(family, torch.float32)
    tokens = generate(tiny)
    set_regard(tiny.model)
    assert torch.equal(generate(tiny), tokens)


@pytest.mark.parametrize("family", ["llama decoder", "mistral decoder", "gemma2 decoder", "gpt_oss decoder"])
def test_a_compiled_model_gives_the_same_logits_and_gradients(family: str) -> None:
    huggingface.register()
    tiny = make_on_gpu(family, torch.float32, "regard")
    expected, expected_gradients = tiny.gradients()
    # the experts of gpt_oss are chosen by a loop over values, which transformers 5.17 cannot trace
    compiled = TinyModel(torch.compile(tiny.model, fullgraph="gpt_oss" not in family), tiny.inputs, tiny.real)
    out, gradients = compiled.gradients()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    names = {name.removeprefix("_orig_mod."): x for name, x in gradients.items()}
    for name, gradient in expected_gradients.items():
        largest = expected_gradients[name].abs().max().item()
        torch.testing.assert_close(names[name], gradient, atol=1e-4 * largest + 1e-7, rtol=1e-3)
