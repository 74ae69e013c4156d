"""Attention written out by hand: a product of two tensors, a softmax of it, and a product with a third.

What is done to the scores in between is followed step by step: a factor becomes beta, what is added becomes a term,
what is filled in becomes a mask. After a step that has no such form the scores are kept as they are, so the record
stays exact and only costs more memory. So are square scores that came from out of sight, from compiled code for
instance: then queries and keys are not known, but every statistic is. Weights made of scores in another way than by a
softmax over the last axis, by exp and a sum for instance, are not followed, and the product with the values says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.core.algebra import Full, Mask
from regard.core.grid import Places
from regard.core.scores import Term, additive
from regard.see.translate import Given, Heard, apart, four_axes, hides, narrowed, read_mask, simplest


@dataclass(frozen=True, eq=False)
class Scores:
    """A tensor of scores, and how it came about: beta q . k, and then what was added."""

    q: Tensor  # (..., i, c)
    k: Tensor  # (..., j, c)
    versions: tuple[int, int]
    beta: float = 1.0
    added: tuple[Tensor, ...] = ()
    plain: bool = True  # every step so far has a form of its own


@dataclass(frozen=True, eq=False)
class Weights:
    """A tensor of weights, and the scores that its softmax was taken of."""

    scores: Scores | None  # None where they came from out of sight
    shape: torch.Size  # that of the scores when the softmax was taken
    given: tuple[Tensor, int] | None  # the scores themselves and their version, where some step had no form
    dropout: float = 0.0
    note: str = ""


@dataclass(frozen=True, eq=False)
class Untold:
    """A tensor that may weigh as attention does, made of scores in a way that is not followed."""

    how: str


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
TIMES = _names(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__, torch.multiply)
OVER = _names(torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__, torch.true_divide)
PLUS = _names(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
MINUS = _names(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__)
FILL = _names(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
CHOOSE = _names(torch.where)
SAME = _names(
    Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as,
    Tensor.contiguous, Tensor.clone, torch.clone,
)  # fmt: skip
SHAPES = _names(
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze,
    Tensor.flatten, torch.flatten, Tensor.unflatten,
)  # fmt: skip
DROPOUTS = _names(F.dropout, torch.dropout)
IN_PLACE = _names(
    Tensor.mul_, Tensor.__imul__, Tensor.div_, Tensor.__itruediv__, Tensor.add_, Tensor.__iadd__, Tensor.sub_,
    Tensor.__isub__, Tensor.masked_fill_,
)  # fmt: skip


class Follower:
    """Follows scores and weights through the functions that a model calls.

    found  is handed a call, its output and the order of the output's axes that gives (..., i, e)
    """

    def __init__(self, found: Callable[[Heard, Tensor, list[int]], None]) -> None:
        self._found = found
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def forget(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Look at one function call that was made."""
        if not isinstance(out, Tensor) or out.ndim < 2 or not out.is_floating_point():
            return
        if (product := _product(func, args, kwargs)) is not None:
            left, right, beta, added = product
            self._refuse_untold(left, right)
            known = self._recall(left)
            if isinstance(known, Weights):
                self._finish(known, right, out, list(range(out.ndim)))
            elif left.ndim >= 3 and right.ndim >= 3:
                q, k = left.detach(), right.detach().mT
                self._keep(out, Scores(q, k, (version(q), version(k)), beta, added))
            return
        if func is torch.einsum:
            self._einsum(args, out)
            return
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        source = next((x for x in tensors if x in self._known), None)
        if source is None:
            if func in SOFTMAXES and out.ndim >= 3 and _last_axis(args, kwargs, out):
                self._keep(out, Weights(None, tensors[0].shape, (tensors[0].detach(), version(tensors[0]))))
            return
        known = self._recall(source, changed=func in IN_PLACE)
        if isinstance(known, Untold):
            if out.numel() == source.numel():
                self._keep(out, known)
        elif isinstance(known, Weights):
            self._keep(out, _onward(known, func, args, kwargs))
        elif func in SOFTMAXES:
            if _last_axis(args, kwargs, out):
                exact = known.plain and (version(known.q), version(known.k)) == known.versions
                self._keep(out, Weights(known, source.shape, None if exact else (source.detach(), version(source))))
            else:
                self._keep(out, Untold("a softmax over another axis than the last"))
        elif func in EXPONENTIALS:
            self._keep(out, Untold(func.__name__.strip("_")))
        elif (step := _step(known, func, args, kwargs, source, out)) is not None:
            self._keep(out, step)

    def _refuse_untold(self, left: Tensor, right: Tensor) -> None:
        """Raise where one of two factors may be weights and it cannot be told what they weigh."""
        for factor in (left, right):
            known = self._recall(factor)
            if isinstance(known, Untold):
                raise RuntimeError(f"values were mixed by {known.how} of a product, attention or not")
        known = self._recall(right)
        if isinstance(known, Weights) and known.scores is not None and not isinstance(self._recall(left), Weights):
            raise RuntimeError("values stood before the weights of a softmax")

    def _keep(self, x: Tensor, known: Scores | Weights | Untold) -> None:
        self._known[x] = (known, version(x))

    def _recall(self, x: Tensor, changed: bool = False) -> Any:
        """What is known of a tensor. One that was written into since is known by its numbers alone."""
        if x not in self._known:
            return None
        known, then = self._known[x]
        if version(x) == then + changed or isinstance(known, Untold):
            return known
        if isinstance(known, Weights):
            return replace(known, note="written into after the softmax")
        return replace(known, plain=False)

    def _einsum(self, args: tuple[Any, ...], out: Tensor) -> None:
        if len(args) != 3 or not isinstance(args[0], str):
            return
        self._refuse_untold(*args[1:])
        if "->" not in args[0] or "." in args[0]:
            if isinstance(self._recall(args[1]), Weights):
                raise RuntimeError(f"values were mixed by einsum({args[0]!r}), whose axes are not all named")
            return
        inputs, result = args[0].replace(" ", "").split("->")
        left, _, right = inputs.partition(",")
        first, second = args[1], args[2]
        known = self._recall(first)
        if isinstance(known, Weights):
            self._einsum_values(known, (left, right, result), second, out)
            return
        summed = [x for x in left if x in right and x not in result]
        if len(summed) != 1 or len(result) < 3:
            return
        leading, i, j = result[:-2], result[-2], result[-1]
        if i not in left or i in right or j not in right or j in left:
            return
        q = _arranged(first.detach(), left, leading + i + summed[0])
        k = _arranged(second.detach(), right, leading + j + summed[0])
        if q is not None and k is not None:
            self._keep(out, Scores(q, k, (version(q), version(k))))

    def _einsum_values(self, known: Weights, letters: tuple[str, str, str], values: Tensor, out: Tensor) -> None:
        left, right, result = letters
        leading, i, j = left[:-2], left[-2], left[-1]
        width = [x for x in right if x in result and x not in left]
        fits = j in right and j not in result and i in result and len(width) == 1
        v = _arranged(values, right, leading + j + width[0]) if fits and set(result) == {*leading, i, *width} else None
        if v is None:
            raise RuntimeError(f"values were mixed by einsum('{left},{right}->{result}'), which has another form")
        self._finish(known, v, out, [result.index(x) for x in leading + i + width[0]])

    def _finish(self, weights: Weights, v: Tensor, out: Tensor, order: list[int]) -> None:
        """The product with the values was made, so it was attention."""
        scores, shape = weights.scores, weights.shape
        leading, (i, j) = shape[:-2], shape[-2:]
        if v.shape[-2] != j:
            raise RuntimeError("only some of the weights of a softmax were mixed with values")
        if scores is None and i != j:
            raise RuntimeError("values were mixed by a softmax of numbers from out of sight, attention or not")
        v, note = _led(v, leading), weights.note
        mask: Mask = Full()
        terms: tuple[Term, ...] = ()
        if weights.given is not None:
            numbers, then = weights.given
            if version(numbers) != then:
                raise RuntimeError("scores were written into between their softmax and the product with the values")
            visible, numbers, _ = apart(four_axes(numbers))
            terms = (Given(numbers),)
            mask = simplest(narrowed(visible), i, j)
        if scores is None:
            q, k = v.new_zeros(*leading, i, 1), v.new_zeros(*leading, j, 1)
            note = ", ".join(["queries and keys were out of sight", *([note] if note else [])])
        else:
            q, k = _led(scores.q, leading), _led(scores.k, leading)
        if scores is not None and weights.given is None:
            mask, terms = _read_added(scores.added, shape)
        heard = Heard(
            ROUTE,
            four_axes(q),
            four_axes(k),
            four_axes(v),
            mask,
            terms,
            1.0 if scores is None else scores.beta,
            Places.last_rows(i, j),
            weights.dropout,
            note,
        )
        self._found(heard, out, order)


def _read_added(added: tuple[Tensor, ...], shape: torch.Size) -> tuple[Mask, tuple[Term, ...]]:
    """All that was added to scores, as one mask and the terms.

    Numbers that hide are summed before they are read: a row in which nothing else is left weighs by what is highest.
    """
    low: Tensor | None = None
    terms: list[Term] = []
    for values in added:
        numbers = narrowed(four_axes(values.expand(shape)))
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


def _step(
    known: Scores, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
) -> Scores | None:
    """The scores after one more function, or None where they are scores no longer."""
    lost = replace(known, plain=False)
    if func in SAME:
        return known
    if func in SHAPES:
        if out.shape[-2:] != source.shape[-2:]:
            return None
        moved = tuple(x.expand(source.shape).reshape(out.shape) for x in known.added)
        return replace(known, added=moved)
    if out.shape != source.shape:
        return None
    if not known.plain:
        return known
    other = next((x for x in args[:2] if x is not source), None) if len(args) > 1 else None
    if func in TIMES or (func in OVER and args[0] is source):
        factor = _number(other)
        if factor is None or factor <= 0:
            return lost  # -inf would turn into something else
        factor = factor if func in TIMES else 1 / factor
        return replace(known, beta=known.beta * factor, added=tuple(x * factor for x in known.added))
    if (func in PLUS or (func in MINUS and args[0] is source)) and not kwargs and other is not None:
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


def _onward(known: Weights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Weights:
    """The weights after one more function. What changes them is told, not followed."""
    if func in SAME or func in SHAPES:
        return known
    if func in DROPOUTS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        return replace(known, dropout=float(p)) if training and p else known
    name = getattr(func, "__name__", str(func)).strip("_")
    return replace(known, note=f"{known.note + ', ' if known.note else ''}{name} after the softmax")


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


def _led(x: Tensor, leading: torch.Size) -> Tensor:
    """The same rows under other leading axes, regrouped or stretched."""
    if math.prod(x.shape[:-2]) == math.prod(leading):
        return x.reshape(*leading, *x.shape[-2:])
    return x.expand(*leading, *x.shape[-2:])


def version(x: Tensor) -> int:
    """How often a tensor was written into. Tensors of inference mode do not count that."""
    return 0 if x.is_inference() else x._version
