"""Measure the conventions of an attention under test, and compute the output that is expected under them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.conform.attention_under_test import PADDING_NAMES, AttentionUnderTest, find_mask
from regard.conform.expected import ExpectedAttention
from regard.conform.inputs import AttentionInputs
from regard.core.scores import alibi_slopes
from regard.see.measure import AttentionMeasurement, measure_attention
from regard.see.measure.biases import name_bias
from regard.see.measure.heads import name_grouping
from regard.see.measure.mask_argument import MaskArgument, fully_masked_row
from regard.see.measure.mask_names import VisibleBand, smallest_band
from regard.see.measure.rotary import RotaryScheme, Rotation
from regard.see.measure.scale import SCALES, ScoreReading, Sizes, name_scale
from regard.see.measure.stats import centre_rows

LONG = 301  # keys: several blocks of a fast kernel, and a remainder
WIDE = 64  # the width of heads at which rotary frequencies are named
# the declared name of a norm, and the name that is measured
NORMS = {None: None, "rms": "rms", "layer": "layer", "l2": "rms"}


@dataclass(frozen=True)
class MeasuredAttention(AttentionUnderTest):
    """An attention under test and its conventions, such as its scale.

    Each convention is measured when it is first used.
    """

    memo: dict[object, Any] = field(default_factory=dict, init=False, compare=False)  # shared by the facts

    def once(self, key: object, compute: Callable[[], Any]) -> Any:
        """Return the value that is cached under `key`; the first call computes it with `compute`."""
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]

    def measurement(self, i: int = 7, j: int | None = None, c: int = 4, h: int = 6) -> AttentionMeasurement:
        """Measure scores, heads and bias of the attention for inputs of these sizes, and cache the result.

        A size that the attention does not accept is replaced by an accepted size.

        i, j  numbers of queries and keys
        c     width of keys
        h     number of query heads
        """
        inputs = self.random_inputs(i, j, c=c, h=h, g=h // 2 if h % 2 == 0 else h)
        _, h, g, i, n, c, _ = inputs.sizes
        keywords = {**self.causal_keywords(inputs.causal), **self.grouped_keywords(inputs.q, inputs.k)}

        def measure() -> AttentionMeasurement:
            sizes: dict[str, Any] = {"queries": i, "keys": n, "heads": h, "kv_heads": g, "width": c}
            return measure_attention(self.probe, **sizes, dtype=self.dtype, seed=self.declared.seed, extra=keywords)

        found: AttentionMeasurement = self.once(("measurement", inputs.sizes), measure)
        return found

    @cached_property
    def precision(self) -> float:
        """The largest difference between two logarithms of attention weights that counts as equal."""
        exact = 1e-5 if self.dtype == torch.float64 else 2e-3
        return max(exact, self.measurement().raw.reader.rounding)

    def flat_weights(
        self, i: int, j: int, causal: bool, h: int = 6, masked: bool = False, c: int = 4
    ) -> Float[Tensor, "h i j"]:
        """Return the attention weights for queries of zero. These weights depend only on mask and bias.

        i, j    numbers of queries and keys
        causal  whether to set the causal argument of the attention
        h, c    number of query heads and width of keys
        masked  whether to pass a mask in which every key is visible
        """

        def read() -> Tensor:
            inputs = self.random_inputs(i, j, b=1, h=h, c=c, causal=causal).with_zero_queries()
            if masked:
                inputs = replace(inputs, visible=torch.ones(inputs.pair_shape, dtype=torch.bool))
            return self.weights(inputs)[0]

        found: Tensor = self.once(("flat", i, j, causal, self.probe.heads or h, masked, self.probe.width or c), read)
        return found

    def visible(self, i: int, j: int) -> Bool[Tensor, "1 h i j"]:
        """Return the measured Boolean mask for i queries and j keys, True where a query sees a key."""
        return (self.flat_weights(i, j, self.uses_causal_argument) > 0)[None]

    @cached_property
    def band(self) -> VisibleBand | None:
        """The band of visible keys: how many keys before and after its own position each query sees.

        The band is measured with 11 keys and again with more, because a wider window shows only there. None if the
        visible keys form no band, that is, if queries see different numbers of earlier or later keys.
        """
        near = self.band_at(11)
        for n in (LONG, 131, 67):
            try:
                far = self.band_at(n)
            except Exception:  # the attention does not accept this length  # nosec B112
                continue
            # a window wider than eleven shows at a greater length only
            return far if near is not None and far is not None and far.cut_to(11) == near else near
        return near

    def band_at(self, n: int) -> VisibleBand | None:
        """Return the band of visible keys, measured with n queries and n keys.

        Returns None if the visible keys form no band, that is, if queries see different numbers of earlier or later
        keys.
        """
        found = self.smallest_band(n)
        return found if found is not None and bool((self.visible(n, n) == found.visible(n, n)).all()) else None

    def smallest_band(self, n: int) -> VisibleBand | None:
        """Return the smallest band around the diagonal that covers every visible pair of n queries and n keys.

        Returns None if no pair is visible.
        """
        return smallest_band(self.visible(n, n)[0].any(0))

    @cached_property
    def leak_in_batch(self) -> tuple[int, ...] | None:
        """The index (sequence, head, query, key) of a visible later key that the first sequence of a batch hides.

        The batch has three sequences. None if each sequence hides all later keys that the first sequence hides.
        """
        seen = self.weights(self.random_inputs(11, 11, b=3).with_zero_queries()) > 0
        later = (seen & ~seen[:1]).triu(1).nonzero()
        return None if not len(later) else tuple(later[0].tolist())

    @property
    def causal(self) -> bool | None:
        """Whether no query sees a later key; None if the visible keys form no band around the diagonal."""
        return None if self.band is None else self.band.after is not None and self.band.after <= 0

    @cached_property
    def alignment(self) -> str | None:
        """How the mask aligns queries with a larger number of keys: "top-left", "bottom-right" or "other".

        "top-left" puts the first query at the position of the first key. "bottom-right" puts the last query at the
        position of the last key. None if the mask does not show the alignment: if the numbers of queries and keys must
        be equal, if every key is visible, or if the visible keys form no band.
        """
        if not self.free_lengths or self.band is None or self.band == VisibleBand(None, None):
            return None
        seen = self.visible(3, 9)[0]
        for name in ("bottom-right", "top-left"):
            if bool((seen == self.band.visible(3, 9, name)).all()):
                return name
        return "other"

    @cached_property
    def rotary_alignment(self) -> str | None:
        """How rotary positions align queries with a larger number of keys: "top-left" or "bottom-right".

        "top-left" gives the first query the position of the first key. "bottom-right" gives the last query the position
        of the last key. None without rotary positions, or if the numbers of queries and keys must be equal.
        """
        if not self.free_lengths or self.scores.rotary is None:
            return None
        return self.measurement(3, 9).rotary_alignment(self.scores)

    @cached_property
    def grouping(self) -> str | None:
        """How grouped-query attention assigns key heads to query heads: "repeat", "tile", or a description in words.

        With 4 query heads and 2 key heads, "repeat" is the order 0 0 1 1, and "tile" is the order 0 1 0 1. None if
        every query head has its own key head.
        """
        if not self.grouped:
            return None
        heads, g = self.measurement().heads, self.measurement().raw.reader.g
        names = {"shared": "repeat", "one to one": "repeat"}
        keys = name_grouping(heads.key_heads, g)
        keys, values = names.get(keys, keys), names.get(heads.grouping or "other", heads.grouping or "other")
        if values == "other":
            return f"other: {list(heads.value_heads or heads.key_heads)}"
        return values if keys == values else f"keys by {keys}, values by {values}"

    def bias(self, i: int, j: int, causal: bool, h: int = 6, c: int = 4) -> Float[Tensor, "1 h i j"] | None:
        """Return the position bias that is added to the scores, or None if there is none.

        Adding a constant to a row of scores does not change the weights, so only the bias minus its mean in each row
        can be measured.

        i, j  numbers of queries and keys
        h, c  number of query heads and width of keys
        """
        weights = self.flat_weights(i, j, causal, h, c=c).double()
        found = centre_rows(torch.where(weights > 0, weights, 1.0).log(), weights > 0)
        return None if found.abs().max().item() < self.precision else found[None]

    @cached_property
    def bias_reading(self) -> tuple[str, tuple[float, ...] | None]:
        """The name of the position bias, and the slopes of the heads if the bias is ALiBi, else None.

        The bias is measured with 11 queries and 11 keys.
        """
        found = self.bias(11, 11, self.uses_causal_argument)
        near = max(self.precision, 1e-5)
        return ("none", None) if found is None else name_bias(found[0], self.visible(11, 11)[0], near)

    @cached_property
    def bias_name(self) -> str:
        """The name of the position bias; for ALiBi with unusual slopes, the slope of each head is added."""
        name, slopes = self.bias_reading
        if slopes is None:
            return name
        h = len(slopes)
        # the slopes of the reference code and of the paper's formula, which differ if h is no power of two
        usual = (alibi_slopes(h).double(), 2.0 ** (-8.0 * torch.arange(1, h + 1, dtype=torch.float64) / h))
        found, near = torch.tensor(slopes, dtype=torch.float64), max(self.precision, 1e-5)
        if any(torch.allclose(found, each, rtol=1e-3, atol=near) for each in usual):
            return name
        return f"{name} with m = {', '.join(f'{m:.4g}' for m in slopes)}"

    @cached_property
    def mask_number(self) -> float | None:
        """The finite mask value, such as -100, that is added to scores to hide keys; None if keys are hidden by -inf.

        The value is measured with queries of zero. A row then has only two different weights: one for hidden keys and
        one for visible keys. Their ratio gives the mask value.
        """
        weights = self.flat_weights(11, 11, self.uses_causal_argument).double()
        gaps = (weights / weights.amax(-1, keepdim=True)).log()
        low = gaps < -3
        if not bool(low.any()) or not bool(gaps.isfinite().all()):
            return None
        number = float(gaps[low].mean())
        return number if bool(torch.where(low, gaps - number, gaps).abs().lt(1e-3).all()) else None

    @cached_property
    def scores(self) -> ScoreReading:
        """How scores are computed from q and k, as measured: scale, soft-cap, normalisation and rotary positions."""
        return self.measurement().scores

    @cached_property
    def rotary(self) -> Rotation | None:
        """The measured rotary embedding of q and k; None if the attention has none.

        The measurement uses a large head width, because a small width has too few frequencies to identify their base.
        """
        if self.scores.rotation is None or self.scores.scale is None:
            return None
        return self.measurement(c=WIDE).scores.rotation or self.scores.rotation

    @property
    def even_widths(self) -> bool:
        # only if it was measured already: an attention that breaks one of the first facts may not be measurable
        return vars(self).get("rotary") is not None

    @cached_property
    def rotary_scheme(self) -> RotaryScheme | None:
        """The base and scaling of the rotary frequencies; None without rotary positions or if the scheme is unknown."""
        return None if self.rotary is None else self.rotary.scheme()

    def rotation(self, c: int) -> Rotation | None:
        """Return the rotary embedding (RoPE) at head width c; None if the attention has none.

        If the measured frequencies are powers of one base up to measurement error, exact powers are used in their
        place.
        """
        found = None if self.rotary is None else self.measurement(c=c).scores.rotation
        if found is None:
            return None
        base, wide = found.base(), self.rotary_scheme
        # a base of few digits is measured more exactly in a wide head; NTK scaling makes another one at each width
        if base is not None and wide is not None and math.isclose(base, wide.base, rel_tol=0.05):
            base = wide.base if wide.base == float(f"{wide.base:.2g}") else base
        return found if base is None else found.with_base(base)

    @cached_property
    def score_span(self) -> float | None:
        """The largest difference between two scores of one query, if a soft-cap limits it; otherwise None."""
        spans, inputs = [], self.random_inputs(9, 9, b=1)
        for factor in (100.0, 1000.0):
            weights = self.weights(inputs.with_tensors(q=factor * inputs.q)).double()[..., -1, :]
            spans.append((weights.amax(-1).log() - weights.amin(-1).log()).max().item())
        return spans[1] if math.isfinite(spans[1]) and math.isclose(*spans, rel_tol=0.02) else None

    @property
    def scores_fit(self) -> bool:
        """Whether the scores are scale * q . k, with the declared soft-cap and norm of q and k and no other change."""
        found, declared = self.scores, self.declared
        if found.scale is None or not math.isfinite(found.scale) or NORMS[declared.qk_norm] != found.qk_norm:
            return False
        if found.norm is not None and not (found.norm.q and found.norm.k):
            return False
        if declared.softcap is None or found.softcap is None:
            return declared.softcap is None and found.softcap is None
        return math.isclose(declared.softcap, found.softcap, rel_tol=1e-2)

    @cached_property
    def scales(self) -> list[tuple[Sizes, float]]:
        """The measured scale of q . k for several inputs, each with the sizes (c, e, h, j) of the inputs.

        The sizes are the width of keys, the width of values, the number of query heads and the number of keys.
        """
        return [self._scale_at(n, c) for c, n in ((4, 7), (12, 7), (4, 9))]

    def _scale_at(self, n: int, c: int) -> tuple[Sizes, float]:
        """Measure the scale of q . k with n queries and n keys of width c.

        Returns the sizes (c, e, h, j) of the inputs, and the scale. The sizes are the width of keys, the width of
        values, the number of query heads and the number of keys. The scale is NaN if no scale was found. If the options
        declare qk_norm="l2", it is the scale for q and k normalised to length one.
        """
        found = self.measurement(n, c=c)
        reader, scale = found.raw.reader, found.scores.scale
        sizes = reader.c, reader.value_width(reader.j), reader.h, reader.j
        return sizes, math.nan if scale is None else scale * (reader.c if self.declared.qk_norm == "l2" else 1)

    @cached_property
    def yarn_factor(self) -> float:
        """The factor by which YaRN (a scaling of rotary frequencies) multiplies the scale of q . k.

        The factor is 1 without YaRN, or if the measured scale does not contain it.
        """
        factor = 1.0 if self.rotary_scheme is None else self.rotary_scheme.beta_factor
        return factor if math.isclose(self.scales[0][1], factor * self.scales[0][0][0] ** -0.5, rel_tol=1e-3) else 1.0

    @property
    def scale_varies(self) -> bool:
        """Whether the scale of q . k differs between widths or lengths, so that it cannot be declared as one number."""
        first, near = self.scales[0][1], self.precision * 10
        return not all(math.isclose(scale, first, rel_tol=near) for _, scale in self.scales)

    @cached_property
    def scale_name(self) -> str:
        """The rule of the scale of q . k, such as "1/sqrt(c)", or the measured numbers if no known rule fits."""
        name = name_scale(self.scales, self.precision * 10)
        if name is None and self.yarn_factor != 1.0:
            return f"{self.yarn_factor:.4g}/sqrt(c), the scale of YaRN"
        if name is None and self.scale_varies:
            named = ("no constant" if math.isnan(scale) else f"{scale:.6g}" for _, scale in self.scales)
            return ", ".join(
                f"{each} at c={c}, j={j}" for each, ((c, _, _, j), _) in zip(named, self.scales, strict=True)
            )
        return name or f"{self.scales[0][1]:.6g}"

    def scale(self, inputs: AttentionInputs) -> float:
        """Return the scale of q . k for inputs of these sizes.

        The scale is computed by the measured rule, such as 1/sqrt(c). If no rule fits, it is measured at the width of
        the inputs. If that fails too, `expected_scale` is returned.
        """
        _, h, _, _, j, c, e = inputs.sizes
        rule = SCALES.get(self.scale_name)
        scale = self._scale_at(7, c)[1] if rule is None else rule(c, e, h, j)
        return scale if math.isfinite(scale) else self.expected_scale(inputs)

    def expected_scale(self, inputs: AttentionInputs) -> float:
        """Return the scale that the options declare, or by default 1/sqrt(c) times the factor of YaRN."""
        usual = self.yarn_factor * inputs.sizes[5] ** -0.5
        return usual if self.declared.scale is None else self.declared.scale

    @cached_property
    def has_gradients(self) -> bool:
        """Whether the output requires grad if the inputs do."""
        inputs = self.random_inputs(7, 7, dtype=torch.float32)
        return self(inputs.map(lambda x: x.clone().requires_grad_())).requires_grad

    @cached_property
    def mask_replaces_causal(self) -> bool:
        """Whether the attention ignores its causal mask when a mask argument is passed."""
        return self.mask is not None and self.mask.works and self.mask_shows_more

    @cached_property
    def mask_shows_more(self) -> bool:
        """Whether passing a mask that hides nothing makes keys visible that are hidden without a mask."""
        plain, masked = (self.flat_weights(7, 7, False, masked=masked) > 0 for masked in (False, True))
        return bool((masked & ~plain).any())

    @cached_property
    def padding(self) -> MaskArgument | None:
        """The argument of the attention that takes a Boolean padding mask (b, j); None if there is none."""
        name = self.find_parameter(PADDING_NAMES)
        return None if name is None else find_mask(self, [name], axes=("b j",))

    @cached_property
    def fully_masked_rows(self) -> str | None:
        """The output of a row that sees no key: "zeros", "nan", "mean", "unmasked", "other" or "refused".

        "mean" is the mean of all values, and "unmasked" is the output without the mask. "refused" means that the call
        raises an error. None if the attention has no mask argument that works.
        """
        if self.mask is None or not self.mask.works:
            return None
        inputs = self.random_inputs(5, 5, b=2, causal=False, dtype=torch.float32)
        try:
            return fully_masked_row(
                lambda **mask: self.weights(inputs, **mask), self.mask, inputs.pair_shape, torch.float32
            )
        except Exception:  # the function of the user may raise any exception
            return "refused"

    def expected(self, inputs: AttentionInputs) -> ExpectedAttention:
        """Return the conventions that determine the expected output for these inputs.

        Some of them are measured, others are declared by the options.
        """
        _, h, _, i, j, c, _ = inputs.sizes
        # a mask may replace the causal one or be added to it
        visible = (self.flat_weights(i, j, inputs.causal, h, inputs.visible is not None, c) > 0)[None]
        sink = self.measurement(h=h).bias.sink if self.declared.sink else None
        return ExpectedAttention(
            visible=visible if inputs.visible is None else visible & inputs.visible,
            scale=self.scale(inputs),
            grouping="tile" if self.grouping == "tile" else "repeat",
            rotation=self.rotation(c),
            rotary_alignment=self.rotary_alignment or "bottom-right",
            norm=self.declared.qk_norm,
            epsilon=self.scores.norm.epsilon if self.scores.norm is not None else 0.0,
            bias=self.bias(i, j, inputs.causal, h, c),
            softcap=self.declared.softcap,
            sink=None if sink is None else torch.tensor(sink),
        )

    def reference(self, inputs: AttentionInputs, **changes: Any) -> Float[Tensor, "b h i e"]:
        """Compute the expected output in float64 from the measured conventions.

        changes  fields of `ExpectedAttention` with values to use in place of the measured ones, such as scale=1.0
        """
        return replace(self.expected(inputs), **changes).reference(inputs)
