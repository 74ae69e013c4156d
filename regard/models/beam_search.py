"""Beam search as a decoding strategy: its settings, and the scores by which hypotheses are compared."""

from dataclasses import dataclass
from typing import ClassVar

from regard.base.errors import ConfigError
from regard.base.validation import LARGEST_FLOAT, check_integer, check_number
from regard.models.hypothesis import Hypothesis
from regard.models.sampling import Strategy


@dataclass(frozen=True, slots=True)
class BeamSearch(Strategy):
    """Beam search: return the best of `num_beams` hypotheses per prompt.

    At every step all one-token continuations of a prompt's hypotheses are compared by the log-probability of the whole
    hypothesis. Of the best `num_beams` continuations, those in which the text ends become finished hypotheses. The best
    `num_beams` continuations in which it does not end are extended in the next step. The texts and scores equal those
    of Hugging Face's beam search. Graves 2012, arXiv:1211.3711; Sutskever et al. 2014.

    length_penalty  alpha in the score of a finished hypothesis, log-probability / (number of new tokens) ** alpha:
                    0 prefers the most likely text, 1 the best mean token; larger values prefer longer texts
    early_stopping  when to stop after `num_beams` hypotheses are finished. True: immediately. False: when the best
                    unfinished hypothesis, scored at its current length, is not better than the worst finished one.
                    "never": when it could not be better at any length up to the maximum either
    """

    name: ClassVar[str] = "beam"
    num_beams: int = 4
    length_penalty: float = 0.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_integer("num_beams", self.num_beams, 1, "hypotheses")
        if abs(check_number("length_penalty", self.length_penalty)) > LARGEST_FLOAT:
            raise ConfigError(f"length_penalty is a finite exponent such as 0.6, not {self.length_penalty}")
        if self.early_stopping not in (False, True, "never"):
            raise ConfigError(f"early_stopping is False, True or 'never', not {self.early_stopping!r}")

    def score(self, text: Hypothesis) -> float:
        """Return the score of a hypothesis: log-probability / (number of new tokens) ** length_penalty."""
        return self._penalise(text.log_probability, text.length)

    def rank(self, finished: list[Hypothesis]) -> list[Hypothesis]:
        """Return the hypotheses sorted by score, the best first."""
        return sorted(finished, key=self.score, reverse=True)

    def can_improve(self, running: Hypothesis, finished: list[Hypothesis], max_new_tokens: int) -> bool:
        """Return whether beam search must continue, because an unfinished hypothesis can still become a result.

        running         the best unfinished hypothesis
        finished        the finished hypotheses, the best first
        max_new_tokens  maximum number of new tokens of a hypothesis
        """
        if len(finished) < self.num_beams or self.early_stopping is True:
            return len(finished) < self.num_beams
        later = self.early_stopping == "never" and self.length_penalty > 0
        possible = self._penalise(running.log_probability, max_new_tokens if later else running.length)
        return possible > self.score(finished[-1])

    def _penalise(self, log_probability: float, length: int) -> float:
        return float(log_probability / length**self.length_penalty)
