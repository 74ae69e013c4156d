"""A function of q, k and v as a probe: its layout, and what it is free in, are found out by trying."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.see.measure.probes.module_copies import home
from regard.see.measure.probes.probe import (
    AS_FUNCTION,
    Probe,
    Sizes,
    Wanted,
    fewer,
    first_fitting,
    first_tensor,
    lacking,
)

HEADS_TRIED = (3, 4, 8, 2, 6, 12, 16, 1, 5, 7)
WIDTHS_TRIED = (8, 16, 64)
# each layout of the arguments, with those in which such a function may answer
LAYOUTS = {
    "b h n c": ("b h n c", "b n h c", "b n (h c)"),
    "b n h c": ("b n h c", "b h n c", "b n (h c)"),
    "b n c": ("b n c",),
    "n c": ("b n c",),  # no batch: one sequence after the other
}
TIME_FIRST = {"n b h c": ("n b h c", "n b (h c)"), "n b c": ("n b c",)}
EVERY = LAYOUTS | TIME_FIRST
# those with more axes first
TRIED = ("b h n c", "b n h c", "n b h c", "b n c", "n b c", "n c")


def probe_function(
    find: Callable[[Tensor], Callable[..., object]],
    signed: object,
    name: str,
    wanted: Wanted,
    module: nn.Module | None = None,
) -> Probe:
    """The probe of a function. `find` gives the one to call for a q, since a module's copies have a dtype each."""
    parameters, needed = signature_of(signed)
    if needed is None:
        raise ConfigError(
            f"{name} takes {len(parameters)} arguments without a name, but an attention takes q, k and v; {AS_FUNCTION}"
        )
    heads = [(number, number) for number in HEADS_TRIED]
    if wanted.heads is not None or wanted.kv_heads is not None:
        h = wanted.heads or 2 * (wanted.kv_heads or 1)
        heads = [(h, wanted.kv_heads or h)]
    widths = [wanted.width] if wanted.width else WIDTHS_TRIED
    dtypes, device = home(module, wanted)
    made_up = tuple(each for each in needed if each not in wanted.extra)
    given = {**dict.fromkeys(made_up, None), **wanted.extra}
    function = _Function(name, find, given, made_up, parameters, module, wanted)
    first: Exception | None = None
    for dtype, c, (h, g) in product(dtypes, widths, heads):
        found = first_fitting(function.attempts(h, g, c, dtype, device))
        if isinstance(found, Probe):
            return function.with_groups(found)
        first = first or found
    (h, g), c, (i, j) = heads[0], widths[0], wanted.lengths()[0]
    raise ConfigError(
        f"{name} could not be asked as an attention: with q {(2, h, i, c)}, k {(2, g, j, c)}, v {(2, g, j, c + 3)} it "
        f"raised {type(first).__name__}: {first}; the layouts {', '.join(f'({each})' for each in TRIED)} and other "
        f"sizes did not help. {lacking(made_up)}Say heads=, kv_heads=, width=, queries= or keys= where it needs "
        f"certain ones, or {AS_FUNCTION}"
    )


@dataclass(frozen=True)
class _Function:
    """What is called, and the keywords that go along every time."""

    name: str
    find: Callable[[Tensor], Callable[..., object]]
    given: Mapping[str, object]
    made_up: tuple[str, ...]
    parameters: tuple[str, ...]
    module: nn.Module | None
    wanted: Wanted

    def attempts(
        self, h: int, g: int, c: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[Probe, Sizes] | Exception]:
        """The probe in each layout in which the function answers, and what it raised in the others."""
        wanted, axes = self.wanted, ""  # of all layouts in which it answered
        for layout in [wanted.layout] if wanted.layout else TRIED:
            if "h" not in layout:
                if wanted.heads not in (None, 1):
                    yield ValueError(f"the layout {layout!r} has no axis for {wanted.heads} heads")
                    continue
                if "h" in axes or ("b" in axes and "b" not in layout):  # without them it would hide what it mixes
                    return
                h = g = 1
            free = (h, wanted.heads) == (HEADS_TRIED[0], None)
            for (i, j), e in product(wanted.lengths(), (c + 3, c)):
                sizes = Sizes(h, g, i, j, c, e)
                answers = self._answers_in(layout, sizes, dtype, device)
                if isinstance(answers, Exception):
                    yield answers
                    continue
                axes += layout
                probe = Probe(
                    self.name,
                    self._placed(layout, answers),
                    heads=None if free else h,
                    kv_heads=None if free and wanted.kv_heads is None else g,
                    width=None if (c, wanted.width) == (WIDTHS_TRIED[0], None) else c,
                    equal_widths=e == c,
                    square=i == j,
                    parameters=self.parameters,
                    module=self.module,
                    layout=layout if answers == EVERY[layout][0] else f"{layout} -> {answers}",
                    grouped=g < h,
                    dtype=dtype,
                    device=device,
                    made_up=self.made_up,
                )
                yield probe, sizes
                break

    def with_groups(self, probe: Probe) -> Probe:
        """The probe with the knowledge whether it takes fewer key heads than query heads."""
        h = probe.heads or 6
        if fewer(h) == h or self.wanted.kv_heads is not None:
            return probe
        (i, j), c = self.wanted.lengths()[-1 if probe.square else 0], probe.width or WIDTHS_TRIED[0]
        sizes = Sizes(h, fewer(h), i, j, c, c if probe.equal_widths else c + 3)
        grouped = probe.tried(sizes) is True
        return replace(probe, grouped=grouped, kv_heads=None if grouped else probe.kv_heads)

    def _asked(self, layout: str, q: Tensor, k: Tensor, v: Tensor, **extra: object) -> Tensor:
        """The answer as it comes; from a function without a batch, those of all sequences."""
        call, settings = self.find(q), {**self.given, **extra}
        if layout == "n c":
            one_by_one = [call(a[0], b[0], c[0], **settings) for a, b, c in zip(q, k, v, strict=True)]
            return torch.stack([first_tensor(out) for out in one_by_one])
        return first_tensor(call(*(turned(x, layout) for x in (q, k, v)), **settings))

    def _answers_in(self, layout: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> str | Exception:
        """The layout in which the function answers, or what it raised."""
        b, h, i, e = sizes.b, sizes.h, sizes.i, sizes.e
        try:
            with torch.no_grad():
                out = self._asked(layout, *sizes.drawn(dtype, device))
        except Exception as error:  # whatever a function of somebody else raises means that it is not asked like this
            return error
        lengths = {"b": b, "h": h, "n": i, "c": e, "(h c)": h * e}
        shapes = {each: tuple(lengths[axis] for axis in re.findall(r"\(.*?\)|\w", each)) for each in EVERY[layout]}
        wrong = ValueError(f"the result is {tuple(out.shape)}, which is not (b h i e) = {(b, h, i, e)} in any layout")
        return next((each for each, shape in shapes.items() if out.shape == shape), wrong)

    def _placed(self, layout: str, shape: str) -> Callable[..., Tensor]:
        """The function with our layout outside and its own inside."""

        def call(q: Tensor, k: Tensor, v: Tensor, **extra: object) -> Tensor:
            out = self._asked(layout, q, k, v, **extra)
            out = out.transpose(0, 1) if shape.startswith("n b") else out
            inner = shape.replace("n b", "b n")
            if inner == "b n (h c)":
                return split(out, q.shape[1])
            return out.transpose(1, 2) if inner == "b n h c" else out[:, None] if inner == "b n c" else out

        return call


def signature_of(fn: object) -> tuple[tuple[str, ...], list[str] | None]:
    """The names of keyword arguments beyond q, k and v, and those without a default; None where three do not fit."""
    try:
        listed = inspect.signature(fn).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # compiled functions show theirs in the first line of their docstring
        shown = re.match(r"\s*\w+\((.*?)\)", getattr(fn, "__doc__", None) or "", re.DOTALL)
        names = [part.split("=")[0].strip() for part in shown.group(1).split(",")] if shown else []
        return tuple(name for name in names[3:] if name.isidentifier()), []
    kinds = inspect.Parameter
    positional = [each for each in listed if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3 and not any(each.kind is kinds.VAR_POSITIONAL for each in listed):
        return tuple(each.name for each in positional), None
    further = [*positional[3:], *(each for each in listed if each.kind is kinds.KEYWORD_ONLY)]
    return tuple(each.name for each in further), [each.name for each in further if each.default is kinds.empty]


def turned(x: Float[Tensor, "b h n c"], layout: str) -> Tensor:
    """The same numbers in another layout; one without heads has the first alone."""
    axes = "bhnc" if "h" in layout else "bnc"
    return (x if "h" in layout else x[:, 0]).permute([axes.index(axis) for axis in layout.split()])


def split(x: Float[Tensor, "b n d"], heads: int) -> Float[Tensor, "b h n c"]:
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def merge(x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b n d"]:
    return x.transpose(1, 2).flatten(2)
