"""A probe: an attention as one can ask it, and the question that shows whether it is asked in the right way."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator

CPU = torch.device("cpu")
AS_FUNCTION = "wrap it in a function of q (b h i c), k (b g j c) and v (b g j e): lambda q, k, v: ..."


@dataclass(frozen=True)
class Probe:
    """An attention as one can ask it: (b h i c), (b g j c), (b g j e) -> (b h i e)."""

    name: str
    call: Callable[..., Tensor]  # call(q, k, v, **extra); extra keywords go on to the function
    heads: int | None = None  # where fixed; None where any number is taken
    kv_heads: int | None = None
    width: int | None = None  # c, where fixed
    equal_widths: bool = False  # e must be c
    square: bool = False  # queries and keys come from one sequence: i = j
    parameters: tuple[str, ...] = ()  # names of further keyword arguments
    module: nn.Module | None = None  # what to switch to train() and eval()
    layout: str = "b h n c"  # as the function itself has it
    value_width: int | None = None  # e, where fixed
    grouped: bool = False  # g may be less than h
    dtype: torch.dtype = torch.float32  # one that it surely takes
    device: torch.device = CPU
    made_up: tuple[str, ...] = ()  # arguments that have to be there, were not handed over and so are filled in

    def tried(self, sizes: "Sizes") -> bool | Exception:
        """Whether each row is a multiple of its sequence's values, as in every attention; or what was raised.

        A layout or an order of heads that was guessed wrong mixes sequences or heads, and so gives another direction.
        """
        q, k, v = sizes.drawn(self.dtype, self.device)
        try:
            with torch.no_grad():
                out = self.call(q, k, v)
        except Exception as error:  # whatever a function of somebody else raises means that it is not asked like this
            return error
        if out.shape != (sizes.b, sizes.h, sizes.i, sizes.e):
            return False
        rows, own = (nn.functional.normalize(x.double(), dim=-1) for x in (out, v[:, :, 0]))
        awake = (out.isfinite() & (out != 0)).any(-1)
        alike = torch.einsum("bhie,bge->bhig", rows.nan_to_num(), own).amax(-1)
        near = 0.999 if self.dtype.itemsize > 2 else 0.98
        return bool(awake.any()) and bool((alike[awake] > near).all())


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call."""

    h: int
    g: int
    i: int
    j: int
    c: int
    e: int
    b: int = 2

    def drawn(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Queries, keys, and values that are one vector per sequence and key head, the same at every position."""
        source = make_generator(0)
        shapes = (self.b, self.h, self.i, self.c), (self.b, self.g, self.j, self.c), (self.b, self.g, 1, self.e)
        q, k, v = (torch.randn(shape, generator=source).to(device, dtype) for shape in shapes)
        return [q, k, v.repeat(1, 1, self.j, 1)]


@dataclass(frozen=True)
class Wanted:
    """What the caller said of the attention."""

    heads: int | None
    kv_heads: int | None
    width: int | None
    layout: str | None
    queries: int | None
    keys: int | None
    device: torch.device | str | None
    extra: Mapping[str, object]

    def lengths(self) -> list[tuple[int, int]]:
        """Numbers of queries and keys to try, those that differ first."""
        i = self.queries or 5
        return [(i, self.keys)] if self.keys not in (None, i) else [(i, i + 2), (i, i)]


def first_fitting(attempts: Iterable[tuple[Probe, Sizes] | Exception]) -> Probe | Exception:
    """The first probe that mixes nothing, else the first that runs, else what was raised first.

    What mixes sequences or heads however it is asked is kept, since that is for others to tell.
    """
    mixing: Probe | None = None
    raised: list[Exception] = []
    for attempt in attempts:
        if isinstance(attempt, Exception):
            raised.append(attempt)
            continue
        probe, sizes = attempt
        ran = probe.tried(sizes)
        if ran is True:
            return probe
        if isinstance(ran, Exception):
            raised.append(ran)
        else:
            mixing = mixing or probe
    return mixing or raised[0]


def lacking(made_up: Iterable[str]) -> str:
    """Arguments without a default that nobody handed over, and what to do about it."""
    names = tuple(made_up)
    if not names:
        return ""
    listed, example = ", ".join(names), f"{names[0]}=..."
    return (
        f"It was given None for {listed}, which {'has' if len(names) == 1 else 'have'} no default: "
        f"hand over {example}, or extra={{{names[0]!r}: ...}} to check. "
    )


def fewer(heads: int) -> int:
    """The largest number of key heads, of those between one and all, that so many heads can share; else all."""
    return max((number for number in range(2, heads) if heads % number == 0), default=heads)


def first_tensor(out: object) -> Tensor:
    """The result itself, where weights or a cache come along with it."""
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise TypeError(f"the result is {type(out).__name__}, not a tensor nor a tuple that begins with one")
    return out
