"""X-ray: measure a black-box attention from outside and print what it does.

The attention is called with chosen q, k and v. It is linear in v, so the output for v = identity is the weights. The
weights for q = 0 show the mask and the bias. The logarithm of the weights, minus the logarithm for k = 0, shows the
scores. Values of 1 in one key head, and 0 in the others, show which query heads use this key head. The measurements are
in `regard.see.measure`; a property that cannot be measured is None, and `notes` has the reason.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.core.masks import full
from regard.see.adapters import as_probe
from regard.see.measure import AttentionMeasurement, measure_attention
from regard.see.measure.biases import BiasReading
from regard.see.measure.heads import HeadReading
from regard.see.measure.linearity import LinearityReading
from regard.see.measure.masks import MaskReading
from regard.see.measure.probes.probe import Probe
from regard.see.measure.scale import ScoreReading


@dataclass(frozen=True, kw_only=True)
class XRay(LinearityReading, MaskReading, ScoreReading, BiasReading, HeadReading):
    """The measured conventions of an attention function: mask, scale, bias, heads and more. `print` shows them.

    Each query head has its own key head in this function:

    >>> xray(torch.nn.functional.scaled_dot_product_attention).grouping
    'one to one'
    """

    name: str
    sizes: str  # sizes, dtype and layout of the calls
    q: Float[Tensor, "b h i c"]  # random
    k: Float[Tensor, "b g j c"]
    weights: Float[Tensor, "b h i j"]  # the weights of this q and k
    visible: Bool[Tensor, "b h i j"]
    dropout: float | None = None  # probability in training
    dropout_in_eval: float  # probability in eval mode, where it should be 0
    deterministic: bool  # whether two calls in eval mode give the same output
    notes: tuple[str, ...]

    def __str__(self) -> str:
        low, high = self.row_sums
        sums = f"{low:.4g}" if math.isclose(low, high, rel_tol=1e-4) else f"{low:.4g} to {high:.4g}"
        meaning = {"keep": "True is visible", "drop": "True is hidden", "additive": "added to the scores"}
        slopes = f"; m = {_join(self.slopes)}" if self.slopes else ""
        lines = [
            ("weights", f"sum to one over {self.normalised or 'nothing'}; rows sum to {sums}"),
            ("values", self._values_line()),
            ("mask", self.mask + (f", aligned {self.alignment}" if self.alignment else "")),
            ("argument", self.mask_argument and f"{self.mask_argument}=, {meaning[self.mask_polarity or 'additive']}"),
            ("empty rows", self.fully_masked_rows or "none seen"),
            ("scale", self._scale_line()),
            ("bias", (self.bias_name or "unknown") + slopes),
            ("sink", "none" if self.sink is None else "logits " + _join(self.sink)),
            ("heads", f"read key heads {list(self.value_heads)}: {self.grouping}" if self.value_heads else "unknown"),
            ("rotary", self._rotary_line()),
            ("dropout", self._dropout_line()),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join([f"{self.name}, with {self.sizes}", *(f"  {what:<10} {text}" for what, text in lines if text)])

    def _values_line(self) -> str:
        if self.linearity_error is None:
            return "unknown whether the output is linear in v"
        if self.linear and not self.equals_weights_at_v:
            return f"linear in v, but not weights @ v, off by {self.linearity_error:.0e}"
        return f"{'linear' if self.linear else 'NOT linear'} in v, off by {self.linearity_error:.0e}"

    def _scale_line(self) -> str:
        if self.scales is None:
            return "unknown"
        value = f"{self.scale:.6g}" if self.scale is not None else _join(self.scales)
        name = f" = {self.scale_name}" if self.scale_name else ""
        cap = f", soft-capped at {self.softcap:.4g}" if self.softcap else ""
        norm = f", after {self.qk_norm} norm" if self.qk_norm else ""
        return f"{value}{name}{cap}{norm}" + (f" (residual {self.residual:.0e})" if self.residual is not None else "")

    def _rotary_line(self) -> str:
        if self.rotary is None:
            return "none" if self.residual is not None and self.residual < 0.05 else "unknown"
        base = "no single base" if self.rotary_base is None else f"base {self.rotary_base:.5g}"
        width = "" if self.rotary_width is None else f", {self.rotary_width} coordinates rotated"
        return f"{self.rotary} pairs, {base}{width}"

    def _dropout_line(self) -> str:
        training = "" if self.dropout is None else f"{self.dropout:.2g} of the weights in training, "
        training = "none in training, " if self.dropout == 0 else training
        if self.dropout_in_eval:
            return f"{training}{self.dropout_in_eval:.2g} ALSO IN EVAL"
        return training + ("none in eval" if self.deterministic else "none in eval, but two equal calls differ")


def xray(
    fn: object,
    *,
    queries: int = 7,
    keys: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    layout: str | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    seed: int = 0,
    **extra: Any,
) -> XRay:
    """Measure the weights, mask, scale, bias, sink, grouping, rotary pairing and dropout of any attention function.

    fn                      a function of q, k and v in any known layout, or a module; see `regard.see.as_probe`
    queries                 number of queries; a window or chunk mask that is wider than this number cannot be detected
    keys                    number of keys; by default the number of queries
    heads, kv_heads, width  numbers of query heads and key heads, and width of one head; by default those of a module,
                            or numbers that work
    layout                  "b h n c", "b n h c", "n b h c", "b n c", "n b c" or "n c"; None finds it by trial calls. n
                            is the axis of positions, c the width of a head
    dtype                   dtype of q, k and v; float32 is used if the function raises an error
    extra                   keyword arguments passed to the function at every call: is_causal=True, attn_mask=...

    >>> xray(torch.nn.functional.scaled_dot_product_attention).scale_name
    '1/sqrt(c)'
    """
    queries = check_integer("xray(queries)", queries, 3, "query positions")
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "width": width}
    for name, size in sizes.items():
        if size is not None:
            check_integer(f"xray({name})", size, 1)
    j = queries if keys is None else check_integer("xray(keys)", keys, 3, "key positions")
    probe = as_probe(fn, **sizes, layout=layout, queries=queries, keys=keys, device=device, **extra)
    if probe.square and j != queries:
        raise ConfigError(
            f"{probe.name} makes queries and keys from one sequence, so keys={j} cannot differ from queries={queries}; "
            "leave keys out"
        )
    for name, size in sizes.items():
        own = getattr(probe, name)
        if size is not None and own not in (None, size):
            raise ConfigError(f"{probe.name} has {name}={own}, so {name}={size} cannot be used; leave it out")
    return _present(measure_attention(probe, queries=queries, keys=j, **sizes, dtype=dtype, seed=seed, extra=extra))


def _present(measured: AttentionMeasurement) -> XRay:
    """Convert an `AttentionMeasurement` to an `XRay`; a property that could not be measured is None, with a note."""
    raw = measured.raw
    measured.notes.extend(_filled_in_notes(raw.reader.probe, raw.reader.extra))
    values: dict[str, Any] = {
        "name": raw.reader.probe.name,
        "sizes": str(raw.reader),
        "q": raw.q,
        "k": raw.k,
        "weights": raw.random,
        "visible": raw.visible,
        "dropout_in_eval": measured.dropout_in_eval,
        "deterministic": raw.deterministic,
    }
    if measured.sees_nothing:
        output = "nan" if bool(raw.flat.isnan().any()) else "zeros"
        measured.notes.append(f"no query sees any key: every output is {output}, so nothing can be measured")
        values |= {"mask": repr(~full()), "fully_masked_rows": output}
    else:
        for part in (measured.heads, measured.linearity, measured.mask, measured.bias, measured.scores):
            values |= vars(part)
        dropout = measured.dropout
        values |= vars(measured.linearity_with_sink()) | {"dropout": None if dropout is None else dropout.probability}
    return XRay(**values, notes=tuple(measured.notes))


def _filled_in_notes(probe: Probe, extra: object) -> list[str]:
    """Return notes on required arguments that the caller did not pass, and for which a value was chosen."""
    notes = [probe.note] if probe.note else []
    for name in probe.filled_in:
        if name not in (extra if isinstance(extra, dict) else {}):
            value = "was computed from the config" if name == "position_embeddings" else "is None"
            notes.append(f"{name} was not passed and {value}; pass {name}= to choose it")
    return notes


def _join(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
