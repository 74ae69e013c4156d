"""Head importance by gradients, and the induction and previous-token scores of heads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, InterventionError
from regard.base.validation import check_integer
from regard.see.heads import previous_token, weights_at
from regard.see.record import Record
from regard.see.watch import watch


def head_importance(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Float[Tensor, "h"]]:
    """Return the importance of each head: the mean over sequences of |z . dL/dz|, for output z and loss L.

    z is the output of the head for all positions of a sequence. Michel et al. 2019, arXiv:1905.10650, equation 2,
    without their division of all numbers of a layer by the norm of these numbers. The importance estimates how much the
    loss changes if the head is ablated. L should be the sum over the sequences: if it is the mean over b sequences, all
    numbers are smaller by a factor of b. The result has one tensor (h) for each layer, by name.

    loss  function that runs the model on its inputs with gradients and returns the loss of all sequences, a scalar

    >>> importance = head_importance(model, lambda: model(tokens).logsumexp(-1).sum())
    >>> importance["blocks.0.attention"].shape
    torch.Size([8])
    """
    with torch.enable_grad(), _gradients_kept(model), watch(model) as seen:
        total = loss()
        if not isinstance(total, Tensor) or total.ndim or not total.requires_grad:
            raise InterventionError(
                "loss() must return a scalar with a gradient; do not use torch.no_grad() inside, and do not freeze all "
                "parameters"
            )
        total.backward()
    found = {}
    for name, record in seen.items():
        if record.gradient is None:
            raise InterventionError(f"{name} has no gradient: the loss does not depend on it, or the layer is fused")
        found[name] = (record.out * record.gradient.to(record.out.dtype)).sum((2, 3)).abs().mean(0)
    return found


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Context manager that restores `.grad` of every parameter on exit."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None  # otherwise a backward pass would add to it in place
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def repeated_tokens(vocab: int, *, length: int = 25, repeats: int = 4, b: int = 8, seed: int = 0) -> Int[Tensor, "b n"]:
    """Sample sequences of random tokens, each repeated several times, as input for `induction_scores`.

    The defaults are those of Olsson et al. 2022.

    vocab    vocabulary size
    length   number of tokens in one copy
    repeats  number of copies
    b        number of sequences

    >>> repeated_tokens(256, length=3, repeats=2, b=1)
    tensor([[172,  47, 117, 172,  47, 117]])
    """
    for name, value, least in (("vocab", vocab, 1), ("length", length, 2), ("repeats", repeats, 2), ("b", b, 1)):
        check_integer(name, value, least)
    draws = torch.Generator().manual_seed(check_integer("seed", seed, 0))
    return torch.randint(vocab, (b, length), generator=draws).repeat(1, repeats)


def induction_scores(
    model: nn.Module, tokens: Int[Tensor, "b n"], length: int, run: Callable[[Tensor], Any] | None = None
) -> dict[str, Float[Tensor, "h"]]:
    """Return the induction score of every head: the weight on tokens that follow earlier copies of a token.

    Olsson et al. 2022, arXiv:2209.11895. Each input is a sequence of random tokens, repeated several times. For each
    token from the second repetition on, the weights on all tokens that follow its earlier occurrences are summed. The
    score is the mean of these sums; a perfect induction head has a score of 1. In contrast, `induction` in
    see/heads.py, the score of the head table, can be computed for any text and counts only the previous occurrence of
    each token.

    tokens  repeated sequences, as returned by `repeated_tokens`
    length  number of tokens in one repetition
    run     function that takes the tokens and calls the model with them; None calls `model(tokens)`

    Three of the four heads of this layer are induction heads:

    >>> tokens = repeated_tokens(95, length=20, repeats=2, b=4)
    >>> scores = induction_scores(regard.load("induction-gpt"), tokens, length=20)
    >>> [round(score, 1) for score in scores["blocks.1.attention"].tolist()]
    [0.8, 0.9, 0.9, 0.1]
    """
    n = tokens.shape[1]
    if not 1 < check_integer("length", length, 0) < n:
        raise ConfigError(f"length is that of one copy, between 2 and {n - 1}, not {length}")
    if not torch.equal(tokens[:, length:], tokens[:, :-length]):
        raise ConfigError(f"tokens do not repeat after {length} tokens; `repeated_tokens` makes such sequences")
    pairs = [(i, j) for i in range(length, n) for j in range(i - length + 1, 0, -length)]
    rows, columns = (torch.tensor(each)[None] for each in zip(*pairs, strict=True))

    def score(record: Record) -> Tensor:
        device = record.q.device
        return weights_at(record, rows.to(device), columns.to(device)).sum(-1).mean(0) / (n - length)

    return _score_heads(model, tokens, run, score)


def previous_token_scores(
    model: nn.Module, tokens: Int[Tensor, "b n"], run: Callable[[Tensor], Any] | None = None
) -> dict[str, Float[Tensor, "h"]]:
    """Return the previous-token score of every head: the mean weight of a token on the token before it.

    Olsson et al. 2022, arXiv:2209.11895. A perfect previous-token head has a score of 1. The score is NaN if the
    positions of queries and keys are unknown.

    run  function that takes the tokens and calls the model with them; None calls `model(tokens)`

    >>> scores = previous_token_scores(model, tokens)
    >>> scores["blocks.0.attention"].shape
    torch.Size([8])
    """

    def score(record: Record) -> Tensor:
        found = previous_token(record) if record.positions_known else None
        return torch.full((record.q.shape[1],), torch.nan) if found is None else found

    return _score_heads(model, tokens, run, score)


def _score_heads(
    model: nn.Module, tokens: Tensor, run: Callable[[Tensor], Any] | None, score: Callable[[Record], Tensor]
) -> dict[str, Tensor]:
    with torch.no_grad(), watch(model, values=False) as seen:
        (model if run is None else run)(tokens)
    b, n = tokens.shape
    wrong = [record for record in seen.values() if record.q.shape[0] != b or record.k.shape[2] != n]
    if not len(seen) or wrong:
        what = f"{wrong[0].name} has {wrong[0].k.shape[2]} keys" if wrong else "no attention was recorded"
        raise InterventionError(f"scores of tokens need self-attention over these {n} tokens, but {what}")
    return {name: score(record) for name, record in seen.items()}
