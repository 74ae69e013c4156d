"""Synthesizer: attention scores that do not compare tokens. Tay et al. 2020, arXiv:2005.00743.

x_i is the vector of token i, which is the query, and j is the position of a key. A layer can use one or several kinds
of scores:

dense   scores_ij = relu(A x_i) . w_j + b_j: predicted from the query token
random  scores_ij = R_ij: a learned matrix, the same for every input
dot     scores_ij = beta q_i . k_j: the scores of scaled dot-product attention

All three are computed by `attend`. A, w, b and R are learned. For "dense" the key of position j is (w_j, b_j), and the
query of token i is (relu(A x_i), 1), so that their dot product is the score.
"""

from inspect import signature

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, ShapeError
from regard.base.keywords import UnknownKeyword, reject_keywords
from regard.base.validation import check_integer
from regard.core.absolute_positions import Positions, key_positions
from regard.core.attend import attend
from regard.core.cache import Cache, Stream
from regard.core.masks.algebra import Mask
from regard.core.scores import Additive
from regard.nn.attention import check_heads, check_probability, check_width, merge_heads, split_heads

PARTS = ("dense", "random", "dot")


class Synthesizer(nn.Module):
    """A Synthesizer layer: attention whose scores may be learned or predicted instead of q . k.

    Tay et al. 2020, arXiv:2005.00743.

    context  maximum number of positions; learned parameters exist for each of them
    parts    names of the scores to add up: "dense" is predicted from the query token, "random" is a learned matrix,
             "dot" is q . k. Several scores are weighted with learned weights that sum to one

    >>> Synthesizer(width=32, heads=4, context=16)(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        context: int,
        *,
        parts: tuple[str, ...] = ("dense",),
        bias: bool = True,
        dropout: float = 0.0,
        kernel: str | None = None,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        check_probability("dropout", dropout)
        check_parts(parts)
        self.heads, self.context, self.parts = heads, check_integer("context", context, 1), tuple(parts)
        self.head_width, self.dropout, self.kernel = width // heads, dropout, kernel
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        if "dense" in parts:
            self.proposal = nn.Linear(width, width, bias=bias)
            self.dense_keys = nn.Parameter(torch.zeros(context, self.head_width))
            self.dense_bias = nn.Parameter(torch.zeros(context))
        if "random" in parts:
            self.random_scores = nn.Parameter(torch.zeros(heads, context, context))
        if "dot" in parts:
            self.query = nn.Linear(width, width, bias=bias)
            self.key = nn.Linear(width, width, bias=bias)
        if len(parts) > 1:
            self.shares = nn.Parameter(torch.zeros(len(parts)))

    def forward(
        self,
        x: Float[Tensor, "b i d"],
        memory: None = None,
        *,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
        stream: Stream | None = None,
        positions: Tensor | None = None,
        **unknown: UnknownKeyword,
    ) -> Float[Tensor, "b i d"]:
        """Return one output for each token of x.

        `positions` is ignored: learned scores belong to the index of a token, counted from the start of the cache.
        """
        if unknown:
            reject_keywords("Synthesizer.forward", unknown, signature(self.forward).parameters)
        if memory is not None or stream is not None:
            raise ConfigError("a synthesizer takes no memory and no stream")
        check_width(x, self.value.in_features)
        i, start = x.shape[1], 0 if cache is None else cache.length
        if start + i > self.context:
            raise ShapeError(f"the synthesizer has a table for {format_axis('n', self.context)}, but {start + i} came")
        v = split_heads(self.value(x), self.heads)
        q, k = self._queries_and_keys(x, start)
        absolute = Positions.last_rows(i, i)
        if cache is not None:
            k, v, absolute = cache.extend(k, v)
        scores = None
        if "random" in self.parts:
            rows, columns = torch.arange(start, start + i), key_positions(absolute, k.shape[2], torch.device("cpu"))
            table = self.random_scores[:, rows[:, None], columns[None, :]]
            scores = Additive(table * self._share("random"))
        dropout = self.dropout if self.training else 0.0
        out = attend(
            q, k, v, mask=mask, scores=scores, beta=1.0, dropout=dropout, kernel=self.kernel, positions=absolute
        )
        return self.out(merge_heads(out))

    def _queries_and_keys(self, x: Tensor, start: int) -> tuple[Float[Tensor, "b h i c"], Float[Tensor, "b h i c"]]:
        """Return queries and keys whose dot products are the "dense" and "dot" scores.

        start  position of the first token
        """
        b, i, _ = x.shape
        queries, keys = [], []
        if "dense" in self.parts:
            here = slice(start, start + i)
            proposal = split_heads(self.proposal(x).relu(), self.heads)
            queries.append(torch.cat([proposal, torch.ones_like(proposal[..., :1])], -1) * self._share("dense"))
            key = torch.cat([self.dense_keys[here], self.dense_bias[here, None]], -1)
            keys.append(key.expand(b, self.heads, -1, -1).to(proposal.dtype))
        if "dot" in self.parts:
            queries.append(split_heads(self.query(x), self.heads) * (self.head_width**-0.5 * self._share("dot")))
            keys.append(split_heads(self.key(x), self.heads))
        if not queries:
            zeros = x.new_zeros(b, self.heads, i, 8)
            return zeros, zeros
        q, k = torch.cat(queries, -1), torch.cat(keys, -1)
        missing = -q.shape[-1] % 8  # fused kernels need multiples of 8; zeros change no product
        return pad(q, (0, missing)), pad(k, (0, missing))

    def _share(self, part: str) -> Tensor | float:
        return self.shares.softmax(0)[self.parts.index(part)] if len(self.parts) > 1 else 1.0


def check_parts(parts: tuple[str, ...]) -> None:
    """Check that `parts` are different names of Synthesizer scores, else raise ConfigError."""
    if not parts or set(parts) - set(PARTS) or len(set(parts)) < len(parts):
        raise ConfigError(f"parts takes one or more of {', '.join(PARTS)}, each once, not {parts!r}")
