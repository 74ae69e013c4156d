"""The validated arguments of one attention call, which every kernel receives."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad

from regard.base.tracing import assume_constant_result
from regard.base.validation import LARGEST_FLOAT
from regard.core.absolute_positions import Grid, Positions, whole_grid
from regard.core.masks.algebra import Full, Mask
from regard.core.scores import BoundTerm, ScoreTerm, Sink, Softcap

STEEP_BETA = 1e15
_innermost_transform = torch._C._functorch.peek_interpreter_stack
MOST_PREPARED = 1 << 19  # pairs of the mask that a prepared call holds
PreparedCall = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k and v, for one mask, beta and sizes


@dataclass(eq=False, slots=True)  # not frozen: that would double the time to make one
class Request:
    """The checked arguments of one attention call.

    mask            the mask, simplified for the positions of this call
    terms           score terms, applied in order
    beta            the factor of q . k
    hides_by_score  whether a term may hide keys by adding -inf
    weights         the attention weights of `attend_with_weights`, if `watch` or `intervene` observes the call; an
                    observer can replace them. Not an argument of `attend`; None for all other calls
    """

    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    mask: Mask
    terms: tuple[ScoreTerm, ...]
    beta: float
    dropout: float
    positions: Positions
    hides_by_score: bool = False  # whether a term may hide keys by adding -inf
    weights: Float[Tensor, "b h i j"] | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """The sizes b, h, g, i, j, c and e of the axes of q (b h i c), k (b g j c) and v (b g j e)."""
        b, h, i, c = self.q.shape
        return b, h, self.k.shape[1], i, self.k.shape[2], c, self.v.shape[3]

    @property
    def steep(self) -> bool:
        """Whether |beta| is so large that the largest score of a row must be subtracted before multiplying by beta."""
        return abs(self.beta) > STEEP_BETA

    @property
    def hard(self) -> bool:
        """Whether beta is infinite. This is hard attention: only the largest score of a query has a weight."""
        return self.beta > LARGEST_FLOAT

    @property
    def causal_square(self) -> bool:
        """Whether the mask is exactly what `is_causal=True` means in fused kernels: query r sees keys 0 .. r."""
        return self.mask.as_window() == (None, 0) and self.positions.square(self.q.shape[2], self.k.shape[2])

    @property
    def plain(self) -> bool:
        """Whether there are no score terms and the mask is full or causal. Fused kernels then need no dense mask."""
        # torch's own triangle is -inf before it is scaled: a beta of zero or less would turn it into NaN or +inf
        return len(self.terms) == 0 and (isinstance(self.mask, Full) or (self.causal_square and self.beta > 0))

    @property
    def visible_pairs(self) -> int:
        """The number of query-key pairs that the mask leaves visible, over all sequences and heads."""
        b, h, _, i, j, _, _ = self.sizes
        sequences = b if self.positions.offsets is not None else self.mask.batch() or 1
        alike = b * h // (sequences * (self.mask.heads() or 1))
        return self.mask.count(i, j, positions=self.positions) * alike

    @property
    def sink(self) -> Float[Tensor, "h"] | None:
        """The log-sum-exp of all sink logits for each head. None if the call has no attention sinks."""
        exact = torch.promote_types(self.q.dtype, torch.float32)
        logits = [term.logits.to(self.q.device, exact) for term in self.terms if isinstance(term, Sink)]
        return torch.stack(logits).logsumexp(0) if len(logits) > 1 else logits[0] if len(logits) == 1 else None

    def grid(self, rows: slice | None = None) -> Grid:
        """Return the `Grid` of all query-key pairs, or only of the query rows in `rows`."""
        b, h, _, i, j, _, _ = self.sizes
        grid = whole_grid(self.positions, b, h, i, j, self.q.device)
        return grid if rows is None else replace(grid, row=grid.row[rows], i=grid.i[..., rows, :], whole=False)

    def visible(self, grid: Grid | None = None) -> Bool[Tensor, "#b #h i j"] | None:
        """Return the dense boolean mask with four axes, True meaning visible. None if every pair is visible.

        Pairs that score terms hide with -inf are False as well.

        grid  the query-key pairs; default all of them
        """
        if isinstance(self.mask, Full) and not self.hides_by_score:
            return None
        grid = self.grid() if grid is None else grid
        i, j = grid.row.shape[0], self.k.shape[2]
        seen, hidden = self.mask.see(grid), self.hidden_by_terms(grid) if self.hides_by_score else None
        seen = seen if hidden is None else seen & ~hidden
        return seen.expand(*seen.shape[:-2], i, j).reshape(*(1,) * (4 - seen.ndim), *seen.shape[:-2], i, j)

    def hidden_by_terms(self, grid: Grid) -> Bool[Tensor, "..."] | None:
        """Return which query-key pairs at least one score term hides with -inf. None if no term can hide a pair."""
        found: Tensor | None = None
        for term in self.terms:
            hidden = term.hidden(grid)
            if hidden is not None:
                found = hidden if found is None else found | hidden
        return found

    def bound_terms(self, tanh: Callable[[Tensor], Tensor] | None = None) -> list[BoundTerm]:
        """Return the score terms as functions of (scores, grid), bound to the queries; without attention sinks.

        tanh  the function that soft-caps use inside a kernel; None outside of kernels
        """
        exact, bound = torch.promote_types(self.q.dtype, torch.float32), []  # terms are as exact as scores are
        for term in self.terms:
            if not isinstance(term, Sink):
                q = self.q.to(exact) if term.reads_queries else self.q.new_empty(0, dtype=exact)
                if tanh is not None and isinstance(term, Softcap):
                    bound.append(term.bind_in_kernel(q, tanh))
                else:
                    bound.append(term.bind(q, self.beta))
        return bound


def sum_terms(terms: list[BoundTerm], grid: Grid, q: Tensor) -> Float[Tensor, "..."]:
    """Sum all additive score terms for the query-key pairs of a grid, in float32 or better."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.zeros((), dtype=exact, device=q.device)
    for term in terms:
        scores = term(scores, grid)
    return scores.to(exact)  # a tensor without axes takes the dtype of what is added to it


def center_bias(
    bias: Float[Tensor, "..."] | None,
    visible: Bool[Tensor, "#n #h i j"] | None,
    sink: Float[Tensor, "h"] | None,
    i: int,
    j: int,
) -> Float[Tensor, "#n #h i jj"]:
    """Return the bias to add to scores, shifted so that the largest value of each row is 0.

    Hidden keys get -inf. An attention sink is appended as one more column, so that the last axis is j or j + 1. The
    shift does not change the softmax, which depends on differences within a row only. Without the shift, adding a bias
    of -1e9 in a whole row would round all digits of the scores away.
    """
    bias = torch.zeros((), dtype=sink.dtype, device=sink.device) if bias is None and sink is not None else bias
    assert bias is not None
    shape = torch.broadcast_shapes(bias.shape, (1, 1 if sink is None else len(sink), i, j))
    added = bias.expand(shape) if visible is None else torch.where(visible, bias.expand(shape), -math.inf)
    if sink is not None:
        added = torch.cat([added, sink.to(added)[:, None, None].expand(*added.shape[:-1], 1)], -1)
    if not added.shape[-1]:
        return added
    top = added.detach().amax(-1, keepdim=True)
    top = top.masked_fill(~top.isfinite(), 0)  # NaN and +inf stay where they are, and -inf stays hidden
    fresh = (visible is not None or sink is not None) and not added.requires_grad
    return added.sub_(top) if fresh else added - top


def add_terms(
    request: Request,
    scores: Float[Tensor, "b h i j"],
    terms: list[BoundTerm],
    grid: Grid,
    visible: Bool[Tensor, "#b #h i j"] | None,
    sink: Float[Tensor, "h"] | None,
    nonfinite: bool,
) -> Float[Tensor, "b h i jj"]:
    """Apply score terms in order, and append an attention sink as one more column of scores.

    The additive terms at the end, after the last term that is not additive, are first summed up and centred by row
    (see `center_bias`), so that large values do not round the scores away.

    terms      the score terms as functions of (scores, grid), from `Request.bound_terms`
    nonfinite  whether the scores may contain NaN or infinity. If True, a term of -inf hides its key even if the score
               of this key is NaN or +inf
    """
    first = 0  # of the terms that are summed up
    for number, term in enumerate(request.terms):
        if not term.additive and term.name != "sink":
            first = number + 1
    for bound in terms[:first]:
        scores = bound(scores, grid)
    if first == len(terms) and sink is None:
        return scores
    i, j = scores.shape[-2:]
    added = center_bias(sum_terms(terms[first:], grid, scores), visible, sink, i, j)
    scores = scores if sink is None else torch.nn.functional.pad(scores, (0, 1))
    return torch.where(added == -math.inf, added, scores + added) if nonfinite else scores + added


def visible_keys(visible: Bool[Tensor, "#b #h i j"], g: int) -> Bool[Tensor, "#b #g j 1"]:
    """Return which keys are visible to at least one of the queries that attend to them.

    These are all queries of the same sequence, in all query heads that share the key head. Kernels set the other keys
    to 0, because these keys may contain NaN.

    visible  the dense mask, True meaning visible
    g        number of key heads
    """
    seen = visible.any(-2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (g, -1)).any(2)
    return seen[..., None]


def in_unsupported_transform(device: torch.device) -> bool:
    """Return whether a torch.func transform is active that torch's fused attention does not support."""
    levels = transform_levels()
    if "Vmap" in levels or "Jvp" in levels or levels.count("Grad") > 1:
        return True
    if torch.compiler.is_compiling():
        return "Grad" in levels and device.type == "cpu"  # a compiled operator has no rule for torch.func.grad
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation is active."""
    return _innermost_transform() is not None or forward_ad._current_level >= 0


@assume_constant_result
def transform_levels() -> tuple[str, ...]:
    """Return the names of the active torch.func transforms, outermost first.

    Compiled code keeps the names that were active when torch.compile traced it.
    """
    return tuple(level.key().name for level in torch._C._functorch.get_interpreter_stack() or [])
