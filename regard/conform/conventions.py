"""What an attention turns out to do: its conventions, found out by choosing q, k and v."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.conform.callable_under_test import PADDINGS, Subject
from regard.conform.expected import View, band
from regard.conform.inputs import Inputs
from regard.conform.options import Declared
from regard.core.scores import alibi_slopes
from regard.see.xray import XRay, xray

LONG = 301  # keys: several blocks of a fast kernel, and a rest
EPSILONS = (0.0, 1e-8, 1e-6, 1e-5)  # what norms usually add
Scale = Callable[[int, int, int, int], float]  # of c, e, h and j
SCALES: dict[str, Scale] = {
    "1/sqrt(c)": lambda c, e, h, j: c**-0.5,
    "1 (none)": lambda c, e, h, j: 1.0,
    "1/c (applied twice)": lambda c, e, h, j: 1 / c,
    "sqrt(c) (multiplied instead of divided)": lambda c, e, h, j: c**0.5,
    "1/sqrt(h c) (the width of all heads)": lambda c, e, h, j: (h * c) ** -0.5,
    "1/sqrt(e) (the width of v)": lambda c, e, h, j: e**-0.5,
    "1/sqrt(j) (the number of keys)": lambda c, e, h, j: j**-0.5,
    "c^-1/4 (on q alone, or on k alone)": lambda c, e, h, j: c**-0.25,
    "c (multiplied)": lambda c, e, h, j: float(c),
    "1/h (the number of heads)": lambda c, e, h, j: 1 / h,
}


@dataclass(frozen=True)
class InferredWindow:
    """Keys from so many earlier ones to so many later ones; None is without end."""

    before: int | None
    after: int | None

    def of(self, n: int) -> "InferredWindow":
        """What n queries and keys show of it."""
        return InferredWindow(*(None if end is None or end >= n - 1 else end for end in (self.before, self.after)))

    def __str__(self) -> str:
        if self.before is None and self.after is None:
            return "every key"
        if self.before is not None and self.before < 0:
            return "later keys only"
        if self.after == 0:
            return "causal" if self.before is None else f"causal, {self.before} earlier keys and itself"
        earlier = "all earlier keys" if self.before is None else f"{self.before} earlier keys"
        later = "all later ones" if self.after is None else f"{self.after} later one{'s' * (self.after != 1)}"
        return f"{earlier}, itself and {later}"


@dataclass(frozen=True)
class Fit:
    """Scores as a multiple of q . k: the factor, how well it fits, and the rotary pairing under which it does."""

    scale: float
    residual: float
    rotary: str | None = None
    base: float = 10000.0
    turning: float = 1.0  # the share of coordinates that rotary turns
    alignment: str = "bottom-right"  # where rotary lets queries stand when there are fewer of them than keys
    epsilon: float = 0.0  # what a declared norm of q and k adds to the mean of squares


@dataclass(frozen=True)
class InferredPadding:
    """The argument for padded keys, and what True means in it: keep, drop, or None where neither hides them."""

    name: str
    polarity: str | None = None
    refused: str = ""  # what it raises, where it takes no booleans of (b j)


class Findings:
    """The conventions of one subject. Each is found out when it is first asked for."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.memo: dict[object, Any] = {}  # what several facts need and one of them measured
        self._seen: dict[tuple[int, int, bool, int, bool, int], Tensor] = {}

    @property
    def declared(self) -> Declared:
        return self.subject.declared

    @property
    def precise(self) -> float:
        """How exactly logarithms of weights can be read."""
        exact = 1e-5 if self.subject.dtype == torch.float64 else 2e-3  # many compute in float32 whatever comes
        return max(exact, self.coarse)

    @cached_property
    def coarse(self) -> float:
        """What is lost by rounding, of three times v: more than that cannot be read in weights either."""
        inputs = self.subject.draw(7, 7, b=1)
        once, thrice = (self.subject(replace(inputs, v=x * inputs.v)).detach().double() for x in (1, 3))
        off = ((3 * once - thrice).abs().max() / thrice.abs().max().clamp(min=1e-30)).item()
        return 8 * off if 1e-5 < off < 0.02 else 0.0

    def flat_weights(
        self, i: int, j: int, causal: bool, h: int = 6, masked: bool = False, c: int = 4
    ) -> Float[Tensor, "h i j"]:
        """Weights at q = 0, where only masks and biases speak. `masked` hands over a mask that hides nothing."""
        h, c = self.subject.probe.heads or h, self.subject.probe.width or c
        key = (i, j, causal, h, masked, c)
        if key not in self._seen:
            inputs = self.subject.draw(i, j, b=1, h=h, c=c, causal=causal)
            if masked:
                inputs = replace(inputs, visible=torch.ones(*inputs.q.shape[:3], j, dtype=torch.bool))
            self._seen[key] = self.subject.weights(replace(inputs, q=torch.zeros_like(inputs.q)))[0]
        return self._seen[key]

    def visible(self, i: int, j: int, causal: bool | None = None, h: int = 6) -> Bool[Tensor, "1 h i j"]:
        """Who sees whom."""
        return (self.flat_weights(i, j, self.subject.asks_causal if causal is None else causal, h) > 0)[None]

    @cached_property
    def band(self) -> InferredWindow | None:
        """The band that is visible when as many queries as keys are asked, or None where it is no band."""
        near = self.band_at(11)
        for n in (LONG, 131, 67):
            try:
                far = self.band_at(n)
            except Exception:
                continue  # longer than it takes
            # a window wider than eleven shows at length only
            return far if near is not None and far is not None and far.of(11) == near else near
        return near

    def band_at(self, n: int) -> InferredWindow | None:
        found = self.reach(n)
        seen = self.visible(n, n)
        return found if found is not None and bool((seen == band(n, n, found.before, found.after)).all()) else None

    @cached_property
    def leaking(self) -> tuple[int, int, int, int] | None:
        """The sequence, head, row and key of a later key that is seen in a batch, but not by its first sequence."""
        inputs = self.subject.draw(11, 11, b=3)
        seen = self.subject.weights(replace(inputs, q=torch.zeros_like(inputs.q))) > 0
        later = (seen & ~seen[:1]).triu(1).nonzero()
        return None if not len(later) else (*later[0].tolist(),)

    def reach(self, n: int) -> InferredWindow | None:
        """The narrowest band that holds all that is visible, or None where nothing is."""
        rows = torch.arange(n)
        distance = (rows[None, :] - rows[:, None])[self.visible(n, n)[0].any(0)]
        if not len(distance):
            return None
        return InferredWindow(-int(distance.min()), int(distance.max())).of(n)

    @property
    def causal(self) -> bool | None:
        return None if self.band is None else self.band.after is not None and self.band.after <= 0

    @cached_property
    def alignment(self) -> str | None:
        """Where the queries stand when there are fewer of them than keys; None where nothing shows it."""
        if not self.subject.free_lengths or self.band is None or self.band == InferredWindow(None, None):
            return None
        seen = self.visible(3, 9)[0]
        for name in ("bottom-right", "top-left"):
            if bool((seen == band(3, 9, self.band.before, self.band.after, name)[0]).all()):
                return name
        return "other"

    @cached_property
    def rotary_alignment(self) -> str | None:
        """Where rotary lets the queries stand when there are fewer of them than keys; None where nothing shows it."""
        if not self.subject.free_lengths or self.scores.rotary is None:
            return None
        inputs = self.subject.draw(3, 9, b=1, c=4)
        ways = [replace(self.scores, alignment=name) for name in ("bottom-right", "top-left")]
        fits = [self.fit(inputs, way) for way in ways]
        return next((fit.alignment for fit in fits if self.fits(fit)), None)

    @cached_property
    def grouping(self) -> str | None:
        """Which key head serves which query head, read with values that name their head."""
        if not self.subject.grouped:
            return None
        inputs = self.subject.draw(5, 5, h=6, g=3, b=1)
        h, g = inputs.sizes[1:3]

        def rule(used: list[int]) -> str:
            if used == [head // (h // g) for head in range(h)]:
                return "repeat"
            return "tile" if used == [head % g for head in range(h)] else f"other: {used}"

        keys, values = self._scored_by(inputs), rule(self._serving(inputs))
        return values if keys is None or rule(keys) == values else f"keys by {rule(keys)}, values by {values}"

    def _serving(self, inputs: Inputs) -> list[int]:
        """The key head whose values each query head takes."""
        names = torch.arange(inputs.v.shape[1], dtype=inputs.dtype)[None, :, None, None].expand_as(inputs.v)
        out = self.subject(replace(inputs, v=names.contiguous())).detach()
        # every row tells, but for those that see nothing, which are zero or NaN
        return [round(value) for value in out[0, :, :, 0].nan_to_num(-1.0, -1.0, -1.0).amax(-1).tolist()]

    def _scored_by(self, inputs: Inputs) -> list[int] | None:
        """The key head by whose keys each query head weighs; None where one head does not tell."""
        plain = self.subject.weights(inputs)
        moved = []
        for head in range(inputs.k.shape[1]):
            k = inputs.k.clone()
            k[:, head] = k[:, head].flip(-2) * 1.5
            moved.append((self.subject.weights(replace(inputs, k=k)) - plain).abs().amax((0, 2, 3)) > 1e-6)
        used = torch.stack(moved)  # key heads, and the query heads whose weights they move
        return used.int().argmax(0).tolist() if bool((used.sum(0) == 1).all()) else None

    def bias(
        self, i: int, j: int, causal: bool | None = None, h: int = 6, c: int = 4
    ) -> Float[Tensor, "1 h i j"] | None:
        """What is added to scores by position, known up to a number per row; None where nothing is."""
        weights = self.flat_weights(i, j, self.subject.asks_causal if causal is None else causal, h, c=c).double()
        seen = weights > 0
        logs = torch.where(seen, weights, 1.0).log()
        found = centred(logs, seen)
        return None if found.abs().max().item() < self.precise else found[None]

    @cached_property
    def bias_name(self) -> str:
        """none, alibi in one of its two forms, or other."""
        n = 11
        found = self.bias(n, n)
        if found is None:
            return "none"
        h = found.shape[1]
        rows = torch.arange(n, dtype=torch.float64)
        seen = self.visible(n, n)[0]
        # those of the reference code, and the formula of the paper, which differ where h is no power of two
        usual = (alibi_slopes(h).double(), 2.0 ** (-8.0 * torch.arange(1, h + 1, dtype=torch.float64) / h))
        forms = {
            "alibi, -m|i - j|": -(rows[:, None] - rows[None, :]).abs(),
            "alibi, +m j": rows[None, :].expand(n, n),
        }
        for name, form in forms.items():
            x = centred(form.expand(h, n, n), seen)
            slopes = (x * found[0]).sum((1, 2)) / x.square().sum((1, 2)).clamp(min=1e-30)
            if (found[0] - slopes[:, None, None] * x).abs().max().item() < max(self.precise, 1e-5):
                atol = max(self.precise, 1e-5)
                near = any(torch.allclose(slopes, known, rtol=1e-3, atol=atol) for known in usual)
                return name if near else f"{name} with m = {', '.join(f'{m:.4g}' for m in slopes.tolist())}"
        return "other"

    def fit(self, inputs: Inputs, way: Fit | None = None, wider: int = 0) -> Fit:
        """The factor that turns q . k into scores, over all rows that see two keys or more, by least squares."""
        _, h, _, i, j, c, _ = inputs.sizes
        way = way or Fit(0.0, 0.0)
        weights = self.subject.weights(inputs, wider).double()
        flat = self.flat_weights(i, j, inputs.causal, h, c=c).double()[None]
        seen = (flat > 0) & (weights > 0)
        logs = torch.where(seen, weights, 1.0).log() - torch.where(seen, flat, 1.0).log()
        view = View(
            visible=seen[:1, :1],
            scale=1.0,
            grouping=self.grouping if self.grouping == "tile" else "repeat",
            rotary=way.rotary,
            base=way.base,
            turning=way.turning,
            alignment=way.alignment,
            norm=self.declared.qk_norm,
            epsilon=way.epsilon,
        )
        q, k, _ = view.prepared(inputs.to(torch.float64))
        products = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        x, y = centred(products, seen), centred(logs, seen)
        scale = ((x * y).sum() / x.square().sum().clamp(min=1e-30)).item()
        if self.declared.softcap is None:
            return replace(way, scale=scale, residual=(y - scale * x).abs().max().item())
        fits = [_capped(products, y, seen, self.declared.softcap, start) for start in (scale, c**-0.5)]
        scale, residual = min(fits, key=lambda fit: fit[1])
        return replace(way, scale=scale, residual=residual)

    @cached_property
    def scores(self) -> Fit:
        """How scores come from q and k: the first of the known ways that fits, else the nearest."""
        inputs = self.subject.draw(7, 7, b=1, c=4)

        def best(way: Fit) -> Fit:
            epsilons = (0.0,) if self.declared.qk_norm is None else EPSILONS
            return min((self.fit(inputs, replace(way, epsilon=e)) for e in epsilons), key=lambda fit: fit.residual)

        plain = best(Fit(0.0, 0.0))
        if self.fits(plain):
            return plain
        return next((found for way in self._turns() if self.fits(found := best(way))), plain)

    def _turns(self) -> Iterator[Fit]:
        """The ways to turn q and k by position that may be behind the scores: the usual ones, then what shows."""
        if self.subject.draw(7, 7, b=1, c=4).q.shape[-1] % 2:
            return
        for base in (10000.0, 500000.0):
            yield from (Fit(0.0, 0.0, pairing, base) for pairing in ("half", "interleaved"))
        seen = self.shown
        if seen is None or seen.rotary is None or seen.rotary_base is None or seen.rotary_width is None:
            return
        share = seen.rotary_width / seen.q.shape[-1]
        # frequencies are measured, and people choose round numbers
        for base in (float(f"{seen.rotary_base:.2g}"), seen.rotary_base):
            yield Fit(0.0, 0.0, seen.rotary, base, share)

    @cached_property
    def shown(self) -> XRay | None:
        """The x-ray of this attention, or None where it cannot be taken."""
        asked: dict[str, Any] = {"width": self.subject.draw(c=16).q.shape[-1]}
        asked |= self.subject.causal_given(self.subject.asks_causal)
        try:
            return xray(self.subject.probe, **asked)
        except Exception:
            return None

    def fits(self, fit: Fit) -> bool:
        # phases are float32 even where all else is float64, and a norm adds some epsilon of its own
        loose = fit.rotary is not None or self.declared.qk_norm is not None
        return fit.residual < (max(self.precise, 1e-4) if loose else self.precise)

    @property
    def scores_fit(self) -> bool:
        return self.fits(self.scores)

    @cached_property
    def scales(self) -> list[tuple[tuple[int, int, int, int], float]]:
        """The scale at several widths and lengths, as far as the attention is free in them, with c, e, h and j."""
        measured = []
        for c, n, wider in ((4, 7, 0), (12, 7, 6), (4, 9, 0)):
            inputs = self.subject.draw(n, n, b=1, c=c)
            _, h, _, _, j, c, e = inputs.sizes
            e = j + wider if self.subject.free_widths else c  # of the identity that reads weights
            measured.append(((c, e, h, j), self.fit(inputs, self.scores, wider).scale))
        return measured

    @property
    def scale_varies(self) -> bool:
        """Whether the scale is another at another width or length, so that no one number declares it."""
        return not all(math.isclose(scale, self.scales[0][1], rel_tol=self.precise * 10) for _, scale in self.scales)

    @cached_property
    def scale_name(self) -> str:
        """The rule behind the scale."""
        for name, rule in SCALES.items():
            if all(math.isclose(scale, rule(*sizes), rel_tol=self.precise * 10) for sizes, scale in self.scales):
                return name
        if not self.scale_varies:
            return f"{self.scales[0][1]:.6g}"
        return ", ".join(f"{scale:.6g} at c={c}, j={j}" for (c, _, _, j), scale in self.scales)

    def scale(self, inputs: Inputs) -> float:
        _, h, _, _, j, c, e = inputs.sizes
        rule = SCALES.get(self.scale_name)
        return self.fit_scale(inputs) if rule is None else rule(c, e, h, j)

    def fit_scale(self, inputs: Inputs) -> float:
        """The measured factor at the width of these inputs."""
        probe = self.subject.draw(7, 7, b=1, c=inputs.sizes[5])
        return self.fit(probe, self.scores).scale

    def expected_scale(self, inputs: Inputs) -> float:
        return inputs.sizes[5] ** -0.5 if self.declared.scale is None else self.declared.scale

    @cached_property
    def carries_gradients(self) -> bool:
        """Whether its output can be learned from."""
        inputs = self.subject.draw(7, 7, dtype=torch.float32)
        leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in ("q", "k", "v")}
        return self.subject(inputs.having(**leaves)).requires_grad

    @cached_property
    def mask_replaces(self) -> bool:
        """Whether a mask that hides nothing shows what is hidden without one."""
        if self.subject.mask is None or not self.subject.mask.obeyed:
            return False
        plain, masked = (self.flat_weights(7, 7, False, masked=masked) > 0 for masked in (False, True))
        return bool((masked & ~plain).any())

    @cached_property
    def padding(self) -> InferredPadding | None:
        """How it is told which keys are padding, where it is told by an argument of its own."""
        name = next((name for name in PADDINGS if name in self.subject.probe.parameters), None)
        if name is None:
            return None
        inputs, real = self.padded()
        for polarity, given in (("keep", real), ("drop", ~real)):
            try:
                flat = self.subject.weights(inputs, **{name: given})
            except Exception as refused:
                return InferredPadding(name, refused=f"{type(refused).__name__}: {refused}"[:80])
            if not bool(flat[1, :, :3, 3:].any()) and bool((flat[0, :, -1] > 0).all()):
                return InferredPadding(name, polarity)
        return InferredPadding(name)

    def padded(self) -> tuple[Inputs, Bool[Tensor, "2 5"]]:
        """A call at q = 0, and which keys are real: all of the first sequence, and three of the second."""
        inputs = self.subject.draw(5, 5, b=2, dtype=torch.float32)
        real = torch.ones(2, 5, dtype=torch.bool)
        real[1, 3:] = False
        flat = inputs.having(q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
        return flat, real

    @cached_property
    def blind_rows(self) -> str | None:
        """What a row gives that sees nothing: zero, nan, mean, unmasked (as if nothing were hidden) or other."""
        if self.subject.mask is None or not self.subject.mask.obeyed:
            return None
        inputs = self.blinded(self.subject.draw(5, 5, b=2, causal=False, dtype=torch.float32))
        try:
            row = self.subject(inputs).detach()[:, :, 2]
        except Exception:
            return "refused"
        if bool(row.isnan().all()):
            return "nan"
        if not bool(row.any()):
            return "zero"
        h, g = inputs.sizes[1:3]
        mean = (
            inputs.v.mean(2).repeat_interleave(h // g, 1)
            if self.grouping != "tile"
            else inputs.v.mean(2).repeat(1, h // g, 1)
        )
        if torch.allclose(row, mean, atol=1e-4):
            return "mean"
        everything = torch.ones(*inputs.q.shape[:3], 5, dtype=torch.bool)
        unmasked = self.subject(replace(inputs, visible=everything)).detach()[:, :, 2]
        # what is added to all scores alike rounds them
        return "unmasked" if torch.allclose(row, unmasked, atol=2e-2) else "other"

    def blinded(self, inputs: Inputs) -> Inputs:
        """The same call under a mask that shows row 2 nothing and hides key 1 from everybody; or all from all rows."""
        b, h, _, i, j, _, _ = inputs.sizes
        assert self.subject.mask is not None
        visible = torch.full((b, h, i, j), self.subject.mask.per_row)
        visible[:, :, 2] = False
        visible[..., 1] = False
        return replace(inputs, visible=visible)

    def view(self, inputs: Inputs) -> View:
        """What the attention is taken to compute for these inputs, by what was found."""
        _, h, _, i, j, c, _ = inputs.sizes
        # a mask may take the place of the causal one, or be one more
        visible = (self.flat_weights(i, j, inputs.causal, h, inputs.visible is not None, c) > 0)[None]
        return View(
            visible=visible if inputs.visible is None else visible & inputs.visible,
            scale=self.scale(inputs),
            grouping=self.grouping if self.grouping == "tile" else "repeat",
            rotary=self.scores.rotary,
            base=self.scores.base,
            turning=self.scores.turning,
            alignment=self.rotary_alignment or "bottom-right",
            norm=self.declared.qk_norm,
            epsilon=self.scores.epsilon,
            bias=self.bias(i, j, inputs.causal, h, c),
            cap=self.declared.softcap,
            sink=self.sink(h),
        )

    def sink(self, h: int = 6) -> Float[Tensor, "h"] | None:
        """The logit of each head's sink, where one is declared: what a row lacks to one at q = 0 is its weight."""
        if not self.declared.sink:
            return None
        weights = self.flat_weights(7, 7, self.subject.asks_causal, h).double()
        # the last row, whose first key every mask but a window shows
        row = weights[:, -1]
        seen = row > 0
        logits = (1 - row.sum(-1, keepdim=True)).clamp(min=1e-300).log() - torch.where(seen, row, 1.0).log()
        return (logits * seen).sum(-1) / seen.sum(-1)


def centred(x: Float[Tensor, "*b i j"], seen: Bool[Tensor, "*b i j"]) -> Float[Tensor, "*b i j"]:
    """What is seen, less its mean along the row; zero elsewhere."""
    mean = (x * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, x - mean, 0.0)


def _capped(products: Tensor, scores: Tensor, seen: Tensor, cap: float, scale: float) -> tuple[float, float]:
    """The scale of cap tanh(scale q . k / cap) nearest to centred scores, by Gauss and Newton, and what it leaves."""
    for _ in range(30):
        pressed = torch.tanh(scale * products / cap)
        left = scores - centred(cap * pressed, seen)
        tilt = centred(products * (1 - pressed.square()), seen)
        scale += ((tilt * left).sum() / tilt.square().sum().clamp(min=1e-30)).item()
    left = scores - centred(cap * torch.tanh(scale * products / cap), seen)
    return scale, left.abs().max().nan_to_num(math.inf).item()


def half_hidden(inputs: Inputs) -> Inputs:
    """The same call under a mask that hides the later half of the keys from everybody."""
    b, h, _, i, j, _, _ = inputs.sizes
    visible = torch.ones(b, h, i, j, dtype=torch.bool)
    visible[..., j // 2 + 1 :] = False
    return replace(inputs, visible=visible)
