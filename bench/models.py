"""Whole models beside those of other libraries at equal sizes: a forward pass and a training step.

    python -m bench.models [--quick] [--only TEXT] [--json]

Peers that are not installed are left out, and said so. Dropout is off everywhere, so that all do the same work.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.cases import GateError, Result
from bench.loading import let_torchvision_load
from bench.race import Run, race
from bench.report import machine, table
from regard.models.bert import BERTConfig
from regard.models.gpt import GPTConfig
from regard.models.model import Config
from regard.models.presets import build_from_config
from regard.models.transformer import TransformerConfig
from regard.models.vit import ViTConfig

Call = Callable[..., Tensor]
TARGET = 1.0


@dataclass(frozen=True)
class Case:
    """One of our models, its inputs, and the same network from others: a module and how it is called."""

    name: str
    config: Config
    inputs: tuple[Tensor, ...]
    peers: dict[str, Callable[[], tuple[nn.Module, Call]]]


def cases(quick: bool) -> Iterator[Case]:
    b, n = (2, 16) if quick else (8, 128)
    vocab, width, depth, heads = 1000, 256, 4, 8
    tokens = torch.randint(0, vocab, (b, n), generator=torch.Generator().manual_seed(0))
    sizes: dict[str, Any] = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "dropout": 0.0}
    yield Case(
        "GPT-2",
        GPTConfig(**sizes, context=n, attention_dropout=0.0),
        (tokens,),
        {
            "Hugging Face": lambda: _hugging_gpt2(vocab, n, width, depth, heads),
            "x-transformers": lambda: _x_transformers("Decoder", vocab, n, width, depth, heads),
        },
    )
    yield Case(
        "BERT",
        BERTConfig(**sizes, context=n, attention_dropout=0.0, head="masked"),
        (tokens,),
        {
            "Hugging Face": lambda: _hugging_bert(vocab, n, width, depth, heads),
            "x-transformers": lambda: _x_transformers("Encoder", vocab, n, width, depth, heads),
        },
    )
    yield Case(
        "Transformer",
        TransformerConfig(**sizes, context=n, ff_width=4 * width),
        (tokens, tokens.flip(1)),
        {"torch.nn.Transformer": lambda: _torch_transformer(vocab, n, width, depth, heads)},
    )
    side = 32 if quick else 112
    image = torch.randn(b, 3, side, side, generator=torch.Generator().manual_seed(0))
    yield Case(
        "ViT",
        ViTConfig(image=side, patch=16, classes=100, width=width, depth=depth, heads=heads, dropout=0.0),
        (image,),
        {
            "Hugging Face": lambda: _hugging_vit(side, width, depth, heads),
            "timm": lambda: _timm_vit(side, width, depth, heads),
        },
    )


def measured(quick: bool, only: str = "") -> Iterator[Result]:
    for case in cases(quick):
        if only.lower() not in case.name.lower():
            continue
        torch.manual_seed(0)
        model = build_from_config(case.config)
        gate(case, model)
        for name, build in case.peers.items():
            try:
                module, call = build()
            except ImportError as error:
                print(f"{case.name}: {name} is left out: {error}", file=sys.stderr)
                continue
            _check_size(case.name, name, model, module)
            for what, ours, theirs in (
                ("forward", _forward(model, model, case.inputs), _forward(module, call, case.inputs)),
                ("training step", _step(model, model, case.inputs), _step(module, call, case.inputs)),
            ):
                model.train(what != "forward")
                module.train(what != "forward")
                rounds, least = (3, 0.02) if quick else (31, 0.1)
                times = race({"regard": ours, name: theirs}, rounds=rounds, least=least, device="cpu")
                ratio = times.ratio(name)
                yield Result(
                    name=f"{case.name}, {what}",
                    shape=" and ".join(" x ".join(map(str, x.shape)) for x in case.inputs),
                    kernel="sdpa",
                    milliseconds=times.typical("regard") * 1e3,
                    peer=name,
                    peer_milliseconds=times.typical(name) * 1e3,
                    ratio=ratio.median,
                    low=ratio.low,
                    high=ratio.high,
                    target=TARGET,
                )


def gate(case: Case, model: nn.Module) -> None:
    """Our output against that of the same weights in float64."""
    with torch.no_grad():
        out = _logits(model.eval()(*case.inputs))
        exact = build_from_config(case.config, dtype=torch.float64)
        exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
        truth = _logits(exact.eval()(*(x.double() if x.is_floating_point() else x for x in case.inputs)))
    error = ((out.double() - truth).abs().max() / truth.std()).item()
    if not error < 1e-4:
        raise GateError(f"{case.name}: off by {error:.1e} standard deviations against float64")


def main(argv: list[str]) -> int:
    """Exit code 0 if every target was reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="bench.models", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes: to see that it runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="only models whose name contains this")
    parser.add_argument("--json", action="store_true", help="results as JSON on standard output")
    options = parser.parse_args(argv)
    results = []
    for result in measured(options.quick, options.only):
        results.append(result)
        print(f"{result.name} [{result.shape}]: {result.ratio:.2f}x {result.peer}", file=sys.stderr, flush=True)
    if options.json:
        lines = [{**asdict(line), "reached": line.reached} for line in results]
        print(json.dumps({"machine": machine("cpu"), "results": lines}, indent=1))
    else:
        print("\n".join([machine("cpu"), "", *table(results)]))
    missed = [f"{line.name} [{line.shape}]: {line.ratio:.2f}x {line.peer}" for line in results if not line.reached]
    if missed:
        print("missed:", *missed, sep="\n  ", file=sys.stderr)
    return 1 if missed else 0


def _forward(module: nn.Module, call: Call, inputs: tuple[Tensor, ...]) -> Run:
    def run() -> object:
        with torch.no_grad():
            return call(*inputs)

    return run


def _step(module: nn.Module, call: Call, inputs: tuple[Tensor, ...]) -> Run:
    """Forward, backward and one step of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, foreach=True)

    def run() -> object:
        loss = _logits(call(*inputs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return run


def _logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


def _check_size(case: str, name: str, ours: nn.Module, theirs: nn.Module) -> None:
    a, b = (sum(parameter.numel() for parameter in module.parameters()) for module in (ours, theirs))
    if abs(a - b) > 0.03 * a:
        raise GateError(f"{case}: ours has {a:,} parameters, {name}'s {b:,}; they are not the same network")


def _hugging_gpt2(vocab: int, n: int, width: int, depth: int, heads: int) -> tuple[nn.Module, Call]:
    let_torchvision_load()
    from transformers import GPT2Config, GPT2LMHeadModel

    nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=vocab, n_positions=n, n_embd=width, n_layer=depth, n_head=heads, **nothing)
    model = GPT2LMHeadModel(config)
    return model, lambda tokens: model(tokens, use_cache=False).logits


def _hugging_bert(vocab: int, n: int, width: int, depth: int, heads: int) -> tuple[nn.Module, Call]:
    let_torchvision_load()
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocab,
        max_position_embeddings=n,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    return model, lambda tokens: model(tokens).logits


def _hugging_vit(side: int, width: int, depth: int, heads: int) -> tuple[nn.Module, Call]:
    let_torchvision_load()
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=side,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=100,
    )
    model = ViTForImageClassification(config)
    return model, lambda image: model(image).logits


def _timm_vit(side: int, width: int, depth: int, heads: int) -> tuple[nn.Module, Call]:
    let_torchvision_load()
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=side, patch_size=16, num_classes=100, embed_dim=width, depth=depth, num_heads=heads
    )
    return model, model


def _x_transformers(kind: str, vocab: int, n: int, width: int, depth: int, heads: int) -> tuple[nn.Module, Call]:
    import x_transformers

    layers = getattr(x_transformers, kind)(
        dim=width, depth=depth, heads=heads, attn_dim_head=width // heads, attn_flash=True, ff_mult=4
    )
    model = x_transformers.TransformerWrapper(num_tokens=vocab, max_seq_len=n, attn_layers=layers, tie_embedding=True)
    return model, model


class _TorchTransformer(nn.Module):
    """torch's encoder and decoder with the embeddings of 2017, as its users write them."""

    positions: Tensor
    later: Tensor

    def __init__(self, vocab: int, n: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.transformer = nn.Transformer(width, heads, depth, depth, 4 * width, dropout=0.0, batch_first=True)
        self.register_buffer("places", torch.randn(n, width))
        self.register_buffer("later", nn.Transformer.generate_square_subsequent_mask(n))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        scale, n = self.tokens.embedding_dim**0.5, target.shape[1]
        x, y = (self.tokens(text) * scale + self.positions[: text.shape[1]] for text in (source, target))
        out = self.transformer(x, y, tgt_mask=self.later[:n, :n], tgt_is_causal=True)
        logits: Tensor = out @ self.tokens.weight.T
        return logits


def _torch_transformer(vocab: int, n: int, width: int, depth: int, heads: int) -> tuple[nn.Module, Call]:
    model = _TorchTransformer(vocab, n, width, depth, heads)
    return model, model


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
