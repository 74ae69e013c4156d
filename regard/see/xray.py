"""X-ray: what an attention does, read from outside by choosing q, k and v.

Attention is linear in v, so v = identity reads the weights out of any black box. q = 0 leaves the mask and the bias;
what k adds to the logarithm of the weights are the scores; v = 1 in one key head shows who reads it. Everything is
measured; what cannot be told is None, with the reason in `notes`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.numbers import whole
from regard.base.seeds import generator
from regard.core.algebra import Mask
from regard.core.grid import Places
from regard.core.masks import blocks, causal, chunks, dilated, full, global_tokens, prefix, window
from regard.see.adapters import Probe, as_probe

READINGS = 64  # of an attention that draws at random: the largest of so many are the weights it kept
FAINT = 1e-18  # a weight this small beside its row's largest is hidden, even where it is not exactly zero
SMALL = 0.35  # the length of basis vectors: their scores stay where a soft-cap does not bend them
MASKS = ("mask", "attn_mask", "attention_mask", "visible", "src_mask")
OWN = "a mask of its own"


@dataclass(frozen=True)
class XRay:
    """What was found out about one attention. `print` it to read it."""

    name: str
    asked: str  # the sizes, dtype and layout it was asked with
    q: Float[Tensor, "b h i c"]  # drawn
    k: Float[Tensor, "b g j c"]
    weights: Float[Tensor, "b h i j"]  # of this q and k
    linear: bool | None  # in v; None where no two calls agree
    off: float | None  # how far the output is from weights @ v, as a share of it
    rows_sum: tuple[float, float]  # least and largest sum of a row that sees anything
    normalised: str | None  # over what weights sum to one: rows, rows and a sink, columns, heads, batch; None: nothing
    visible: Bool[Tensor, "b h i j"]
    described: str  # the mask in the words of regard.core.masks
    alignment: str | None  # where queries stand among more keys: "top-left" or "bottom-right"
    blind_rows: str | None  # what a row gives that sees nothing: "zeros", "NaN", "mean" or "unmasked"
    mask_argument: str | None  # the keyword that takes a mask
    mask_means: str | None  # what its True does: "keep" or "drop"; "added" where it takes numbers
    scale: float | None
    scales: tuple[float, ...] | None  # of each head
    scale_named: str | None
    residual: float | None  # what the scores found leave unexplained, as a share of them
    softcap: float | None
    qk_norm: str | None  # "rms" or "layer", or "unknown" where q or k is normalised in another way
    bias: Float[Tensor, "h i j"] | None  # what is added to the scores, centred in each row; zero where hidden
    bias_named: str | None
    slopes: tuple[float, ...] | None  # of ALiBi, for each head
    sink: tuple[float, ...] | None  # the logit of each head's sink
    groups: tuple[int, ...] | None  # the key head that each query head reads
    grouping: str | None  # "repeat", "tile", "one to one" or "shared"
    rotary: str | None  # the pairing: "half" or "interleaved"
    rotary_base: float | None
    rotary_width: int | None  # how many coordinates turn
    frequencies: tuple[float, ...] | None  # radians per position of each pair
    dropout: float | None  # share of weights zeroed in training
    dropped_in_eval: float  # the same in eval, where it should be 0
    deterministic: bool  # in eval
    notes: tuple[str, ...]

    def __str__(self) -> str:
        low, high = self.rows_sum
        sums = f"{low:.4g}" if math.isclose(low, high, rel_tol=1e-4) else f"{low:.4g} to {high:.4g}"
        lines = [
            ("weights", f"sum to one over {self.normalised or 'nothing'}; rows sum to {sums}"),
            ("values", self._linear_line()),
            ("mask", self.described + (f", aligned {self.alignment}" if self.alignment else "")),
            ("blind row", self.blind_rows or "not seen"),
            ("scale", self._scale_line()),
            ("bias", (self.bias_named or "not found out") + (f"; m = {_listed(self.slopes)}" if self.slopes else "")),
            ("sink", "none" if self.sink is None else "logits " + _listed(self.sink)),
            (
                "heads",
                "not found out" if self.groups is None else f"read key heads {list(self.groups)}: {self.grouping}",
            ),
            ("rotary", self._rotary_line()),
            ("dropout", self._dropout_line()),
        ]
        if self.mask_argument:
            means = {"keep": "True is visible", "drop": "True is hidden", "added": "added to the scores"}
            lines.insert(3, ("argument", f"{self.mask_argument}=, {means[self.mask_means or 'added']}"))
        lines += [("note", note) for note in self.notes]
        return "\n".join([f"{self.name}, asked with {self.asked}", *(f"  {what:<10} {text}" for what, text in lines)])

    def _linear_line(self) -> str:
        if self.linear is None or self.off is None:
            return "not found out whether linear in v"
        return f"{'linear' if self.linear else 'NOT linear'} in v, off by {self.off:.0e}"

    def _scale_line(self) -> str:
        if self.scale is None and self.scales is None:
            return "not found out"
        value = f"{self.scale:.6g}" if self.scale is not None else _listed(self.scales or ())
        named = f" = {self.scale_named}" if self.scale_named else ""
        cap = f", soft-capped at {self.softcap:.4g}" if self.softcap else ""
        norm = f", after {self.qk_norm} norm" if self.qk_norm else ""
        return f"{value}{named}{cap}{norm}" + (f" (residual {self.residual:.0e})" if self.residual is not None else "")

    def _rotary_line(self) -> str:
        if self.rotary is None:
            explained = self.residual is not None and self.residual < 0.05
            return "none" if explained else "not found out"
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
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    seed: int = 0,
    **extra: Any,
) -> XRay:
    """The weights, mask, scale, bias, sink, grouping, rotary pairing and dropout of any attention.

    fn       a function of q, k and v in any layout, or a module: `regard.see.adapters.as_probe` says which
    queries  how many to ask with; a window or chunk wider than that does not show
    keys     as many as queries unless told
    dtype    of the question; float32 is used where the function refuses it
    extra    keywords handed on to the function at every call: is_causal=True, attn_mask=...
    """
    queries = whole("xray(queries)", queries, 3, "query positions")
    probe = as_probe(
        fn, heads=heads, kv_heads=kv_heads, width=width, queries=queries, keys=keys, device=device, **extra
    )
    j = queries if keys is None else whole("xray(keys)", keys, 3, "key positions")
    if probe.square and j != queries:
        raise ConfigError(
            f"{probe.name} makes queries and keys of one sequence, so keys={j} cannot differ from queries={queries}; "
            "leave keys out"
        )
    for what, said, own in (
        ("heads", heads, probe.heads),
        ("kv_heads", kv_heads, probe.kv_heads),
        ("width", width, probe.width),
    ):
        if said is not None and own not in (None, said):
            raise ConfigError(f"{probe.name} has {what}={own}, so it cannot be asked with {what}={said}; leave it out")
    h = probe.heads or heads or (6 if probe.grouped else 3)
    g = probe.kv_heads or kv_heads or (_fewer(h) if probe.grouped else h)
    c = probe.width or width or 8
    e = probe.value_width or (c if probe.equal_widths else None)
    spare = [probe.device.index or 0] if probe.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=spare), switched(probe.module, training=False):
        torch.manual_seed(seed)
        eye = _Eye(probe, 2, h, g, queries, j, c, e, extra)
        return _Plate(*eye.settled(dtype, seed)).developed()


@contextmanager
def switched(module: nn.Module | None, *, training: bool) -> Iterator[None]:
    """A module in training or in eval mode for a while; every part gets its own mode back."""
    modes = {} if module is None else {part: part.training for part in module.modules()}
    if module is not None:
        module.train(training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@dataclass(frozen=True)
class _Eye:
    """The instrument: the attention, the sizes it is asked with, and how its weights are read."""

    probe: Probe
    b: int
    h: int
    g: int
    i: int
    j: int
    c: int
    e: int | None  # None where values may be as wide as wanted
    extra: Mapping[str, Any]
    dtype: torch.dtype = torch.float64
    readings: int = 1
    affine: bool = False  # v = 0 gives something of its own, which is taken off
    larger: float = 1.0  # what dropout keeps is larger by this factor
    coarse: float = 0.0  # how far the answer to three times v is from three times the answer

    def settled(self, dtype: torch.dtype, seed: int) -> tuple["_Eye", Tensor, Tensor, Tensor, list[str]]:
        """The instrument in a dtype that is taken, with drawn q, k and v, and what there is to note."""
        source = generator(seed)
        shapes = (
            (self.b, self.h, self.i, self.c),
            (self.b, self.g, self.j, self.c),
            (self.b, self.g, self.j, self.e or 5),
        )
        drawn = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
        refused: Exception | None = None
        for kind in dict.fromkeys((dtype, torch.float32, self.probe.dtype)):
            eye = replace(self, dtype=kind)
            try:
                eye.ask(*drawn)
            except Exception as error:  # whatever a function of somebody else raises is its refusal
                refused = refused or error
                continue
            q, k, v = (x.to(kind).double() for x in drawn)
            notes = [] if kind == dtype else [f"asked in {kind}, since {dtype} was refused: {_first_line(refused)}"]
            return eye, q, k, v, notes
        raise ConfigError(
            f"{self.probe.name} refused q {shapes[0]}, k {shapes[1]}, v {shapes[2]} in {dtype} and float32: "
            f"{_first_line(refused)}; say queries=, heads=, kv_heads= or width= where it needs certain ones"
        )

    @property
    def rounding(self) -> float:
        """What may be left of a fit and still be rounding; layers compute parts in float32 even where asked in more."""
        return max({torch.float64: 1e-5, torch.float32: 1e-4}.get(self.dtype, 0.05), 10 * self.coarse)

    def ask(self, q: Tensor, k: Tensor, v: Tensor, **more: object) -> Float[Tensor, "b h i e"]:
        """The part of the answer that v makes."""
        out = self.answer(q, k, v, **more)
        return out - self.answer(q, k, 0 * v, **more) if self.affine else out

    def answer(self, q: Tensor, k: Tensor, v: Tensor, **more: object) -> Float[Tensor, "b h i e"]:
        asked = [x.to(self.probe.device, self.dtype) for x in (q, k, v)]
        return self.probe.call(*asked, **{**self.extra, **more}).double().cpu()

    def once(self, q: Tensor, k: Tensor, **more: object) -> Float[Tensor, "b h i j"]:
        """The weights by v = identity, a slice at a time where values cannot be as wide as there are keys."""
        b, j = len(k), k.shape[2]
        e = self.e or j
        parts = []
        for start in range(0, j, e):
            v = torch.zeros(b, self.g, j, e, dtype=torch.float64)
            some = range(start, min(start + e, j))
            v[:, :, some, [key - start for key in some]] = 1
            parts.append(self.ask(q, k, v, **more)[..., : len(some)])
        return torch.cat(parts, -1)

    def weights(self, q: Tensor, k: Tensor, **more: object) -> Float[Tensor, "b h i j"]:
        """The weights; of several readings the largest, which is the weight wherever it was not dropped."""
        read = self.once(q, k, **more)
        for _ in range(self.readings - 1):
            read = torch.maximum(read, self.once(q, k, **more))
        return read / self.larger


@dataclass(frozen=True)
class _Turn:
    """A rotation of coordinates by position."""

    pairing: str
    first: int
    frequencies: tuple[float, ...]

    @property
    def width(self) -> int:
        return 2 * len(self.frequencies)

    def pairs(self) -> list[tuple[int, int]]:
        size = len(self.frequencies)
        if self.pairing == "half":
            return [(self.first + pair, self.first + pair + size) for pair in range(size)]
        return [(self.first + 2 * pair, self.first + 2 * pair + 1) for pair in range(size)]

    def applied(self, x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n c"]:
        phases = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor(self.frequencies, dtype=x.dtype)
        a, b = (list(side) for side in zip(*self.pairs(), strict=True))
        turned = x.clone()
        turned[..., a] = x[..., a] * phases.cos() - x[..., b] * phases.sin()
        turned[..., b] = x[..., a] * phases.sin() + x[..., b] * phases.cos()
        return turned

    def base(self) -> float | None:
        """The base whose falling powers the frequencies are, or None where they are no such row."""
        steps = torch.arange(len(self.frequencies), dtype=torch.float64) / len(self.frequencies)
        found = torch.tensor(self.frequencies, dtype=torch.float64)
        if len(found) < 2 or bool((found <= 0).any()):
            return None
        trust = found**2  # a slow turn is measured less exactly
        base = math.exp(-float((trust * steps * found.log()).sum() / (trust * steps**2).sum()))
        return base if bool((found / base**-steps - 1).abs().max() < 0.02) else None


@dataclass
class _Plate:
    """What the instrument has seen so far of one attention; each step adds what it found out."""

    eye: _Eye
    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    notes: list[str]
    found: dict[str, Any] = field(default_factory=dict)

    def developed(self) -> XRay:
        eye = self.eye
        answers = [eye.answer(self.q, self.k, self.v) for _ in range(3)]
        self.found["deterministic"] = all(torch.equal(answers[0].nan_to_num(), x.nan_to_num()) for x in answers[1:])
        nothing = eye.answer(self.q, self.k, 0 * self.v).nan_to_num().abs().max()
        if nothing > 1e-6:
            self.notes.append(
                f"v = 0 gives up to {float(nothing):.2g}: something is added to the values, taken off here"
            )
        readings = 1 if self.found["deterministic"] else READINGS
        self.eye = eye = replace(eye, readings=readings, affine=bool(nothing > 1e-6))
        # only rounding, or a function that is not linear at all, tells three times v from v
        coarse = _apart(3 * eye.ask(self.q, self.k, self.v), eye.ask(self.q, self.k, 3 * self.v))
        coarse = coarse if self.found["deterministic"] and coarse < 0.02 else 0.0
        if coarse > 1e-5:
            self.notes.append(f"it computes coarsely, to a share of {coarse:.0e}, so small things do not show")
        self.eye = eye = replace(eye, coarse=coarse)
        self.flat = eye.weights(0 * self.q, 0 * self.k)
        self.drawn = eye.weights(self.q, self.k)
        self._see()
        self.found["dropped_in_eval"] = 0.0
        if not self.found["deterministic"] and bool(self.awake.any()):
            larger = float(self.flat.sum(-1)[self.awake].median())  # every weight was kept in some reading
            self.found["dropped_in_eval"] = self._dropped(lambda: larger)
            if self.found["dropped_in_eval"]:
                self.eye = eye = replace(eye, larger=larger)
                self.flat, self.drawn = self.flat / larger, self.drawn / larger
        if bool(self.awake.any()):
            self._group()
            self._values()
            self._normalisation()
            self._mask()
            self._bias()
            self._sink()
            self._scores()
            self._dropout()
        else:
            self._nothing()
        lengths = f"b={eye.b} h={eye.h} g={eye.g} i={eye.i} j={eye.j} c={eye.c}"
        asked = f"{lengths} in {str(eye.dtype).removeprefix('torch.')} as ({eye.probe.layout})"
        return XRay(
            name=eye.probe.name,
            asked=asked,
            q=self.q,
            k=self.k,
            weights=self.drawn,
            visible=self.visible,
            notes=tuple(self.notes),
            **self.found,
        )

    def _nothing(self) -> None:
        """All that can be told where no query sees any key."""
        gives = "NaN" if bool(self.flat.isnan().any()) else "zeros"
        self.notes.append(f"no query sees any key: everything is {gives}, and tells nothing")
        unknown = {each.name for each in fields(XRay)} - set(self.found)
        self.found |= dict.fromkeys(unknown - {"name", "asked", "q", "k", "weights", "visible", "notes"})
        self.found |= {"described": repr(~full()), "blind_rows": gives, "rows_sum": (0.0, 0.0)}

    def _see(self) -> None:
        """Who sees whom: whatever has weight where q = 0."""
        flat = self.flat
        self.still = 0 * self.q, 0 * self.k
        self.divides = bool(flat.isnan().all()) and not bool(self.drawn.isnan().all())
        if self.divides:
            self.notes.append("q = 0 and k = 0 give NaN, so the mask is read from drawn q and k, and the bias is not")
            self.still = self.q, self.k
            self.flat = flat = (self.drawn.abs() > 0).double()
        self.visible = _seen(flat)
        faint = flat.abs()[~self.visible & flat.isfinite()]
        if faint.numel() and faint.max() > 0:
            self.notes.append(f"hidden keys keep a weight of up to {float(faint.max()):.0e}: the mask value is finite")
        self.awake = self.visible.any(-1)

    def _group(self) -> None:
        """Which key head each query head reads: v = 1 in one of them, and k changed in one of them."""
        eye, q, k = self.eye, self.q, self.k
        share, moved = torch.zeros(eye.h, eye.g), torch.zeros(eye.h, eye.g, dtype=torch.bool)
        leak = 0.0
        for head in range(eye.g):
            v = torch.zeros_like(self.v)
            v[:1, head] = 1
            out = eye.ask(*self.still, v)[..., 0].masked_fill(~self.awake, 0)
            share[:, head] = out[0].sum(-1) / self.awake[0].sum(-1).clamp(min=1)
            leak = max(leak, float(out[1:].abs().max()))
            other = k.clone()
            other[:, head] = -other[:, head]
            change = (eye.weights(q, other) - self.drawn).masked_fill(~self.visible, 0)
            moved[:, head] = change.abs().amax((0, 2, 3)) > 1e-6
        if leak > 1e-6:
            self.notes.append(f"sequences are mixed: values of the first reach others with a weight of {leak:.2g}")
        own = share.abs().argmax(1)
        only = share.abs() > 1e-4
        self.found["groups"] = tuple(own.tolist()) if bool((only.sum(1) == 1).all()) else None
        self.found["grouping"] = None
        if self.found["groups"] is None:
            mixed = [head for head in range(eye.h) if int(only[head].sum()) != 1]
            self.notes.append(f"query heads {mixed} read the values of none or of several key heads")
        else:
            self.found["grouping"] = _grouping(self.found["groups"], eye.g)
        reads = moved.int().argmax(1)
        told = bool((moved.sum(1) == 1).all())
        self.key_heads = reads if told else own
        if bool((moved.sum(1) > 1).any()) and (self.found["deterministic"] or self.found["dropped_in_eval"]):
            self.notes.append("the weights of a query head depend on several key heads: heads are mixed")
        if told and self.found["groups"] is not None and not torch.equal(reads, own):
            self.notes.append(f"keys are read by another order than values: {reads.tolist()}")

    def _values(self) -> None:
        """Whether the weights explain the output of any v."""
        self.found["linear"] = self.found["off"] = None
        if not self.found["deterministic"]:
            return
        eye, v, groups = self.eye, self.v, self.found["groups"]
        if groups is None:  # the sum over key heads is what v = identity in all of them has read
            v, groups = v[:, :1].expand_as(v), (0,) * eye.h
        out = eye.ask(self.q, self.k, v)
        known = self.awake[..., None] & out.isfinite()
        apart = (out - self.drawn @ v[:, list(groups)])[known].abs()
        self.found["off"] = float(apart.max() / out[known].abs().max().clamp(min=1e-300)) if apart.numel() else 0.0
        self.found["linear"] = self.found["off"] < max(10 * eye.rounding, 1e-4)

    def _normalisation(self) -> None:
        """Over which axis the weights sum to one."""
        w = self.drawn.nan_to_num().masked_fill(~self.visible, 0)
        sums = w.sum(-1)[self.awake]
        self.found["rows_sum"] = (float(sums.min()), float(sums.max())) if sums.numel() else (0.0, 0.0)
        if bool((w < -1e-9).any()):
            self.notes.append("some weights are negative")
        self.found["normalised"] = None
        for name, axis in (("rows", -1), ("columns", -2), ("heads", 1), ("batch", 0)):
            some = self.visible.any(axis)
            if bool(some.any()) and bool(((w.sum(axis) - 1).abs()[some] < 10 * self.eye.rounding).all()):
                self.found["normalised"] = name
                break
        if self.found["normalised"] not in ("rows", None):
            self.notes.append(f"the softmax runs over {self.found['normalised']}, not over the keys of a row")

    def _mask(self) -> None:
        """The mask in words, how it is aligned, and what a row gives that sees nothing."""
        eye, seen = self.eye, self.visible
        alike = bool((seen == seen[:1]).all())
        each = [describe(head) for head in seen[0]]
        words = [name for name, _ in each]
        if not alike:
            self.found["described"] = f"{OWN}, which differs between sequences"
        elif len(set(words)) == 1 and (words[0] != OWN or bool((seen == seen[:, :1]).all())):
            self.found["described"] = words[0]
        else:
            self.found["described"] = "; ".join(f"head {head}: {word}" for head, word in enumerate(words))
        self.found["alignment"] = each[0][1]
        if eye.i == eye.j and not eye.probe.square and words[0] != "full()" and OWN not in words:
            longer = eye.i + 4
            k = torch.zeros(eye.b, eye.g, longer, eye.c, dtype=torch.float64)
            try:
                flat = eye.weights(0 * self.q, k)
                self.found["alignment"] = describe(_seen(flat)[0, 0])[1]
            except Exception as error:  # whatever a function of somebody else raises means that it cannot be asked
                self.notes.append(
                    f"alignment was not asked: {eye.i} queries of {longer} keys gave {_first_line(error)}"
                )
        blind = ~self.awake
        rows = self.flat[blind]
        self.found["blind_rows"] = None
        if rows.numel():
            self.found["blind_rows"] = "NaN" if bool(rows.isnan().any()) else "zeros"
        self.found["mask_argument"] = self.found["mask_means"] = None
        self._mask_argument()
        if bool((~seen & self.awake[..., None]).any()):
            steep = torch.full_like(self.q, 1e6), torch.full_like(self.k, -1e6)
            try:
                found = eye.weights(*steep)[~seen & self.awake[..., None]]
            except Exception as error:  # whatever a function of somebody else raises is its answer
                self.notes.append(f"very negative scores raise {_first_line(error)}")
                return
            if bool((found > 0).any()):
                self.notes.append("hidden keys win against very negative scores: the mask value is finite")

    def _mask_argument(self) -> None:
        """Hand in a mask, where one is taken, and look what it hides."""
        eye = self.eye
        rows, columns = torch.arange(eye.i)[:, None], torch.arange(eye.j)
        pattern = (rows + 2 * columns) % 3 != 0
        blind = pattern & (rows != eye.i // 2)
        for name in (each for each in MASKS if each in eye.probe.parameters and each not in eye.extra):
            for means, lead in (("keep", ()), ("keep", (eye.b, 1)), ("added", (eye.b, 1)), ("added", ())):
                handed = _as_mask(pattern, means, lead, eye.dtype).to(eye.probe.device)
                try:
                    seen = _seen(eye.weights(0 * self.q, 0 * self.k, **{name: handed}))
                except Exception:  # not taken in this form; the next may be
                    continue
                polarity = next(
                    (
                        meant
                        for meant, kept in ((means, pattern), ("drop", ~pattern))
                        if torch.equal(seen, self.visible & kept)
                    ),
                    None,
                )
                if polarity is None or torch.equal(seen, self.visible):
                    continue
                self.found["mask_argument"], self.found["mask_means"] = name, polarity
                handed = _as_mask(blind, polarity, lead, eye.dtype).to(eye.probe.device)
                self._blind_row(eye.i // 2, **{name: handed})
                return

    def _blind_row(self, row: int, **handed: Tensor) -> None:
        try:
            read = self.eye.weights(self.q, self.k, **handed)[:, :, row]
        except Exception as error:  # whatever a function of somebody else raises is its answer
            self.notes.append(f"a row that sees nothing raises {_first_line(error)}")
            return
        if bool(read.isnan().any()):
            self.found["blind_rows"] = "NaN"
        elif bool((read == 0).all()):
            self.found["blind_rows"] = "zeros"
        elif bool((read - read.mean(-1, keepdim=True)).abs().max() < 1e-6):
            self.found["blind_rows"] = "mean"
        elif bool((read - self.drawn[:, :, row]).abs().max() < 1e-6):
            self.found["blind_rows"] = "unmasked"
        else:
            self.notes.append("a row that sees nothing gives neither zeros nor NaN nor a mean")

    def _bias(self) -> None:
        """What is added to the scores: the logarithm of the weights where q = 0, centred in each row."""
        self.found |= {"bias": None, "bias_named": None, "slopes": None}
        if self.divides:
            return
        if self.found["normalised"] in ("columns", "heads", "batch"):
            self.notes.append("the bias was not read: that needs weights that are normalised along a row")
            return
        logs = self.flat.clamp(min=1e-300).log()
        count = self.visible.sum(-1, keepdim=True).clamp(min=1)
        centred = (logs - logs.masked_fill(~self.visible, 0).sum(-1, keepdim=True) / count).masked_fill(
            ~self.visible, 0
        )
        if float((centred - centred[:1]).abs().max()) > 10 * self.eye.rounding:
            self.notes.append("the bias differs between sequences; that of the first is given")
        self.found["bias"] = bias = centred[0]
        self.found["bias_named"], self.found["slopes"] = _bias_name(bias, self.visible[0], 10 * self.eye.rounding)

    def _sink(self) -> None:
        """The logit of what takes weight without giving a value: it is what a row lacks to one where q = 0."""
        self.found["sink"] = None
        lack = 1 - self.flat.masked_fill(~self.visible, 0).sum(-1)
        if self.found["normalised"] is not None or self.found["bias"] is None or not self.awake.any():
            return
        uniform = bool(((self.flat - 1 / self.eye.j).abs()[self.visible] < 1e-6).all())
        if uniform and not bool(self.visible[self.awake].all()):
            self.notes.append("weights are hidden after the softmax and not normalised again")
            return
        if bool((lack[self.awake] < self.eye.rounding).any()):
            return
        if float((self.drawn - self.flat).masked_fill(~self.visible, 0).sum(-1).abs().max()) < 1e-6:
            self.notes.append("rows sum to the same whatever q and k are: a gate or a factor acts on the output")
            return
        known = self.found["bias_named"] or ""
        if not known.startswith(("none", "ALiBi")):
            self.notes.append("rows sum to less than one, but beside a bias that is known up to a constant only")
            return
        place = torch.arange(self.eye.j)
        distance = (torch.arange(self.eye.i)[:, None] + self.eye.j - self.eye.i - place).abs()
        slopes = torch.tensor(self.found["slopes"] or [0.0] * self.eye.h, dtype=torch.float64)[:, None, None]
        # a bias is known up to a constant of each row; the right constants make the sink the same in all rows
        for bias in (-slopes * distance, slopes * place):
            logits = (lack.clamp(min=1e-300).log()[..., None] - self.flat.clamp(min=1e-300).log() + bias)[0]
            per_head = [logits[head][self.visible[0, head]] for head in range(self.eye.h)]
            if all(float(one.max() - one.min()) < 100 * self.eye.rounding for one in per_head):
                self.found["sink"] = tuple(float(one.mean()) for one in per_head)
                self.found["normalised"] = "rows and a sink"
                return

    def _scores(self) -> None:
        """The scale, and what else is done to q . k on the way to the scores."""
        names = ("scale", "scales", "scale_named", "residual", "softcap", "qk_norm")
        self.found |= dict.fromkeys((*names, "rotary", "rotary_base", "rotary_width", "frequencies"))
        eye = self.eye
        shown = self.drawn[self.visible]
        if shown.numel() and bool(((shown == 0) | ((shown - 1).abs() < 1e-9)).all()) and bool((shown == 0).any()):
            self.found |= {
                "scale": math.inf,
                "scales": (math.inf,) * eye.h,
                "scale_named": "hard: the largest takes all",
            }
            self.notes.append("hard attention shows no cap, norm or rotary")
            return
        if bool((shown == 0).any()) and self.found["deterministic"]:
            share = float((shown == 0).double().mean())
            self.notes.append(
                f"a share of {share:.2g} of the visible keys gets no weight at all: only the best are kept"
            )
        if not self.found["deterministic"] and not self.found["dropped_in_eval"]:
            self.notes.append("no two calls agree, so the weights are the largest of many readings, and tell no scale")
            return
        if self.divides or self.found["normalised"] in ("columns", "heads", "batch"):
            self._scale_beside({"columns": -2, "heads": 1, "batch": 0}.get(self.found["normalised"], -1))
            return
        self.keyed = bool((eye.weights(0 * self.q, self.k) - self.flat)[self.visible].abs().max() > 1e-6)
        if self.keyed:
            self.notes.append("keys change the weights even where q = 0: a term of k alone is left out of the scale")
        if bool((eye.weights(self.q, 0 * self.k) - self.flat)[self.visible].abs().max() > 1e-6):
            self.notes.append("queries change the weights even where k = 0: a term of q and position, left out here")
        scores = self.scores(self.q, self.k)
        if not bool(scores.isfinite().any()):
            self.notes.append("no row sees two keys side by side, so nothing tells the scale")
            return
        # loud enough for a cap to show, and not so loud that weights vanish
        loud = min(max(25 / max(float(scores.nan_to_num().abs().max()), 1e-9), 1.0), 1e4)
        louder = self.scores(loud * self.q, self.k)
        if self._fits(louder, loud * self.q, self.k):
            return
        doubled = [self.scores(2 * self.q, self.k), self.scores(self.q, 2 * self.k)]
        normed = tuple(_apart(scores, other) < 10 * eye.rounding for other in doubled)
        if any(normed):
            which = {(True, True): "q and k are", (True, False): "q is", (False, True): "k is"}[normed[0], normed[1]]
            self.notes.append(f"{which} normalised: a vector twice as long changes nothing")
            self.found["qk_norm"] = "unknown"
        turn = self._turn()
        if turn is not None:
            self.found["rotary"] = turn.pairing
        if self._explain(louder, loud * self.q, normed, turn):
            if turn is not None:
                base = turn.base()
                self.found |= {"rotary_base": base, "rotary_width": turn.width, "frequencies": turn.frequencies}
                if base is None and turn.width > 2:
                    self.notes.append("the frequencies of rotary are no powers of one base: stretched, or learned")
            return
        slopes, left = _slopes(louder, self.pairs(loud * self.q, self.k))
        self.found |= {"scales": tuple(slopes), "residual": left}
        if turn is not None:
            self.notes.append(
                "the pairing of rotary is read from single coordinates; drawn q and k do not confirm more"
            )
        self.notes.append(f"the scores are no linear function of q . k: a share of {left:.2g} is left unexplained")

    def _explain(self, scores: Tensor, queries: Tensor, normed: tuple[bool, ...], turn: _Turn | None) -> bool:
        """Whether q and k can be read so that the scores are linear in q . k, or linear up to a soft-cap."""
        eye = self.eye
        slack = 10 if turn else 3
        for norm in ("rms", "layer") if any(normed) else (None,):
            q = _normed(queries, norm) if normed[0] else queries
            k = _normed(self.k, norm) if normed[1] else self.k
            if turn is not None:
                q, k = turn.applied(q), turn.applied(k)
            if self._fits(scores, q, k, norm, slack):
                self.found["qk_norm"] = norm
                return True
            scale, cap, left = _capped(scores, self.pairs(q, k))
            # a cap far beyond every score is rounding that found a shape
            if left < slack * eye.rounding and cap < 30 * float(scores.nan_to_num().abs().max()):
                self.found |= {"scale": scale, "scales": (scale,) * eye.h, "softcap": cap, "residual": left}
                self.found |= {"qk_norm": norm, "scale_named": scale_name(scale, eye.h, eye.c, norm)}
                return True
        if self.found["normalised"] is None:
            sigmoid = self.drawn.logit() - eye.weights(self.q, 0 * self.k).logit()
            if self._fits(sigmoid.masked_fill(~self.visible, math.nan), self.q, self.k):
                self.notes.append("each weight is a sigmoid of its own score")
                return True
        return any(normed) and self._weighted(normed, turn, slack)

    def _weighted(self, normed: tuple[bool, ...], turn: _Turn | None, slack: float) -> bool:
        """Whether the scores are those of normalised vectors with a learned weight for each coordinate."""
        eye = self.eye
        enough = 4 * 4 * eye.c // (eye.b * eye.i * eye.j) + 1  # draws, for more equations than weights
        for norm in ("rms", "layer"):
            parts, told = [], []
            for draw in range(enough):
                source = generator(draw + 1)
                q, k = (torch.randn(x.shape, generator=source, dtype=torch.float64) for x in (self.q, self.k))
                told.append(self.scores(q, k))
                q, k = _normed(q, norm) if normed[0] else q, _normed(k, norm) if normed[1] else k
                parts.append(_products(q, k[:, self.key_heads], turn))
            terms, scores = torch.cat(parts), torch.cat(told)
            means, left = [], 0.0
            for head in range(eye.h):
                known = scores[:, head].isfinite()
                y, x = scores[:, head][known], terms[:, head][known]
                weights = torch.linalg.lstsq(x, y, driver="gelsd").solution
                means.append(float(weights.mean()))
                left = max(left, float((x @ weights - y).norm() / y.norm()))
            if left < slack * eye.rounding:
                self._scales(means, left, norm)
                self.found["qk_norm"] = norm
                self.notes.append("the norm weighs each coordinate by itself: the scale is the mean over coordinates")
                return True
        return False

    def scores(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        """What k adds to the scores of q; NaN where it cannot be told.

        Weights tell scores up to a constant of each row. So every second key is zero in turn: its score is known.
        """
        seen = self.visible if len(q) == len(self.visible) else self.visible[:1].expand(len(q), -1, -1, -1)
        without = self._log(q, 0 * k) - (self._log(0 * q, 0 * k) if self.keyed else 0)
        told = torch.full(seen.shape, math.nan, dtype=torch.float64)
        for parity in (0, 1):
            some = k.clone()
            some[:, :, parity::2] = 0
            gain = self._log(q, some) - (self._log(0 * q, some) if self.keyed else 0) - without
            zero = seen & gain.isfinite()
            zero[..., 1 - parity :: 2] = False
            constant = gain.masked_fill(~zero, 0).sum(-1, keepdim=True) / zero.sum(-1, keepdim=True)
            told[..., 1 - parity :: 2] = (gain - constant)[..., 1 - parity :: 2]
        return told.masked_fill(~seen | ~told.isfinite(), math.nan)

    def _log(self, q: Tensor, k: Tensor) -> Tensor:
        weights = self.eye.weights(q, k)
        # what was taken off leaves rounding, beside which a tiny weight means nothing
        return weights.masked_fill(weights < 1e-9, 0).log() if self.eye.affine else weights.log()

    def pairs(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        """q . k, each query head with the key head that it reads."""
        return torch.einsum("bhic,bhjc->bhij", q, k[:, self.key_heads])

    def _fits(self, scores: Tensor, q: Tensor, k: Tensor, norm: str | None = None, slack: float = 1) -> bool:
        """Whether the scores are a multiple of q . k; the multiple is then found."""
        slopes, left = _slopes(scores, self.pairs(q, k))
        if not left < slack * self.eye.rounding:
            return False
        self._scales(slopes, left, norm)
        return True

    def _scales(self, slopes: Sequence[float], left: float, norm: str | None) -> None:
        eye = self.eye
        known = [each for each in slopes if math.isfinite(each)]
        self.found["scales"] = tuple(slopes)
        self.found["residual"] = left
        spread = max(known) - min(known) if known else math.inf
        if spread <= 100 * eye.rounding * max((abs(each) for each in known), default=0.0) + 1e-12:
            self.found["scale"] = scale = sum(known) / len(known)
            self.found["scale_named"] = scale_name(scale, eye.h, eye.c, norm)
        else:
            self.notes.append("heads have scales of their own")

    def _scale_beside(self, axis: int) -> None:
        """The scale where no zero can be asked for or another axis sums to one: logarithms centred along that axis."""
        seen = self.visible
        logs = self.drawn.clamp(min=1e-300).log() - self.flat.clamp(min=1e-300).log()
        for norm in (None, "rms", "layer"):
            pairs = self.pairs(_normed(self.q, norm), _normed(self.k, norm)) if norm else self.pairs(self.q, self.k)
            both = []
            for x in (logs, pairs):
                mean = x.masked_fill(~seen, 0).sum(axis, keepdim=True) / seen.sum(axis, keepdim=True).clamp(min=1)
                both.append((x - mean).masked_fill(~seen, math.nan))
            slopes, left = _slopes(both[0], both[1])
            if left < self.eye.rounding:
                self._scales(slopes, left, norm)
                self.found["qk_norm"] = norm
                return
        self.notes.append("the scale was not found out: the logarithms of the weights are not linear in q . k")

    def _turn(self) -> _Turn | None:
        """The rotation of q and k by position, if there is one, from the scores of basis vectors."""
        eye = self.eye
        if eye.i != eye.j:
            self.notes.append("rotary was not looked for: that needs as many keys as queries")
            return None
        if eye.rounding > 1e-3:
            self.notes.append("rotary was not looked for: that needs finer numbers")
            return None
        own = self._coupled([(a, a) for a in range(eye.c)])
        size = own[:, 0].abs().clamp(min=1e-12)
        turning = [a for a in range(eye.c) if _spread(own[a]) > 1e-3 * float(size[a])]
        if not turning:
            return None
        first = turning[0]
        across = self._coupled([(first, b) for b in range(eye.c)])
        across[first] = 0
        partner = max(range(eye.c), key=lambda b: _spread(across[b]))
        step = partner - first
        if step < 1 or first + 2 * step > eye.c:
            self.notes.append("scores change with position, but not as if pairs of coordinates turned by i - j")
            return None
        pairing = "interleaved" if step == 1 and eye.c > 2 else "half"
        known = step if pairing == "half" else (eye.c - first) // 2
        pairs = _Turn(pairing, first, (0.0,) * known).pairs()
        there, back = self._coupled(pairs), self._coupled([(b, a) for a, b in pairs])
        found = []
        for at, (a, b) in enumerate(pairs):
            # both ways together, so that a weight that one of the coordinates has of its own drops out
            sines = there[at].sign() * (there[at] * back[at]).abs().sqrt() / (own[a][0] * own[b][0]).abs().sqrt()
            found.append(_frequency(own[a] / own[a][0], sines * own[a][0].sign()))
        if pairing == "interleaved":
            while found and abs(found[-1]) * eye.i < 1e-5:
                found.pop()  # beyond the last pair that turns
        if len(found) == 1:
            self.notes.append("a single pair turns, which is half and interleaved at once")
            pairing = "half"
        return _Turn(pairing, first, tuple(found))

    def _coupled(self, couples: list[tuple[int, int]]) -> Float[Tensor, "pairs distances"]:
        """The score of q = e_a and k = e_b by distance i - j = 0, 1, ..: the mean over all pairs that far apart."""
        try:
            rows = self._scores_of(couples)
        except Exception:  # it takes no more sequences than it was asked with
            size = self.eye.b
            rows = [row for start in range(0, len(couples), size) for row in self._scores_of(couples[start:][:size])]
        return torch.stack([torch.stack([row.diagonal(-far).nanmean() for far in range(self.eye.i)]) for row in rows])

    def _scores_of(self, couples: list[tuple[int, int]]) -> list[Tensor]:
        """The first head's scores of pairs of basis vectors, one pair in each sequence."""
        size = max(len(couples), self.eye.b)
        q, k = self.q.new_zeros(size, *self.q.shape[1:]), self.k.new_zeros(size, *self.k.shape[1:])
        for at, (a, b) in enumerate(couples):
            q[at, ..., a] = k[at, ..., b] = SMALL
        return list(self.scores(q, k)[: len(couples), 0])

    def _dropout(self) -> None:
        """The share of weights that training zeroes."""
        eye = self.eye
        self.found["dropout"] = None
        if eye.probe.module is None:
            if self.found["dropped_in_eval"]:
                self.notes.append("weights are dropped at every call: a function has no eval mode to tell it not to")
            return
        exact = eye.weights(*self.still)
        with switched(eye.probe.module, training=True):
            largest = replace(eye, readings=READINGS, larger=1.0)
            self.found["dropout"] = self._dropped(
                lambda: float((largest.weights(*self.still) / exact)[self.visible].median())
            )

    def _dropped(self, measure: Callable[[], float]) -> float:
        """The share of weights that are zeroed; `measure` gives the factor by which the others are larger."""
        eye = self.eye
        read = torch.stack([eye.once(*self.still)[self.visible] == 0 for _ in range(16)]).double()
        share = float(read.mean()) if read.numel() else 0.0
        if not share:
            return 0.0
        same = eye.answer(*self.still, torch.ones_like(self.v)).masked_fill(~self.awake[..., None], 0)
        if bool(((same - same[..., :1]).abs() > 1e-6).any()):
            self.notes.append("dropout acts on the output, not on the weights")
        larger = measure()
        exact = 1 - 1 / larger
        if abs(exact - share) < 5 * math.sqrt(share * (1 - share) / read.numel()) + 1e-3:
            return round(exact, 6)  # what is kept is larger by 1 / (1 - p), which tells p exactly
        self.notes.append(f"dropout makes what it keeps {larger:.4g} times as large, which is not 1 / (1 - p)")
        return share


def _seen(weights: Float[Tensor, "b h i j"]) -> Bool[Tensor, "b h i j"]:
    """The keys that have a weight worth the name."""
    size = weights.abs()
    return (size > FAINT * size.nan_to_num().amax(-1, keepdim=True)) & weights.isfinite()


def describe(visible: Bool[Tensor, "i j"]) -> tuple[str, str | None]:
    """A mask in the words of `regard.core.masks`, and where queries stand among the keys if that can be told."""
    for words, aligned in _drawn_candidates(*visible.shape):
        fits = [name for name, seen in aligned.items() if torch.equal(seen, visible)]
        if fits:
            return words, fits[0] if len(fits) < len(aligned) else None
    return OWN, None


@lru_cache(maxsize=16)
def _drawn_candidates(i: int, j: int) -> list[tuple[str, dict[str, Tensor]]]:
    """Each mask in words, and as a matrix for queries that are the last positions or the first."""
    aligned = {"bottom-right": Places(j - i), "top-left": Places(0)}
    return [
        (repr(mask), {name: mask.dense(i, j, places=places) for name, places in aligned.items()})
        for mask in _candidates(max(i, j))
    ]


def _candidates(n: int) -> Iterator[Mask]:
    """Masks by name, the simplest first."""
    yield from (full(), causal(), causal() & ~window())
    yield from (causal() & window(before=before) for before in range(1, n))
    yield from (window(None, after) for after in range(1, n))
    yield from (window(before, None) for before in range(n))
    yield from (window(before, after) for before in range(n) for after in range(n))
    for size in range(2, n):
        yield blocks(size)
        yield from (chunks(size, before, after) for before in (0, None, 1, 2) for after in (0, None, 1))
        yield causal() & blocks(size)
        yield from (causal() & chunks(size, before) for before in (1, 2))
        yield from (dilated(size), causal() & dilated(size))
        yield from (prefix(size - 1), causal() | prefix(size), causal() & prefix(size - 1))
        for before in range(n):
            yield causal() & window(before=before) | prefix(size - 1)
            yield window(before, before) | global_tokens(size - 1)


def scale_name(scale: float, heads: int, c: int, norm: str | None = None) -> str | None:
    """What a scale usually is called, or None."""
    names = {
        "c ** -0.5": c**-0.5,
        "1: not scaled": 1.0,
        "1 / c: c ** -0.5 twice": 1 / c,
        "c ** 0.5: multiplied where it should be divided": c**0.5,
        "(h c) ** -0.5: from the width of all heads": (heads * c) ** -0.5,
        "0: the mean of what is visible": 0.0,
    }
    for name, value in names.items():
        if math.isclose(scale, value, rel_tol=1e-3, abs_tol=1e-9):
            return name
    return None if norm is None else f"{scale * c:.4g} on vectors of length one"


def _grouping(groups: Sequence[int], g: int) -> str:
    h = len(groups)
    if list(groups) == list(range(h)):
        return "one to one"
    if g == 1:
        return "shared"
    if h % g == 0 and list(groups) == [head // (h // g) for head in range(h)]:
        return "repeat"
    return "tile" if list(groups) == [head % g for head in range(h)] else "an order of its own"


def _bias_name(
    bias: Float[Tensor, "h i j"], visible: Bool[Tensor, "h i j"], rounding: float
) -> tuple[str, tuple[float, ...] | None]:
    """The bias in words, and the slopes of each head where it is ALiBi."""
    h, i, j = bias.shape
    if float(bias.abs().max()) < rounding:
        return "none", None
    # only differences between keys of a row are known, so they are what is compared along diagonals
    steps = bias[..., 1:] - bias[..., :-1]
    both = visible[..., 1:] & visible[..., :-1]
    distance = torch.arange(j - 1) - (torch.arange(i)[:, None] + j - i)  # of the left key, seen from the query
    slopes, relative = [], True
    for head in range(h):
        seen = both[head]
        by_distance = {int(far): steps[head][seen & (distance == far)] for far in distance[seen].unique()}
        relative &= all(float(each.max() - each.min()) < rounding for each in by_distance.values())
        slopes.append({far: float(each.mean()) for far, each in by_distance.items()})
    if not relative:
        return "a bias of its own", None
    rises = [{far: step for far, step in each.items() if far < 0} for each in slopes]
    falls = [{far: step for far, step in each.items() if far >= 0} for each in slopes]
    flat = [_one(list(each.values()), rounding) for each in rises]
    down = [_one(list(each.values()), rounding) for each in falls]
    if all(slope is not None for slope in flat):
        slopes_found = tuple(float(slope or 0.0) for slope in flat)
        if not any(falls):
            return "ALiBi: -m |i - j|, which is +m j where only earlier keys are visible", slopes_found
        pairs = list(zip(flat, down, strict=True))
        if all(b is not None and a is not None and abs(a + b) < rounding for a, b in pairs):
            return "ALiBi: -m |i - j|", slopes_found
        if all(b is not None and a is not None and abs(a - b) < rounding for a, b in pairs):
            return "ALiBi: +m j", slopes_found
    return "relative: a function of j - i, as T5's", None


def _one(values: list[float], rounding: float) -> float | None:
    """The value, where all are the same."""
    return values[0] if values and max(values) - min(values) < rounding else None


def _slopes(scores: Float[Tensor, "b h i j"], pairs: Float[Tensor, "b h i j"]) -> tuple[list[float], float]:
    """The slope of each head's scores on q . k, and the largest share that it leaves unexplained."""
    known = scores.isfinite()
    s, x = scores.masked_fill(~known, 0), pairs.masked_fill(~known, 0)
    slopes = (s * x).sum((0, 2, 3)) / (x * x).sum((0, 2, 3))
    left = (s - slopes[:, None, None] * x).square().sum((0, 2, 3)).sqrt()
    whole_of = s.square().sum((0, 2, 3)).sqrt()
    share = torch.where(whole_of > 1e-9 * x.square().sum((0, 2, 3)).sqrt(), left / whole_of, torch.zeros_like(left))
    share = share[slopes.isfinite()]
    return slopes.tolist(), float(share.max()) if share.numel() else math.inf


def _apart(a: Tensor, b: Tensor) -> float:
    """How far two score maps are from each other, as a share of the first."""
    known = a.isfinite() & b.isfinite()
    return float((a - b)[known].norm() / a[known].norm()) if bool(known.any()) else math.inf


def _capped(scores: Tensor, pairs: Tensor) -> tuple[float, float, float]:
    """The scale and the cap of cap tanh(scale q . k / cap) that explain the scores best, and what they leave."""
    known = scores.isfinite()
    s, x = scores[known], pairs[known]
    start = float((s * x).sum() / (x * x).sum())
    sign = math.copysign(1.0, start)
    best = torch.tensor([abs(start) * 1.5, float(s.abs().max()) * 1.5 + 1e-12], dtype=torch.float64).log()

    def error(logs: Tensor) -> tuple[Tensor, Tensor]:
        scale, cap = logs.exp()
        bent = torch.tanh(sign * scale * x / cap)
        straight = 1 - bent**2
        columns = (sign * scale * x * straight, cap * bent - sign * scale * x * straight)
        return cap * bent - s, torch.stack(columns, 1)

    damping = 1e-3
    left, slope = error(best)
    for _ in range(80):
        squares = slope.T @ slope
        step = torch.linalg.solve(squares + damping * torch.diag(squares.diagonal() + 1e-30), slope.T @ left)
        further, tilt = error(best - step)
        if bool(further.isfinite().all()) and float(further.norm()) < float(left.norm()):
            best, left, slope, damping = best - step, further, tilt, damping / 3
        else:
            damping *= 4
    scale, cap = best.exp().tolist()
    return sign * scale, cap, float(left.norm() / s.norm()) if float(s.norm()) else math.inf


def _normed(x: Tensor, kind: str | None) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return centred * centred.square().mean(-1, keepdim=True).rsqrt()


def _products(q: Tensor, k: Tensor, turn: _Turn | None) -> Float[Tensor, "b h i j terms"]:
    """The products of coordinates that make up a score, each turned as rotary turns it."""
    outer = q[:, :, :, None] * k[:, :, None]
    if turn is None:
        return outer
    a, b = (list(side) for side in zip(*turn.pairs(), strict=True))
    rest = [each for each in range(q.shape[-1]) if each not in (*a, *b)]
    distance = torch.arange(q.shape[2], dtype=q.dtype)[:, None] - torch.arange(k.shape[2], dtype=q.dtype)
    phases = distance[..., None] * torch.tensor(turn.frequencies, dtype=q.dtype)
    there, back = q[:, :, :, None, a] * k[:, :, None, :, b], q[:, :, :, None, b] * k[:, :, None, :, a]
    turned = [outer[..., a] * phases.cos(), outer[..., b] * phases.cos(), there * phases.sin(), -back * phases.sin()]
    return torch.cat([*turned, outer[..., rest]], -1)


def _spread(values: Tensor) -> float:
    """The range of those that are known."""
    known = values[values.isfinite()]
    return float(known.max() - known.min()) if known.numel() else 0.0


def _frequency(cosines: Tensor, sines: Tensor) -> float:
    """Radians per position, from the cosine and the sine of the turn at distances 0, 1, .."""
    phases = torch.atan2(sines, cosines)
    total, weight, guess = 0.0, 0.0, float(phases[1])
    for far in (far for far in range(1, len(phases)) if phases[far].isfinite()):
        turns = round((guess * far - float(phases[far])) / (2 * math.pi))
        total += far * (float(phases[far]) + 2 * math.pi * turns)
        weight += far * far
        guess = total / weight
    return guess


def _as_mask(visible: Bool[Tensor, "i j"], means: str, lead: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A mask in the form that an argument may take."""
    if means == "added":
        shaped = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -math.inf)
    else:
        shaped = ~visible if means == "drop" else visible
    return shaped.expand(*lead, *visible.shape)


def _fewer(heads: int) -> int:
    """The largest number of key heads below that of the heads that divides it and leaves more than one."""
    return max((number for number in range(2, heads) if heads % number == 0), default=heads)


def _first_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
