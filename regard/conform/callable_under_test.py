"""The attention under examination: how it is called, and what it can be asked."""

import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.conform.inputs import Inputs
from regard.conform.options import Declared
from regard.conform.reset_state import Anew
from regard.see.adapters import Probe

CAUSAL = ("is_causal", "causal")
GROUPED = ("enable_gqa",)
ADDED = ("attn_bias", "attention_bias", "bias")  # masks of numbers, by their name: no boolean is handed over
MASKS = ("attn_mask", "attention_mask", "mask", "visible", "bias_mask", *ADDED)
SCALES = ("scale", "softmax_scale", "sm_scale")
PADDINGS = ("key_padding_mask", "key_mask", "padding_mask", "padding")
DOCUMENTS = ("documents", "document_ids", "segment_ids", "doc_ids")
DROPOUTS = ("dropout_p", "dropout")
WIDTHS = (4, 8, 12, 64)
AXES = ("b h i j", "b 1 i j", "(b h) i j", "b i j", "i j", "b 1 1 j", "b j")
VALUES = ("boolean", "ones", "additive")  # one that is added takes the others as well, and makes nothing of them


@dataclass(frozen=True)
class MaskArgument:
    """How a mask is handed over: the name, the axes and values it has, and whether True, or one, keeps or hides.

    values  "boolean"; "ones", numbers that are 1 and 0; or "additive", 0 and minus infinity
    """

    name: str
    axes: str
    values: str
    polarity: str | None  # keep, drop, "transposed", or None where it hides nothing
    boolean_added: bool = False  # a boolean mask is taken too, and counted as numbers 0 and 1

    @property
    def obeyed(self) -> bool:
        return self.polarity in ("keep", "drop")

    @property
    def per_row(self) -> bool:
        """Whether each query may have a mask of its own."""
        return "i" in self.axes

    def shaped(self, x: Shaped[Tensor, "b h i j"]) -> Tensor:
        """A tensor of a number for each pair, in the axes that this argument has."""
        return {
            "b h i j": lambda: x,
            "b 1 i j": lambda: x[:, :1],
            "(b h) i j": lambda: x.flatten(0, 1),
            "b i j": lambda: x[:, 0],
            "i j": lambda: x[0, 0],
            "b 1 1 j": lambda: x[:, :1, :1],
            "b j": lambda: x[:, 0, 0],
        }[self.axes]()

    def filled(self, visible: Bool[Tensor, "b h i j"], dtype: torch.dtype) -> Tensor:
        """The mask as this argument takes it."""
        shaped = self.shaped(visible)
        if self.values == "additive":
            return torch.zeros(shaped.shape, dtype=dtype).masked_fill(~shaped, -math.inf)
        shaped = ~shaped if self.polarity == "drop" else shaped
        return shaped if self.values == "boolean" else shaped.to(dtype)


@dataclass(frozen=True)
class CallConvention:
    """How its owner writes a call: the lines before it, and what to call."""

    before: tuple[str, ...]
    call: str


@dataclass(frozen=True)
class Subject:
    """A probe, with what was declared and what it turned out to be able to do."""

    probe: Probe
    declared: Declared
    seed: int = 0
    dtype: torch.dtype = torch.float32
    free_lengths: bool = True  # i may differ from j
    free_widths: bool = True  # e may differ from c
    widths: tuple[int, ...] = ()  # of heads, where it takes some and refuses others; empty where it takes all
    grouped: bool = False  # g may be less than h
    causal_alone: bool = True  # its causal argument, where it has one, can be used without a mask
    mask: MaskArgument | None = None
    way: CallConvention | None = None
    fitting: str = ""  # a layout in which it would mix no sequences, where in the expected one it does
    anew: Anew | None = None  # the way to the state before its first call, where there is one
    last: list[Inputs] = field(default_factory=list, compare=False)  # what was asked last, should it be refused

    @property
    def causal_argument(self) -> str | None:
        return next((name for name in CAUSAL if name in self.probe.parameters), None)

    @property
    def dropout_argument(self) -> str | None:
        return next((name for name in DROPOUTS if name in self.probe.parameters), None)

    @property
    def scale_argument(self) -> str | None:
        return next((name for name in SCALES if name in self.probe.parameters), None)

    @property
    def asks_causal(self) -> bool:
        """Whether causality is to be asked for by an argument: it has one, and nobody declared it not to be causal."""
        return self.causal_argument is not None and self.causal_alone and self.declared.causal is not False

    def causal_given(self, causal: bool) -> dict[str, bool]:
        """The causal argument as it is handed over: also where it is declared off and may be on by default."""
        if self.causal_argument is None or not (causal or self.declared.causal is False):
            return {}
        return {self.causal_argument: causal}

    def __call__(self, inputs: Inputs, **extra: object) -> Tensor:
        """The attention's answer. It gets copies, so that it cannot spoil the question."""
        q, k, v = (x if x.requires_grad else x.detach().clone() for x in (inputs.q, inputs.k, inputs.v))
        return self.asked(q, k, v, inputs, **extra)

    def asked(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, **extra: object) -> Tensor:
        """The answer to these very tensors, with the arguments that the inputs call for."""
        self.last[:] = [replace(inputs, q=q.detach(), k=k.detach(), v=v.detach())]
        given: dict[str, object] = {}
        given |= self.causal_given(inputs.causal)
        if k.shape[1] < q.shape[1]:
            given |= {name: True for name in GROUPED if name in self.probe.parameters}
        if inputs.visible is not None:
            if self.mask is None:
                raise ConfigError(f"{self.probe.name} takes no mask that is known; declare mask_argument")
            given[self.mask.name] = self.mask.filled(inputs.visible, q.dtype).clone()
        return self.probe.call(q, k, v, **given, **extra)

    def draw(
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
    ) -> Inputs:
        """Normal numbers in the sizes asked for, as far as the attention is free in them."""
        h = self.probe.heads or h
        g = self.probe.kv_heads or (h if g is None or not self.grouped else g)
        if self.widths and c not in self.widths:
            c = max((width for width in self.widths if width < c), default=min(self.widths))
        c = self.probe.width or c
        e = 5 if e is None and self.free_widths else e
        e = c if not self.free_widths or e is None else e
        j = i if j is None else j
        i = i if self.free_lengths else j
        source = make_generator(1000 * self.seed + seed)
        shapes = (b, h, i, c), (b, g, j, c), (b, g, j, e)
        q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
        asked = self.asks_causal if causal is None else causal
        return Inputs(q, k, v, causal=asked).to(self.dtype if dtype is None else dtype)

    def weights(self, inputs: Inputs, wider: int = 0, /, **extra: object) -> Float[Tensor, "b h i j"]:
        """Weights of keys, read out of the answer: with V = identity the output is the weights."""
        b, _, g, _, j, c, _ = inputs.sizes
        width = j + wider if self.free_widths else c  # columns beyond the keys are zero
        eye = torch.eye(math.ceil(j / width) * width, dtype=inputs.dtype)[:j]
        # where v must be as wide as q, the identity is handed over a few columns at a time
        parts = [
            self(replace(inputs, v=part.expand(b, g, j, width).contiguous()), **extra) for part in eye.split(width, 1)
        ]
        return torch.cat(parts, -1)[..., :j].detach()


def settled(probe: Probe, declared: Declared, seed: int = 0) -> Subject:
    """The subject, with its abilities found out by asking."""
    subject = Subject(probe, declared, seed, free_lengths=not probe.square, free_widths=not probe.equal_widths)
    if probe.width is None:
        taken = tuple(c for c in WIDTHS if _answers(replace(subject, widths=(c,), free_widths=False)))
        subject = replace(subject, widths=() if taken == WIDTHS else taken)
    if subject.free_widths and not _answers(subject, e=5):
        subject = replace(subject, free_widths=False)
    if subject.free_lengths and not _answers(subject, i=4):
        subject = replace(subject, free_lengths=False)
    if probe.heads is None:
        subject = replace(subject, grouped=_answers(replace(subject, grouped=True), g=2))
    else:
        subject = replace(subject, grouped=(probe.kv_heads or probe.heads) < probe.heads)
    if _answers(subject, dtype=torch.float64):
        subject = replace(subject, dtype=torch.float64)
    if subject.causal_argument is not None:
        subject = replace(subject, causal_alone=_answers(subject, causal=True))
    return replace(subject, mask=find_mask(subject))


def _answers(subject: Subject, i: int = 6, g: int | None = None, **sizes: Any) -> bool:
    """Whether an ordinary call of these sizes gives a tensor of the right shape and dtype."""
    inputs = subject.draw(i, 6, h=4, g=g, **{"e": 4, "causal": False, **sizes})
    b, h, _, i, _, _, e = inputs.sizes
    try:
        out = subject(inputs)
    except Exception:
        return False
    return isinstance(out, Tensor) and out.shape == (b, h, i, e) and out.dtype == inputs.dtype


def find_mask(subject: Subject) -> MaskArgument | None:
    """The first way to hand over a mask that the attention accepts, and what it makes of True."""
    names = [subject.declared.mask_argument] if subject.declared.mask_argument else list(MASKS)
    inputs = subject.draw(6, 6, h=4, e=6, causal=False)
    b, h, _, i, j, _, _ = inputs.sizes
    hidden = torch.zeros(b, h, i, j, dtype=torch.bool)
    hidden[..., 1] = True
    inputs = replace(inputs, q=torch.zeros_like(inputs.q))
    accepted = None
    for name in names:
        if name not in subject.probe.parameters:
            continue
        for values, axes in product(reversed(VALUES) if name in ADDED else VALUES, AXES):
            argument = MaskArgument(name, axes, values, None)
            found = polarity(replace(subject, mask=argument), inputs, ~hidden)
            if found == "refused":
                continue
            if found is not None:
                taken = accepted is not None and accepted.name == name and accepted.values == "boolean"
                return replace(argument, polarity=found, boolean_added=taken and values == "additive")
            accepted = accepted or argument
    if subject.declared.mask_argument and accepted is None:
        raise ConfigError(
            f"mask_argument={subject.declared.mask_argument!r} was declared, but {subject.probe.name} takes no mask of "
            f"that name; it has: {', '.join(subject.probe.parameters) or 'no further arguments'}"
        )
    return accepted


def polarity(subject: Subject, inputs: Inputs, visible: Tensor) -> str | None:
    """keep, drop or transposed, as weights at q = 0 show; None where nothing is hidden; "refused" where it raises.

    What a mask leaves visible keeps a weight: where there is NaN in its place, nothing was hidden but all destroyed.
    """
    try:
        before = subject.weights(inputs)
        after = subject.weights(replace(inputs, visible=visible))
    except Exception:
        return "refused"
    if after.shape != before.shape:
        return "refused"  # it was spread over other axes than those of the scores
    seen = before > 0
    kept = seen & visible
    for name, left in (("keep", kept), ("drop", seen & ~visible)):
        gone = seen & ~left & left.any(-1, keepdim=True)
        if bool(gone.any()) and bool((after[left] > 0).all()) and bool((after[gone] == 0).all()):
            return name
    hidden_rows = (before > 0).any(-1) & ~(after > 0).any(-1)
    return "transposed" if bool(hidden_rows[..., 1].all()) and not bool(hidden_rows[..., 2:].any()) else None
