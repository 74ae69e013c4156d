"""Ways to take the next token from what a model says of it. Each is a value; equal logits go to the lower token."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.base.errors import ConfigError
from regard.base.validation import LARGEST_FLOAT, check_integer, check_number

BINS = 4096  # at most, and so many that few tokens share one
FAINT = 40.0  # so far below the largest logit, a whole vocabulary has no share to speak of


class Strategy:
    """How a text goes on."""

    def check(self, vocab: int) -> None:
        """Raise where a setting asks for more tokens than there are; most have no such setting."""


class Choice(Strategy, ABC):
    """One token for each text at a time."""

    seed: int = 0

    @abstractmethod
    def choose(self, logits: Float[Tensor, "b w"], chance: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        """The next token of each text; `chance` is one number in [0, 1) for each, for those that leave it to luck."""


@dataclass(frozen=True, slots=True)
class Greedy(Choice):
    """Always the likeliest token."""

    def choose(self, logits: Float[Tensor, "b w"], chance: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        return logits.argmax(-1)  # of equal ones, the first: torch promises so


@dataclass(frozen=True, slots=True)
class Kth(Choice):
    """Always the token that comes k-th."""

    k: int

    def __post_init__(self) -> None:
        check_integer("kth(k)", self.k, 1)

    def check(self, vocab: int) -> None:
        _check_vocab("kth(k)", self.k, vocab)

    def choose(self, logits: Float[Tensor, "b w"], chance: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        return leading(logits, self.k)[:, -1]


@dataclass(frozen=True, slots=True)
class Sample(Choice):
    """Each token as often as its probability says, after some were ruled out."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < check_number("sample(temperature)", self.temperature) <= LARGEST_FLOAT:
            raise ConfigError(
                f"sample(temperature) divides the logits, so it is above 0 and finite, not {self.temperature}; "
                "for the likeliest token at every step use greedy()"
            )
        if self.top_k is not None:
            check_integer("sample(top_k)", self.top_k, 1, "tokens")
        if self.top_p is not None and not 0.0 < check_number("sample(top_p)", self.top_p) <= 1.0:
            raise ConfigError(f"sample(top_p) is a share of probability, above 0 and at most 1, not {self.top_p}")
        check_integer("sample(seed)", self.seed, 0)

    def check(self, vocab: int) -> None:
        if self.top_k is not None:
            _check_vocab("sample(top_k)", self.top_k, vocab)

    def probabilities(self, logits: Float[Tensor, "b w"]) -> Float[Tensor, "b w"]:
        """What is drawn from: softmax(logits / temperature), of which top_k and then top_p leave a part."""
        tokens, shares = self.left(logits)
        if tokens is None:
            return shares
        return shares.new_zeros(logits.shape).scatter(-1, tokens, shares)

    def choose(self, logits: Float[Tensor, "b w"], chance: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        tokens, shares = self.left(logits)
        reached = shares.cumsum(-1)
        total = reached[:, -1:]
        # the product may round up to the total, which no token would exceed
        aim = torch.minimum(chance.to(reached)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        place = torch.searchsorted(reached, aim, right=True)
        return (place if tokens is None else tokens.gather(-1, place))[:, 0]

    def left(self, logits: Float[Tensor, "b w"]) -> tuple[Int[Tensor, "b k"] | None, Float[Tensor, "b k"]]:
        """The tokens that can be drawn, by number, and how often each is; None means all tokens."""
        tokens = None
        if self.top_k is not None:
            tokens = leading(logits, self.top_k).sort(-1).values
            logits = logits.gather(-1, tokens)
        shares = self._shares(logits)
        if self.top_p is not None and self.top_p < 1.0:
            shares.mul_(nucleus(logits, shares, self.top_p, FAINT * self.temperature))
        return tokens, shares.div_(shares.sum(-1, keepdim=True))

    def _shares(self, logits: Float[Tensor, "b w"]) -> Float[Tensor, "b w"]:
        if self.temperature == 1.0:
            return logits.softmax(-1, dtype=torch.float64)
        logits = logits.double()
        # the largest becomes 0 first: the smallest temperatures would make it infinite
        return (logits - logits.amax(-1, keepdim=True)).div_(self.temperature).softmax(-1)


@dataclass(frozen=True, slots=True)
class Beam(Strategy):
    """The best of several texts that are continued side by side.

    At every step all one-token continuations of a prompt's texts are compared by their log-probability; the best
    `width` go on. A text that has ended keeps its place among the `width`, and the search is over when all have.
    Then score = log-probability / (new tokens) ** length_penalty decides.
    """

    width: int
    length_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_integer("beam(width)", self.width, 1, "texts")
        if abs(check_number("beam(length_penalty)", self.length_penalty)) > LARGEST_FLOAT:
            raise ConfigError(f"beam(length_penalty) is a finite exponent such as 0.6, not {self.length_penalty}")

    def score(self, log_probability: float, length: int) -> float:
        return float(log_probability / length**self.length_penalty)


def greedy() -> Strategy:
    """Always the likeliest token."""
    return Greedy()


def sample(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0) -> Strategy:
    """Tokens drawn by their probability. Text number r of a batch draws with seed + r, whatever stands beside it.

    temperature  divides the logits: below 1 likely tokens gain, above 1 rare ones
    top_k        only the k likeliest tokens. Fan et al. 2018, arXiv:1805.04833
    top_p        only the fewest likeliest tokens that together reach this probability. Holtzman et al. 2019,
                 arXiv:1904.09751
    """
    return Sample(temperature, top_k, top_p, seed)


def kth_largest(k: int) -> Strategy:
    """Always the k-th likeliest token: kth(1) is greedy."""
    return Kth(k)


def beam(width: int, length_penalty: float = 0.0) -> Strategy:
    """The best of `width` texts searched side by side. Graves 2012, arXiv:1211.3711; Sutskever et al. 2014.

    length_penalty  alpha of score = log-probability / (new tokens) ** alpha, by which ended texts are compared: 0 asks
                    for the likeliest text, 1 for the best mean token, and the larger, the longer
    """
    return Beam(width, length_penalty)


def ranked(logits: Float[Tensor, "*b w"]) -> Int[Tensor, "*b w"]:
    """Tokens from the likeliest on."""
    return logits.sort(stable=True, dim=-1, descending=True).indices


def leading(logits: Float[Tensor, "*b w"], k: int) -> Int[Tensor, "*b k"]:
    """The first k of `ranked`, without a sort of all the others."""
    if 4 * k >= logits.shape[-1]:
        return ranked(logits)[..., :k]
    values, tokens = logits.topk(k + 1)
    border = values[..., k - 1 : k]
    if (border == values[..., k:]).any():
        # some that equal the k-th are left out: those with the highest numbers
        above, level = logits > border, logits == border
        room = k - above.sum(-1, keepdim=True)
        tokens = (above | (level & (level.cumsum(-1) <= room))).nonzero()[:, -1].view(*logits.shape[:-1], k)
    else:
        tokens = tokens[..., :k].sort(-1).values
    return tokens.gather(-1, ranked(logits.gather(-1, tokens)))


def nucleus(
    logits: Float[Tensor, "b w"], shares: Float[Tensor, "b w"], top_p: float, reach: float = FAINT
) -> Bool[Tensor, "b w"]:
    """Which tokens come before the likeliest ones have reached top_p together.

    Tokens fall into bins by how far their logits are below the largest, up to `reach`. Bins are in or out as a whole,
    and only in the one where top_p is reached tokens are ranked.
    """
    count = min(BINS, logits.shape[-1])
    depth = (logits.amax(-1, keepdim=True) - logits).float()
    span = depth.amax(-1, keepdim=True).clamp(max=min(reach, 1e30)).clamp(min=1e-30)
    bins = depth.mul_(count / span).clamp_(max=count - 1).long()
    before = pad(shares.new_zeros(len(shares), count).scatter_add(-1, bins, shares).cumsum(-1), (1, -1))
    border = (before < top_p).sum(-1, keepdim=True) - 1
    kept = bins < border
    rows, tokens = (bins == border).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=len(bins))
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    # the tokens of each row's bin side by side, lower ones first; where there are fewer, nothing follows
    level = logits.new_full((len(bins), max(1, int(counts.max()))), -torch.inf)
    level[rows, places] = logits[rows, tokens]
    mass = torch.zeros_like(level, dtype=shares.dtype)
    mass[rows, places] = shares[rows, tokens]
    order = ranked(level)
    mass = mass.gather(-1, order)
    above = before.gather(-1, border) + mass.cumsum(-1) - mass
    if (torch.cat([before, above], -1) - top_p).abs().amin() < 1e-12:
        # so close that the order of summation decides: then it is that of the ranking, as if there were no bins
        order = ranked(logits)
        mass = shares.gather(-1, order)
        return torch.zeros_like(kept).scatter(-1, order, mass.cumsum(-1) - mass < top_p)
    inside = above < top_p
    kept[rows, tokens] = torch.empty_like(inside).scatter(-1, order, inside)[rows, places]
    return kept


def check_strategy(strategy: object, vocab: int) -> None:
    """Raise where this is none, or asks for more tokens than there are."""
    if not isinstance(strategy, Choice | Beam):
        raise ConfigError(
            f"strategy is a value such as greedy(), sample(top_p=0.9), kth(2) or beam(4), not {strategy!r}"
        )
    strategy.check(vocab)


def _check_vocab(what: str, k: int, vocab: int) -> None:
    if k > vocab:
        raise ConfigError(f"{what} is {k}, but the vocabulary has only {vocab} tokens")
