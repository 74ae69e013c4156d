"""Attention written out by hand: a product of two tensors, a softmax of it, and a product with a third.

A product is a matmul, an einsum of any number of operands, or an elementwise product and a sum. What is done to the
scores in between is followed step by step: a factor becomes beta, what is added becomes a term, what is filled in
becomes a mask. After a step that has no such form the scores are kept as they are, so the record stays exact and only
costs more memory. So are square scores that are no product, or none that was seen: then queries and keys are not known,
but every statistic is. Weights made of scores in another way than by a softmax over the last axis,
by exp and a sum or by a sigmoid for instance, are not followed, nor is a part of the weights, or weights whose axes
were moved: the product with the values says so.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from regard.core.absolute_positions import Positions
from regard.core.masks.algebra import Full, Mask
from regard.core.scores import ScoreTerm, additive
from regard.see.call_adapters import (
    ArgumentOrder,
    CallAdapter,
    InterceptedCall,
    MeasuredScores,
    ParsedCall,
    apart,
    batch_and_heads,
    heads_within,
    hides,
    narrowed,
    read_mask,
    simplest,
)


@dataclass(frozen=True, eq=False)
class Scores:
    """A tensor of scores, and how it came about: beta q . k, and then what was added."""

    q: Tensor  # (..., i, c), with the leading axes of the product
    k: Tensor  # (..., j, c)
    versions: tuple[int, int]
    beta: float = 1.0
    added: tuple[Tensor, ...] = ()
    plain: bool = True  # every step so far has a form of its own
    learned: bool = False  # k is a parameter, as in a feed-forward part
    bent: str = ""  # the function that may have made weights of them, though it is no softmax


@dataclass(frozen=True, eq=False)
class Weights:
    """A tensor of weights, and the scores that its softmax was taken of."""

    scores: Scores | None  # None where they are no product that was seen
    shape: torch.Size  # that of the scores when the softmax was taken
    given: tuple[Tensor, int] | None  # the scores themselves and their version, where some step had no form
    dropout: float = 0.0
    note: str = ""


@dataclass(frozen=True, eq=False)
class Untold:
    """A tensor that may weigh as attention does, made of scores in a way that is not followed."""

    reason: str


@dataclass(frozen=True, eq=False)
class Pairs:
    """The elementwise product of every query with every key, (..., i, j, c), whose sum over c are scores."""

    q: Tensor  # (..., i, c)
    k: Tensor  # (..., j, c)
    versions: tuple[int, int]
    learned: bool


@dataclass(frozen=True, eq=False)
class Mixing:
    """Every weight times every value, (..., i, j, e), whose sum over keys is what attention gives."""

    weights: Weights | Untold
    v: Tensor  # (..., j, e)
    version: int


Known = Scores | Weights | Untold | Pairs | Mixing


@dataclass(frozen=True, eq=False)
class Multiplied:
    """The heads went through an einsum together with other factors, with an output projection for instance."""

    heads: str  # the letters of (..., i, e)
    sizes: tuple[int, ...]
    others: tuple[str, ...]
    factors: tuple[Tensor, ...]
    result: str

    def forth(self, heads: Tensor, out: Tensor) -> Tensor:
        factors = (factor.to(heads.dtype) for factor in self.factors)
        return torch.einsum(
            f"{','.join((self.heads, *self.others))}->{self.result}", heads.reshape(self.sizes), *factors
        )

    def back(self, gradient: Tensor) -> Tensor:
        factors = (factor.to(gradient.dtype) for factor in self.factors)
        return torch.einsum(f"{','.join((self.result, *self.others))}->{self.heads}", gradient, *factors)


ROUTE = "softmax"


def _names(*functions: Any) -> frozenset[Any]:
    return frozenset(functions)


F = torch.nn.functional
PRODUCTS = _names(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SOFTMAXES = _names(torch.softmax, Tensor.softmax, F.softmax)
EXPONENTIALS = _names(
    torch.exp, Tensor.exp, Tensor.exp_, torch.exp2, Tensor.exp2, Tensor.exp2_, torch.log_softmax, Tensor.log_softmax,
    F.log_softmax, F.gumbel_softmax,
)  # fmt: skip
BENDS = _names(
    torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_, F.sigmoid, F.logsigmoid, F.hardsigmoid, torch.relu, Tensor.relu,
    torch.relu_, Tensor.relu_, F.relu, F.relu_, F.relu6, F.leaky_relu, F.elu, F.softplus, F.gelu, F.silu, F.mish,
    torch.tanh, Tensor.tanh, Tensor.tanh_, F.tanh, torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__,
    torch.clamp, Tensor.clamp, Tensor.clamp_, torch.clamp_min, Tensor.clamp_min,
)  # fmt: skip
SUMS = _names(torch.sum, Tensor.sum)
TIMES = _names(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__, torch.multiply)
OVER = _names(torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__, torch.true_divide)
PLUS = _names(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
MINUS = _names(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__)
FILL = _names(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
CHOOSE = _names(torch.where)
SAME = _names(
    Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as,
    Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.detach,
)  # fmt: skip
SHAPES = _names(
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze,
    Tensor.flatten, torch.flatten, Tensor.unflatten,
)  # fmt: skip
ARITHMETIC = TIMES | OVER | PLUS | MINUS | FILL | CHOOSE
REDUCTIONS = _names(
    *("sum", "nansum", "mean", "nanmean", "median", "prod", "max", "min", "amax", "amin", "norm", "std", "var"),
    *("logsumexp", "vector_norm"),
)
# names of functions after which a number of the same shape may stand elsewhere, among other rows or keys
MOVES = _names(
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "adjoint", "T", "mT", "H", "mH", "flip"),
    *("fliplr", "flipud", "rot90", "roll", "getitem", "index_select", "gather", "take", "take_along_dim"),
)
DROPOUTS = _names(F.dropout, torch.dropout)
IN_PLACE = _names(
    Tensor.mul_, Tensor.__imul__, Tensor.div_, Tensor.__itruediv__, Tensor.add_, Tensor.__iadd__, Tensor.sub_,
    Tensor.__isub__, Tensor.masked_fill_,
)  # fmt: skip


class Follower:
    """Follows scores and weights through the functions that a model calls.

    found  is handed a call, its output and the way from (..., i, e) to that output
    said   how many heads the call being made has, where somebody says so
    """

    def __init__(
        self, found: Callable[[InterceptedCall, Tensor, CallAdapter], None], said: Callable[[], ParsedCall | None]
    ) -> None:
        self._found, self._said = found, said
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def forget(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Look at one function call that was made."""
        if func is Tensor.__setitem__ and args[0].is_inference() and args[0] in self._known:
            self._keep(args[0], _written(self._known[args[0]][0]))  # where no version tells
        if isinstance(out, tuple | list):
            self._parted(func, args, out)
        if not isinstance(out, Tensor) or out.ndim < 2 or not out.is_floating_point():
            return
        if (product := _product(func, args, kwargs)) is not None:
            self._multiplied(*product, out)
        elif func is torch.einsum:
            self._einsum(args, out)
        elif (source := self._source((*args, *kwargs.values()))) is not None:
            known = self._recall(source, changed=func in IN_PLACE)
            after = self._after(known, func, args, kwargs, source, out)
            if after is not None:
                self._keep(out, after)
        elif func in SOFTMAXES and out.ndim >= 3 and _last_axis(args, kwargs, out):
            given = args[0] if args else kwargs["input"]
            self._keep(out, Weights(None, given.shape, (given.detach(), version(given))))
        elif func in TIMES and (pairs := _paired(args, out)) is not None:
            self._keep(out, pairs)

    def _source(self, values: Sequence[Any]) -> Tensor | None:
        """The argument of which something is known, one that can be followed before one that cannot."""
        known = [x for x in _tensors(values) if x in self._known]
        return min(known, key=lambda x: isinstance(self._known[x][0], Untold), default=None)

    def _multiplied(self, left: Tensor, right: Tensor, beta: float, added: tuple[Tensor, ...], out: Tensor) -> None:
        """A product of matrices: with values where the first is weights, else it may be scores."""
        self._refuse_untold(left, right)
        known = self._recall(left)
        if isinstance(known, Weights):
            if right.ndim < 2:
                raise RuntimeError("values had one axis, that of keys")
            self._finish(known, left.shape, right, out, ArgumentOrder(list(range(out.ndim))), out.shape[:-2])
        elif left.ndim >= 3 and right.ndim >= 3:
            learned = isinstance(right, nn.Parameter)
            self._keep(out, _scores(left.detach(), right.detach().mT, out, beta, added, learned))

    def _after(
        self, known: Known, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
    ) -> Known | None:
        """What is known of the result of a function, from what is known of one argument."""
        if _makes(func):
            return None
        if isinstance(known, Pairs):
            if func in SUMS and _summed(args, kwargs, source) == source.ndim - 1:
                same = (version(known.q), version(known.k)) == known.versions
                return Scores(known.q, known.k, known.versions, plain=same, learned=known.learned)
            return known if func in SAME else None
        if isinstance(known, Mixing):
            if func in SAME:
                return known
            self._mixed(known, func, args, kwargs, source, out)
            return None
        if isinstance(known, Scores):
            return _from_scores(known, func, args, kwargs, source, out)
        if func in TIMES and (mixing := _mixing(known, args, source, out)) is not None:
            return mixing
        if isinstance(known, Untold):
            return known if _carries(func, args, source, out) else None
        others = [x for x in _tensors(args) if x is not source]
        if any(x in self._known and isinstance(self._known[x][0], Weights) for x in others):
            return Untold(f"values were mixed by {_named(func)} of the weights of two softmaxes")
        if out.numel() != source.numel() and func in ARITHMETIC:
            return None  # a factor of something larger
        if out.shape != source.shape and func not in SAME and _beside(source, args):
            raise RuntimeError(f"the weights of a softmax went into {_named(func)}, which is not followed")
        return _onward(known, func, args, kwargs, source, out)

    def _mixed(
        self, known: Mixing, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
    ) -> None:
        """Values weighed one by one are attention once they are summed over keys."""
        summed = func in SUMS and _summed(args, kwargs, source) == source.ndim - 2
        if isinstance(known.weights, Untold):
            if summed:
                raise RuntimeError(known.weights.reason)
            return  # a factor for each of some vectors, as a router has them
        if not summed:
            raise RuntimeError(f"values were weighed one by one, and then {_named(func)} was no sum over keys alone")
        if version(known.v) != known.version:
            raise RuntimeError("values were written into between their product with the weights and its sum")
        self._finish(
            known.weights, source.shape[:-1], known.v, out, ArgumentOrder(list(range(out.ndim))), out.shape[:-2]
        )

    def _parted(self, func: Any, args: tuple[Any, ...], parts: Sequence[Any]) -> None:
        """Several tensors made of one, by chunk or unbind for instance: each may be a part of the weights."""
        source = self._source(args)
        known = None if source is None else self._recall(source)
        if isinstance(known, Untold) or (isinstance(known, Weights) and known.scores is not None):
            for part in parts:
                if isinstance(part, Tensor) and part.is_floating_point():
                    self._keep(part, known if isinstance(known, Untold) else _not_themselves(func))

    def _refuse_untold(self, left: Tensor, right: Tensor) -> None:
        """Raise where one of two factors may be weights and it cannot be told what they weigh."""
        for factor in (left, right):
            known = self._recall(factor)
            if isinstance(known, Untold):
                raise RuntimeError(known.reason)
        known = self._recall(left)
        if isinstance(known, Scores) and known.bent and right.ndim >= 3 and not isinstance(right, nn.Parameter):
            raise RuntimeError(_no_softmax(known).reason)
        known = self._recall(right)
        if isinstance(known, Weights) and known.scores is not None and not isinstance(self._recall(left), Weights):
            raise RuntimeError("values stood before the weights of a softmax")

    def _keep(self, x: Tensor, known: Known) -> None:
        self._known[x] = (known, version(x))

    def _recall(self, x: Tensor, changed: bool = False) -> Any:
        """What is known of a tensor. One that was written into since is known by its numbers alone."""
        if x not in self._known:
            return None
        known, then = self._known[x]
        return known if version(x) == then + changed else _written(known)

    def _einsum(self, args: tuple[Any, ...], out: Tensor) -> None:
        """A product of any number of tensors: with values where one of them is weights, else it may be scores."""
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], tuple | list):
            operands = list(operands[0])
        told = [self._recall(x) for x in operands]
        for known in told:
            if isinstance(known, Untold):
                raise RuntimeError(known.reason)
        # the softmax of other numbers than scores may be anything, so only in the first place it is taken for weights
        weighs = [at for at, known in enumerate(told) if isinstance(known, Weights) and (known.scores or at == 0)]
        letters, result = _lettered(equation, operands)
        if len(weighs) > 1:
            raise RuntimeError(f"einsum({equation!r}) multiplied the weights of two softmaxes")
        if weighs:
            self._einsum_values(equation, told[weighs[0]], weighs[0], letters, result, operands, out)
            return
        for at, known in enumerate(told):
            if isinstance(known, Scores) and known.bent and _sums_with_another(at, letters, result, operands):
                raise RuntimeError(_no_softmax(known).reason)
        if (scores := _einsum_scores(letters, result, operands, out)) is not None:
            self._keep(out, scores)

    def _einsum_values(
        self,
        equation: str,
        known: Weights,
        at: int,
        letters: list[str],
        result: str,
        operands: list[Tensor],
        out: Tensor,
    ) -> None:
        """Weights times values, and whatever else is multiplied in: it becomes part of the way to the output."""
        own = letters[at]
        leading, i, j = own[:-2], own[-2], own[-1]
        rest = [n for n in range(len(operands)) if n != at]
        valued = next((n for n in rest if j in letters[n]), None)
        others = [n for n in rest if n != valued]
        width = "" if valued is None else "".join(x for x in letters[valued] if x not in own)
        heads, outside = leading + i + width, "".join([result, *(letters[n] for n in others)])
        # every axis of the heads must be found again behind them, and that of keys must not
        fits = (
            len(width) == 1
            and j not in outside
            and set(heads) <= set(outside)
            and (others or len(result) == len(heads))
        )
        v = _arranged(operands[valued], letters[valued], leading + j + width) if fits and valued is not None else None
        if v is None:
            raise RuntimeError(f"values were mixed by einsum({equation!r}), which has another form")
        sizes = _sizes(letters, operands)
        way: CallAdapter = (
            ArgumentOrder([result.index(x) for x in heads])
            if not others
            else Multiplied(
                heads,
                tuple(sizes[x] for x in heads),
                tuple(letters[n] for n in others),
                tuple(operands[n].detach() for n in others),
                result,
            )
        )
        self._finish(known, operands[at].shape, v, out, way, torch.Size(sizes[x] for x in leading))

    def _finish(
        self, weights: Weights, factor: torch.Size, v: Tensor, out: Tensor, way: CallAdapter, lead: torch.Size
    ) -> None:
        """The product with the values was made, so it was attention.

        factor  the shape of the weights as a factor of the product
        lead    the leading axes of the product
        """
        scores, shape, note = weights.scores, weights.shape, weights.note
        i, j = shape[-2:]
        if factor[-2:] != shape[-2:]:
            raise RuntimeError(f"weights {tuple(shape)} of a softmax were mixed with values as {tuple(factor)}")
        if scores is None and i != j:
            raise RuntimeError(
                "values were mixed by a softmax of numbers that are no product of queries and keys, or none that was "
                "seen, as additive attention has them; attention or not"
            )
        if lead != factor[:-2]:
            if factor != shape:
                raise RuntimeError(f"weights {tuple(shape)} of a softmax were mixed with values of {tuple(lead)} each")
            shape = torch.Size((*lead, i, j))  # one map for the values of several
        leading = shape[:-2]
        heads, told = self._heads(leading, factor[:-2])
        note = ", ".join(part for part in (note, told) if part)
        v = v.expand(*lead, *v.shape[-2:]).reshape(*leading, *v.shape[-2:])
        mask: Mask = Full()
        terms: tuple[ScoreTerm, ...] = ()
        if weights.given is not None:
            numbers, then = weights.given
            if version(numbers) != then:
                raise RuntimeError("scores were written into between their softmax and the product with the values")
            visible, numbers, _ = apart(batch_and_heads(numbers.expand(shape), heads))
            terms = (MeasuredScores(numbers),)
            mask = simplest(narrowed(visible), i, j)
        if scores is None:
            q, k = v.new_zeros(*leading, i, 1), v.new_zeros(*leading, j, 1)
            note = ", ".join(
                [
                    "its scores are no product that was seen, so queries and keys are not known",
                    *([note] if note else []),
                ]
            )
        else:
            q, k = (_led(x, weights.shape[:-2], leading) for x in (scores.q, scores.k))
        if scores is not None and weights.given is None:
            mask, terms = _read_added(scores.added, shape, heads)
        heard = InterceptedCall(
            ROUTE,
            batch_and_heads(q, heads),
            batch_and_heads(k, heads),
            batch_and_heads(v, heads),
            mask,
            terms,
            1.0 if scores is None else scores.beta,
            Positions.last_rows(i, j),
            weights.dropout,
            note,
        )
        self._found(heard, out, way)

    def _heads(self, leading: torch.Size, factor: torch.Size) -> tuple[int | None, str]:
        """How many heads are within the leading axes of the scores, and who said so. The product may show it."""
        if len(leading) == 2:
            return None, ""
        if len(leading) == 1 and len(factor) == 2 and leading.numel() == factor.numel():
            return factor[1], ""
        said = self._said()
        heads = heads_within(leading, said)
        return heads, said.note if said is not None and heads is not None else ""


def _read_added(added: tuple[Tensor, ...], shape: torch.Size, heads: int | None) -> tuple[Mask, tuple[ScoreTerm, ...]]:
    """All that was added to scores, as one mask and the terms.

    Numbers that hide are summed before they are read: a row in which nothing else is left weighs by what is highest.
    """
    low: Tensor | None = None
    terms: list[ScoreTerm] = []
    for values in added:
        numbers = narrowed(batch_and_heads(values.expand(shape), heads))
        hidden = hides(numbers)
        rest = torch.where(hidden, 0.0, numbers)
        if bool(rest.any()):
            terms.append(additive(narrowed(rest)))
        if bool(hidden.any()):
            hiding = torch.where(hidden, numbers, 0.0)
            low = hiding if low is None else low + hiding
    mask, level, _ = read_mask(low, *shape[-2:])
    return mask, (*terms, *level)


def _product(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, float, tuple[Tensor, ...]] | None:
    """The two factors of a product, the factor before it, and what is added to it."""
    if func in PRODUCTS and len(args) == 2 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
        return args[0], args[1], 1.0, ()
    if func in (torch.baddbmm, Tensor.baddbmm):
        given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
        beta, alpha = float(given.get("beta", 1)), float(given.get("alpha", 1))
        return given["batch1"], given["batch2"], alpha, () if beta == 0 else (given["input"].detach() * beta,)
    return None


def _from_scores(
    known: Scores, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
) -> Known | None:
    """What scores become: weights by a softmax, something untold by an exponential, scores by all else."""
    if func in SOFTMAXES:
        if not _last_axis(args, kwargs, out):
            return _by("a softmax over another axis than the last")
        exact = known.plain and (version(known.q), version(known.k)) == known.versions
        return Weights(known, source.shape, None if exact else (source.detach(), version(source)))
    if func in EXPONENTIALS:
        return _by(_named(func))
    step = _step(known, func, args, kwargs, source, out)
    if step is None and known.bent:
        return _no_softmax(known)
    return step


def _step(
    known: Scores, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
) -> Scores | None:
    """The scores after one more function, or None where they are scores no longer."""
    lost = replace(known, plain=False)
    if func in SAME:
        return known
    if _reshapes(func, args, source, out):
        if out.shape[-2:] != source.shape[-2:]:
            return None
        moved = tuple(x.expand(source.shape).reshape(out.shape) for x in known.added)
        return replace(known, added=moved)
    if out.shape != source.shape or _named(func) in MOVES:
        return None
    if func in BENDS and not known.learned:
        return replace(lost, bent=_named(func))
    if not known.plain or kwargs:  # a keyword may make another function of it
        return lost
    other = next((x for x in args[:2] if x is not source), None) if len(args) > 1 else None
    if func in TIMES or (func in OVER and args[0] is source):
        factor = _number(other)
        if factor is None or factor <= 0:
            return lost  # -inf would turn into something else
        factor = factor if func in TIMES else 1 / factor
        return replace(known, beta=known.beta * factor, added=tuple(x * factor for x in known.added))
    if (func in PLUS or (func in MINUS and args[0] is source)) and other is not None:
        values = torch.as_tensor(other, device=out.device).detach().to(out.dtype, copy=True)
        return replace(known, added=(*known.added, -values if func in MINUS else values))
    if func in FILL and len(args) == 3:
        return _filled(known, args[1], _number(args[2]), source)
    if func in CHOOSE and len(args) == 3:
        value = _number(args[2] if args[1] is source else args[1])
        hidden = ~args[0] if args[1] is source else args[0]
        return _filled(known, hidden, value, source)
    return lost


def _filled(known: Scores, hidden: Tensor, value: float | None, source: Tensor) -> Scores:
    """Scores with a very low number in some places: the same as adding it there, where it swallows them.

    It also takes the place of a low number that was there, where adding both would make -inf.
    """
    if value is None or value > torch.finfo(source.dtype).min / 2:
        return replace(known, plain=False)
    hidden = hidden.detach()
    low = torch.zeros(hidden.shape, dtype=source.dtype, device=source.device).masked_fill(hidden, value)
    before = tuple(torch.where(hidden, 0.0, x) if bool(hides(x).any()) else x for x in known.added)
    return replace(known, added=(*before, low))


def _onward(
    known: Weights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
) -> Weights | Untold:
    """The weights after one more function. What changes them is told, not followed."""
    if func in SAME or _reshapes(func, args, source, out):
        return known
    if func in DROPOUTS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        return replace(known, dropout=float(p)) if training and p else known
    if out.shape != source.shape or _named(func) in MOVES:
        return _not_themselves(func)
    return replace(known, note=f"{known.note + ', ' if known.note else ''}{_named(func)} after the softmax")


def _written(known: Known) -> Known:
    """What is left to know of a tensor that was written into."""
    if isinstance(known, Scores):
        return replace(known, plain=False)
    if isinstance(known, Weights):
        return replace(known, note="written into after the softmax")
    if isinstance(known, Mixing):
        return replace(known, weights=Untold("values were weighed one by one, and then written into"))
    return known if isinstance(known, Untold) else replace(known, versions=(-1, -1))


def _by(name: str) -> Untold:
    return Untold(f"values were mixed by {name} of a product, attention or not")


def _no_softmax(known: Scores) -> Untold:
    reason = f"{_by(known.bent).reason}: it is no softmax, so log-sum-exp and entropy do not apply"
    return Untold(reason)


def _not_themselves(func: Any) -> Untold:
    return Untold(f"values were mixed by {_named(func)} of the weights of a softmax, not by the weights themselves")


def _named(func: Any) -> str:
    """The name of a function as one would write it; of a property such as mT, the name of that."""
    name = getattr(func, "__name__", str(func))
    return (func.__self__.__name__ if name == "__get__" else name).strip("_")


def _makes(func: Any) -> bool:
    """Whether a function makes new numbers and only takes its shape or dtype from an argument."""
    name = _named(func)
    return name.endswith("_like") or name.startswith("new_")


def _carries(func: Any, args: tuple[Any, ...], source: Tensor, out: Tensor) -> bool:
    """Whether the numbers themselves go on, all or some, and not their sums or what they are a factor of."""
    return out.numel() == source.numel() if _beside(source, args) else _named(func) not in REDUCTIONS


def _beside(source: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether other numbers than those of the source went into a function, and not only the indices to take."""
    return any(isinstance(x, Tensor) and x is not source and x.is_floating_point() for x in args)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, and those in lists of them, as torch.cat takes them."""
    each = (x for value in values for x in (value if isinstance(value, tuple | list) else (value,)))
    return [x for x in each if isinstance(x, Tensor)]


def _reshapes(func: Any, args: tuple[Any, ...], source: Tensor, out: Tensor) -> bool:
    """Whether all numbers stay in their order and only axes are split, merged, added or taken away."""
    if func is Tensor.__getitem__:
        key = args[1] if isinstance(args[1], tuple) else (args[1],)
        basic = all(part is None or part is ... or type(part) in (int, slice) for part in key)
        return basic and out.numel() == source.numel()
    return func in SHAPES


def _scores(
    q: Tensor, k: Tensor, out: Tensor, beta: float = 1.0, added: tuple[Tensor, ...] = (), learned: bool = False
) -> Scores:
    """The scores that a product is, each factor stretched to its leading axes."""
    q, k = (x.expand(*out.shape[:-2], *x.shape[-2:]) for x in (q, k))
    return Scores(q, k, (version(q), version(k)), beta, added, learned=learned)


def _paired(args: tuple[Any, ...], out: Tensor) -> Pairs | None:
    """The factors (..., i, 1, c) and (..., 1, j, c) of an elementwise product, in either order."""
    if len(args) != 2 or not all(isinstance(x, Tensor) and x.ndim >= 2 for x in args) or out.ndim < 4:
        return None
    leading, (i, j, c) = out.shape[:-3], out.shape[-3:]
    for q, k in (args, args[::-1]):
        if q.shape[-2] == 1 and (k.ndim == 2 or k.shape[-3] == 1) and q.ndim >= 3:
            learned = isinstance(k, nn.Parameter)
            q = q.detach().expand(*leading, i, 1, c).squeeze(-2)
            k = k.detach().expand(*leading, 1, j, c).squeeze(-3)
            return Pairs(q, k, (version(q), version(k)), learned)
    return None


def _mixing(known: Weights | Untold, args: tuple[Any, ...], source: Tensor, out: Tensor) -> Mixing | None:
    """Weights (..., i, j, 1) times values (..., 1, j, e)."""
    values = next((x for x in args[:2] if isinstance(x, Tensor) and x is not source), None)
    if (
        values is None
        or values.ndim < 2
        or source.ndim < 3
        or source.shape[-1] != 1
        or out.shape[:-1] != source.shape[:-1]
    ):
        return None
    if isinstance(known, Weights):
        i, j = known.shape[-2:]
        if source.shape[-3:-1] != (i, j) or source.shape[-2:] == (i, j) or (known.scores is None and i != j):
            return None
        if values.shape[-2] != source.shape[-2]:
            known = Untold("the weights of a softmax were multiplied by numbers that are not one vector for each key")
        elif values.ndim > 2 and values.shape[-3] != 1:
            known = Untold("the weights of a softmax were multiplied by other values for each query")
        else:
            values = values.squeeze(-3) if values.ndim > 2 else values
    return Mixing(known, values.detach(), version(values))


def _summed(args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor) -> int | None:
    """The one axis that a sum was taken over and that is gone."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(axis, tuple | list) and len(axis) == 1:
        axis = axis[0]
    if not isinstance(axis, int) or kwargs.get("keepdim", args[2] if len(args) > 2 else False):
        return None
    return axis % source.ndim


def _lettered(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """The letters of every operand and of the result; dots become letters, and a result that was left out is told."""
    equation = equation.replace(" ", "")
    inputs, arrow, result = equation.partition("->")
    parts = inputs.split(",")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    unnamed = [x.ndim - len(part) + 3 if "..." in part else 0 for part, x in zip(parts, operands, strict=True)]
    most = max(unnamed)
    if not arrow:
        once = sorted(letter for letter in set(inputs) - {",", "."} if inputs.count(letter) == 1)
        result = "".join(["..." if most else "", *once])
    parts = [
        part.replace("...", "".join(spare[most - count : most])) for part, count in zip(parts, unnamed, strict=True)
    ]
    return parts, result.replace("...", "".join(spare[:most]))


def _sizes(letters: list[str], operands: list[Tensor]) -> dict[str, int]:
    """The size of every axis; where one is stretched, that of the others."""
    sizes: dict[str, int] = {}
    for part, x in zip(letters, operands, strict=True):
        for letter, size in zip(part, x.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    return sizes


def _einsum_scores(letters: list[str], result: str, operands: list[Tensor], out: Tensor) -> Scores | None:
    """The scores that an einsum may be: keys in one operand, and in all others together what they are multiplied by."""
    if len(result) < 3 or len(operands) < 2:
        return None
    leading, i, j = result[:-2], result[-2], result[-1]
    keyed = [at for at, part in enumerate(letters) if j in part]
    rest = [at for at in range(len(operands)) if at not in keyed]
    inside = "".join(letters[at] for at in rest)
    if len(keyed) != 1 or i in letters[keyed[0]] or i not in inside:
        return None
    summed = [x for x in letters[keyed[0]] if x in inside and x not in result]
    if len(summed) != 1:
        return None
    left, q = letters[rest[0]], operands[rest[0]].detach()
    if len(rest) > 1:
        left = "".join(x for x in leading + i + summed[0] if x in inside)
        q = torch.einsum(f"{','.join(letters[at] for at in rest)}->{left}", *(operands[at].detach() for at in rest))
    q_placed = _arranged(q, left, leading + i + summed[0])
    k_placed = _arranged(operands[keyed[0]].detach(), letters[keyed[0]], leading + j + summed[0])
    if q_placed is None or k_placed is None:
        return None
    return _scores(q_placed, k_placed, out, learned=isinstance(operands[keyed[0]], nn.Parameter))


def _sums_with_another(at: int, letters: list[str], result: str, operands: list[Tensor]) -> bool:
    """Whether the last axis of an operand is summed with that of another that is no parameter."""
    others = [n for n in range(len(operands)) if n != at and not isinstance(operands[n], nn.Parameter)]
    key = letters[at][-1]
    return key not in result and any(key in letters[n] and operands[n].ndim >= 3 for n in others)


def _last_axis(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> bool:
    """Whether a softmax was taken over keys."""
    return kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, out.ndim - 1)


def _number(x: Any) -> float | None:
    """A factor that is the same for all pairs."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, int | float) else None


def _arranged(x: Tensor, letters: str, wanted: str) -> Tensor | None:
    """Axes in the wanted order, with size one where a letter is missing."""
    if any(letter not in wanted for letter in letters) or len(set(letters)) != len(letters):
        return None
    x = x.permute([letters.index(letter) for letter in wanted if letter in letters])
    for at, letter in enumerate(wanted):
        if letter not in letters:
            x = x.unsqueeze(at)
    return x


def _led(x: Tensor, before: torch.Size, leading: torch.Size) -> Tensor:
    """The same rows with their leading axes regrouped as those of the scores were, and then stretched."""
    return x.reshape(*before, *x.shape[-2:]).expand(*leading, *x.shape[-2:])


def version(x: Tensor) -> int:
    """How often a tensor was written into. Tensors of inference mode do not count that."""
    return 0 if x.is_inference() else x._version
