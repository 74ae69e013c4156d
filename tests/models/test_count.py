"""Counts with fake tensors, compared with torch's counters over a real pass and with sums by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.base.counting import saved_tensor_bytes
from regard.base.errors import ConfigError
from regard.models.count import count, sum_by_module
from regard.models.presets import MODEL_CLASSES, PRESETS, build

SMALL = {
    "birthplace": {"depth": 2},
    "birthplace-rotary": {"depth": 1, "window": 20},
    "birthplace-synthesizer": {"depth": 1},
    "transformer-tiny": {"depth": 1},
    "bert-base": {"depth": 1, "width": 48, "heads": 4, "vocab": 101, "context": 64},
    "vit-ti/16": {"depth": 1, "image": 96},
    "davit-tiny": {},
    "speech-stream": {"depth": 2},
    "rnn": {},
    "rnn-attention": {},
    "mlp": {},
    "cnn": {},
    "resnet": {},
}
LENGTHS = {"vit-ti/16": 96, "davit-tiny": 64, "speech-stream": 67, "mlp": None, "cnn": None, "resnet": None}


def test_every_architecture_is_counted() -> None:
    counted = {type(PRESETS[name]) for name in SMALL}
    missing = [name for name in MODEL_CLASSES if MODEL_CLASSES[name].Config not in counted]
    assert not missing, f"add a small form of {missing} to SMALL"


@pytest.fixture(params=SMALL)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_counts_are_those_of_a_real_pass(name: str) -> None:
    # dropout of weights needs the matrix of weights on a CPU, and no fused kernel of a GPU keeps it
    without = {"attention_dropout": 0.0} if name.startswith(("birthplace", "speech", "bert")) else {}
    model = build(name, **SMALL[name], **without)
    length = LENGTHS.get(name, 60)
    counted = count(model.config, batch=2, length=length)
    assert counted.total == model.parameter_count
    inputs = model.example_inputs(2, length)
    if not name.startswith("rnn"):  # torch's fused recurrence keeps what it likes; counted is the one written out
        with saved_tensor_bytes([*model.parameters(), *model.buffers()]) as kept:
            model.train()(*inputs)
        if name == "birthplace-rotary":  # a real pass caches which keys its window hides; a counted one saves it
            assert counted.activation_bytes == pytest.approx(sum(kept.values()), rel=0.1)
        else:
            assert counted.activation_bytes == sum(kept.values()) > 0
    with torch.no_grad():
        assert counted.cache_bytes == model.eval().cache_bytes(2, length)


# these skip blocks or widen heads on a CPU, which the meta device does not
ELSEWHERE = ("birthplace-rotary", "birthplace-synthesizer", "speech-stream")


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ELSEWHERE])
def test_multiply_adds_are_what_torch_counts(name: str) -> None:
    """On the meta device torch writes attention as products of matrices, all of which its own counter knows."""
    model = build(name, **SMALL[name], device="meta").eval()
    length = LENGTHS.get(name, 60)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        model(*(x.to("meta") for x in model.example_inputs(2, length)))
    assert count(model.config, batch=2, length=length).multiply_adds == flops.get_total_flops() // 2 > 0


def test_gpt2_by_hand() -> None:
    n, d, depth, vocab = 100, 768, 12, 50257
    counted = count(PRESETS["gpt2"], batch=3, length=n)
    assert counted.multiply_adds == 3 * (depth * (12 * n * d * d + 2 * n * n * d) + n * d * vocab)
    assert counted.attention_entries == 3 * depth * 12 * n * (n + 1) // 2
    assert counted.cache_bytes == 3 * depth * 2 * n * d * 4
    assert counted.parameters["blocks.*.attention"] == depth * (4 * d * d + 4 * d)
    assert counted.total == 124_439_808


def test_a_window_is_counted_as_a_window() -> None:
    config = build("birthplace-rotary", window=9, depth=3, device="meta").config
    counted = count(config, length=100)
    assert counted.attention_entries == 3 * 8 * (10 * 100 - 45)
    assert counted.cache_bytes == 3 * 2 * 9 * 256 * 4


def test_parts_are_summed_over_blocks() -> None:
    sizes = {"a.weight": 1, "blocks.0.x.y.weight": 2, "blocks.11.x.z.bias": 4, "blocks.1.p": 8, "scale": 16}
    assert sum_by_module(sizes) == {"a": 1, "blocks.*.x": 6, "blocks.*": 8, "scale": 16}


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch is 0, but must be at least 1"):
        count(PRESETS["gpt2"], batch=0)
    with pytest.raises(ConfigError, match="length takes a whole number"):
        count(PRESETS["gpt2"], length=1.5)


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "bert-base", "vit-b/32", "davit-tiny", "speech-stream"])
def test_presets_are_counted_at_their_own_size(name: str) -> None:
    assert count(PRESETS[name]).multiply_adds > 0
