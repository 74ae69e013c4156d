"""One attention call, checked and settled: what a kernel is asked to compute."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad

from regard.base.validation import LARGEST_FLOAT
from regard.core.absolute_positions import Grid, Positions, whole_grid
from regard.core.masks.algebra import Full, Mask
from regard.core.scores import BoundTerm, ScoreTerm, Sink

STEEP_BETA = 1e15


@dataclass(frozen=True)
class Request:
    """Tensors that fit each other, a mask simplified to where they stand, terms, and the numbers of the call."""

    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    mask: Mask
    terms: tuple[ScoreTerm, ...]
    beta: float
    dropout: float
    positions: Positions
    hides_by_score: bool = False  # whether a term may hide keys by adding -inf

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """b, h, g, i, j, c, e."""
        b, h, i, c = self.q.shape
        return b, h, self.k.shape[1], i, self.k.shape[2], c, self.v.shape[3]

    @property
    def steep(self) -> bool:
        """Whether beta is so large that scores have to be centred before it: only differences stay in range."""
        return abs(self.beta) > STEEP_BETA

    @property
    def hard(self) -> bool:
        """Whether only the largest score counts."""
        return self.beta > LARGEST_FLOAT

    @property
    def causal_square(self) -> bool:
        """Whether the mask is the plain lower triangle, which fused kernels know by themselves."""
        return self.mask.as_window() == (None, 0) and self.positions.square(self.q.shape[2], self.k.shape[2])

    @property
    def plain(self) -> bool:
        """Whether nothing but q, k, v and the lower triangle is needed."""
        # torch's own triangle is -inf before it is scaled: a beta of zero or less would turn it into NaN or +inf
        return len(self.terms) == 0 and (isinstance(self.mask, Full) or (self.causal_square and self.beta > 0))

    @property
    def visible_pairs(self) -> int:
        """The number of query-key pairs that the mask leaves visible, over all sequences and heads."""
        b, h, _, i, j, _, _ = self.sizes
        alike = b * h // ((self.mask.batch() or 1) * (self.mask.heads() or 1))
        return self.mask.count(i, j, positions=self.positions) * alike

    @property
    def sink(self) -> Float[Tensor, "h"] | None:
        """The logits of all sinks together: sinks add up as exponentials do."""
        exact = torch.promote_types(self.q.dtype, torch.float32)
        logits = [term.logits.to(self.q.device, exact) for term in self.terms if isinstance(term, Sink)]
        return torch.stack(logits).logsumexp(0) if logits else None

    def grid(self, rows: slice | None = None) -> Grid:
        """All pairs of a query and a key, or those of some rows."""
        b, h, _, i, j, _, _ = self.sizes
        grid = whole_grid(self.positions, b, h, i, j, self.q.device)
        return grid if rows is None else replace(grid, row=grid.row[rows], i=grid.i[rows], whole=False)

    def visible(self, grid: Grid | None = None) -> Bool[Tensor, "#b #h i j"] | None:
        """The dense mask with all four axes, less what terms hide with -inf; None where everything is visible."""
        if isinstance(self.mask, Full) and not self.hides_by_score:
            return None
        grid = self.grid() if grid is None else grid
        i, j = grid.row.shape[0], self.k.shape[2]
        seen = self.mask.see(grid)
        for hidden in (term.hidden(grid) for term in self.terms if self.hides_by_score):
            seen = seen if hidden is None else seen & ~hidden
        return seen.expand(*seen.shape[:-2], i, j).reshape(*(1,) * (4 - seen.ndim), *seen.shape[:-2], i, j)

    def bound_terms(self) -> list[BoundTerm]:
        if not self.terms:
            return []  # before q is copied in another dtype for nobody
        q = self.q.to(torch.promote_types(self.q.dtype, torch.float32))  # terms are as exact as scores are
        return [term.bind(q, self.beta) for term in self.terms]


def summed(terms: list[BoundTerm], grid: Grid, q: Tensor) -> Float[Tensor, "..."]:
    """All additive terms of the grid's pairs as one tensor, in float32 or better."""
    scores = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for term in terms:
        scores = term(scores, grid)
    return scores


def centred_bias(
    bias: Float[Tensor, "..."] | None,
    visible: Bool[Tensor, "#n #h i j"] | None,
    sink: Float[Tensor, "h"] | None,
    i: int,
    j: int,
) -> Float[Tensor, "#n #h i jj"]:
    """What is added to scores: the bias, -inf where hidden, and the sink as one more column. The largest of a row is 0.

    Only differences within a row count. Without this, a row of -1e9 would leave no digits of the scores themselves.
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
    top = top.masked_fill(top == -math.inf, 0)
    fresh = (visible is not None or sink is not None) and not added.requires_grad
    return added.sub_(top) if fresh else added - top


def seen_keys(visible: Bool[Tensor, "#b #h i j"], g: int) -> Bool[Tensor, "#b #g j 1"]:
    """The keys that some query of their sequence may see. The others may hold NaN, so they have to be cleared."""
    seen = visible.any(-2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (g, -1)).any(2)
    return seen[..., None]


def in_transform() -> bool:
    """Whether derivatives or batches are being taken for which torch's fused attention has no rule."""
    if torch.compiler.is_compiling():
        return False  # the compiler has taken the transform apart before this is asked
    if forward_ad._current_level >= 0:
        return True
    levels = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or []]
    return "Vmap" in levels or "Jvp" in levels or levels.count("Grad") > 1
