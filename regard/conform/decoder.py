"""A whole decoder under examination: tokens in, logits out, and the ways it takes padding, positions and caches."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.conform.options import Declared
from regard.conform.report import Convention
from regard.core.masks import padding

FIRST = ("tokens", "input_ids", "token_ids", "ids", "idx", "inputs")
POSITIONS = ("position_ids", "positions")
CACHES = ("past_key_values", "kv_cache", "layer_past", "past_kv", "past", "cache")
START = "start_pos"  # of a decoder that keeps its cache inside


@dataclass(frozen=True)
class DecoderCache:
    """How a decoder remembers: the argument, and where in its answer what to hand over at the next step is."""

    argument: str
    key: str | int | None = None  # None where the cache is made before the first step, or kept inside
    attribute: bool = False
    settings: tuple[str, ...] = ()  # arguments that are True for it

    @property
    def place(self) -> str:
        """How it is written behind an answer."""
        return f".{self.key}" if self.attribute else f"[{self.key!r}]"

    def of(self, out: Any) -> object:
        return getattr(out, str(self.key)) if self.attribute else out[self.key]

    def given(self, cache: object) -> dict[str, object]:
        return {self.argument: cache, **dict.fromkeys(self.settings, True)}

    def __str__(self) -> str:
        return (
            f"{self.argument}, which is entry {self.key} of the answer" if isinstance(self.key, int) else self.argument
        )


@dataclass(frozen=True)
class DecoderUnderTest:
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
    extra: Mapping[str, object] = field(default_factory=dict)  # handed over at every call; a function is given tokens

    def draw(self, n: int = 9, b: int = 2, seed: int = 0) -> Int[Tensor, "b n"]:
        """Tokens at random, none of them twice in a row."""
        source = make_generator(1000 * self.seed + seed)
        tokens = torch.randint(0, self.vocab, (b, n), generator=source)
        for place in range(1, n):
            again = tokens[:, place] == tokens[:, place - 1]
            tokens[:, place] = torch.where(again, (tokens[:, place] + 1) % self.vocab, tokens[:, place])
        return tokens

    def __call__(self, tokens: Int[Tensor, "b n"], **extra: object) -> Tensor:
        """The logits, whatever they come wrapped in."""
        with torch.no_grad():
            return unwrapped(self.asked(tokens.clone(), **extra))

    def asked(self, tokens: Int[Tensor, "b n"], **extra: object) -> object:
        """The answer to these very tokens."""
        start: dict[str, object] = {START: 0} if START in self.parameters else {}
        every = {name: value(tokens) if callable(value) else value for name, value in self.extra.items()}
        return self.run(tokens, **{**start, **every, **extra})

    @property
    def positions_argument(self) -> str | None:
        return next((name for name in POSITIONS if name in self.parameters), None)

    @property
    def padding_argument(self) -> str | None:
        return next((name for name in ("attention_mask", "padding") if name in self.parameters), None)

    @cached_property
    def cache(self) -> DecoderCache | None:
        """How it remembers: by a `cache()` method beside a `cache` argument, inside, by what it hands back, or not."""
        if "cache" in self.parameters and callable(getattr(self.module, "cache", None)):
            return DecoderCache("cache")
        if START in self.parameters:
            return DecoderCache(START)
        name = next((name for name in CACHES if name in self.parameters), None)
        settings = [each for each in ("use_cache",) if each in self.parameters]
        try:
            return None if name is None else self._handed_back(name, tuple(settings))
        except Exception:
            return None  # what the argument takes is not known

    def _handed_back(self, name: str, settings: tuple[str, ...]) -> DecoderCache | None:
        tokens = self.draw(3, 1)
        with torch.no_grad():
            out = self.asked(tokens, **DecoderCache(name, settings=settings).given(None))
        for key in dict.fromkeys((name, "past_key_values")):
            if getattr(out, key, None) is not None:
                return DecoderCache(name, key, attribute=True, settings=settings)
            if isinstance(out, Mapping) and out.get(key) is not None:
                return DecoderCache(name, key, settings=settings)
        if not isinstance(out, tuple | list):
            return None
        for place in range(1, len(out)):
            if out[place] is None:
                continue
            found = DecoderCache(name, place, settings=settings)
            try:  # that it stands second does not say that it is a cache
                with torch.no_grad():
                    self.asked(tokens[:, :1], **found.given(out[place]))
            except Exception:
                return None
            return found
        return None

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
        assert self.cache is not None
        kept: object = None
        if self.cache.argument == "cache" and self.cache.key is None and self.module is not None:
            make: Any = self.module.cache
            kept = make() if capacity is None else make(capacity)
        for size in sizes:
            step = tokens[:, start : start + size].clone()
            with torch.no_grad():
                out = self.asked(step, **self.cache.given(start if self.cache.argument == START else kept))
            kept = kept if self.cache.key is None else self.cache.of(out)
            rows.append(unwrapped(out))
            start += size
        return torch.cat(rows, 1)

    def conventions(self) -> tuple[Convention, ...]:
        """How it takes what a decoder may be handed."""
        found = [Convention("vocabulary", str(self.vocab))]
        for name, value in (
            ("padding by", self.padding_argument),
            ("positions by", self.positions_argument),
            ("cache by", self.cache and str(self.cache)),
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
    """Whether its first argument is tokens by name, or it is a module that embeds what it is handed."""
    names = _parameters(fn)
    if not names:
        return False
    if isinstance(fn, nn.Module):
        # positions may be embedded too, so that an embedding alone says nothing
        return names[0] in FIRST or (names[0] == "x" and "k" not in names and _embedder(fn) is not None)
    return names[0] in FIRST and (len(names) < 2 or names[1] not in ("k", "keys", "key"))


def _embedder(module: nn.Module) -> nn.Embedding | None:
    """The embedding that is handed the very tokens of a call."""
    parts = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    own = next(module.parameters(), torch.empty(0))
    tokens = torch.tensor([[1, 0, 0, 1]], device=own.device)
    found: list[nn.Embedding] = []

    def look(part: nn.Module, given: tuple[Any, ...]) -> None:
        read = given[0] if given else None
        if isinstance(read, Tensor) and read.shape == tokens.shape and torch.equal(read, tokens):
            assert isinstance(part, nn.Embedding)
            found.append(part)

    hooks = [part.register_forward_pre_hook(look) for part in parts]
    training = {part: part.training for part in module.modules()}
    try:
        if parts:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                module.eval()(tokens)
    except Exception:  # it may need more than tokens, after they were embedded
        return found[0] if found else None
    finally:
        for hook in hooks:
            hook.remove()
        for part, mode in training.items():
            part.training = mode
    return found[0] if found else None


def as_decoder(
    fn: object,
    declared: Declared,
    *,
    vocab: int | None = None,
    seed: int = 0,
    extra: Mapping[str, object] | None = None,
) -> DecoderUnderTest:
    """The decoder, with its vocabulary and arguments found out."""
    if not callable(fn):
        raise ConfigError(f"a decoder is a function or module from tokens to logits, not {fn!r}")
    module = fn if isinstance(fn, nn.Module) else None
    config = getattr(module, "config", None)
    for name in ("vocab", "vocab_size"):
        vocab = vocab or getattr(config, name, None)
    if vocab is None and module is not None:
        embedder = _embedder(module)
        sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
        vocab = embedder.num_embeddings if embedder is not None else sizes[0] if sizes else None
    if vocab is None:
        raise ConfigError("the decoder does not tell how many tokens it knows; say vocab=")
    name = type(fn).__name__ if module is not None else getattr(fn, "__name__", type(fn).__name__)
    names, given = _parameters(fn), dict(extra or {})
    unknown = [each for each in given if each not in names]
    if unknown and not _takes_any(fn):
        raise ConfigError(f"extra has {', '.join(unknown)}, but {name} takes {', '.join(names) or 'no arguments'}")
    return DecoderUnderTest(name, fn, vocab, names, module, declared, seed, extra=given)


def _takes_any(fn: object) -> bool:
    """Whether it has a ** that takes every keyword."""
    target = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        kinds = [each.kind for each in inspect.signature(target).parameters.values()]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True
    return inspect.Parameter.VAR_KEYWORD in kinds
