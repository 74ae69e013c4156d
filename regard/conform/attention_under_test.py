"""`AttentionUnderTest`: call the attention under test, and find which arguments and sizes it accepts."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.conform.inputs import AttentionInputs
from regard.conform.options import CheckOptions
from regard.conform.reset_state import StateReset
from regard.see.adapters import Probe
from regard.see.measure.mask_argument import AXES, MASK_NAMES, MaskArgument, find_mask_argument
from regard.see.measure.read_weights import read_with_identity

CAUSAL_NAMES = ("is_causal", "causal")
GROUPED_NAME = "enable_gqa"
SCALE_NAMES = ("scale", "softmax_scale", "sm_scale")
PADDING_NAMES = ("key_padding_mask", "key_mask", "padding_mask", "padding")
DOCUMENT_NAMES = ("documents", "document_ids", "segment_ids", "doc_ids")
DROPOUT_NAMES = ("dropout_p", "dropout")
TRAINING_NAMES = ("training", "is_training", "train")
WIDTHS = (4, 8, 12, 64)  # widths of heads to try


@dataclass(frozen=True)
class CallCode:
    """How a call of the attention is written in the Python code that reproduces a failure.

    before  lines of code that come before the call, such as imports
    name    name of the function that is called
    """

    before: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class AttentionUnderTest:
    """An attention function under test, with the sizes and arguments that it accepts.

    probe               the attention, wrapped so that it is called as probe.call(q, k, v, ...)
    declared            the options of the check; some of them declare conventions of the attention
    dtype               the dtype of the test inputs
    widths              the accepted head widths; empty if every width is accepted
    grouped             whether the attention accepts fewer key heads than query heads
    causal_works_alone  whether the causal argument works without a mask
    mask                the mask argument of the attention; None if it is unknown
    code                how a call is written in the Python code that reproduces a failure
    reset               restores the state before the first call; None if this is not possible
    last_inputs         a list that holds the inputs of the last call
    """

    probe: Probe
    declared: CheckOptions
    dtype: torch.dtype = torch.float32
    widths: tuple[int, ...] = ()  # accepted widths of heads, if only some of WIDTHS are accepted
    grouped: bool = False  # whether the attention accepts fewer key heads than query heads
    causal_works_alone: bool = True  # whether its causal argument works without a mask
    mask: MaskArgument | None = None
    code: CallCode = field(default_factory=lambda: CallCode((), "f"))
    reset: StateReset | None = None  # restores the state before the first call
    last_inputs: list[AttentionInputs] = field(default_factory=list, compare=False)  # the inputs of the last call

    @property
    def free_lengths(self) -> bool:
        """Whether the attention accepts a number of queries other than the number of keys."""
        return not self.probe.square

    @property
    def free_widths(self) -> bool:
        """Whether the attention accepts values whose width differs from that of the keys."""
        return not self.probe.equal_widths

    @property
    def even_widths(self) -> bool:
        """Whether q and k in examples must have an even width, because the attention has rotary positions."""
        return False

    def find_parameter(self, names: tuple[str, ...]) -> str | None:
        """Return the first of these names that is an argument of the attention; None if no name is."""
        return next((name for name in names if name in self.probe.parameters), None)

    @property
    def causal_argument(self) -> str | None:
        return self.find_parameter(CAUSAL_NAMES)

    @property
    def dropout_argument(self) -> str | None:
        return self.find_parameter(DROPOUT_NAMES)

    @property
    def scale_argument(self) -> str | None:
        return self.find_parameter(SCALE_NAMES)

    @property
    def uses_causal_argument(self) -> bool:
        """Whether test calls pass the argument that makes the attention causal, such as `is_causal`.

        The argument is passed if it exists and works without a mask, unless the options declare causal=False.
        """
        return self.causal_argument is not None and self.causal_works_alone and self.declared.causal is not False

    def causal_keywords(self, causal: bool) -> dict[str, bool]:
        """Return the causal argument for a call, such as {"is_causal": True}; {} if none is passed.

        The value True is passed if `causal` is True and the attention has such an argument. The value False is passed
        only if the options declare causal=False.
        """
        if self.causal_argument is None or not (causal or self.declared.causal is False):
            return {}
        return {self.causal_argument: causal}

    def grouped_keywords(self, q: Tensor, k: Tensor) -> dict[str, bool]:
        """Return {"enable_gqa": True} if k has fewer heads than q and the attention has this argument; otherwise {}."""
        return {GROUPED_NAME: True} if k.shape[1] < q.shape[1] and GROUPED_NAME in self.probe.parameters else {}

    def __call__(self, inputs: AttentionInputs, **keywords: object) -> Tensor:
        """Call the attention with these inputs and return its output.

        Inputs that do not require grad are copied first, so that an in-place operation cannot change them.
        """
        q, k, v = (x if x.requires_grad else x.detach().clone() for x in (inputs.q, inputs.k, inputs.v))
        return self.call(q, k, v, inputs, **keywords)

    def call(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, **keywords: object) -> Tensor:
        """Call the attention with q, k and v, and the mask and causal argument of `inputs`; return its output."""
        self.last_inputs[:] = [replace(inputs, q=q.detach(), k=k.detach(), v=v.detach())]
        given: dict[str, object] = {**self.causal_keywords(inputs.causal), **self.grouped_keywords(q, k)}
        if inputs.visible is not None:
            if self.mask is None:
                raise ConfigError(f"{self.probe.name} has no known mask argument; declare mask_argument")
            given[self.mask.name] = self.mask.convert(inputs.visible, q.dtype)
        return self.probe.call(q, k, v, **given, **keywords)

    def random_inputs(
        self,
        i: int = 7,
        j: int | None = None,
        *,
        b: int = 2,
        h: int = 6,
        g: int | None = None,
        c: int = 4,
        e: int | None = None,
        dtype: torch.dtype | None = None,
        causal: bool | None = None,
        seed: int = 0,
    ) -> AttentionInputs:
        """Sample q, k and v from a normal distribution.

        A size that the attention does not accept is replaced by an accepted size.

        i, j    numbers of queries and keys; j is i by default
        b       batch size
        h, g    number of query heads, and number of key and value heads; g is h by default
        c, e    width of queries and keys, and width of values; e is 5 by default, or c if both widths must be equal
        causal  whether the call is causal; None means causal if the attention has a causal argument that works
        """
        h = self.probe.heads or h
        g = self.probe.kv_heads or (h if g is None or not self.grouped else g)
        if self.widths and c not in self.widths:
            c = max((width for width in self.widths if width < c), default=min(self.widths))
        c = self.probe.width or c
        e = c if not self.free_widths else 5 if e is None else e
        j = i if j is None else j
        i = i if self.free_lengths else j
        source = make_generator(1000 * self.declared.seed + seed)
        shapes = (b, h, i, c), (b, g, j, c), (b, g, j, e)
        q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
        causal = self.uses_causal_argument if causal is None else causal
        return AttentionInputs(q, k, v, causal=causal).to(self.dtype if dtype is None else dtype)

    def weights(self, inputs: AttentionInputs, **keywords: object) -> Float[Tensor, "b h i j"]:
        """Return the attention weights, measured as the output with the identity matrix as v."""
        b, _, g, _, j, c, _ = inputs.sizes
        width = j if self.free_widths else c

        def output(v: Tensor) -> Tensor:
            return self(replace(inputs, v=v.expand(b, g, j, width).contiguous()), **keywords)

        return read_with_identity(output, j, width, inputs.dtype).detach()

    def accepts(self, i: int = 6, g: int | None = None, **sizes: Any) -> bool:
        """Return whether a call with inputs of these sizes returns a tensor of the expected shape and dtype.

        i      number of queries
        g      number of key and value heads; None for as many as query heads
        sizes  further arguments of `random_inputs`, such as c=8 or dtype=torch.float64
        """
        inputs = self.random_inputs(i, 6, h=4, g=g, **{"e": 4, "causal": False, **sizes})
        b, h, _, i, _, _, e = inputs.sizes
        try:
            out = self(inputs)
        except Exception:  # the function of the user may raise any exception
            return False
        return isinstance(out, Tensor) and out.shape == (b, h, i, e) and out.dtype == inputs.dtype


A = TypeVar("A", bound=AttentionUnderTest)


def find_abilities(a: A) -> A:
    """Find by trial calls which sizes and arguments an attention accepts; return a copy with the results in its fields.

    The results are the dtype, the head widths, and whether grouped-query attention, the causal argument and a
    mask argument work.
    """
    probe = a.probe
    if probe.width is None:
        accepted = tuple(c for c in WIDTHS if replace(a, widths=(c,)).accepts(e=c))
        a = replace(a, widths=() if accepted == WIDTHS else accepted)
    fixed = probe.heads is not None and (probe.kv_heads or probe.heads) < probe.heads
    a = replace(a, grouped=fixed or (probe.heads is None and replace(a, grouped=True).accepts(g=2)))
    if a.accepts(dtype=torch.float64):
        a = replace(a, dtype=torch.float64)
    if a.causal_argument is not None:
        a = replace(a, causal_works_alone=a.accepts(causal=True))
    return replace(a, mask=_find_declared_mask(a))


def find_mask(a: AttentionUnderTest, names: list[str], axes: tuple[str, ...] = AXES) -> MaskArgument | None:
    """Find by trial calls which argument of the attention takes a mask, and what True means in the mask.

    Returns None if none of the arguments takes a mask.

    names  names of the arguments to try
    axes   mask shapes to try, such as "b j"
    """
    inputs = a.random_inputs(6, 6, h=4, e=6, causal=False).with_zero_queries()
    return find_mask_argument(lambda **mask: a.weights(inputs, **mask), names, inputs.pair_shape, inputs.dtype, axes)


def _find_declared_mask(a: AttentionUnderTest) -> MaskArgument | None:
    declared = a.declared.mask_argument
    names = [name for name in ([declared] if declared else MASK_NAMES) if name in a.probe.parameters]
    found = find_mask(a, names)
    if declared and found is None:
        raise ConfigError(
            f"mask_argument={declared!r} was declared, but {a.probe.name} accepts no mask of that name; "
            f"it has: {', '.join(a.probe.parameters) or 'no further arguments'}"
        )
    return found
