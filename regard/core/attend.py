"""The one door to attention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.base.axes import LEGEND, read, spelled
from regard.base.errors import ConfigError, DeviceError, DtypeError, ShapeError
from regard.core import kernels
from regard.core.algebra import Full, Mask
from regard.core.grid import Places
from regard.core.kernels.call import Call
from regard.core.masks import as_mask
from regard.core.scores import Term, as_terms
from regard.core.softargmax import check_beta

if TYPE_CHECKING:
    from regard.core.kernels import Explanation

Scores = Term | Tensor | Sequence[Term | Tensor]


def attend(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    mask: Mask | Bool[Tensor, "*bh i j"] | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
    places: Places | None = None,
) -> Float[Tensor, "b h i e"]:
    """Each query's mean of the visible values, weighted by softargmax(beta q . k + terms).

    mask    who may see whom: `causal() & window(before=255)`, or a boolean matrix with True meaning visible
    scores  a term such as `alibi(heads=8)`, a tensor to add, or several in order
    beta    inverse temperature: None is c ** -0.5, 0 the mean of what is visible, inf hard attention (ties share)
    dropout share of weights set to zero; pass 0 outside training
    kernel  None chooses; a name runs that kernel or raises all its reasons not to
    places  absolute positions, as a cache hands them out; without them the queries are the last rows
    """
    return kernels.run(settle_call(q, k, v, mask, scores, beta, dropout, places), kernel)


def explain(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    mask: Mask | Bool[Tensor, "*bh i j"] | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    places: Places | None = None,
) -> "Explanation":
    """Which kernel `attend` would run for this call, why each other refuses, the visible pairs and the memory."""
    return kernels.explain(settle_call(q, k, v, mask, scores, beta, dropout, places))


def settle_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    scores: Scores | None,
    beta: float | None,
    dropout: float,
    places: Places | None,
) -> Call:
    """The call that was meant, or an error that says what does not fit."""
    for name, x, letters in (("q", q, "b h i c"), ("k", k, "b g j c"), ("v", v, "b g j e")):
        _check_tensor(name, x, letters)
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        low = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(low), k.to(low), v.to(low)
    _check_together(q, k, v)
    b, h, i, c = q.shape
    j = k.shape[2]
    beta = c**-0.5 if beta is None else float(beta)
    check_beta(beta)
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout is the share of weights set to zero, at least 0 and less than 1, not {dropout}")
    settled = as_mask(mask)
    terms = as_terms(scores)
    for term in terms:
        term.check(q, j)
    if places is None:
        places = Places.last_rows(i, j)
    elif isinstance(places.keys, Tensor) and places.keys.shape != (j,):
        raise ShapeError(
            f"places has {len(places.keys)} key positions, but k has {spelled('j', j)}; give one for each key"
        )
    if not isinstance(settled, Full):
        settled.check(places, i, j, b, h)
        settled = settled.to(q.device)
        if i and j and isinstance(places.keys, int):
            settled = settled.within(places.queries, places.queries + i - 1, places.keys, places.keys + j - 1)
    return Call(q, k, v, settled, terms, beta, dropout, places)


def _check_tensor(name: str, x: Tensor, letters: str) -> None:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} must be a tensor read as ({letters}), not {type(x).__name__}")
    if x.ndim != 4:
        raise ShapeError(
            f"{name} has {x.ndim} axes, {tuple(x.shape)}, but is read as ({letters}): "
            + ", ".join(LEGEND[letter] for letter in letters.split())
            + _rank_hint(name, x)
        )
    if not x.is_floating_point():
        raise DtypeError(f"{name} is {x.dtype}, but attention needs floating numbers; call {name}.float() first")


def _rank_hint(name: str, x: Tensor) -> str:
    if x.ndim == 3:
        return f"; for one head write {name}[:, None], for one sequence {name}[None]"
    if x.ndim == 2:
        return f"; for one sequence and one head write {name}[None, None]"
    return f"; reshape {name} to four axes"


def _check_together(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise DtypeError(
                f"{name} is {x.dtype}, but q is {q.dtype}; convert one of them, for instance {name}.to(q.dtype)"
            )
        if x.device != q.device:
            raise DeviceError(
                f"{name} lies on {x.device}, but q on {q.device}; move one of them, for instance {name}.to(q.device)"
            )
        if x.shape[0] != q.shape[0]:
            raise _mismatch(name, x, "b", 0, "q", q.shape[0], f"repeat or slice {name} to {q.shape[0]} sequences")
    if k.shape[3] != q.shape[3]:
        raise _mismatch("k", k, "c", 3, "q", q.shape[3], f"project k and q to one width, for instance {q.shape[3]}")
    if v.shape[1] != k.shape[1]:
        raise _mismatch("v", v, "g", 1, "k", k.shape[1], "k and v come in pairs, so give both as many heads")
    if v.shape[2] != k.shape[2]:
        raise _mismatch("v", v, "j", 2, "k", k.shape[2], "k and v come in pairs, so give both as many positions")
    h, g = q.shape[1], k.shape[1]
    if h % g if g else h:
        raise ShapeError(
            f"q has {spelled('h', h)}, which is not a multiple of k's {spelled('g', g)}; "
            f"{read('q', q.shape, 'b h i c')}, {read('k', k.shape, 'b g j c')}; choose g among the divisors of {h}"
        )


def _mismatch(name: str, x: Tensor, letter: str, axis: int, other: str, size: int, fix: str) -> ShapeError:
    letters = "b g j c" if name == "k" else "b g j e"
    return ShapeError(
        f"{name} has {spelled(letter, x.shape[axis])}, but {other} has {letter}={size}; "
        f"{read(name, x.shape, letters)}; {fix}"
    )
