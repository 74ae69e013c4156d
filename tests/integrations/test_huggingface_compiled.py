"""Models on `attn_implementation="regard"` inside torch.compile, in one graph."""

from typing import Any

import pytest
import torch

from regard.integrations import huggingface
from tests.integrations.test_huggingface import CASES, PADDED, draw_ids
from tests.integrations.tiny_models import make

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name", ["sliding window, padded", "causal", "padding on either side", "chunks, padded", "packed documents"]
)
def test_compiled_models_give_the_same_logits_and_gradients(name: str) -> None:
    huggingface.register()
    family, settings, given, _ = CASES[name]
    tiny = make(family, "regard", num_hidden_layers=1, **settings)
    inputs: dict[str, Any] = {"input_ids": draw_ids(len(next(iter(given.values()), PADDED)), 9), **given}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    results = []
    for model in (tiny.model, torch.compile(tiny.model, fullgraph=True, backend="aot_eager")):
        tiny.model.zero_grad()
        out = model(**inputs).logits[real]
        out.square().sum().backward()
        results.append((out.detach(), [x.grad.clone() for x in tiny.model.parameters()]))
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)


def test_a_static_cache_works_in_a_compiled_model() -> None:
    from transformers import StaticCache

    huggingface.register()
    tiny = make("llama decoder", "regard", num_hidden_layers=1)
    ids = draw_ids(2, 8)
    compiled = torch.compile(tiny.model, fullgraph=True, backend="eager")
    results = []
    for model in (tiny.model, compiled):
        cache = StaticCache(config=tiny.model.config, max_cache_len=11)
        with torch.no_grad():
            results.append([model(part, past_key_values=cache).logits for part in ids.split([5, 1, 1, 1], 1)])
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral decoder", "llama decoder", "gemma3_text decoder"])
def test_a_compiled_model_is_not_compiled_again_for_a_step_or_a_length(family: str) -> None:
    from transformers import StaticCache

    huggingface.register()
    tiny = make(family, "regard")
    ids = draw_ids(2, 30)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(tiny.model, backend=count)
    cache = StaticCache(config=tiny.model.config, max_cache_len=30)
    with torch.no_grad():
        for part in ids[:, :12].split([5, 1, 1, 1, 1, 1, 1, 1], 1):
            compiled(part, past_key_values=cache)
        assert len(graphs) == 2  # the prompt and the steps
        graphs.clear()
        torch.compiler.reset()
        for n in (8, 11, 17, 23):
            compiled(ids[:, :n], use_cache=False)
        assert len(graphs) == 2  # the first length and all others
