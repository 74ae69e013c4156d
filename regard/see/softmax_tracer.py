"""Trace attention written by hand: two tensors are multiplied, then a softmax and a product with a third tensor follow.

A product is a matmul, an einsum of any number of operands, or an elementwise product and a sum. Functions of
torch.special, torch.linalg and torch.ops.aten are traced like those of torch. Each operation on the scores before the
softmax is traced: a factor becomes beta (the scale), an added tensor becomes a score term, a filled value becomes a
mask.

After any other operation, the scores themselves are stored, which is exact and needs more memory. If the scores are not
a traced product but square matrices (i = j), they are stored too: the queries and keys are then unknown, but every
statistic can be computed.

Three kinds of weights are not supported: weights that were not computed by a softmax over the last axis, weights of
which only some rows or keys are used, and weights with permuted axes. The product of such weights with the values
raises UnsupportedAttention, which `watch` adds to `seen.left_out`.
"""

import string
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from regard.core.absolute_positions import Positions
from regard.core.masks.algebra import Full, Mask
from regard.core.scores import ScoreTerm, additive
from regard.see.call_adapters import (
    MARGIN,
    AxisPermutation,
    HeadTransform,
    MeasuredScores,
    OutputTransform,
    collapse_repeated,
    finite_score_bound,
    is_hiding,
    read_mask,
    simplify_mask,
    split_hidden,
)
from regard.see.interventions.returned_weights import WeightTensors
from regard.see.leading_axes import HeadCount, LeadingAxes, read_leading_axes
from regard.see.record import Record, UnsupportedAttention

ROUTE = "softmax"
AFTER_SOFTMAX = "after the softmax"  # part of the note of a record whose weights are changed after the softmax
LARGE_SCORE = 1000.0  # bound of measured scores: lower numbers with a gap above them hide a pair
SINGLE_QUERY = "values were multiplied by a softmax for one query without an axis: pass queries (1, c), as q[None]"
ONE_AXIS_OF_VALUES = "values had one axis, that of keys"
ONE_ROW = "values were multiplied by a softmax with one row for each sequence; it may be attention pooling"
NOT_ALONE = "a factor or a bias was applied in the same call as the product of softmax weights and values"
SQUARE = "values were multiplied by a softmax of a square matrix that is no traced product; it may be graph attention"
UNKNOWN_PRODUCT = "its scores are not a traced product, so queries and keys are unknown"
# names of torch functions, without underscores
PRODUCTS = ("matmul", "rmatmul", "bmm", "mm", "mv", "inner", "linear")
# functions that add a tensor to a product, with the names of their arguments
SUMS = {"baddbmm": ("input", "batch1", "batch2"), "addmm": ("input", "mat1", "mat2")}
RIGHT_TRANSPOSED = ("inner", "linear")  # q @ k.mT of q and k
FACTORS = ("input", "self", "other", "mat2", "tensor", "weight")  # names of the two factors
TIMES = ("mul", "rmul", "imul", "multiply")
OVER = ("div", "truediv", "itruediv", "divide", "true_divide")
PLUS = ("add", "radd", "iadd")
MINUS = ("sub", "isub", "subtract")
ARITHMETIC = (*TIMES, *OVER, *PLUS, *MINUS, "masked_fill", "where")
SAME = ("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone", "detach")
RESHAPES = ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")
EXPONENTIALS = ("exp", "exp2", "log_softmax", "gumbel_softmax", "softmin")
NONLINEARITIES = (
    "sigmoid", "logsigmoid", "hardsigmoid", "relu", "relu6", "leaky_relu", "elu", "softplus", "gelu", "silu", "mish",
    "tanh", "square", "pow", "clamp", "clamp_min",
)  # fmt: skip
REDUCTIONS = (
    "sum", "nansum", "mean", "nanmean", "median", "prod", "max", "min", "amax", "amin", "norm", "std", "var",
    "logsumexp", "vector_norm",
)  # fmt: skip
# functions that may move an entry to another row or key, though the shape stays the same
MOVES = (
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "adjoint", "T", "mT", "H", "mH", "flip",
    "fliplr", "flipud", "rot90", "roll", "getitem", "index_select", "gather", "take", "take_along_dim",
)  # fmt: skip
SELECTIONS = ("topk", "gather", "take_along_dim")  # functions that select keys for each query


@dataclass(frozen=True, eq=False)
class TracedScores:
    """A traced tensor of attention scores: beta q . k plus the tensors `added`."""

    q: Tensor  # (..., i, c), with the leading axes of the product
    k: Tensor  # (..., j, c)
    versions: tuple[int, int]
    learned: bool = False  # k is a parameter, as in a feed-forward layer
    beta: float = 1.0
    added: tuple[Tensor, ...] = ()
    exact: bool = True  # whether `beta` and `added` contain every operation so far
    nonlinearity: str = ""  # name of a function that may have computed weights without a softmax


@dataclass(frozen=True, eq=False)
class TracedWeights:
    """A traced tensor of attention weights: the scores before the softmax, and what changed the weights after it."""

    scores: TracedScores | None  # None if the scores are not a traced product
    shape: torch.Size  # shape of the scores at the softmax
    measured: tuple[Tensor, int] | None  # the scores themselves and their version, if `scores` is not exact
    dropout: float = 0.0
    note: str = ""
    root: object = field(default_factory=object)  # the same for all tensors that are made from one softmax


@dataclass(frozen=True, eq=False)
class Unsupported:
    """A traced tensor that may be attention weights but was computed in an unsupported way, with the reason."""

    reason: str
    root: object = None  # as in TracedWeights, if it was made from attention weights


@dataclass(frozen=True, eq=False)
class PairProducts:
    """A traced elementwise product of every query with every key, (..., i, j, c); its sum over c gives the scores."""

    scores: TracedScores


@dataclass(frozen=True, eq=False)
class WeightedValues:
    """A traced product of each weight with each value, (..., i, j, e); its sum over keys is the attention output."""

    weights: TracedWeights | Unsupported
    v: Tensor  # (..., j, e)
    version: int
    key_axis: int = -2


@dataclass(frozen=True, eq=False)
class SingleScores:
    """A traced product of keys (j, c) and one query (c), which may be scores (j) without an axis for queries."""


@dataclass(frozen=True, eq=False)
class RowWeights:
    """A traced softmax of a tensor with two axes; its result may be attention weights or class probabilities.

    Attention weights are (b, j), for one query of each sequence, or (i, j), for one sequence.
    """


Traced = TracedScores | TracedWeights | Unsupported | PairProducts | WeightedValues | SingleScores | RowWeights


@dataclass(frozen=True, eq=False)
class EinsumProjection:
    """An output transform for an einsum of the heads' output and other factors, such as the weight of a projection."""

    heads: str  # the letters of (..., i, e)
    sizes: tuple[int, ...]
    others: tuple[str, ...]
    factors: tuple[Tensor, ...]
    result: str
    product: tuple[str, Tensor, Tensor]  # the einsum of weights and values that gives the heads, and the two factors

    def apply(self, heads: Tensor, out: Tensor) -> Tensor:
        factors = (factor.to(heads.dtype) for factor in self.factors)
        equation = f"{','.join((self.heads, *self.others))}->{self.result}"
        return torch.einsum(equation, heads.reshape(self.sizes), *factors)

    def read_heads(self, out: Tensor) -> Tensor:
        return torch.einsum(*self.product)

    def pull_back(self, gradient: Tensor) -> Tensor:
        factors = (factor.to(gradient.dtype) for factor in self.factors)
        return torch.einsum(f"{','.join((self.result, *self.others))}->{self.heads}", gradient, *factors)


def function_name(func: Any) -> str:
    """Return the name of a torch function or property, without underscores, namespace and overload."""
    name: str = getattr(func, "__name__", str(func))
    name = (func.__self__.__name__ if name == "__get__" else name).partition(".")[0].strip("_")
    return name.removeprefix("special_").removeprefix("linalg_").removeprefix("safe_")


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of a torch function: its arguments and one output tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor

    @cached_property
    def name(self) -> str:
        return function_name(self.func)

    @property
    def is_in_place(self) -> bool:
        """Whether the function overwrites its first argument, such as `add_` or `+=`."""
        name = getattr(self.func, "__name__", "")
        return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))

    @property
    def creates(self) -> bool:
        """Whether the function reads only the shape and dtype of its argument, not the values, such as zeros_like."""
        return self.name.endswith("_like") or self.name.startswith("new_")

    def option(self, name: str, at: int, default: Any) -> Any:
        """Return an argument of the call by its keyword `name` or its position `at`; `default` if it was not passed."""
        return self.kwargs.get(name, self.args[at] if len(self.args) > at else default)

    @property
    def is_softmax_over_keys(self) -> bool:
        return self.name == "softmax" and self.option("dim", 1, None) in (-1, self.out.ndim - 1)

    def has_other_numbers(self, source: Tensor) -> bool:
        """Return whether the positional arguments contain a floating-point tensor other than `source`."""
        return any(isinstance(x, Tensor) and x is not source and x.is_floating_point() for x in self.args)

    def reshapes(self, source: Tensor) -> bool:
        """Return whether the function only splits, merges, adds or removes axes of `source`, with entries in order."""
        if self.name == "getitem":
            key = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
            basic = all(part is None or part is ... or type(part) in (int, slice) for part in key)
            return basic and self.out.numel() == source.numel()
        return self.name in RESHAPES

    def rearranges(self, source: Tensor) -> bool:
        """Return whether the function can move entries of `source` to another row or another key.

        True for every function that changes the shape, even if no entry is moved.
        """
        return self.out.shape != source.shape or self.name in MOVES

    def carries(self, source: Tensor) -> bool:
        """Return whether the output contains the entries of `source`, each moved or changed on its own.

        If `source` is the only tensor among the arguments, this is True except for known reductions such as a sum. If
        there are other tensors, the output must have as many entries as `source`.
        """
        if self.has_other_numbers(source):
            return self.out.numel() == source.numel()
        return self.name not in REDUCTIONS

    def summed_axis(self, source: Tensor) -> int | None:
        """Return the axis that a sum removes; None if the function is not a sum over one axis."""
        axis = self.option("dim", 1, None)
        axis = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
        if self.name != "sum" or not isinstance(axis, int) or self.option("keepdim", 2, False):
            return None
        return axis % source.ndim


STARTS = {*PRODUCTS, *SUMS, *TIMES, "einsum", "multi_dot", "tensordot", "softmax"}


def can_start_trace(name: str) -> bool:
    """Return whether a trace can begin at this function: a product, which can give scores, or a softmax."""
    return name in STARTS


class SoftmaxTracer:
    """Finds attention that is written by hand, by tracing scores and weights through the torch functions of a model.

    Traced tensors keep their gradients unless `trace` is called without gradients.

    found       function that is called for each attention call with the record, the output, the transform from
                the heads' output (..., i, e) to this output, and a function that returns the tensors that hold
                the weights
    head_count  function that returns the number of heads of the current call; None if unknown
    """

    def __init__(
        self,
        found: Callable[[Record, Tensor, OutputTransform, Callable[[], WeightTensors]], None],
        head_count: Callable[[], HeadCount | None],
    ) -> None:
        self._found, self._head_count = found, head_count
        self._traced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.traced: Sized = self._traced.data  # empty if no tensor that is still alive is traced

    def close(self) -> None:
        """Release all traced tensors and the functions `found` and `head_count`.

        The functions refer to the owner of the tracer. Without this call, the reference cycle would keep the tracer
        and its owner in memory until the garbage collector runs.
        """
        self._traced.clear()
        del self._found, self._head_count

    def trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Process one call of a torch function: trace its output, and report an attention call that it completes."""
        if func is Tensor.__setitem__ and args[0].is_inference() and args[0] in self._traced:
            self._keep(args[0], _overwritten(self._traced[args[0]][0]))  # inference tensors have no version
        if isinstance(out, tuple | list):
            for part in out:
                if isinstance(part, Tensor) and part.is_floating_point():
                    self._trace_part(Operation(func, args, kwargs, part))
        if not isinstance(out, Tensor) or out.ndim < 1 or not out.is_floating_point():
            return
        operation = Operation(func, args, kwargs, out)
        if out.ndim == 1:
            self._trace_single(operation)
            return
        if (product := _read_product(operation)) is not None:
            self._trace_product(*product, out)
        elif (equation := _as_einsum(operation)) is not None:
            self._trace_einsum(equation, out)
        elif (source := self._find_source((*args, *kwargs.values()))) is not None:
            after = self._trace_step(self._recall(source, operation.is_in_place), operation, source)
            if after is not None:
                self._keep(out, after)
        elif operation.is_softmax_over_keys and out.ndim >= 3:  # a matrix may be class probabilities
            scores = operation.option("input", 0, None)
            self._keep(out, TracedWeights(None, scores.shape, (scores, version(scores))))
        elif operation.name == "softmax":
            self._keep(out, RowWeights() if out.ndim == 2 else _no_softmax("a softmax over another axis"))
        elif operation.name in TIMES and (pairs := _read_pair_products(args, out)) is not None:
            self._keep(out, pairs)

    def _trace_single(self, operation: Operation) -> None:
        """Trace an operation whose output has one axis: it may be scores, weights or the output of a single query.

        Attention of a single query without an axis for queries cannot be recorded. The product of its weights and the
        values raises an error.
        """
        if operation.name in PRODUCTS:
            factors = _tensors((*operation.args, *operation.kwargs.values()))[:2]
            for traced in map(self._recall, factors):
                _refuse(traced)
                if isinstance(traced, TracedWeights) and traced.scores is not None:
                    raise UnsupportedAttention(ONE_AXIS_OF_VALUES)
            if sorted(x.ndim for x in factors) == [1, 2] and not any(map(_is_parameter, factors)):
                self._keep(operation.out, SingleScores())
            return
        source = self._find_source((*operation.args, *operation.kwargs.values()))
        traced = None if source is None else self._recall(source, operation.is_in_place)
        if source is None or operation.out.shape != source.shape or operation.creates:
            return
        if isinstance(traced, Unsupported):
            self._keep(operation.out, traced)
        elif isinstance(traced, SingleScores):
            self._keep(operation.out, Unsupported(SINGLE_QUERY) if operation.name == "softmax" else traced)

    def _keep(self, x: Tensor, traced: Traced) -> None:
        self._traced[x] = (traced, version(x))

    def _recall(self, x: Tensor, changed: bool = False) -> Any:
        """Return the trace entry of a tensor, such as `TracedScores`; None if the tensor is not traced.

        changed  whether the current operation wrote into the tensor in place; any other write since it was traced
                 counts as unknown
        """
        if x not in self._traced:
            return None
        traced, then = self._traced[x]
        return traced if version(x) == then + changed else _overwritten(traced)

    def _find_source(self, values: Sequence[Any]) -> Tensor | None:
        """Return a traced tensor among the arguments, if possible a supported one; None if no argument is traced."""
        traced = [x for x in _tensors(values) if x in self._traced]
        return min(traced, key=lambda x: isinstance(self._traced[x][0], Unsupported), default=None)

    def _trace_part(self, operation: Operation) -> None:
        """Trace one of several outputs, such as those of chunk or unbind; a part of weights becomes `Unsupported`."""
        source = self._find_source(operation.args)
        traced = None if source is None else self._recall(source)
        if isinstance(traced, Unsupported):
            self._keep(operation.out, traced)
        elif isinstance(traced, TracedWeights) and traced.scores is not None:
            self._keep(operation.out, _changed_weights(operation.name, traced.root))
        elif isinstance(traced, TracedScores) and operation.name in SELECTIONS and not traced.learned:
            self._keep(operation.out, _selected_scores(operation.name))

    def _trace_product(self, left: Tensor, right: Tensor, beta: float, added: tuple[Tensor, ...], out: Tensor) -> None:
        """Trace a matrix product: an attention output if the left factor is attention weights, else possibly scores.

        beta   number by which the product is multiplied
        added  tensors added to the product
        """
        traced = self._recall(left)
        other = self._recall(right)
        for factor in (traced, other):
            _refuse(factor)
        for rows, values in ((left, right), (right, left)):
            if isinstance(self._recall(rows), RowWeights) and not _is_parameter(values):
                _refuse_rows(rows, values, is_left=rows is left)
        if isinstance(traced, TracedScores) and not _is_parameter(right):
            # relu and the like between products of matrices may be a layer whose weights are no parameters
            ambiguous = right.ndim < 3 and traced.nonlinearity not in EXPONENTIALS
            if not ambiguous:
                _refuse_nonlinear(traced)
        if isinstance(traced, TracedWeights):
            if beta != 1 or added:
                raise UnsupportedAttention(NOT_ALONE)
            if right.ndim >= 2:
                self._finish(traced, left.shape, right, out, AxisPermutation(list(range(out.ndim))), out.shape[:-2])
            elif traced.scores is not None:
                raise UnsupportedAttention(ONE_AXIS_OF_VALUES)
        elif isinstance(other, TracedWeights) and other.scores is not None:
            raise UnsupportedAttention("values were the left factor of a product with softmax weights")
        elif min(left.ndim, right.ndim) >= 2 and (right.ndim >= 3 or not _is_parameter(right)):
            scores = _scores(left, right.mT, out, _is_parameter(right))
            self._keep(out, replace(scores, beta=beta, added=added))

    def _trace_step(self, traced: Traced, operation: Operation, source: Tensor) -> Traced | None:
        """Return the `Traced` entry of the output of an operation on a traced tensor; None if tracing ends there."""
        if operation.creates or isinstance(traced, SingleScores):
            return None
        if isinstance(traced, RowWeights):
            same = operation.name in (*SAME, "dropout") or operation.reshapes(source)
            return traced if same and operation.out.ndim in (2, 3) else None
        if isinstance(traced, PairProducts):
            if operation.summed_axis(source) == source.ndim - 1:
                scores = traced.scores
                return replace(scores, exact=_versions(scores.q, scores.k) == scores.versions)
            return traced if operation.name in SAME else None
        if isinstance(traced, WeightedValues):
            if operation.name in SAME:
                return traced
            self._sum_values(traced, operation, source)
            return None
        if isinstance(traced, TracedScores):
            return _trace_scores(traced, operation, source)
        if operation.name in TIMES and (weighted := _read_weighted_values(traced, operation, source)) is not None:
            return weighted
        if operation.name in TIMES and _spreads_over_values(traced, operation, source):
            # one value for each query and key, as in deformable attention
            return WeightedValues(Unsupported(_own_values(traced)), source, version(source), key_axis=-1)
        if isinstance(traced, Unsupported):
            return traced if operation.carries(source) else None
        others = [x for x in _tensors(operation.args) if x is not source]
        if any(x in self._traced and isinstance(self._traced[x][0], TracedWeights) for x in others):
            return Unsupported(f"values were multiplied by {operation.name} of two softmaxes")
        if operation.out.numel() != source.numel() and operation.name in ARITHMETIC:
            return None  # a factor of a larger tensor
        resized = operation.out.shape != source.shape and operation.name not in SAME
        if resized and operation.has_other_numbers(source):
            raise UnsupportedAttention(f"softmax weights were an argument of {operation.name}, which is not supported")
        return _trace_weights(traced, operation, source)

    def _sum_values(self, traced: WeightedValues, operation: Operation, source: Tensor) -> None:
        """Report an attention call if the operation sums weights times values over keys, else raise an error."""
        summed = operation.summed_axis(source) == source.ndim + traced.key_axis
        if isinstance(traced.weights, Unsupported):
            axis = operation.option("dim", 1, None)
            if summed or (operation.name == "sum" and axis in (traced.key_axis, [traced.key_axis])):
                _refuse(traced.weights)
            return  # a factor for each of some vectors, as in a router
        if not summed or version(traced.v) != traced.version:
            raise UnsupportedAttention(f"{operation.name} of weights times values is not a sum over keys alone")
        permutation = AxisPermutation(list(range(operation.out.ndim)))
        self._finish(traced.weights, source.shape[:-1], traced.v, operation.out, permutation, operation.out.shape[:-2])

    def _trace_einsum(self, args: tuple[Any, ...], out: Tensor) -> None:
        """Trace an einsum: `out` is the output of attention if an operand is attention weights, else possibly scores.

        args  the equation and the operands
        """
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], tuple | list):
            operands = list(operands[0])
        traced = [self._recall(x) for x in operands]
        for each in traced:
            _refuse(each)
        # a softmax of untraced scores may be anything, so only the first operand is taken for weights
        weights = [at for at, each in enumerate(traced) if isinstance(each, TracedWeights) and (each.scores or at == 0)]
        letters, result = _expand_letters(equation, operands)
        if len(weights) > 1:
            raise UnsupportedAttention(f"einsum({equation!r}) multiplied the weights of two softmaxes")
        if weights:
            self._finish_einsum(equation, traced[weights[0]], weights[0], letters, result, operands, out)
            return
        for at, each in enumerate(traced):
            if isinstance(each, TracedScores) and _sums_with_another(at, letters, result, operands):
                _refuse_nonlinear(each)
            if isinstance(each, RowWeights) and _sums_with_another(at, letters, result, operands):
                raise UnsupportedAttention(ONE_ROW)
        if (scores := _read_einsum_scores(letters, result, operands, out)) is not None:
            self._keep(out, scores)

    def _finish_einsum(
        self,
        equation: str,
        weights: TracedWeights,
        at: int,
        letters: list[str],
        result: str,
        operands: list[Tensor],
        out: Tensor,
    ) -> None:
        """Report an attention call for an einsum of weights and values.

        Operands other than weights and values become part of the output transform.

        at       index of the weights among the operands
        letters  letters of the axes of each operand
        result   letters of the axes of the result
        """
        own = letters[at]
        leading, i, j = own[:-2], own[-2], own[-1]
        rest = [n for n in range(len(operands)) if n != at]
        values = next((n for n in rest if j in letters[n]), None)
        others = [n for n in rest if n != values]
        width = "" if values is None else "".join(x for x in letters[values] if x not in own)
        heads, outside = leading + i + width, "".join([result, *(letters[n] for n in others)])
        # the result or the other factors have every axis of the heads, and not that of keys
        fits = len(width) == 1 and j not in outside and set(heads) <= set(outside)
        fits = fits and (bool(others) or len(result) == len(heads))
        v = None
        if fits and values is not None:
            product = (f"{own},{letters[values]}->{heads}", operands[at], operands[values])
            v = _arrange_axes(operands[values], letters[values], leading + j + width)
        if v is None:
            raise UnsupportedAttention(f"einsum({equation!r}) of weights and values is not supported")
        sizes = _axis_sizes(letters, operands)
        transform: OutputTransform = AxisPermutation([result.index(x) for x in heads]) if not others else (
            EinsumProjection(
                heads,
                tuple(sizes[x] for x in heads),
                tuple(letters[n] for n in others),
                tuple(operands[n] for n in others),
                result,
                product,
            )
        )  # fmt: skip
        self._finish(weights, operands[at].shape, v, out, transform, torch.Size(sizes[x] for x in leading))

    def _finish(
        self,
        weights: TracedWeights,
        factor: torch.Size,
        v: Tensor,
        out: Tensor,
        transform: OutputTransform,
        leading: torch.Size,
    ) -> None:
        """Report an attention call after its last step, the product of weights and values.

        factor   the shape that the weights have in the product with the values
        leading  sizes of the leading axes of the product
        """
        scores, shape = weights.scores, weights.shape
        i, j = shape[-2:]
        if factor[-2:] != shape[-2:] or (leading != factor[:-2] and factor != shape):
            raise UnsupportedAttention(f"softmax weights {tuple(shape)} were multiplied with values as {tuple(factor)}")
        if scores is None and i != j:
            raise UnsupportedAttention(
                "values were multiplied by a softmax of numbers that are not a traced product of queries and keys, "
                "as in additive attention; it may be attention"
            )
        if leading != factor[:-2]:
            shape = torch.Size((*leading, i, j))  # one map for the values of several heads
        axes = self._read_axes(shape[:-2], factor[:-2])
        v = axes.to_heads(v.expand(*leading, *v.shape[-2:]).reshape(*shape[:-2], *v.shape[-2:]))
        mask: Mask = Full()
        terms: tuple[ScoreTerm, ...] = ()
        if scores is None:
            q, k, beta = v.new_zeros(*v.shape[:2], i, 1), v.new_zeros(*v.shape[:2], j, 1), 1.0
        else:
            q, k = (
                axes.to_heads(x.reshape(*weights.shape[:-2], *x.shape[-2:]).expand(*shape[:-2], *x.shape[-2:]))
                for x in (scores.q, scores.k)
            )
            beta = scores.beta
            if weights.measured is None:
                mask, terms = _read_added([axes.to_heads(x.expand(shape)) for x in scores.added], q, k, beta)
        if weights.measured is not None:
            numbers, then = weights.measured
            if version(numbers) != then:
                raise UnsupportedAttention("scores were written into between their softmax and the product")
            visible, numbers, _ = split_hidden(axes.to_heads(numbers.expand(shape)), LARGE_SCORE)
            mask, terms = simplify_mask(collapse_repeated(visible), i, j), (MeasuredScores(numbers),)
        note = ", ".join(filter(None, ("" if scores is not None else UNKNOWN_PRODUCT, weights.note, axes.note)))
        positions = Positions.last_rows(i, j)
        record = Record(q, k, v, mask, terms, beta, positions, ROUTE, weights.dropout, note)
        self._found(record, out, HeadTransform(axes, transform), lambda: self._weight_tensors(weights, shape, axes))

    def _weight_tensors(self, weights: TracedWeights, shape: torch.Size, axes: LeadingAxes) -> WeightTensors:
        """Return the tensors that hold these weights, before and after dropout.

        shape  shape to which the weights are broadcast in the product with the values
        axes   which leading axes, those before (i, j), are the batch and which are the heads
        """
        tensors, refusal = [], ""
        for tensor, (traced, _) in list(self._traced.items()):
            if getattr(traced, "root", None) is not weights.root:
                continue
            if isinstance(traced, TracedWeights) and traced.note == weights.note:
                tensors.append((ref(tensor), traced.dropout > 0))
            else:
                what = traced.note if isinstance(traced, TracedWeights) else traced.reason
                refusal = f"also computed something else from its weights before they were used ({what})"
        return WeightTensors(tuple(tensors), weights.shape, shape, axes, refusal)

    def _read_axes(self, leading: torch.Size, factor: torch.Size) -> LeadingAxes:
        """Return which leading axes of the scores, those before (i, j), are the batch and which are the heads.

        leading  sizes of the leading axes of the scores
        factor   sizes of the leading axes of the weights in the product with the values; they may show which axis is
                 the heads
        """
        if len(leading) == 1 and len(factor) == 2 and leading.numel() == factor.numel():
            return read_leading_axes(leading, HeadCount(factor[1]))
        return read_leading_axes(leading, None if len(leading) in (0, 2) else self._head_count())


def _refuse(traced: Traced | None) -> None:
    if isinstance(traced, Unsupported):
        raise UnsupportedAttention(traced.reason)


def _refuse_nonlinear(scores: TracedScores) -> None:
    if scores.nonlinearity:
        _refuse(_no_softmax(scores.nonlinearity))


def _refuse_rows(rows: Tensor, values: Tensor, is_left: bool) -> None:
    """Raise UnsupportedAttention if the product of a softmax and other numbers may be attention.

    The product may be attention if the softmax has one row for each sequence, (b, 1, j) or (b, j, 1), or is a square
    matrix (j, j).

    rows     the result of the softmax
    values   the other factor of the product
    is_left  whether `rows` is the left factor
    """
    if rows.ndim == 3 and values.ndim >= 3 and rows.shape[-2 if is_left else -1] == 1:
        raise UnsupportedAttention(ONE_ROW)
    if rows.ndim == values.ndim == 2 and is_left and rows.shape[0] == rows.shape[1]:
        raise UnsupportedAttention(SQUARE)


def _no_softmax(name: str) -> Unsupported:
    return Unsupported(
        f"values were multiplied by {name} of a product, which is not a softmax over the last axis; it may be attention"
    )


def _changed_weights(name: str, root: object) -> Unsupported:
    return Unsupported(f"values were multiplied by {name} of softmax weights, not by the weights themselves", root)


def _selected_scores(name: str) -> Unsupported:
    return Unsupported(f"values were multiplied by a softmax of {name} of scores, so each query has keys of its own")


def _read_added(added: Sequence[Tensor], q: Tensor, k: Tensor, beta: float) -> tuple[Mask, tuple[ScoreTerm, ...]]:
    """Convert the tensors that were added to the scores, each (b h i j), to a mask and score terms.

    The values of all tensors that are low enough to hide a key are summed and become the mask. All other values become
    score terms. A row in which all sums are that low is treated as in `split_hidden`.
    """
    low: Tensor | None = None
    terms: list[ScoreTerm] = []
    bound = finite_score_bound(q, k, beta) if added else 0.0
    for values in added:
        numbers = collapse_repeated(values)
        hidden = is_hiding(numbers, bound)
        rest = torch.where(hidden, 0.0, numbers)
        if bool(rest.any()):
            terms.append(additive(collapse_repeated(rest)))
        if bool(hidden.any()):
            hiding = torch.where(hidden, numbers, 0.0)
            low = hiding if low is None else low + hiding
    mask, uniform, _ = read_mask(low, q, k, beta)
    return mask, (*terms, *uniform)


def _read_product(operation: Operation) -> tuple[Tensor, Tensor, float, tuple[Tensor, ...]] | None:
    """Return the two factors of a matrix product, the number that scales the product, and the tensors added to it.

    Returns None if the operation is not a matrix product, or is a linear layer, whose second factor is a parameter.
    """
    if operation.name in PRODUCTS:
        named = [operation.kwargs[name] for name in FACTORS if name in operation.kwargs]
        factors: list[Any] = [*operation.args, *named, None, None]
        left, right = factors[:2]
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return None
        if operation.name == "rmatmul":
            left, right = right, left
        bias = operation.option("bias", 2, None) if operation.name == "linear" else None
        if operation.name == "linear" and _is_parameter(right):
            return None
        right = right.mT if operation.name in RIGHT_TRANSPOSED and right.ndim >= 2 else right
        return left, right, 1.0, () if bias is None else (bias,)
    if operation.name in SUMS:
        start, left, right = (operation.option(name, at, None) for at, name in enumerate(SUMS[operation.name]))
        beta, alpha = (float(operation.kwargs.get(name, 1)) for name in ("beta", "alpha"))
        return left, right, alpha, () if beta == 0 else (start * beta,)
    return None


def _as_einsum(operation: Operation) -> tuple[Any, ...] | None:
    """Convert a call of einsum, multi_dot or tensordot to arguments of torch.einsum; None for other functions."""
    if operation.func is torch.einsum:
        return operation.args
    if operation.name == "multi_dot":
        factors = operation.option("tensors", 0, ())
        pairs = [string.ascii_letters[at : at + 2] for at in range(len(factors))]
        return (",".join(pairs), *factors) if all(x.ndim == 2 for x in factors) else None
    if operation.name != "tensordot":
        return None
    left, right = operation.option("a", 0, None), operation.option("b", 1, None)
    dims = operation.option("dims", 2, 2)
    dims = (range(left.ndim - dims, left.ndim), range(dims)) if isinstance(dims, int) else dims
    one, other = list(string.ascii_letters[: left.ndim]), list(string.ascii_letters[left.ndim :][: right.ndim])
    for first, second in zip(*dims, strict=True):
        other[second] = one[first]
    result = [each for each in (*one, *other) if (each in one) != (each in other)]
    return f"{''.join(one)},{''.join(other)}->{''.join(result)}", left, right


def _trace_scores(scores: TracedScores, operation: Operation, source: Tensor) -> Traced | None:
    """Return the `Traced` entry for the output of an operation on scores: weights for a softmax, else mostly scores."""
    if operation.name == "softmax":
        if not operation.is_softmax_over_keys:
            return _no_softmax("a softmax over another axis")
        exact = scores.exact and _versions(scores.q, scores.k) == scores.versions
        return TracedWeights(scores, source.shape, None if exact else (source, version(source)))
    after = _change_scores(scores, operation, source)
    if after is None and scores.nonlinearity and operation.carries(source):
        return _no_softmax(scores.nonlinearity)
    if after is None and operation.name in SELECTIONS and not scores.learned:
        return _selected_scores(operation.name)
    return after


def _change_scores(scores: TracedScores, operation: Operation, source: Tensor) -> TracedScores | None:
    """Return the `TracedScores` entry for the output of an operation on scores; None if it is no longer scores.

    scores  the entry for the operation's input `source`
    """
    name, args, out = operation.name, operation.args, operation.out
    inexact = replace(scores, exact=False)
    if name in SAME:
        return scores
    if operation.reshapes(source):
        if out.shape[-2:] != source.shape[-2:]:
            return None
        return replace(scores, added=tuple(x.expand(source.shape).reshape(out.shape) for x in scores.added))
    if operation.rearranges(source):
        return None
    if name in EXPONENTIALS or (name in NONLINEARITIES and not scores.learned):
        return replace(inexact, nonlinearity=name)
    if not scores.exact or operation.kwargs:  # a keyword may change what the function computes
        return inexact
    other = next((x for x in args[:2] if x is not source), None) if len(args) > 1 else None
    if name in TIMES or (name in OVER and args[0] is source):
        factor = _to_number(other)
        if factor is None or factor <= 0:
            return inexact  # -inf would change its sign
        factor = factor if name in TIMES else 1 / factor
        return replace(scores, beta=scores.beta * factor, added=tuple(x * factor for x in scores.added))
    if (name in PLUS or (name in MINUS and args[0] is source)) and other is not None:
        values = torch.as_tensor(other, device=out.device).to(out.dtype, copy=True)
        return replace(scores, added=(*scores.added, -values if name in MINUS else values))
    if name == "masked_fill" and len(args) == 3:
        return _fill_scores(scores, args[1], _to_number(args[2]), source)
    if operation.func is torch.where and len(args) == 3:
        value = _to_number(args[2] if args[1] is source else args[1])
        return _fill_scores(scores, ~args[0] if args[1] is source else args[0], value, source)
    return inexact


def _fill_scores(scores: TracedScores, hidden: Tensor, value: float | None, source: Tensor) -> TracedScores:
    """Return the scores after masked_fill with a low value, as if the value were added at the hidden pairs.

    If the value is not low enough to hide a pair, the scores are marked as not exact, so that their numbers are stored.

    hidden  boolean tensor, True where the value was filled in
    """
    lowest = torch.finfo(source.dtype).min
    if value is None or (value > lowest / 2 and not _hides(scores, value)):
        return replace(scores, exact=False)
    value = value if value <= lowest / 2 else lowest
    low = torch.zeros(hidden.shape, dtype=source.dtype, device=source.device).masked_fill(hidden, value)
    bound = finite_score_bound(scores.q, scores.k, scores.beta)
    before = tuple(torch.where(hidden, 0.0, x) if bool(is_hiding(x, bound).any()) else x for x in scores.added)
    return replace(scores, added=(*before, low))


def _hides(scores: TracedScores, value: float) -> bool:
    """Return whether a pair with the score `value` has a weight below rounding error, whatever the other scores are."""
    bound = finite_score_bound(scores.q, scores.k, scores.beta)
    visible = (x.detach().masked_fill(is_hiding(x, bound), 0) for x in scores.added)
    return -value > 2 * (bound + sum(float(x.abs().max()) for x in visible if x.numel())) + MARGIN


def _trace_weights(weights: TracedWeights, operation: Operation, source: Tensor) -> TracedWeights | Unsupported:
    """Return the entry for the output of an operation on attention weights.

    Dropout is stored in the field `dropout`, other operations are listed in the field `note`. After an operation that
    moves entries to other rows or keys, the weights are unsupported.

    weights  the entry for the operation's input `source`
    """
    if operation.name in SAME or operation.reshapes(source):
        return weights
    if operation.name == "dropout":
        p, training = operation.option("p", 1, 0.5), operation.option("training", 2, True)
        return replace(weights, dropout=float(p)) if training and p else weights
    if operation.rearranges(source):
        return _changed_weights(operation.name, weights.root)
    note = f"{operation.name} {AFTER_SOFTMAX}"
    return replace(weights, note=", ".join(filter(None, (weights.note, note))))


def _overwritten(traced: Traced) -> Traced:
    """Return the `Traced` entry of a tensor after it was changed in place by an unknown operation."""
    if isinstance(traced, TracedScores):
        return replace(traced, exact=False)
    if isinstance(traced, TracedWeights):
        return replace(traced, note=f"written into {AFTER_SOFTMAX}")
    if isinstance(traced, WeightedValues):
        return replace(traced, weights=Unsupported("weights times values were written into before their sum"))
    if isinstance(traced, PairProducts):
        return PairProducts(replace(traced.scores, versions=(-1, -1)))
    return traced


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among arguments, including those inside lists, such as the argument of torch.cat."""
    each = (x for value in values for x in (value if isinstance(value, tuple | list) else (value,)))
    return [x for x in each if isinstance(x, Tensor)]


def _scores(q: Tensor, k: Tensor, out: Tensor, learned: bool) -> TracedScores:
    """Return the entry for the product of q and the transpose of k, both expanded to the leading axes of the output.

    learned  whether k is a parameter
    """
    q, k = (x.expand(*out.shape[:-2], *x.shape[-2:]) for x in (q, k))
    return TracedScores(q, k, _versions(q, k), learned)


def _read_pair_products(args: tuple[Any, ...], out: Tensor) -> PairProducts | None:
    """Return the `PairProducts` of the product of queries (..., i, 1, c) and keys (..., 1, j, c), or None."""
    if len(args) != 2 or not all(isinstance(x, Tensor) and x.ndim >= 2 for x in args) or out.ndim < 4:
        return None
    leading, (i, j, c) = out.shape[:-3], out.shape[-3:]
    for q, k in (args, args[::-1]):
        if q.shape[-2] == 1 and (k.ndim == 2 or k.shape[-3] == 1) and q.ndim >= 3:
            learned = isinstance(k, nn.Parameter)
            q = q.expand(*leading, i, 1, c).squeeze(-2)
            k = k.expand(*leading, 1, j, c).squeeze(-3)
            return PairProducts(TracedScores(q, k, _versions(q, k), learned))
    return None


def _read_weighted_values(
    traced: TracedWeights | Unsupported, operation: Operation, source: Tensor
) -> WeightedValues | None:
    """Return the `WeightedValues` of the product of weights (..., i, j, 1) and values (..., 1, j, e), else None."""
    values = next((x for x in operation.args[:2] if isinstance(x, Tensor) and x is not source), None)
    if values is None or values.ndim < 2 or source.ndim < 3 or source.shape[-1] != 1:
        return None
    if operation.out.shape[:-1] != source.shape[:-1]:
        return None
    if isinstance(traced, TracedWeights):
        i, j = traced.shape[-2:]
        if source.shape[-3:-1] != (i, j) or source.shape[-2:] == (i, j) or (traced.scores is None and i != j):
            return None
        if values.shape[-2] != j or (values.ndim > 2 and values.shape[-3] != 1):
            traced = Unsupported("softmax weights were multiplied by values that are not one vector for each key")
        else:
            values = values.squeeze(-3) if values.ndim > 2 else values
    return WeightedValues(traced, values, version(values))


def _expand_letters(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """Return the letters of the operands and of the result of an einsum equation.

    "..." is replaced by letters, and a result that the equation leaves out is added.
    """
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


def _axis_sizes(letters: list[str], operands: list[Tensor]) -> dict[str, int]:
    """Return the size of the axis of each letter of an einsum, after broadcasting.

    letters  letters of the axes of each operand
    """
    sizes: dict[str, int] = {}
    for part, x in zip(letters, operands, strict=True):
        for letter, size in zip(part, x.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    return sizes


def _read_einsum_scores(letters: list[str], result: str, operands: list[Tensor], out: Tensor) -> TracedScores | None:
    """Return the result of an einsum as traced scores; None if the einsum is not a product of queries and keys.

    The operand that has the last letter of the result is taken for the keys, and the product of all other operands for
    the queries.
    """
    if len(result) < 2 or len(operands) < 2:
        return None
    leading, i, j = result[:-2], result[-2], result[-1]
    with_keys = [at for at, part in enumerate(letters) if j in part]
    rest = [at for at in range(len(operands)) if at not in with_keys]
    inside = "".join(letters[at] for at in rest)
    if len(with_keys) != 1 or i in letters[with_keys[0]] or i not in inside:
        return None
    summed = [x for x in letters[with_keys[0]] if x in inside and x not in result]
    if len(summed) != 1 or (len(result) == 2 and _is_parameter(operands[with_keys[0]])):
        return None
    left, q = letters[rest[0]], operands[rest[0]]
    if len(rest) > 1:
        left = "".join(x for x in leading + i + summed[0] if x in inside)
        q = torch.einsum(f"{','.join(letters[at] for at in rest)}->{left}", *(operands[at] for at in rest))
    queries = _arrange_axes(q, left, leading + i + summed[0])
    keys = _arrange_axes(operands[with_keys[0]], letters[with_keys[0]], leading + j + summed[0])
    if queries is None or keys is None:
        return None
    return _scores(queries, keys, out, isinstance(operands[with_keys[0]], nn.Parameter))


def _sums_with_another(at: int, letters: list[str], result: str, operands: list[Tensor]) -> bool:
    """Return whether an einsum sums over the last axis of operand `at` and of another operand, which may be values.

    The other operand must have at least three axes and must not be a parameter.
    """
    others = [n for n in range(len(operands)) if n != at and not isinstance(operands[n], nn.Parameter)]
    key = letters[at][-1]
    return key not in result and any(key in letters[n] and operands[n].ndim >= 3 for n in others)


def _to_number(x: Any) -> float | None:
    """Convert a Python number or a tensor of one element to a float; None for other values."""
    if isinstance(x, Tensor):
        return float(x.detach()) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, int | float) else None


def _arrange_axes(x: Tensor, letters: str, wanted: str) -> Tensor | None:
    """Permute the axes to the order `wanted`, with size 1 for missing letters; None if that is impossible."""
    if any(letter not in wanted for letter in letters) or len(set(letters)) != len(letters):
        return None
    x = x.permute([letters.index(letter) for letter in wanted if letter in letters])
    for at, letter in enumerate(wanted):
        if letter not in letters:
            x = x.unsqueeze(at)
    return x


def _is_parameter(x: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one, such as a transposed weight."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def _spreads_over_values(traced: TracedWeights | Unsupported, operation: Operation, source: Tensor) -> bool:
    """Return whether an elementwise product multiplies weights by values that differ for each query.

    An example is deformable attention. The values have more axes than the weights, which are broadcast, and the keys
    are the last axis of both.
    """
    is_own_softmax = isinstance(traced, Unsupported) or traced.scores is None
    repeated = operation.out.numel() > source.numel() > 0 and operation.out.shape[-1] == source.shape[-1] > 1
    return is_own_softmax and repeated and operation.has_other_numbers(source)


def _own_values(traced: TracedWeights | Unsupported) -> str:
    if isinstance(traced, Unsupported):
        return traced.reason
    return "values that differ for each query were multiplied by a softmax and summed, as in deformable attention"


def _versions(q: Tensor, k: Tensor) -> tuple[int, int]:
    return version(q), version(k)


def version(x: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which have no version counter."""
    return 0 if x.is_inference() else x._version
