"""The one door to attention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Bool, Float
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import check_number
from regard.core import kernels
from regard.core.absolute_positions import Positions, check_positions
from regard.core.input_checks import check_inputs
from regard.core.kernels.request import Request
from regard.core.masks import as_mask
from regard.core.masks.algebra import Full, Mask
from regard.core.scores import Additive, ScoreTerm, as_terms
from regard.core.softargmax import as_beta

if TYPE_CHECKING:
    from regard.core.kernels import Explanation

Scores = ScoreTerm | Tensor | Sequence[ScoreTerm | Tensor]


def attend(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    mask: Mask | Bool[Tensor, "*bh #i #j"] | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
    positions: Positions | None = None,
) -> Float[Tensor, "b h i e"]:
    """Each query's mean of the visible values, weighted by softargmax(beta q . k + terms).

    mask    who may see whom: `causal() & window(before=255)`, or a boolean matrix with True meaning visible
    scores  a term such as `alibi(heads=8)`, a tensor to add, or several in order
    beta    inverse temperature: None is c ** -0.5, 0 the mean of what is visible, inf hard attention (ties share)
    dropout share of weights set to zero; pass 0 outside training
    kernel  None chooses; a name runs that kernel or raises all its reasons not to
    places  absolute positions, as a cache hands them out; without them the queries are the last rows
    """
    return kernels.run_kernel(prepare_request(q, k, v, mask, scores, beta, dropout, positions), kernel)


def explain(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    mask: Mask | Bool[Tensor, "*bh #i #j"] | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    positions: Positions | None = None,
) -> "Explanation":
    """Which kernel `attend` would run for this call, why each other refuses, the visible pairs and the memory."""
    return kernels.explain(prepare_request(q, k, v, mask, scores, beta, dropout, positions))


def prepare_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    scores: Scores | None,
    beta: float | None,
    dropout: float,
    positions: Positions | None,
) -> Request:
    """The call that was meant, or an error that says what does not fit."""
    q, k, v = check_inputs(q, k, v)
    b, h, i, c = q.shape
    j = k.shape[2]
    beta = c**-0.5 if beta is None else as_beta(beta)
    if not 0.0 <= check_number("dropout", dropout, "the share of weights set to zero") < 1.0:
        raise ConfigError(f"dropout is the share of weights set to zero, at least 0 and less than 1, not {dropout!r}")
    rule = as_mask(mask)
    terms = as_terms(scores)
    for term in terms:
        term.check(q, j)
    positions = check_positions(positions, i, j)
    if not isinstance(rule, Full):
        rule.check(positions, i, j, b, h)
        rule = rule.to(q.device)
        if i and j and isinstance(positions.keys, int):
            rule = rule.within(positions.queries, positions.queries + i - 1, positions.keys, positions.keys + j - 1)
    hides = any(isinstance(term, Additive) and term.may_hide() for term in terms)
    return Request(q, k, v, rule, terms, beta, dropout, positions, hides)
