"""The benchmark of Hugging Face models: attn_implementation="regard" compared with "sdpa" and "flex_attention".

    python -m bench.huggingface [--quick] [--only TEXT] [--json]

Logits are compared before the timing. A forward pass of the layers is timed, in bfloat16 on a GPU.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.report import BenchmarkResult, CorrectnessError, make_parser, make_result, print_report
from bench.timing import time_alternating
from regard.core.kernels import recording
from regard.integrations.huggingface import register
from regard.integrations.torchvision import let_torchvision_load

CASES = {"causal": (None, 1.0), "sliding window": (1024, 1.3)}  # window, target


def measure(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
    """Yield the time of a decoder's forward pass for each mask and length, compared with the other implementations."""
    let_torchvision_load()
    register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = (1024,) if quick else (2048, 8192, 32768) if device == "cuda" else (2048, 8192)
    rounds, min_seconds = (3, 0.02) if quick else (11, 0.1)
    for name, (window, target) in CASES.items():
        if only not in name:
            continue
        for n in lengths:
            model, tokens = _build(64 if quick and window else window, n, quick, device)
            peers = ("sdpa", "flex_attention") if device == "cuda" else ("sdpa",)
            functions = {other: _forward(model, tokens, other) for other in ("regard", *peers)}
            with recording() as kernels:
                ours = functions["regard"]()
            for other in peers:
                _check(name, ours, functions[other]())
            timings = time_alternating(functions, rounds=rounds, min_seconds=min_seconds, device=device)
            del ours
            goal = target if n >= 8192 or not window else 0.0
            yield make_result(timings, name, f"1 x {n}", kernels[0], timings.fastest_peer(), goal)


def _build(window: int | None, n: int, quick: bool, device: str) -> tuple[Any, Tensor]:
    from transformers import AutoModel, MistralConfig

    wide = device == "cuda"
    config = MistralConfig(
        vocab_size=512, hidden_size=4096 if wide else 256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=32 if wide else 4, num_key_value_heads=8 if wide else 2, sliding_window=window,
        max_position_embeddings=n,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    model = model.to(device, torch.bfloat16 if wide else torch.float32)
    return model, torch.randint(0, 512, (1, n), device=device)


def _forward(model: Any, tokens: Tensor, implementation: str) -> Any:
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(tokens, use_cache=False).last_hidden_state
        return out

    return run


def _check(name: str, ours: Tensor, theirs: Tensor) -> None:
    room = 0.1 if ours.dtype == torch.bfloat16 else 1e-4
    error = (ours - theirs).abs().max().item()
    if not error < room:
        raise CorrectnessError(f"{name}: hidden states differ by {error:.1e}")


def main(argv: list[str]) -> int:
    """Run the benchmark of Hugging Face models. Returns the exit code: 0 if every target was reached, else 1."""
    options = make_parser("bench.huggingface", __doc__).parse_args(argv)
    return print_report(
        measure(options.quick, options.only), "cuda" if torch.cuda.is_available() else "cpu", options.json
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
