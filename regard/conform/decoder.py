"""A whole decoder under examination: tokens in, logits out, and the ways it takes padding, positions and caches."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import generator
from regard.conform.declared import Declared
from regard.conform.report import Convention
from regard.core.masks import padding

FIRST = ("tokens", "input_ids", "token_ids", "ids", "idx", "inputs")
POSITIONS = ("position_ids", "positions")


@dataclass(frozen=True)
class Decoder:
    """Something that turns tokens (b n) into logits (b n w)."""

    name: str
    run: Callable[..., object]
    vocab: int
    parameters: tuple[str, ...]
    module: nn.Module | None
    declared: Declared
    seed: int = 0
    memo: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # what several facts need and one has measured
    words: dict[str, str] = field(default_factory=dict)  # the same, of how it is written

    def draw(self, n: int = 9, b: int = 2, seed: int = 0) -> Int[Tensor, "b n"]:
        """Tokens at random, none of them twice in a row."""
        source = generator(1000 * self.seed + seed)
        tokens = torch.randint(0, self.vocab, (b, n), generator=source)
        for place in range(1, n):
            again = tokens[:, place] == tokens[:, place - 1]
            tokens[:, place] = torch.where(again, (tokens[:, place] + 1) % self.vocab, tokens[:, place])
        return tokens

    def __call__(self, tokens: Int[Tensor, "b n"], **extra: object) -> Tensor:
        """The logits, whatever they come wrapped in."""
        with torch.no_grad():
            return unwrapped(self.run(tokens.clone(), **extra))

    @property
    def positions_argument(self) -> str | None:
        return next((name for name in POSITIONS if name in self.parameters), None)

    @property
    def padding_argument(self) -> str | None:
        return next((name for name in ("attention_mask", "padding") if name in self.parameters), None)

    @property
    def cache_kind(self) -> str | None:
        """hugging-face, own (a `cache()` method beside a `cache` argument), or none."""
        if "past_key_values" in self.parameters:
            return "past_key_values"
        return "cache" if "cache" in self.parameters and callable(getattr(self.module, "cache", None)) else None

    def padded(self, real: list[int], n: int, side: str) -> dict[str, object]:
        """The arguments that tell of padding on one side, with positions that count real tokens only."""
        name = self.padding_argument
        if name is None:
            return {}
        lengths = torch.tensor(real)
        if name == "padding":
            return {name: padding(lengths) if side == "right" else padding(lengths, side="left", width=n)}
        place = torch.arange(n)[None, :]
        kept = place < lengths[:, None] if side == "right" else place >= n - lengths[:, None]
        given: dict[str, object] = {name: kept.long()}
        if side == "left" and self.positions_argument is not None:
            given[self.positions_argument] = (kept.long().cumsum(1) - 1).clamp(min=0)
        return given

    def in_steps(
        self, tokens: Int[Tensor, "b n"], sizes: list[int], capacity: int | None = None
    ) -> Float[Tensor, "b n w"]:
        """The logits of the same tokens handed over in steps, through a cache."""
        rows, start = [], 0
        cache: Any = None
        if self.cache_kind == "cache" and self.module is not None:
            make: Any = self.module.cache
            cache = make() if capacity is None else make(capacity)
        for size in sizes:
            step = tokens[:, start : start + size].clone()
            with torch.no_grad():
                if self.cache_kind == "cache":
                    out = self.run(step, cache=cache)
                else:
                    out = self.run(step, past_key_values=cache, use_cache=True)
                    cache = (
                        out["past_key_values"] if isinstance(out, Mapping) else getattr(out, "past_key_values", None)
                    )
            rows.append(unwrapped(out))
            start += size
        return torch.cat(rows, 1)

    def conventions(self) -> tuple[Convention, ...]:
        """How it takes what a decoder may be handed."""
        found = [Convention("vocabulary", str(self.vocab))]
        for name, value in (
            ("padding by", self.padding_argument),
            ("positions by", self.positions_argument),
            ("cache by", self.cache_kind),
        ):
            found.append(Convention(name, value or "nothing"))
        return tuple(found)


def unwrapped(out: object) -> Tensor:
    """The logits of an answer: itself, `.logits`, ["logits"] or the first of several."""
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    out = getattr(out, "logits", out)
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise ConfigError(f"a decoder gives logits (b n w), or something with .logits, not {type(out).__name__}")
    return out


def _parameters(fn: object) -> tuple[str, ...]:
    target = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        return tuple(inspect.signature(target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()


def looks_like_a_decoder(fn: object) -> bool:
    """Whether its first argument is tokens by name, or it is a module that embeds them."""
    names = _parameters(fn)
    if not names:
        return False
    if isinstance(fn, nn.Module):
        embeds = any(isinstance(part, nn.Embedding) for part in fn.modules())
        return names[0] in FIRST or (embeds and names[0] == "x" and "k" not in names)
    return names[0] in FIRST and (len(names) < 2 or names[1] not in ("k", "keys", "key"))


def as_decoder(fn: object, declared: Declared, *, vocab: int | None = None, seed: int = 0) -> Decoder:
    """The decoder, with its vocabulary and arguments found out."""
    if not callable(fn):
        raise ConfigError(f"a decoder is a function or module from tokens to logits, not {fn!r}")
    module = fn if isinstance(fn, nn.Module) else None
    config = getattr(module, "config", None)
    for name in ("vocab", "vocab_size"):
        vocab = vocab or getattr(config, name, None)
    if vocab is None and module is not None:
        sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
        vocab = sizes[0] if sizes else None
    if vocab is None:
        raise ConfigError("the decoder does not tell how many tokens it knows; say vocab=")
    name = type(fn).__name__ if module is not None else getattr(fn, "__name__", type(fn).__name__)
    return Decoder(name, fn, vocab, _parameters(fn), module, declared, seed)
