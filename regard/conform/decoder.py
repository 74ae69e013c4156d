"""`DecoderUnderTest`: call a decoder from tokens to logits, and find its padding, position and cache arguments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.conform.options import CheckOptions
from regard.conform.report import Convention
from regard.see.measure.read_weights import training_mode

TOKEN_NAMES = ("tokens", "input_ids", "token_ids", "ids", "idx", "inputs")
POSITION_NAMES = ("position_ids", "positions")
CACHE_NAMES = ("past_key_values", "kv_cache", "layer_past", "past_kv", "past", "cache")
START = "start_pos"  # argument of a decoder that keeps its cache inside


@dataclass(frozen=True)
class DecoderCache:
    """How a KV cache is passed to a decoder and returned by it.

    argument      name of the decoder's argument that takes the cache
    key           index or attribute at which the output holds the updated cache; None if the cache is not returned
    is_attribute  whether `key` is an attribute of the output instead of an index
    flags         further arguments that must be True, such as use_cache
    """

    argument: str
    key: str | int | None = None  # None if the cache is made before the first step, or kept inside
    is_attribute: bool = False
    flags: tuple[str, ...] = ()  # arguments that are set to True, such as use_cache

    @property
    def access_code(self) -> str:
        """The Python code that gets the cache from an output, such as `.past_key_values` or `[1]`."""
        return f".{self.key}" if self.is_attribute else f"[{self.key!r}]"

    def keywords(self, cache: object) -> dict[str, object]:
        """Return the keyword arguments that pass a cache to the decoder."""
        return {self.argument: cache, **dict.fromkeys(self.flags, True)}

    def __str__(self) -> str:
        return f"{self.argument}, entry {self.key} of the output" if isinstance(self.key, int) else self.argument


@dataclass(frozen=True)
class DecoderUnderTest:
    """A decoder under test: a function or module that maps tokens to logits over the vocabulary.

    name        name of the decoder
    run         the function or module
    vocab       size of the vocabulary
    parameters  names of the arguments
    module      the decoder if it is an nn.Module, else None
    declared    options of the check

    The tokens have the shape (b, n) and the logits the shape (b, n, w), where w is the size of the vocabulary.
    """

    name: str
    run: Callable[..., object]
    vocab: int
    parameters: tuple[str, ...]
    module: nn.Module | None
    declared: CheckOptions
    memo: dict[object, Any] = field(default_factory=dict, init=False, compare=False)  # shared by the facts

    def once(self, key: object, compute: Callable[[], Any]) -> Any:
        """Return the value that is cached under `key`; the first call computes it with `compute`."""
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]

    @property
    def extra(self) -> Mapping[str, object]:
        """The keyword arguments that the options declare for every call.

        If a value is a function, the function is called with the tokens and its result is passed.
        """
        return self.declared.extra or {}

    def random_tokens(self, n: int = 9, b: int = 2, seed: int = 0) -> Int[Tensor, "b n"]:
        """Sample b random sequences of n tokens in which no two adjacent tokens are equal."""
        source = make_generator(1000 * self.declared.seed + seed)
        tokens = torch.randint(0, self.vocab, (b, n), generator=source)
        for position in range(1, n):
            again = tokens[:, position] == tokens[:, position - 1]
            tokens[:, position] = torch.where(again, (tokens[:, position] + 1) % self.vocab, tokens[:, position])
        return tokens

    def __call__(self, tokens: Int[Tensor, "b n"], **keywords: object) -> Tensor:
        """Run the decoder on a copy of the tokens, without gradients, and return the logits."""
        with torch.no_grad():
            return get_logits(self.call(tokens.clone(), **keywords))

    def call(self, tokens: Int[Tensor, "b n"], **keywords: object) -> object:
        """Run the decoder on the tokens and return its output as it is, such as a tuple or an output object."""
        start: dict[str, object] = {START: 0} if START in self.parameters else {}
        every = {name: value(tokens) if callable(value) else value for name, value in self.extra.items()}
        return self.run(tokens, **{**start, **every, **keywords})

    def logits_or_none(self, tokens: Int[Tensor, "b n"]) -> Tensor | None:
        """Run the decoder and return the logits; None if the call raises an error, such as for too many tokens."""
        try:
            return self(tokens)
        except Exception:  # the function of the user may raise any exception
            return None

    def find_parameter(self, names: tuple[str, ...]) -> str | None:
        """Return the first of these names that is an argument of the decoder; None if no name is."""
        return next((name for name in names if name in self.parameters), None)

    @property
    def positions_argument(self) -> str | None:
        return self.find_parameter(POSITION_NAMES)

    @property
    def padding_argument(self) -> str | None:
        return self.find_parameter(("attention_mask", "padding"))

    @cached_property
    def cache(self) -> DecoderCache | None:
        """How a KV cache is passed to the decoder and returned by it; None if the decoder takes none in a known way.

        Three ways are known: a method `cache()` that creates a cache for the argument `cache`; an argument `start_pos`,
        with the cache kept inside the decoder; and an argument for a cache that the output returns.
        """
        if "cache" in self.parameters and callable(getattr(self.module, "cache", None)):
            return DecoderCache("cache")
        if START in self.parameters:
            return DecoderCache(START)
        name = self.find_parameter(CACHE_NAMES)
        try:
            return None if name is None else self._find_returned_cache(name)
        except Exception:
            return None  # the argument takes something else

    def _find_returned_cache(self, name: str) -> DecoderCache | None:
        flags = tuple(each for each in ("use_cache",) if each in self.parameters)
        tokens = self.random_tokens(3, 1)
        with torch.no_grad():
            out = self.call(tokens, **DecoderCache(name, flags=flags).keywords(None))
        for key in dict.fromkeys((name, "past_key_values")):
            if getattr(out, key, None) is not None:
                return DecoderCache(name, key, is_attribute=True, flags=flags)
            if isinstance(out, Mapping) and out.get(key) is not None:
                return DecoderCache(name, key, flags=flags)
        if not isinstance(out, tuple | list):
            return None
        for number in range(1, len(out)):
            if out[number] is not None:
                found = DecoderCache(name, number, flags=flags)
                with torch.no_grad():  # raises if this entry is no cache
                    self.call(tokens[:, :1], **found.keywords(out[number]))
                return found
        return None

    def run_code(self, tokens: Int[Tensor, "b n"], lines: Sequence[str], gradients: bool = False) -> dict[str, Any]:
        """Execute lines of Python code in which `tokens` is a copy of the tokens, and return all variables by name.

        gradients  whether autograd is enabled
        """
        space = {**self.extra, "torch": torch, "tokens": tokens.clone(), self.name_in_code: self.run}
        with torch.set_grad_enabled(gradients):
            exec("\n".join(lines), space)  # code written by this package, which the report shows  # nosec B102
        return space

    @property
    def name_in_code(self) -> str:
        """The name of the decoder in the Python code of an example."""
        if self.module is not None:
            return "model"
        return self.name if self.name.isidentifier() else "f"

    def conventions(self) -> tuple[Convention, ...]:
        """Return the vocabulary size, and the names of the padding, position and cache arguments, for the report."""
        arguments = {
            "padding argument": self.padding_argument,
            "positions argument": self.positions_argument,
            "cache argument": self.cache and str(self.cache),
        }
        found = [Convention(name, value or "none") for name, value in arguments.items()]
        return (Convention("vocabulary", str(self.vocab)), *found)


def get_logits(out: object) -> Tensor:
    """Return the logits in a decoder's output: `out`, out.logits, out["logits"] or the first entry of a tuple."""
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    out = getattr(out, "logits", out)
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise ConfigError(f"a decoder returns logits (b n w), or something with .logits, not {type(out).__name__}")
    return out


def _parameters(fn: object) -> Mapping[str, inspect.Parameter]:
    target = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        return inspect.signature(target).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {}


def takes_tokens(fn: object) -> bool:
    """Return whether a callable takes tokens, which makes it a decoder.

    The name of the first argument must be usual for tokens, such as `input_ids`. In a module the first argument can
    also be named x, if the module passes it to an nn.Embedding.
    """
    names = list(_parameters(fn))
    if not names:
        return False
    if isinstance(fn, nn.Module):
        # an embedding alone does not show that: positions may be embedded too
        return names[0] in TOKEN_NAMES or (names[0] == "x" and "k" not in names and token_embedding(fn) is not None)
    return names[0] in TOKEN_NAMES and (len(names) < 2 or names[1] not in ("k", "keys", "key"))


def token_embedding(module: nn.Module) -> str | None:
    """Return the path of the nn.Embedding that receives the tokens when the module is called, or None."""
    own = next(module.parameters(), torch.empty(0))
    tokens = torch.tensor([[1, 0, 0, 1]], device=own.device)
    found: list[str] = []

    def record(path: str, part: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and torch.equal(given[0], tokens):
            found.append(path)

    parts = {path: part for path, part in module.named_modules() if isinstance(part, nn.Embedding)}
    hooks = [part.register_forward_pre_hook(partial(record, path)) for path, part in parts.items()]
    try:
        if parts:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), training_mode(module, training=False):
                module(tokens)
    except Exception:  # the call may fail after the tokens were embedded
        return found[0] if found else None
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def make_decoder(fn: object, options: CheckOptions) -> DecoderUnderTest:
    """Wrap a decoder for tests, with its vocabulary size and argument names.

    Raises ConfigError if the vocabulary size is unknown.
    """
    if not callable(fn):
        raise ConfigError(f"a decoder is a function or module from tokens to logits, not {fn!r}")
    module = fn if isinstance(fn, nn.Module) else None
    config, vocab = getattr(module, "config", None), options.vocab
    for name in ("vocab", "vocab_size"):
        vocab = vocab or getattr(config, name, None)
    if vocab is None and module is not None:
        sizes = {path: part.num_embeddings for path, part in module.named_modules() if isinstance(part, nn.Embedding)}
        vocab = sizes.get(token_embedding(module) or "", next(iter(sizes.values()), None))
    if vocab is None:
        raise ConfigError("the vocabulary size of the decoder is unknown; pass vocab=, as check(decoder, vocab=50257)")
    name = type(fn).__name__ if module is not None else getattr(fn, "__name__", type(fn).__name__)
    parameters = _parameters(fn)
    unknown = [each for each in options.extra or {} if each not in parameters]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values()) or not parameters
    if unknown and not takes_any:
        raise ConfigError(f"extra has {', '.join(unknown)}, but {name} takes {', '.join(parameters)}")
    return DecoderUnderTest(name, fn, vocab, tuple(parameters), module, options)
