"""The keywords and the results of text generation, and the decoding strategy that the keywords choose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor

from regard.base.errors import ConfigError
from regard.models.beam_search import BeamSearch
from regard.models.hypothesis import FinishReason
from regard.models.sampling import Greedy, Sample, Strategy

TokenIds = Sequence[int] | Tensor
Prompts = Sequence[TokenIds] | Tensor


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of `regard.generate`. Its docstring explains them."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    num_beams: int
    length_penalty: float | None
    early_stopping: bool | str | None
    seed: int | None
    strategy: Strategy | str | None
    stop: Sequence[int | TokenIds]
    use_cache: bool
    capture: bool | None


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The continuation of one prompt.

    tokens             the new tokens, including the stop sequence if one ended the text
    log_probabilities  log-probability of each new token by the model, before temperature, top_k or top_p
    finish_reason      "stop": a stop sequence was generated; "length": max_new_tokens was reached; "context": the
                       model's context is full
    stop               the stop sequence that ended the text, empty if there was none
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    finish_reason: FinishReason
    stop: tuple[int, ...] = ()

    @property
    def body(self) -> tuple[int, ...]:
        """The new tokens without the stop sequence."""
        return self.tokens[: len(self.tokens) - len(self.stop)]

    @property
    def log_probability(self) -> float:
        """The log-probability of all new tokens together."""
        return sum(self.log_probabilities)


# each strategy by name, and the keywords of `generate` that belong to it
STRATEGIES: dict[str, tuple[type[Strategy], tuple[str, ...]]] = {
    "greedy": (Greedy, ()),
    "sample": (Sample, ("temperature", "top_k", "top_p", "seed")),
    "beam": (BeamSearch, ("num_beams", "length_penalty", "early_stopping")),
}


def make_strategy(
    strategy: Strategy | str | None = None,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
) -> Strategy:
    """Return the decoding strategy for the keywords of `generate`: sampling, beam search or greedy decoding.

    strategy  a `Strategy`, or its name: "greedy", "sample", "beam". None chooses beam search for num_beams
              above 1, sampling if temperature, top_k or top_p is given, and greedy decoding otherwise

    The other arguments are settings of `Sample` and `BeamSearch`. ConfigError is raised for those that do not belong to
    the strategy.
    """
    beams = None if num_beams == 1 else num_beams
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    beam = {"num_beams": beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
    settings: dict[str, Any] = {**sampling, "seed": seed, **beam}
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(strategy, Strategy):
        if given:
            raise ConfigError(f"strategy={strategy!r} has its own settings; leave out {', '.join(given)}")
        return strategy
    if strategy is None:
        strategy = "beam" if "num_beams" in given else "sample" if {*given} & {*sampling} else "greedy"
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy is {', '.join(map(repr, STRATEGIES))} or a value such as Sample(top_p=0.9), not {strategy!r}"
        )
    kind, names = STRATEGIES[strategy]
    for name, value in given.items():
        if name not in names:
            (owner,) = (other for other, (_, settings) in STRATEGIES.items() if name in settings)
            chosen = ", ".join(f"{each}={given[each]}" for each in given if each in names) or f"strategy={strategy!r}"
            fix = " or give temperature, top_k or top_p too" if name == "seed" and strategy == "greedy" else ""
            raise ConfigError(f"{name}={value} is for strategy={owner!r}, but {chosen} was chosen; leave it out{fix}")
    return kind(**given)
