"""Build the probe of a function of q, k and v: trial calls find its order of axes and the sizes that it accepts."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.core.heads import split_heads
from regard.see.measure.probes.module_copies import dtypes_and_device
from regard.see.measure.probes.probe import (
    AS_FUNCTION,
    Probe,
    ProbeOptions,
    ProbeSizes,
    fewer_kv_heads,
    first_tensor,
    first_working,
    missing_argument_hint,
)

HEADS_TRIED = (3, 4, 8, 2, 6, 12, 16, 1, 5, 7)
WIDTHS_TRIED = (8, 16, 64)
# each layout of the arguments with the possible layouts of the output; layouts with more axes are tried first
LAYOUTS = {
    "b h n c": ("b h n c", "b n h c", "b n (h c)"),
    "b n h c": ("b n h c", "b h n c", "b n (h c)"),
    "n b h c": ("n b h c", "n b (h c)"),
    "b n c": ("b n c",),
    "n b c": ("n b c",),
    "n c": ("b n c",),  # no batch axis: one call per sequence
}
ROLES = {"q": ("q", "query", "queries"), "k": ("k", "key", "keys"), "v": ("v", "value", "values")}


@dataclass(frozen=True)
class Signature:
    """The arguments of an attention function besides q, k and v.

    further   names of all these arguments
    required  names of the arguments without a default
    """

    further: tuple[str, ...]
    required: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None  # names of q, k and v, if they have to be passed by name
    takes_qkv: bool = True


def probe_function(
    function_for: Callable[[Tensor], Callable[..., object]],
    signed: object,
    name: str,
    options: ProbeOptions,
    module: nn.Module | None = None,
) -> Probe:
    """Build the probe of an attention function: find its layout and sizes by trial calls.

    function_for  function that takes q and returns the attention function to call, since a module has one copy for each
                  dtype
    signed        the function or module whose signature lists the arguments of the attention function
    module        the module behind the function, or None
    """
    signature = read_signature(signed)
    if not signature.takes_qkv:
        raise ConfigError(
            f"{name} takes {len(signature.further)} positional arguments, but an attention takes q, k and v; "
            f"{AS_FUNCTION}"
        )
    heads = [(number, number) for number in HEADS_TRIED]
    if options.heads is not None or options.kv_heads is not None:
        h = options.heads or 2 * (options.kv_heads or 1)
        heads = [(h, options.kv_heads or h)]
    widths = [options.width] if options.width else WIDTHS_TRIED
    dtypes, device = dtypes_and_device(module, options)
    filled_in = tuple(each for each in signature.required if each not in options.extra)
    function = _Function(name, function_for, signature, filled_in, module, options)
    first: Exception | None = None
    for dtype, c, (h, g) in product(dtypes, widths, heads):
        found = first_working(function.attempts(h, g, c, dtype, device))
        if isinstance(found, Probe):
            return function.with_grouping(found)
        first = first or found
    (h, g), c, (i, j) = heads[0], widths[0], options.lengths()[0]
    raise ConfigError(
        f"{name} could not be called as an attention: with q {(2, h, i, c)}, k {(2, g, j, c)}, v {(2, g, j, c + 3)} "
        f"it raised {type(first).__name__}: {first}; the layouts {', '.join(f'({each})' for each in LAYOUTS)} and "
        f"other sizes failed too. {missing_argument_hint(name, filled_in)}Pass heads=, kv_heads= or width= if it needs "
        f"certain sizes, or {AS_FUNCTION}"
    )


@dataclass(frozen=True)
class _Function:
    """An attention function, with the keyword arguments that are passed in every trial call.

    filled_in  names of the required arguments that the caller did not pass; None is passed for them
    """

    name: str
    function_for: Callable[[Tensor], Callable[..., object]]
    signature: Signature
    filled_in: tuple[str, ...]
    module: nn.Module | None
    options: ProbeOptions

    def attempts(
        self, h: int, g: int, c: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[Probe, ProbeSizes] | Exception]:
        """Try all layouts, such as "b h n c": yield a probe and its sizes for one that works, else the exception.

        After a layout that works, layouts without its axis of heads or of sequences are not tried: with them, a
        function that mixes heads or sequences by mistake could not be detected.

        h, g  numbers of query heads and key heads
        c     width of one head
        """
        options, axes = self.options, ""  # axes of all layouts that worked
        for layout in [options.layout] if options.layout else LAYOUTS:
            if "h" not in layout:
                if options.heads not in (None, 1):
                    yield ValueError(f"the layout {layout!r} has no axis for {options.heads} heads")
                    continue
                if "h" in axes or ("b" in axes and "b" not in layout):  # fewer axes would hide what it mixes
                    return
                h = g = 1
            free = (h, options.heads) == (HEADS_TRIED[0], None)
            for (i, j), e in product(options.lengths(), (c + 3, c)):
                sizes = ProbeSizes(h, g, i, j, c, e)
                output_layout = self._output_layout(layout, sizes, dtype, device)
                if isinstance(output_layout, Exception):
                    yield output_layout
                    continue
                axes += layout
                probe = Probe(
                    self.name,
                    self._with_layout(layout, output_layout),
                    heads=None if free else h,
                    kv_heads=None if free and options.kv_heads is None else g,
                    width=None if (c, options.width) == (WIDTHS_TRIED[0], None) else c,
                    equal_widths=e == c,
                    square=i == j,
                    parameters=self.signature.further,
                    module=self.module,
                    layout=layout if output_layout == LAYOUTS[layout][0] else f"{layout} -> {output_layout}",
                    grouped=g < h,
                    dtype=dtype,
                    device=device,
                    filled_in=self.filled_in,
                )
                yield probe, sizes
                break

    def with_grouping(self, probe: Probe) -> Probe:
        """Return the probe with `grouped` set to whether the function accepts fewer key heads than query heads."""
        h = probe.heads or 6
        if fewer_kv_heads(h) == h or self.options.kv_heads is not None:
            return probe
        (i, j), c = self.options.lengths()[-1 if probe.square else 0], probe.width or WIDTHS_TRIED[0]
        sizes = ProbeSizes(h, fewer_kv_heads(h), i, j, c, c if probe.equal_widths else c + 3)
        grouped = probe.test_layout(sizes) is True
        return replace(probe, grouped=grouped, kv_heads=None if grouped else probe.kv_heads)

    def _call(self, layout: str, q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Tensor:
        """Call the function in a layout and return its output.

        The tensors q, k and v are (b h n c) and are permuted to the layout. For the layout "n c", the function is
        called once for each sequence, and the outputs are stacked.
        """
        function, names = self.function_for(q), self.signature.names
        keywords = {**dict.fromkeys(self.filled_in), **self.options.extra, **keywords}

        def run(*tensors: Tensor) -> Tensor:
            if names is None:
                return first_tensor(function(*tensors, **keywords))
            return first_tensor(function(**dict(zip(names, tensors, strict=True)), **keywords))

        if layout == "n c":
            return torch.stack([run(*one) for one in zip(*(x[:, 0] for x in (q, k, v)), strict=True)])
        return run(*(to_layout(x, layout) for x in (q, k, v)))

    def _output_layout(
        self, layout: str, sizes: ProbeSizes, dtype: torch.dtype, device: torch.device
    ) -> str | Exception:
        """Call the function with random tensors in a layout; return the layout of its output, or an exception."""
        b, h, i, e = sizes.b, sizes.h, sizes.i, sizes.e
        try:
            with torch.no_grad():
                out = self._call(layout, *sizes.random_tensors(dtype, device))
        except Exception as error:  # the function may raise any exception in a wrong layout
            return error
        lengths = {"b": b, "h": h, "n": i, "c": e, "(h c)": h * e}
        shapes = {each: tuple(lengths[axis] for axis in re.findall(r"\(.*?\)|\w", each)) for each in LAYOUTS[layout]}
        wrong = ValueError(f"the result is {tuple(out.shape)}, which is not (b h i e) = {(b, h, i, e)} in any layout")
        return next((each for each, shape in shapes.items() if out.shape == shape), wrong)

    def _with_layout(self, layout: str, output_layout: str) -> Callable[..., Tensor]:
        """Wrap the function to take and return (b h n c) tensors.

        layout         layout that the function takes
        output_layout  layout that the function returns
        """

        def call(q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Tensor:
            out = self._call(layout, q, k, v, **keywords)
            out = out.transpose(0, 1) if output_layout.startswith("n b") else out
            axes = output_layout.replace("n b", "b n")
            if axes == "b n (h c)":
                return split_heads(out, q.shape[1])
            return out.transpose(1, 2) if axes == "b n h c" else out[:, None] if axes == "b n c" else out

        return call


def read_signature(fn: object) -> Signature:
    """Return the arguments of a function besides q, k and v.

    The arguments are read from the signature. A compiled function, such as one of torch, may have none; its arguments
    are then read from the first line of its docstring.
    """
    try:
        listed = list(inspect.signature(fn).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):  # compiled functions show their arguments in the first line of their docstring
        shown = re.match(r"\s*\w+\((.*?)\)", getattr(fn, "__doc__", None) or "", re.DOTALL)
        names = [part.split("=")[0].strip() for part in shown.group(1).split(",")] if shown else []
        return Signature(tuple(name for name in names[3:] if name.isidentifier()))
    kinds = inspect.Parameter
    positional = [each for each in listed if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = [each for each in listed if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    known = [each.name for words in ROLES.values() for each in named if each.name.lower() in words]
    if len(known) == 3 and known != [each.name for each in positional[:3]]:
        further = [each for each in named if each.name not in known]
        order: tuple[str, ...] | None = tuple(known)
    elif len(positional) < 3 and not any(each.kind is kinds.VAR_POSITIONAL for each in listed):
        return Signature(tuple(each.name for each in positional), takes_qkv=False)
    else:
        further = [*positional[3:], *(each for each in listed if each.kind is kinds.KEYWORD_ONLY)]
        order = None
    required = tuple(each.name for each in further if each.default is kinds.empty)
    return Signature(tuple(each.name for each in further), required, order)


def to_layout(x: Float[Tensor, "b h n c"], layout: str) -> Tensor:
    """Permute the axes of a (b h n c) tensor to another layout; a layout without heads keeps only the first head."""
    axes = "bhnc" if "h" in layout else "bnc"
    return (x if "h" in layout else x[:, 0]).permute([axes.index(axis) for axis in layout.split()])
