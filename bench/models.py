"""The benchmark of whole models: a forward pass, a training step and decoding, compared with other libraries.

    python -m bench.models [--quick] [--only TEXT] [--json]

Libraries that are not installed are skipped with a message. Dropout is off, so that all models do the same work.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.report import BenchmarkResult, CorrectnessError, make_parser, make_result, print_report
from bench.timing import Function, time_alternating
from regard.integrations.torchvision import let_torchvision_load
from regard.models.bert import BERTConfig
from regard.models.gpt import GPT, GPTConfig
from regard.models.model import Config
from regard.models.presets import build_from_config
from regard.models.transformer import TransformerConfig
from regard.models.vit import ViTConfig
from regard.nn.int8 import quantize_int8

TARGET = 1.0
DECODING, DECODING_TARGET = "GPT-2 124M, generate", 1.5


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its input: b sequences of n tokens, or b images."""

    b: int
    n: int
    image: int
    vocab: int = 1000
    classes: int = 100
    width: int = 256
    depth: int = 4
    heads: int = 8


@dataclass(frozen=True)
class ModelCase:
    """A model of regard, its inputs, and functions that build the same network with other libraries, by library."""

    name: str
    config: Config
    inputs: tuple[Tensor, ...]
    peers: dict[str, Callable[[Sizes], nn.Module]]


def make_cases(s: Sizes) -> Iterator[ModelCase]:
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, s.vocab, (s.b, s.n), generator=draws)
    image = torch.randn(s.b, 3, s.image, s.image, generator=draws)
    common: dict[str, Any] = {"width": s.width, "depth": s.depth, "heads": s.heads, "dropout": 0.0}
    text = common | {"vocab": s.vocab, "context": s.n}
    gpt = GPTConfig(**text, attention_dropout=0.0)
    bert = BERTConfig(**text, attention_dropout=0.0, head="masked")
    transformer = TransformerConfig(**text, ff_width=4 * s.width)
    vit = ViTConfig(**common, image=s.image, patch=16, classes=s.classes)
    yield ModelCase("GPT-2", gpt, (tokens,), {"Hugging Face": _huggingface_gpt2, "x-transformers": _x_transformers_gpt})
    yield ModelCase(
        "BERT", bert, (tokens,), {"Hugging Face": _huggingface_bert, "x-transformers": _x_transformers_bert}
    )
    yield ModelCase("Transformer", transformer, (tokens, tokens.flip(1)), {"torch.nn.Transformer": TorchTransformer})
    yield ModelCase("ViT", vit, (image,), {"Hugging Face": _huggingface_vit, "timm": _timm_vit})


def measure(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
    """Yield the time of a forward pass and of a training step of each model, compared with each other library.

    only  measure only models whose name contains this text
    """
    sizes = Sizes(2, 16, 32) if quick else Sizes(8, 128, 112)
    rounds, min_seconds = (3, 0.02) if quick else (31, 0.1)
    for case in make_cases(sizes):
        if only.lower() not in case.name.lower():
            continue
        torch.manual_seed(0)
        model = build_from_config(case.config)
        check_model(case, model)
        shape = " and ".join(" x ".join(map(str, x.shape)) for x in case.inputs)
        for peer, build_peer in case.peers.items():
            try:
                other = build_peer(sizes)
            except ImportError as error:
                print(f"{case.name}: {peer} is skipped: {error}", file=sys.stderr)
                continue
            _check_size(case.name, peer, model, other)
            for name, prepare in (("forward", _forward), ("training step", _training_step)):
                functions = {"regard": prepare(model, case.inputs), peer: prepare(other, case.inputs)}
                timings = time_alternating(functions, rounds=rounds, min_seconds=min_seconds, device="cpu")
                yield make_result(timings, f"{case.name}, {name}", shape, "sdpa", peer, TARGET)
    if only.lower() in DECODING.lower():
        yield from measure_decoding(quick, rounds, min_seconds)


def measure_decoding(quick: bool, rounds: int, min_seconds: float) -> Iterator[BenchmarkResult]:
    """Yield the time of greedy decoding of one text by GPT-2 with random weights, in float32 and with int8 weights.

    Both times are compared with Hugging Face in float32, which must generate the same text as regard in float32.
    """
    let_torchvision_load()
    try:
        from transformers import GPT2LMHeadModel, logging
    except ImportError as error:
        print(f"{DECODING}: Hugging Face is skipped: {error}", file=sys.stderr)
        return
    logging.set_verbosity_error()
    config = GPTConfig(vocab=1000, width=64, depth=2, heads=2) if quick else GPTConfig(vocab=50257)
    model, prompt, new = GPT(config).eval(), torch.arange(5, 13)[None], 4 if quick else 48
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder)
        other = GPT2LMHeadModel.from_pretrained(folder).eval()  # nosec B615: our own folder
    settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def ours() -> list[int]:
        return list(model.generate(prompt, max_new_tokens=new)[0].tokens)

    def theirs() -> list[int]:
        return list(other.generate(prompt, max_new_tokens=new, **settings)[0, prompt.shape[1] :].tolist())

    if ours() != theirs():
        raise CorrectnessError(f"{DECODING}: the texts differ")
    functions: dict[str, Function] = {"regard": ours, "Hugging Face": theirs}
    timings = time_alternating(functions, rounds=min(rounds, 9), min_seconds=min_seconds, device="cpu")
    yield make_result(timings, DECODING, f"1 x {new} new tokens", "sdpa", "Hugging Face", DECODING_TARGET)
    small = quantize_int8(model)
    with torch.no_grad():
        exact = model(prompt)
        change = ((small(prompt) - exact).std() / exact.std()).item()
    if not change < 0.05:
        raise CorrectnessError(f"{DECODING}: the logits of int8 weights are {change:.1e} standard deviations off")

    def int8() -> list[int]:
        return list(small.generate(prompt, max_new_tokens=new)[0].tokens)

    timings = time_alternating(
        functions | {"regard": int8}, rounds=min(rounds, 9), min_seconds=min_seconds, device="cpu"
    )
    yield make_result(
        timings, f"{DECODING}, int8 weights", f"1 x {new} new tokens", "sdpa", "Hugging Face", DECODING_TARGET
    )


def check_model(case: ModelCase, model: nn.Module) -> None:
    """Compare the model's output with that of the same weights in float64; raise CorrectnessError if they differ."""
    with torch.no_grad():
        out = _logits(model.eval()(*case.inputs))
        exact = build_from_config(case.config, dtype=torch.float64)
        exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
        truth = _logits(exact.eval()(*(x.double() if x.is_floating_point() else x for x in case.inputs)))
    error = ((out.double() - truth).abs().max() / truth.std()).item()
    if not error < 1e-4:
        raise CorrectnessError(f"{case.name}: the error is {error:.1e} standard deviations against float64")


def main(argv: list[str]) -> int:
    """Run the benchmark of models. Returns the exit code: 0 if every target was reached, else 1."""
    options = make_parser("bench.models", __doc__, "models").parse_args(argv)
    return print_report(measure(options.quick, options.only), "cpu", options.json)


def _forward(model: nn.Module, inputs: tuple[Tensor, ...]) -> Function:
    model.eval()

    def run() -> object:
        with torch.no_grad():
            return model(*inputs)

    return run


def _training_step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Function:
    """Return a function that does one training step: forward pass, backward pass and an AdamW step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)

    def run() -> object:
        loss = _logits(model(*inputs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return run


def _logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


def _check_size(case: str, peer: str, ours: nn.Module, other: nn.Module) -> None:
    a, b = (sum(parameter.numel() for parameter in module.parameters()) for module in (ours, other))
    if abs(a - b) > 0.03 * a:
        raise CorrectnessError(f"{case}: ours has {a:,} parameters, {peer}'s {b:,}; they are not the same network")


def _huggingface_gpt2(s: Sizes) -> Any:
    let_torchvision_load()
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": s.vocab, "n_positions": s.n, "n_embd": s.width, "n_layer": s.depth, "n_head": s.heads}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, use_cache=False))


def _huggingface_sizes(s: Sizes) -> dict[str, Any]:
    """Return the configuration settings that BERT and ViT of Hugging Face have in common."""
    return {
        "hidden_size": s.width, "num_hidden_layers": s.depth, "num_attention_heads": s.heads,
        "intermediate_size": 4 * s.width, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def _huggingface_bert(s: Sizes) -> Any:
    let_torchvision_load()
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=s.vocab, max_position_embeddings=s.n, **_huggingface_sizes(s)))


def _huggingface_vit(s: Sizes) -> Any:
    let_torchvision_load()
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=s.image, num_labels=s.classes, **_huggingface_sizes(s)))


def _timm_vit(s: Sizes) -> Any:
    let_torchvision_load()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=s.image, patch_size=16, num_classes=s.classes, embed_dim=s.width, depth=s.depth, num_heads=s.heads
    )


def _x_transformers_gpt(s: Sizes, layers: str = "Decoder") -> Any:
    import x_transformers

    stack = getattr(x_transformers, layers)(
        dim=s.width, depth=s.depth, heads=s.heads, attn_dim_head=s.width // s.heads, attn_flash=True, ff_mult=4
    )
    return x_transformers.TransformerWrapper(num_tokens=s.vocab, max_seq_len=s.n, attn_layers=stack, tie_embedding=True)


def _x_transformers_bert(s: Sizes) -> Any:
    return _x_transformers_gpt(s, "Encoder")


class TorchTransformer(nn.Module):
    """A sequence-to-sequence model made of torch.nn.Transformer, with embeddings, positions and an output layer."""

    positions: Tensor
    causal: Tensor

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s.vocab, s.width)
        self.transformer = nn.Transformer(
            s.width, s.heads, s.depth, s.depth, 4 * s.width, dropout=0.0, batch_first=True
        )
        self.register_buffer("positions", torch.randn(s.n, s.width))
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(s.n))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        scale, n = self.tokens.embedding_dim**0.5, target.shape[1]
        x, y = (self.tokens(text) * scale + self.positions[: text.shape[1]] for text in (source, target))
        out = self.transformer(x, y, tgt_mask=self.causal[:n, :n], tgt_is_causal=True)
        logits: Tensor = out @ self.tokens.weight.T
        return logits


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
