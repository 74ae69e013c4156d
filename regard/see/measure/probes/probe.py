"""`Probe`: an attention as a function of q, k and v, with a test whether its order of axes was found correctly."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator

CPU = torch.device("cpu")
AS_FUNCTION = "wrap it in a function of q (b h i c), k (b g j c) and v (b g j e): lambda q, k, v: ..."


@dataclass(frozen=True)
class Probe:
    """Any attention implementation as a function of q (b h i c), k (b g j c) and v (b g j e) that returns (b h i e).

    There are b sequences, h query heads, g key heads, i queries and j keys. c and e are the widths of one head of q and
    of v.

    In this example, q is (1 4 5 8):

    >>> as_probe(torch.nn.functional.scaled_dot_product_attention).call(q, k, v).shape
    torch.Size([1, 4, 5, 8])
    """

    name: str
    call: Callable[..., Tensor]  # call(q, k, v, **keywords); the keywords are passed to the function
    heads: int | None = None  # the number of query heads, if fixed; None if any number works
    kv_heads: int | None = None
    width: int | None = None  # width c of q and k, if fixed
    equal_widths: bool = False  # whether e must equal c
    square: bool = False  # whether queries and keys come from one sequence, so that i = j
    parameters: tuple[str, ...] = ()  # names of further keyword arguments
    module: nn.Module | None = None  # the module to switch between train() and eval()
    layout: str = "b h n c"  # axes of the function itself
    value_width: int | None = None  # width e of v, if fixed
    grouped: bool = False  # whether g may be less than h
    dtype: torch.dtype = torch.float32  # a dtype that works
    device: torch.device = CPU
    filled_in: tuple[str, ...] = ()  # required arguments that the caller did not pass
    filled_values: Mapping[str, str] = field(default_factory=dict)  # what was passed for them, if not None
    note: str = ""  # what could not be called, in words
    # for a layer with projections: the shapes of its sequence arguments, such as x, or query, key and value, and a
    # function that finds from which of them the layer computes q, k and v
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    find_sources: Callable[[], Mapping[str, set[str]]] = dict
    other_layout: str = ""  # a layout that mixes no sequences, if the expected layout mixes them

    def test_layout(self, sizes: "ProbeSizes") -> bool | Exception:
        """Return whether the order of axes was found correctly, by a call in which all keys have equal values.

        The attention is called with one value vector for each sequence and key head, repeated for all keys. Every
        output vector must then have the direction of such a vector of its own sequence. A wrong order of axes or heads
        mixes sequences or heads, which changes this direction. If the call raises an exception, the exception is
        returned.
        """
        q, k, v = sizes.random_tensors(self.dtype, self.device)
        try:
            with torch.no_grad():
                out = self.call(q, k, v)
        except Exception as error:  # the function may raise any exception if it is called wrongly
            return error
        if out.shape != (sizes.b, sizes.h, sizes.i, sizes.e):
            return False
        rows, own = (nn.functional.normalize(x.double(), dim=-1) for x in (out, v[:, :, 0]))
        nonempty = (out.isfinite() & (out != 0)).any(-1)
        cosine = torch.einsum("bhie,bge->bhig", rows.nan_to_num(), own).amax(-1)
        threshold = 0.999 if self.dtype.itemsize > 2 else 0.98
        return bool(nonempty.any()) and bool((cosine[nonempty] > threshold).all())

    def usual_sizes(self) -> "ProbeSizes":
        """Return small tensor sizes that this attention accepts."""
        h, c = self.heads or 3, self.width or 8
        e = self.value_width or (c if self.equal_widths else c + 3)
        return ProbeSizes(h, self.kv_heads or h, 5, 5 if self.square else 7, c, e)


@dataclass(frozen=True)
class ProbeSizes:
    """The tensor sizes of one attention call: q is (b h i c), k is (b g j c), v is (b g j e)."""

    h: int
    g: int
    i: int
    j: int
    c: int
    e: int
    b: int = 2

    def random_tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return random q, k and v; v has one vector for each sequence and key head, repeated at every position."""
        source = make_generator(0)
        shapes = (self.b, self.h, self.i, self.c), (self.b, self.g, self.j, self.c), (self.b, self.g, 1, self.e)
        q, k, v = (torch.randn(shape, generator=source).to(device, dtype) for shape in shapes)
        return [q, k, v.repeat(1, 1, self.j, 1)]


@dataclass(frozen=True)
class ProbeOptions:
    """The arguments of `as_probe`, except the function."""

    heads: int | None
    kv_heads: int | None
    width: int | None
    layout: str | None
    queries: int | None
    keys: int | None
    device: torch.device | str | None
    extra: Mapping[str, object]

    def lengths(self) -> list[tuple[int, int]]:
        """Return the pairs (number of queries, number of keys) to try, first one with different numbers."""
        i = self.queries or 5
        return [(i, self.keys)] if self.keys not in (None, i) else [(i, i + 2), (i, i)]


def first_working(attempts: Iterable[tuple[Probe, ProbeSizes] | Exception]) -> Probe | Exception:
    """Return the first probe with the right order of axes, else the first that runs, else the first exception.

    The order of axes is right if `Probe.test_layout` finds that sequences and heads are not mixed. If they are mixed by
    every probe that runs, the first of these probes is returned, so that `check` can report the mistake.
    """
    mixing: Probe | None = None
    raised: list[Exception] = []
    for attempt in attempts:
        if isinstance(attempt, Exception):
            raised.append(attempt)
            continue
        probe, sizes = attempt
        result = probe.test_layout(sizes)
        if result is True:
            return probe
        if isinstance(result, Exception):
            raised.append(result)
        else:
            mixing = mixing or probe
    return mixing or raised[0]


def missing_argument_hint(name: str, filled_in: tuple[str, ...], of: str = "") -> str:
    """Return a hint for an error message: for which required arguments None was passed, and how to pass a value.

    name       name of the attention function or layer
    filled_in  names of these arguments
    of         name of the layer's input, if a value in `extra` may be a function that is called with this input; empty
               if not
    """
    if not filled_in:
        return ""
    extra = f"extra={{{', '.join(f'{each!r}: ...' for each in filled_in)}}}"
    computed = f"; a value may be a function of the input {of}" if of else ""
    return (
        f"None was passed for {', '.join(filled_in)}, which {'has' if len(filled_in) == 1 else 'have'} no default: "
        f"pass {filled_in[0]}=..., or {extra} to check, as check({name}, {extra}){computed}. "
    )


def fewer_kv_heads(heads: int) -> int:
    """Return the largest divisor of `heads` between 1 and `heads`, both excluded, as a number of key heads.

    Returns `heads` itself if there is no such divisor.
    """
    return max((number for number in range(2, heads) if heads % number == 0), default=heads)


def first_tensor(out: object) -> Tensor:
    """Return the output itself, or the first entry of a tuple or list; raise TypeError if that is not a tensor."""
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise TypeError(f"the result is {type(out).__name__}, not a tensor nor a tuple that begins with one")
    return out
