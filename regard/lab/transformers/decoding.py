"""Which text does each decoding strategy write?

Claim: A beam as wide as the number of texts finds the most likely text. Greedy decoding often does not, and a beam of
    width 1 is greedy decoding. Sampling draws each text with the probability of the model. Top-k and nucleus sampling
    draw only from the most likely tokens, with their renormalised probabilities. Always choosing the k-th most likely
    token gives less and less likely texts for larger k.
Measures: A small GPT trained here on a language whose next letter depends on the last two. For several prompts, the
    probability of every text of a given length by brute force, compared with the texts that `generate` writes. How
    often each next letter is drawn, against its probability.
Finding: Of {{ n.prompts }} prompts with {{ n.texts|comma }} texts each, the most likely text is found for {{ n["share
    found by greedy"]|percent }} by greedy decoding and for {% for share in n["share found by beams"] %}{{ share|percent
    }}{{ ", " if not loop.last }}{% endfor %} by beams of {{ n["beam widths"]|join_numbers }}. Mean log-probability: {{
    n["log-probability by beams"][-1]|fixed }} by the widest beam, {{ n["log-probability by greedy"]|fixed }} greedy, {{
    n["log-probability by sampling"]["top-k"]|fixed }} top-k, {{ n["log-probability by sampling"]["nucleus"]|fixed }}
    nucleus, {{ n["log-probability by sampling"]["sampling"]|fixed }} sampling ({{ n["expected log-probability"]|fixed
    }} expected), {{ n["log-probability by rank"][1]|fixed }} always the second token. The distance of the draws from
    the probabilities of the model is {{ n["distance of draws"]["sampling"]|fixed(3) }}, expected by chance {{
    n["distance by chance"]["sampling"]|fixed(3) }}; draws outside top-k or nucleus: {{ n["draws outside"]["top-k"] +
    n["draws outside"]["nucleus"] }}.
Budget: 60 seconds
Source: 003, notebook 12.4
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.positions import Rotary
from regard.lab.drawing import COLOURS, Figure, make_figure, mark_level, plot_lines
from regard.lab.fitting import fit_cross_entropy
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.beam_search import BeamSearch
from regard.models.generation import generate
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT, GPTConfig
from regard.models.sampling import Greedy, KthLargest, Sample, Strategy

MATHS = (
    r"p(x_1 \dots x_n) = \prod_i p(x_i | x_1 \dots x_{i-1}), \quad "
    r"\mathrm{argmax} \prod_i p_i \ge \prod_i \mathrm{max} p_i"
)

Writer = Callable[..., list[GeneratedText]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: a random language, a GPT model and its training, and the texts to generate.

    letters          number of different letters, the tokens of the language
    sharpness        evenness of the next-letter distribution; a lower value makes fewer letters likely
    length           number of letters to generate after a prompt; letters ** length is at most 1,000,000, because
                     the probability of every text is computed
    prompts          number of prompts
    draws            number of texts sampled for each prompt
    top_k            number of letters kept by top-k sampling
    top_p            smallest total probability of the letters kept by nucleus sampling
    width            width of the model
    depth            number of blocks
    batch            number of texts per training step
    training_length  number of letters of a training text
    steps            number of training steps
    rate             learning rate
    """

    letters: int = 8
    sharpness: float = 0.6
    length: int = 5
    prompts: int = 16
    draws: int = 1000
    top_k: int = 3
    top_p: float = 0.8
    width: int = 48
    depth: int = 2
    batch: int = 32
    training_length: int = 32
    steps: int = 300
    rate: float = 0.005
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("letters", self.letters, 3)
        check_integer("length", self.length, 2, "letters; one letter needs no search")
        check_integer("prompts", self.prompts, 2)
        check_at_least(self, draws=50, top_k=2)
        if not self.sharpness > 0:
            raise setting_error(self, "sharpness must be above 0", "sharpness")
        if self.letters**self.length > 1_000_000:
            raise ConfigError(
                f"{self.letters} letters make {self.letters**self.length:,} texts of length {self.length}, too many "
                "to enumerate; lower letters or length"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of beam search to compare: 1, 2, 4, and letters ** (length - 1), an exhaustive search."""
        return (1, 2, 4, self.letters ** (self.length - 1))


SMOKE = Setup(letters=5, length=4, prompts=12, draws=160, width=24, depth=1, batch=16, training_length=16, steps=80)


def run(setup: Setup, writer: Writer = generate, gpt: Callable[[GPTConfig], Any] = GPT) -> Numbers:
    """Compare the texts of each decoding strategy with the probabilities of all texts; return the numbers by name.

    writer  generates texts: writer(model, prompts, strategy=..., max_new_tokens=...)
    gpt     builds the model: gpt(config)
    """
    language = _language(setup)
    model = _train(setup, language, gpt)
    prompts = _sample_texts(language, setup.prompts, 4, make_generator(setup.seed + 2)).tolist()
    everything = [_all_log_probabilities(model, prompt, setup) for prompt in prompts]
    best = [float(each.max()) for each in everything]

    def written(
        strategy: Strategy, after: Sequence[Sequence[int]] = prompts, length: int = setup.length
    ) -> list[GeneratedText]:
        return writer(model, after, strategy=strategy, max_new_tokens=length)

    beams = {width: written(BeamSearch(width)) for width in setup.widths}
    likeliest = written(Greedy())
    ranks = {k: written(KthLargest(k)) for k in range(1, setup.letters + 1)}
    drawn = {name: _sample(written, strategy, prompts, setup) for name, strategy in _samplers(setup).items()}
    truth = [_next_probabilities(model, prompt) for prompt in prompts]
    wanted = {
        "sampling": truth,
        "top-k": [_truncate(shares, count=setup.top_k) for shares in truth],
        "nucleus": [_truncate(shares, reach=setup.top_p) for shares in truth],
    }
    return {
        "letters": setup.letters,
        "length": setup.length,
        "texts": setup.letters**setup.length,
        "prompts": setup.prompts,
        "draws": setup.draws,
        "probability of all texts": fmean(float(each.exp().sum()) for each in everything),
        "log-probability of the most likely text": fmean(best),
        "beam widths": list(setup.widths),
        "share found by beams": [_share_found(beams[width], best) for width in setup.widths],
        "share found by greedy": _share_found(likeliest, best),
        "log-probability by beams": [_mean_log_probability(beams[width]) for width in setup.widths],
        "log-probability by greedy": _mean_log_probability(likeliest),
        "log-probability by rank": [_mean_log_probability(texts) for texts in ranks.values()],
        "log-probability by sampling": {name: _mean_log_probability(texts) for name, texts in drawn.items()},
        "a beam of one is greedy": all(
            one.tokens == other.tokens for one, other in zip(beams[1], likeliest, strict=True)
        ),
        "expected log-probability": fmean(float((each.exp() * each).sum()) for each in everything),
        "standard error": (fmean(map(_log_probability_variance, everything)) / (setup.prompts * setup.draws)) ** 0.5,
        "distance of draws": {name: _distance(drawn[name], wanted[name], setup) for name in drawn},
        "distance from the model's shares": {name: _distance(drawn[name], truth, setup) for name in drawn},
        "distance by chance": {name: _expected_distance(shares, setup.draws) for name, shares in wanted.items()},
        "tokens kept": {name: fmean(float((each > 0).sum()) for each in shares) for name, shares in wanted.items()},
        "draws outside": {name: _count_outside(drawn[name], wanted[name], setup) for name in drawn},
    }


def _samplers(setup: Setup) -> dict[str, Strategy]:
    seed = 100_000 * (setup.seed + 1)
    return {
        "sampling": Sample(seed=seed),
        "top-k": Sample(top_k=setup.top_k, seed=seed),
        "nucleus": Sample(top_p=setup.top_p, seed=seed),
    }


def _language(setup: Setup) -> Float[Tensor, "w w w"]:
    """Return the random language: the probabilities of the next letter (last axis) after each pair of letters."""
    draws = make_generator(setup.seed)
    # a lower sharpness makes the probabilities more uneven
    raw = torch.rand(setup.letters, setup.letters, setup.letters, generator=draws, dtype=torch.float64)
    return functional.normalize(raw ** (1 / setup.sharpness), p=1.0, dim=-1)


def _sample_texts(
    language: Float[Tensor, "w w w"], count: int, length: int, draws: torch.Generator
) -> Int[Tensor, "b n"]:
    """Sample `count` texts of `length` letters from the language."""
    texts = torch.randint(len(language), (count, 2), generator=draws)
    while texts.shape[1] < length:
        after = torch.multinomial(language[texts[:, -2], texts[:, -1]], 1, generator=draws)
        texts = torch.cat([texts, after], 1)
    return texts


def _train(setup: Setup, language: Float[Tensor, "w w w"], gpt: Callable[[GPTConfig], Any]) -> Any:
    longest = max(setup.training_length, 4 + setup.length)
    sizes = {"context": longest, "width": setup.width, "depth": setup.depth, "heads": 2, "positions": Rotary()}
    model = gpt(GPTConfig(vocab=setup.letters, dropout=0.0, attention_dropout=0.0, **sizes))  # type: ignore[arg-type]  # the config checks
    model.init_weights(setup.seed)
    draws = make_generator(setup.seed + 1)

    def sample() -> tuple[tuple[Tensor], Tensor]:
        tokens = _sample_texts(language, setup.batch, setup.training_length, draws)
        return (tokens[:, :-1],), tokens[:, 1:]

    fit_cross_entropy(model, sample, steps=setup.steps, rate=setup.rate)
    return model


@torch.no_grad()
def _all_log_probabilities(model: Any, prompt: Sequence[int], setup: Setup) -> Float[Tensor, "t"]:
    """Return the log-probability of every possible continuation of a prompt by `setup.length` letters.

    The continuations are in lexicographic order.
    """
    texts = torch.tensor([prompt])
    totals = torch.zeros(1, dtype=torch.float64)
    for _ in range(setup.length):
        steps = model(texts)[:, -1].double().log_softmax(-1)
        totals = (totals[:, None] + steps).flatten()
        letters = torch.arange(setup.letters).repeat(len(texts))
        texts = torch.cat([texts.repeat_interleave(setup.letters, 0), letters[:, None]], 1)
    return totals


@torch.no_grad()
def _next_probabilities(model: Any, prompt: Sequence[int]) -> Float[Tensor, "w"]:
    """Return the model's probability of each letter after a prompt."""
    shares: Tensor = model(torch.tensor([prompt]))[0, -1].double().softmax(-1)
    return shares


def _truncate(shares: Float[Tensor, "w"], *, count: int | None = None, reach: float = 1.0) -> Float[Tensor, "w"]:
    """Set the probabilities of unlikely letters to 0 and renormalise the others, by top-k or nucleus sampling.

    count  top-k sampling: number of letters to keep
    reach  nucleus sampling (if count is None): keep the fewest letters whose probabilities sum to at least this
    """
    kept: list[int] = []
    for letter in sorted(range(len(shares)), key=lambda letter: -float(shares[letter])):
        if len(kept) == count or (count is None and float(shares[kept].sum()) >= reach):
            break
        kept.append(letter)
    left = torch.zeros_like(shares)
    left[kept] = shares[kept] / shares[kept].sum()
    return left


def _sample(
    written: Callable[..., list[GeneratedText]], strategy: Strategy, prompts: Sequence[Sequence[int]], setup: Setup
) -> list[GeneratedText]:
    return written(strategy, [prompt for prompt in prompts for _ in range(setup.draws)])


def _first_letter_frequencies(texts: Sequence[GeneratedText], setup: Setup) -> Float[Tensor, "p w"]:
    """Return, for each prompt (p), the fraction of its `setup.draws` texts that start with each letter (w)."""
    firsts = torch.tensor([text.tokens[0] for text in texts]).view(setup.prompts, setup.draws)
    return functional.one_hot(firsts, setup.letters).double().mean(1)


def _distance(texts: Sequence[GeneratedText], wanted: Sequence[Float[Tensor, "w"]], setup: Setup) -> float:
    """Return the total variation distance between the frequencies of first letters in `texts` and `wanted`.

    The distance is averaged over prompts.

    texts   texts generated for each prompt
    wanted  the probabilities of the first letter, one tensor per prompt
    """
    return float((_first_letter_frequencies(texts, setup) - torch.stack(list(wanted))).abs().sum(-1).mean() / 2)


def _expected_distance(shares: Sequence[Float[Tensor, "w"]], draws: int) -> float:
    """Return the expected total variation distance between probabilities and frequencies in `draws` samples.

    A frequency with probability p deviates by sqrt(2 * p * (1 - p) / (pi * draws)) on average.

    shares  the probabilities, one tensor per prompt
    """
    each = torch.stack(list(shares))
    return float((2 * each * (1 - each) / (torch.pi * draws)).sqrt().sum(-1).mean() / 2)


def _count_outside(texts: Sequence[GeneratedText], wanted: Sequence[Float[Tensor, "w"]], setup: Setup) -> int:
    """Count the generated texts that start with a letter whose probability in `wanted` is 0."""
    return round(
        float((_first_letter_frequencies(texts, setup) * (torch.stack(list(wanted)) == 0)).sum()) * setup.draws
    )


def _log_probability_variance(totals: Float[Tensor, "t"]) -> float:
    """Return the variance of the log-probability of a sampled text, given the log-probabilities of all texts."""
    shares = totals.exp()
    return float((shares * totals**2).sum() - (shares * totals).sum() ** 2)


def _share_found(texts: Sequence[GeneratedText], best: Sequence[float]) -> float:
    return fmean(abs(text.log_probability - most) < 1e-4 for text, most in zip(texts, best, strict=True))


def _mean_log_probability(texts: Sequence[GeneratedText]) -> float:
    return fmean(text.log_probability for text in texts)


def verdict(numbers: Numbers) -> Decision:
    found = numbers["share found by beams"]
    searched = found[-1] == 1.0 and numbers["a beam of one is greedy"]
    easy = numbers["share found by greedy"] == 1.0
    beams, ranks = numbers["log-probability by beams"], numbers["log-probability by rank"]
    better = beams[-1] > max(beams) - 1e-6 and beams[-1] > beams[0] and ranks == sorted(ranks, reverse=True)
    drawn, chance = numbers["distance of draws"], numbers["distance by chance"]
    fair = all(drawn[name] < 1.5 * chance[name] for name in drawn) and not any(numbers["draws outside"].values())
    mean, expected = numbers["log-probability by sampling"]["sampling"], numbers["expected log-probability"]
    steady = abs(mean - expected) < 4 * numbers["standard error"]
    biased = all(numbers["distance from the model's shares"][name] > 2 * chance[name] for name in ("top-k", "nucleus"))
    missing = "greedy decoding finds every text; raise letters, length or steps" if easy else ""
    return decide(searched and better and fair and steady and biased, missing=missing)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    plot_lines(left, numbers["beam widths"], {"beam": numbers["share found by beams"]})
    mark_level(left, numbers["share found by greedy"], "greedy")
    left.set(xscale="log", ylim=(0, 1.05), xlabel="beam width", ylabel="most likely text found", title="Search")
    values = {
        "widest beam": numbers["log-probability by beams"][-1],
        "greedy": numbers["log-probability by greedy"],
        **{name: numbers["log-probability by sampling"][name] for name in ("top-k", "nucleus", "sampling")},
        "second": numbers["log-probability by rank"][1],
    }
    right.bar_label(right.barh(list(values)[::-1], list(values.values())[::-1], color=COLOURS[0]), fmt="%.1f")
    right.margins(x=0.15)
    right.set(xlabel="mean log-probability", ylabel="strategy", title="Probability of the texts")
    return figure
