"""X-ray: what an attention does, read from outside by choosing q, k and v.

Attention is linear in v, so v = identity reads the weights out of any black box. q = 0 leaves the mask and the bias;
what k adds to the logarithm of the weights are the scores; v = 1 in one key head shows who reads it. Everything is
measured; what cannot be told is None, with the reason in `notes`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.core.masks import full
from regard.see.adapters import as_probe
from regard.see.measure.biases import Bias, read_bias
from regard.see.measure.dropout import dropped_in_training, seen_through
from regard.see.measure.groups import Groups, read_groups
from regard.see.measure.linearity import Sums, read_sums
from regard.see.measure.masks import Masked, read_mask
from regard.see.measure.measurement import Plate, exposed
from regard.see.measure.probes.probe import fewer
from regard.see.measure.read_weights import Eye, training_mode
from regard.see.measure.scale import Scale, read_scale


@dataclass(frozen=True, kw_only=True)
class XRay(Sums, Masked, Scale, Bias, Groups):
    """What was found out about one attention. `print` it to read it."""

    name: str
    asked: str  # the sizes, dtype and layout it was asked with
    q: Float[Tensor, "b h i c"]  # drawn
    k: Float[Tensor, "b g j c"]
    weights: Float[Tensor, "b h i j"]  # of this q and k
    visible: Bool[Tensor, "b h i j"]
    dropout: float | None = None  # share of weights zeroed in training
    dropped_in_eval: float  # the same in eval, where it should be 0
    deterministic: bool  # in eval
    notes: tuple[str, ...]

    def __str__(self) -> str:
        low, high = self.rows_sum
        sums = f"{low:.4g}" if math.isclose(low, high, rel_tol=1e-4) else f"{low:.4g} to {high:.4g}"
        means = {"keep": "True is visible", "drop": "True is hidden", "added": "added to the scores"}
        lines = [
            ("weights", f"sum to one over {self.normalised or 'nothing'}; rows sum to {sums}"),
            ("values", self._linear_line()),
            ("mask", self.described + (f", aligned {self.alignment}" if self.alignment else "")),
            ("argument", self.mask_argument and f"{self.mask_argument}=, {means[self.mask_means or 'added']}"),
            ("blind row", self.blind_rows or "not seen"),
            ("scale", self._scale_line()),
            ("bias", (self.bias_named or "not found out") + (f"; m = {_listed(self.slopes)}" if self.slopes else "")),
            ("sink", "none" if self.sink is None else "logits " + _listed(self.sink)),
            ("heads", f"read key heads {list(self.groups)}: {self.grouping}" if self.groups else "not found out"),
            ("rotary", self._rotary_line()),
            ("dropout", self._dropout_line()),
            *(("note", note) for note in self.notes),
        ]
        told = (f"  {what:<10} {text}" for what, text in lines if text)
        return "\n".join([f"{self.name}, asked with {self.asked}", *told])

    def _linear_line(self) -> str:
        if self.off is None:
            return "not found out whether linear in v"
        if self.linear and not self.explained:
            return f"linear in v, but not weights @ v, off by {self.off:.0e}"
        return f"{'linear' if self.linear else 'NOT linear'} in v, off by {self.off:.0e}"

    def _scale_line(self) -> str:
        if self.scales is None:
            return "not found out"
        value = f"{self.scale:.6g}" if self.scale is not None else _listed(self.scales)
        named = f" = {self.scale_named}" if self.scale_named else ""
        cap = f", soft-capped at {self.softcap:.4g}" if self.softcap else ""
        norm = f", after {self.qk_norm} norm" if self.qk_norm else ""
        return f"{value}{named}{cap}{norm}" + (f" (residual {self.residual:.0e})" if self.residual is not None else "")

    def _rotary_line(self) -> str:
        if self.rotary is None:
            return "none" if self.residual is not None and self.residual < 0.05 else "not found out"
        base = "no single base" if self.rotary_base is None else f"base {self.rotary_base:.5g}"
        width = "" if self.rotary_width is None else f", {self.rotary_width} coordinates turn"
        return f"{self.rotary} pairs, {base}{width}"

    def _dropout_line(self) -> str:
        training = "" if self.dropout is None else f"{self.dropout:.2g} of the weights in training, "
        training = "none in training, " if self.dropout == 0 else training
        if self.dropped_in_eval:
            return f"{training}{self.dropped_in_eval:.2g} ALSO IN EVAL"
        return training + ("nothing in eval" if self.deterministic else "nothing in eval, but no two calls agree")


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
    """The weights, mask, scale, bias, sink, grouping, rotary pairing and dropout of any attention.

    fn       a function of q, k and v in any layout, or a module: `regard.see.adapters.as_probe` says which
    queries  how many to ask with; a window or chunk wider than that does not show
    keys     as many as queries unless told
    layout   "b h n c", "b n h c", "n b h c", "b n c", "n b c" or "n c", where it shall not be found out by trying
    dtype    of the question; float32 is used where the function refuses it
    extra    keywords handed on to the function at every call: is_causal=True, attn_mask=...
    """
    queries = check_integer("xray(queries)", queries, 3, "query positions")
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "width": width}
    for what, said in sizes.items():
        if said is not None:
            check_integer(f"xray({what})", said, 1)
    j = queries if keys is None else check_integer("xray(keys)", keys, 3, "key positions")
    probe = as_probe(fn, **sizes, layout=layout, queries=queries, keys=keys, device=device, **extra)
    if probe.square and j != queries:
        raise ConfigError(
            f"{probe.name} makes queries and keys of one sequence, so keys={j} cannot differ from queries={queries}; "
            "leave keys out"
        )
    for what, said in sizes.items():
        own = getattr(probe, what)
        if said is not None and own not in (None, said):
            raise ConfigError(f"{probe.name} has {what}={own}, so it cannot be asked with {what}={said}; leave it out")
    h = probe.heads or heads or (6 if probe.grouped else 3)
    g = probe.kv_heads or kv_heads or (fewer(h) if probe.grouped else h)
    c = probe.width or width or 8
    e = probe.value_width or (c if probe.equal_widths else None)
    spare = [probe.device.index or 0] if probe.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=spare), training_mode(probe.module, training=False):
        torch.manual_seed(seed)
        return _developed(exposed(Eye(probe, 2, h, g, queries, j, c, e, extra), dtype, seed))


def _developed(plate: Plate) -> XRay:
    """Everything that can be read from a plate, in the order in which one reading needs another."""
    plate, in_eval = seen_through(plate)
    steady = plate.deterministic or in_eval > 0
    plate.notes.extend(_made_up(plate.eye))
    facts: dict[str, Any] = {
        "name": plate.eye.probe.name,
        "asked": str(plate.eye),
        "q": plate.q,
        "k": plate.k,
        "weights": plate.drawn,
        "visible": plate.visible,
        "dropped_in_eval": in_eval,
        "deterministic": plate.deterministic,
    }
    if bool(plate.awake.any()):
        groups = read_groups(plate, steady)
        sums = read_sums(plate, groups.groups)
        mask = read_mask(plate)
        bias = read_bias(plate, sums.normalised)
        if bias.sink is not None:
            sums = replace(sums, normalised="rows and a sink")
        scale = read_scale(plate, groups.key_heads, sums.normalised, steady)
        for part in (groups, sums, mask, bias, scale):
            facts |= vars(part)
        facts["dropout"] = dropped_in_training(plate, in_eval)
    else:
        gives = "NaN" if bool(plate.flat.isnan().any()) else "zeros"
        plate.notes.append(f"no query sees any key: everything is {gives}, and tells nothing")
        facts |= {"described": repr(~full()), "blind_rows": gives}
    return XRay(**facts, notes=tuple(plate.notes))


def _made_up(eye: Eye) -> list[str]:
    """Which arguments nobody handed over, and what they got: another value may give another attention."""
    return [
        f"{name} was not handed over, so it was "
        f"{'made from the config' if name == 'position_embeddings' else 'None'}; say {name}= to choose it"
        for name in eye.probe.made_up
        if name not in eye.extra
    ]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
