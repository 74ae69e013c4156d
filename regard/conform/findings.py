"""What an attention turns out to do: its conventions, found out by choosing q, k and v."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.conform.declared import Declared
from regard.conform.inputs import Inputs
from regard.conform.subject import Subject
from regard.conform.view import View, band
from regard.core.scores import alibi_slopes

Scale = Callable[[int, int, int], float]  # of c, e and h
SCALES: dict[str, Scale] = {
    "1/sqrt(c)": lambda c, e, h: c**-0.5,
    "1 (none)": lambda c, e, h: 1.0,
    "1/c (applied twice)": lambda c, e, h: 1 / c,
    "sqrt(c) (multiplied instead of divided)": lambda c, e, h: c**0.5,
    "1/sqrt(h c) (the width of all heads)": lambda c, e, h: (h * c) ** -0.5,
    "1/sqrt(e) (the width of v)": lambda c, e, h: e**-0.5,
    "c^-1/4 (on q alone, or on k alone)": lambda c, e, h: c**-0.25,
    "c (multiplied)": lambda c, e, h: float(c),
    "1/h (the number of heads)": lambda c, e, h: 1 / h,
}


@dataclass(frozen=True)
class Band:
    """Keys from so many earlier ones to so many later ones; None is without end."""

    before: int | None
    after: int | None

    def __str__(self) -> str:
        if self.before is None and self.after is None:
            return "every key"
        if self.after == 0:
            return "causal" if self.before is None else f"causal, {self.before} earlier keys and itself"
        earlier = "all earlier keys" if self.before is None else f"{self.before} earlier keys"
        later = "all later ones" if self.after is None else f"{self.after} later ones"
        return f"{earlier}, itself and {later}"


@dataclass(frozen=True)
class Fit:
    """Scores as a multiple of q . k: the factor, how well it fits, and the rotary pairing under which it does."""

    scale: float
    residual: float
    rotary: str | None = None
    base: float = 10000.0


class Findings:
    """The conventions of one subject. Each is found out when it is first asked for."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.memo: dict[object, Any] = {}  # what several facts need and one of them measured
        self._seen: dict[tuple[int, int, bool, int, bool], Tensor] = {}

    @property
    def declared(self) -> Declared:
        return self.subject.declared

    @property
    def precise(self) -> float:
        """How exactly logarithms of weights can be read."""
        return 1e-5 if self.subject.dtype == torch.float64 else 2e-3  # many compute in float32 whatever comes

    def flat_weights(self, i: int, j: int, causal: bool, h: int = 6, masked: bool = False) -> Float[Tensor, "h i j"]:
        """Weights at q = 0, where only masks and biases speak. `masked` hands over a mask that hides nothing."""
        key = (i, j, causal, h, masked)
        if key not in self._seen:
            inputs = self.subject.draw(i, j, b=1, h=h, causal=causal)
            if masked:
                inputs = replace(inputs, visible=torch.ones(*inputs.q.shape[:3], j, dtype=torch.bool))
            self._seen[key] = self.subject.weights(replace(inputs, q=torch.zeros_like(inputs.q)))[0]
        return self._seen[key]

    def visible(self, i: int, j: int, causal: bool | None = None, h: int = 6) -> Bool[Tensor, "1 h i j"]:
        """Who sees whom."""
        return (self.flat_weights(i, j, self.subject.asks_causal if causal is None else causal, h) > 0)[None]

    @cached_property
    def band(self) -> Band | None:
        """The band that is visible when as many queries as keys are asked, or None where it is no band."""
        return self.band_at(11)

    def band_at(self, n: int) -> Band | None:
        seen = self.visible(n, n)[0]
        if bool((seen != seen[:1]).any()):
            return None
        rows = torch.arange(n)
        distance = (rows[None, :] - rows[:, None])[seen[0]]
        if not len(distance):
            return None
        before, after = -int(distance.min()), int(distance.max())
        found = Band(None if before == n - 1 else before, None if after == n - 1 else after)
        return found if bool((seen == band(n, n, found.before, found.after)[0]).all()) else None

    @property
    def causal(self) -> bool | None:
        return None if self.band is None else self.band.after is not None and self.band.after <= 0

    @cached_property
    def alignment(self) -> str | None:
        """Where the queries stand when there are fewer of them than keys; None where nothing shows it."""
        if not self.subject.free_lengths or self.band is None or self.band == Band(None, None):
            return None
        seen = self.visible(3, 9)[0]
        for name in ("bottom-right", "top-left"):
            if bool((seen == band(3, 9, self.band.before, self.band.after, name)[0]).all()):
                return name
        return "other"

    @cached_property
    def grouping(self) -> str | None:
        """Which key head serves which query head, read with values that name their head."""
        if not self.subject.grouped:
            return None
        inputs = self.subject.draw(5, 5, h=6, g=3, b=1)
        h, g = inputs.sizes[1:3]
        used = self._serving(inputs)
        if used == [head // (h // g) for head in range(h)]:
            return "repeat"
        return "tile" if used == [head % g for head in range(h)] else f"other: {used}"

    def _serving(self, inputs: Inputs) -> list[int]:
        names = torch.arange(inputs.v.shape[1], dtype=inputs.dtype)[None, :, None, None].expand_as(inputs.v)
        out = self.subject(replace(inputs, v=names.contiguous()))
        return [round(value) if math.isfinite(value) else -1 for value in out[0, :, -1, 0].tolist()]

    def bias(self, i: int, j: int, causal: bool | None = None, h: int = 6) -> Float[Tensor, "1 h i j"] | None:
        """What is added to scores by position, known up to a number per row; None where nothing is."""
        weights = self.flat_weights(i, j, self.subject.asks_causal if causal is None else causal, h).double()
        seen = weights > 0
        logs = torch.where(seen, weights, 1.0).log()
        centred = logs - (logs * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
        centred = torch.where(seen, centred, 0.0)
        return None if centred.abs().max().item() < self.precise else centred[None]

    @cached_property
    def bias_name(self) -> str:
        """none, alibi in one of its two forms, or other."""
        n = 11
        found = self.bias(n, n)
        if found is None:
            return "none"
        h = found.shape[1]
        rows = torch.arange(n)
        seen = self.visible(n, n)[0]
        slopes = alibi_slopes(h).double()[:, None, None]
        forms = {
            "alibi, -m|i - j|": -(rows[:, None] - rows[None, :]).abs() * slopes,
            "alibi, +m j": rows[None, :] * slopes.expand(h, n, 1),
        }
        for name, form in forms.items():
            centred = form - (form * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
            if (torch.where(seen, centred, 0.0) - found[0]).abs().max().item() < max(self.precise, 1e-5):
                return name
        return "other"

    def fit(self, inputs: Inputs, rotary: str | None = None, base: float = 10000.0) -> Fit:
        """The factor that turns q . k into scores, over all rows that see two keys or more, by least squares."""
        _, h, _, i, j, _, _ = inputs.sizes
        weights = self.subject.weights(inputs).double()
        flat = self.flat_weights(i, j, inputs.causal, h).double()[None]
        seen = (flat > 0) & (weights > 0)
        logs = torch.where(seen, weights, 1.0).log() - torch.where(seen, flat, 1.0).log()
        q, k, _ = View(seen[:1, :1], 1.0, self.grouping or "repeat", rotary, base).prepared(inputs.to(torch.float64))
        products = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        count = seen.sum(-1, keepdim=True).clamp(min=1)
        x, y = (torch.where(seen, a - (a * seen).sum(-1, keepdim=True) / count, 0.0) for a in (products, logs))
        scale = ((x * y).sum() / x.square().sum().clamp(min=1e-30)).item()
        return Fit(scale, (y - scale * x).abs().max().item(), rotary, base)

    @cached_property
    def scores(self) -> Fit:
        """How scores come from q and k: the first of the known ways that fits, else the nearest."""
        inputs = self.subject.draw(7, 7, b=1, c=4)
        ways: list[tuple[str | None, float]] = [(None, 10000.0)]
        if inputs.q.shape[-1] % 2 == 0:
            ways += [(pairing, base) for base in (10000.0, 500000.0) for pairing in ("half", "interleaved")]
        fits = []
        for rotary, base in ways:
            fits.append(self.fit(inputs, rotary, base))
            # phases are float32 even where all else is float64
            if fits[-1].residual < (self.precise if rotary is None else max(self.precise, 1e-4)):
                return fits[-1]
        return min(fits, key=lambda fit: fit.residual)

    @property
    def scores_fit(self) -> bool:
        return self.scores.residual < (self.precise if self.scores.rotary is None else max(self.precise, 1e-4))

    @cached_property
    def scale_name(self) -> str:
        """The rule behind the scale, from two widths where the attention is free in them."""
        measured = []
        for c in (4, 12):
            inputs = self.subject.draw(7, 7, b=1, c=c)
            _, h, _, _, j, c, e = inputs.sizes
            e = j if self.subject.free_widths else c  # the identity that reads weights is as wide as there are keys
            measured.append((c, e, h, self.fit(inputs, self.scores.rotary, self.scores.base).scale))
        for name, rule in SCALES.items():
            if all(math.isclose(scale, rule(c, e, h), rel_tol=self.precise * 10) for c, e, h, scale in measured):
                return name
        return (
            f"{measured[0][-1]:.6g}"
            if len({round(m[-1], 6) for m in measured}) == 1
            else (", ".join(f"{scale:.6g} at c={c}" for c, _, _, scale in measured))
        )

    def scale(self, inputs: Inputs) -> float:
        _, h, _, _, _, c, e = inputs.sizes
        rule = SCALES.get(self.scale_name)
        return self.fit_scale(inputs) if rule is None else rule(c, e, h)

    def fit_scale(self, inputs: Inputs) -> float:
        """The measured factor at the width of these inputs."""
        probe = self.subject.draw(7, 7, b=1, c=inputs.sizes[5])
        return self.fit(probe, self.scores.rotary, self.scores.base).scale

    def expected_scale(self, inputs: Inputs) -> float:
        return inputs.sizes[5] ** -0.5 if self.declared.scale is None else self.declared.scale

    @cached_property
    def mask_replaces(self) -> bool:
        """Whether a mask that hides nothing shows what is hidden without one."""
        if self.subject.mask is None or not self.subject.mask.obeyed:
            return False
        plain, masked = (self.flat_weights(7, 7, False, masked=masked) > 0 for masked in (False, True))
        return bool((masked & ~plain).any())

    @cached_property
    def blind_rows(self) -> str | None:
        """What a row gives that sees nothing: zero, nan, mean or other."""
        if self.subject.mask is None or not self.subject.mask.obeyed:
            return None
        inputs = blinded(self.subject.draw(5, 5, b=2, causal=False, dtype=torch.float32))
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
        return "mean" if torch.allclose(row, mean, atol=1e-4) else "other"

    def view(self, inputs: Inputs) -> View:
        """What the attention is taken to compute for these inputs, by what was found."""
        _, h, _, i, j, _, _ = inputs.sizes
        # a mask may take the place of the causal one, or be one more
        visible = (self.flat_weights(i, j, inputs.causal, h, inputs.visible is not None) > 0)[None]
        return View(
            visible=visible if inputs.visible is None else visible & inputs.visible,
            scale=self.scale(inputs),
            grouping=self.grouping if self.grouping == "tile" else "repeat",
            rotary=self.scores.rotary,
            base=self.scores.base,
            bias=self.bias(i, j, inputs.causal, h),
            cap=self.declared.softcap,
        )


def blinded(inputs: Inputs) -> Inputs:
    """The same call under a mask that shows row 2 nothing and hides key 1 from everybody."""
    b, h, _, i, j, _, _ = inputs.sizes
    visible = torch.ones(b, h, i, j, dtype=torch.bool)
    visible[:, :, 2] = False
    visible[..., 1] = False
    return replace(inputs, visible=visible)


def half_hidden(inputs: Inputs) -> Inputs:
    """The same call under a mask that hides the later half of the keys from everybody."""
    b, h, _, i, j, _, _ = inputs.sizes
    visible = torch.ones(b, h, i, j, dtype=torch.bool)
    visible[..., j // 2 + 1 :] = False
    return replace(inputs, visible=visible)
