"""Facts about numbers: outputs, gradients, precision and extremes, held against the definition in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import LONG, Findings, half_hidden
from regard.conform.example import Ask, Raised, Shows, drawn_example, example
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import equal, kept_in_kind, refusal, seeded
from regard.conform.inputs import Inputs
from regard.conform.shrink import Complaint, failure
from regard.conform.tolerance import GRADIENT, OUTPUT, allowed, error, same
from regard.see.measure.read_weights import training_mode

FACTS: Registry[Fact] = Registry("fact")

IN_FLOAT32 = 1e-6  # of the largest number: some work in float32 whatever comes, which is no fault in itself
SHAPES: tuple[dict[str, Any], ...] = (
    {"i": 7, "j": 7},
    {"i": 13, "j": 13, "b": 1, "c": 12},
    {"i": 3, "j": 11, "h": 6, "g": 2},
    {"i": 37, "j": 37},
)
# what kernels are chosen by: one head, many that share one key head, values as wide as keys, and length
CHOOSING: tuple[dict[str, Any], ...] = (
    {"i": 5, "j": 5, "h": 1, "c": 64, "e": 64},
    {"i": 5, "j": 5, "h": 12, "c": 128, "e": 128},
    {"i": 5, "j": 5, "b": 3, "h": 6, "g": 1},
    {"i": 3, "j": LONG, "b": 1, "h": 2},
    {"i": LONG, "j": LONG, "b": 1, "h": 1},
)
DROPPED = 0.25  # not a half, which is as much dropped as kept


def shapes(f: Findings) -> list[dict[str, Any]]:
    """The sizes to compare numbers at. What it may refuse, such as lengths beyond a context, is then left out."""
    if "shapes" not in f.memo:
        free = f.subject.free_lengths
        plain = [sizes for sizes in SHAPES if free or sizes["i"] == sizes["j"]]
        # as many queries as keys only where few of them cannot be had
        others = [sizes for sizes in CHOOSING if sizes["j"] != LONG or (sizes["i"] != LONG) == free]
        f.memo["shapes"] = plain + [
            sizes for sizes in others if refusal(f, f.subject.draw(dtype=torch.float32, **sizes)) is None
        ]
    kept: list[dict[str, Any]] = f.memo["shapes"]
    return kept


def far(f: Findings, inputs: Inputs) -> Complaint | None:
    """The complaint about an output that is farther from the truth than the naive method's, twice over."""
    view = f.view(inputs)
    truth = view.truth(inputs)
    got = f.subject(inputs).detach()
    most = allowed(view.naive(inputs), truth, OUTPUT)
    if inputs.dtype == torch.float64:
        most = max(most, IN_FLOAT32 * truth.abs().max().item())
    if view.norm is not None:
        most += 3e-5 * truth.abs().max().item()  # each norm adds an epsilon of its own
    if view.rotary is not None:
        most += 4e-6 * truth.abs().max().item()  # phases are float32, and each project rounds them in its own order
    off = error(got, truth)
    if off <= most:
        return None
    said, allow = apart(off, most)
    return Complaint(f"off by {said} in {inputs.dtype}, {allow} is allowed", got, truth.to(got.dtype))


def apart(off: float, most: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to tell them apart, two at least."""
    pairs = ((f"{off:.{digits}e}", f"{most:.{digits}e}") for digits in range(1, 17))
    return next((pair for pair in pairs if pair[0] != pair[1]), (repr(off), repr(most)))


@fact(
    FACTS,
    "one-key",
    student="With one key there is nothing to choose: the answer is its value.",
    engineer="i = j = 1 works, and a single key weighs 1.",
    cause="squeeze() without an axis, a loop that starts at 1, a variance over one number",
    explained_by=("causality", "one-query"),
)
def one_key(f: Findings) -> Failure | None:
    inputs = f.subject.draw(1, 1, dtype=torch.float32)

    def judge(inputs: Inputs) -> Complaint | None:
        inputs = replace(inputs, v=torch.ones_like(inputs.v))
        if (raised := refusal(f, inputs)) is not None:
            return Complaint(f"one key raises {raised.kind}: {raised.words}", raised)
        weights = f.subject(inputs).detach()
        if bool((weights - 1).abs().max() <= 1e-5) or f.declared.sink:
            return None
        words = f"a single key weighs {weights.flatten()[0].item():.4g}, not 1"
        show = "torch.ones_like(v)"
        return Complaint(words, weights, torch.ones_like(weights), lambda ask: [f"out = {ask('q', 'k', show)}"])

    return failure(f.subject, inputs, kept_in_kind(judge))


@fact(
    FACTS,
    "outputs",
    student="The answer is the weighted mean of the values, and nothing else.",
    engineer="Outputs are at most 2x as far from float64 as the naive method in the same dtype, plus one ulp.",
    cause="an approximation, an accumulation in lower precision, or something this checker has no name for yet",
    explained_by=("mask-ignored", "grouping", "causality", "last-rows-alone"),
)
def outputs(f: Findings) -> Failure | None:
    for dtype in (f.subject.dtype, torch.float32):
        for sizes in shapes(f):
            if sizes in CHOOSING and dtype != torch.float32:
                continue
            inputs = f.subject.draw(dtype=dtype, **sizes)
            if (found := failure(f.subject, inputs, lambda inputs: far(f, inputs))) is not None:
                return found
    return None


@fact(
    FACTS,
    "gradient-mode",
    student="The answer is the same, whether somebody takes notes for learning from it or not.",
    engineer="Under torch.no_grad(), and where q, k and v require gradients, outputs are those of an ordinary call.",
    cause="a fused path that is taken only without gradients, and computes something else (pytorch#97111)",
    explained_by=("outputs",),
)
def gradient_mode(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7, dtype=torch.float32)

    def unrecorded(inputs: Inputs) -> Complaint | None:
        with torch.no_grad():
            got = f.subject(inputs)
        expected = f.subject(inputs).detach()
        words = f"under torch.no_grad() the output is {error(got, expected):.1e} away from that of an ordinary call"
        shows = _beside(lambda ask: f"torch.no_grad()({ask.name}){ask().removeprefix(ask.name)}")
        return None if same(got, expected) else Complaint(words, got, expected, shows)

    def recorded(inputs: Inputs) -> Complaint | None:
        got, expected = f.subject(with_gradients(inputs)).detach(), f.subject(inputs).detach()
        words = f"with gradients the output is {error(got, expected):.1e} away from that of an ordinary call"
        leaves = [f"{x}.clone().requires_grad_()" for x in ("q", "k", "v")]
        shows = _beside(lambda ask: f"{ask(*leaves)}.detach()")
        return None if same(got, expected) else Complaint(words, got, expected, shows)

    return failure(f.subject, inputs, unrecorded) or failure(f.subject, inputs, recorded)


def _beside(out: Callable[[Ask], str]) -> Shows:
    """How an answer is written beside that of an ordinary call."""
    return lambda ask: [f"expected = {ask()}", f"out = {out(ask)}"]


@fact(
    FACTS,
    "rotary-precision",
    student="The hand of a clock has to be read finely, or late hours look alike.",
    engineer="Rotary phases are float32 at least, whatever the dtype of q: 200 and 201 differ in bfloat16 too.",
    cause="positions or frequencies cast to the dtype of the model (transformers#25681)",
    explained_by=("outputs", "output-dtype"),
)
def rotary_precision(f: Findings) -> Failure | None:
    if f.scores.rotary is None:
        raise NotApplicableError("it has no rotary positions inside")
    inputs = f.subject.draw(301, 301, b=1, h=2, dtype=torch.bfloat16)
    try:
        f.subject(inputs)
    except Exception as refused:
        raise NotApplicableError("it does not take bfloat16") from refused

    def judge(inputs: Inputs) -> Complaint | None:
        complaint = far(f, inputs)
        words = "" if complaint is None else f"{inputs.q.shape[2]} positions in bfloat16: {complaint.words}"
        return None if complaint is None else replace(complaint, words=words)

    return failure(f.subject, inputs, judge, square=True)


@fact(
    FACTS,
    "half-precision",
    student="Coarse numbers in, coarse numbers out; but the sums between are done finely.",
    engineer="bfloat16 and float16 outputs are at most 2x as far from float64 as the naive method in that dtype.",
    cause="sums of products or of weights accumulated in half precision; scores rounded several times",
    explained_by=("outputs", "output-dtype", "rotary-precision"),
)
def half_precision(f: Findings) -> Failure | None:
    ran = False
    for dtype in (torch.bfloat16, torch.float16):
        for inputs in (f.subject.draw(7, 7, c=12, dtype=dtype), f.subject.draw(61, 61, b=1, c=64, dtype=dtype)):
            try:
                f.subject(inputs)
            except Exception:
                continue
            ran = True
            if (found := failure(f.subject, inputs, lambda inputs: far(f, inputs))) is not None:
                return found
    if not ran:
        raise NotApplicableError("it takes neither bfloat16 nor float16")
    return None


@fact(
    FACTS,
    "finite-mask-value",
    student="Forbidden is forbidden, not merely very unlikely.",
    engineer="A hidden key gets no weight even where every visible score is -3e5 or -1e10.",
    cause="masked_fill(-1e9) or -1e4 in place of -inf: a score below it loses to what is hidden (TransformerLens#385)",
)
def finite_mask_value(f: Findings) -> Failure | None:
    hides = f.band is not None and (f.band.before is not None or f.band.after is not None)
    maskable = f.subject.mask is not None and f.subject.mask.obeyed
    if not hides and not maskable:
        raise NotApplicableError("nothing is hidden, and it takes no mask")
    if f.scores.rotary is not None:
        raise NotApplicableError("positions turn queries and keys, so their product cannot be made alike for all pairs")

    def judge(inputs: Inputs) -> Complaint | None:
        # only keys that v names, and only in rows that see others but none of these: how those share is rounding
        visible = f.view(inputs).visible.expand(*inputs.q.shape[:3], inputs.k.shape[2])
        named = (inputs.v != 0).any(-1).any(1)[:, None, None, :]
        rows = (visible.any(-1) & ~(visible & named).any(-1))[..., None]
        got = f.subject(inputs).detach()
        if not bool((rows & (got.abs() > 1e-3)).any()):
            return None
        words = "what is hidden has weight where visible scores are very negative"
        return Complaint(words, got, got.masked_fill(rows, 0.0))

    calls = []
    if hides:
        plain = f.subject.draw(11, 11, b=1, dtype=torch.float32)
        calls += [replace(plain, v=_naming(plain, slice(at, at + 1))) for at in (10, 0)]
    if maskable:
        covered = half_hidden(f.subject.draw(5, 5, b=1, dtype=torch.float32, causal=False))
        assert covered.visible is not None
        assert f.subject.mask is not None
        if f.subject.mask.per_row:
            covered.visible[:, :, -1] = True  # what nobody sees may be cleared before it is weighed
        calls += [replace(covered, v=_naming(covered, slice(3, None)))]
    for size in (1e10, 3e5):
        for inputs in calls:
            # q . k is about the same negative number for every pair
            root = (size / (inputs.q.shape[-1] * max(f.scale(inputs), 1e-9))) ** 0.5
            inputs = replace(inputs, q=torch.full_like(inputs.q, -root), k=torch.full_like(inputs.k, root))
            if (found := failure(f.subject, inputs, judge)) is not None:
                return found
    return None


def _naming(inputs: Inputs, keys: slice) -> Tensor:
    """Values that are one in those keys and zero elsewhere, so that the output is their weight."""
    v = torch.zeros_like(inputs.v)
    v[:, :, keys] = 1.0
    return v


@fact(
    FACTS,
    "overflow",
    student="However large a score is, weights stay shares between 0 and 1.",
    engineer="Scores of 1e4 in float32, and of 40 in float16, give finite outputs that match float64.",
    cause="exp(scores) without subtracting the largest of the row first",
    explained_by=("outputs",),
)
def overflow(f: Findings) -> Failure | None:
    for dtype, size in ((torch.float32, 1e4), (torch.float16, 40.0)):
        inputs = f.subject.draw(7, 7, dtype=dtype)
        # one product of each row is as large as asked for, others are anything between
        factor = size / max((inputs.q.double() @ _spread(inputs).mT).abs().max().item() * f.scale(inputs), 1e-9)
        inputs = replace(inputs, q=inputs.q * factor**0.5, k=inputs.k * factor**0.5)
        try:
            f.subject(inputs)
        except Exception:
            continue

        def judge(inputs: Inputs) -> Complaint | None:
            got = f.subject(inputs).detach()
            if bool(got.isfinite().all()):
                return None
            return Complaint("large scores give NaN or infinity", got, f.view(inputs).truth(inputs).to(got.dtype))

        if (found := failure(f.subject, inputs, judge)) is not None:
            return found
    return None


def _spread(inputs: Inputs) -> Tensor:
    return inputs.k.double().repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1)


@fact(
    FACTS,
    "extreme-scores",
    student="When one key fits far better than all others, its value is the answer.",
    engineer="Scores of +-1e4 give what float64 gives, to the rounding of float32 scores.",
    cause="scores clamped or capped, a temperature or epsilon added to the sum",
    explained_by=("outputs", "overflow", "finite-mask-value"),
)
def extreme_scores(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7, dtype=f.subject.dtype)

    def judge(inputs: Inputs) -> Complaint | None:
        # the smallest steps between scores of this size decide little, so only clear winners are compared
        truth = f.view(inputs).truth(inputs)
        got = f.subject(inputs).detach()
        if error(got, truth) <= 1e-2 * truth.abs().max().item():
            return None
        return Complaint("scores of thousands do not give what float64 gives", got, truth.to(got.dtype))

    return failure(f.subject, replace(inputs, q=100 * inputs.q, k=100 * inputs.k), judge)


def _gradient(f: Findings, name: str) -> Failure | None:
    for sizes in shapes(f):
        if sizes in (SHAPES[3], *CHOOSING[:3]):
            continue
        inputs = f.subject.draw(dtype=f.subject.dtype if sizes == SHAPES[1] else torch.float32, **sizes)
        if ("gradients", *inputs.sizes) not in f.memo:
            if not f.carries_gradients:
                raise NotApplicableError("its output carries no gradient at all")
            # the gradients of all three come from one pass, so they are judged together
            f.memo["gradients", *inputs.sizes] = off_gradients(f, inputs)
        if f.memo["gradients", *inputs.sizes][name] is None:
            continue
        found = failure(f.subject, inputs, lambda inputs: off_gradients(f, inputs)[name])
        if found is not None:
            return found
    return None


def gradient_lines(name: str) -> Shows:
    """How the gradient of one of q, k and v is written."""

    def show(ask: Ask) -> list[str]:
        return [
            "for x in (q, k, v):",
            "    x.requires_grad_()",
            f"out = {ask()}",
            "above = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).sin().to(out.dtype)",
            f"gradient = torch.autograd.grad(out, {name}, above, materialize_grads=True)[0]",
        ]

    return show


def off_gradients(f: Findings, inputs: Inputs) -> dict[str, Complaint | None]:
    """The complaint about each gradient, if there is one."""
    view = f.view(inputs)
    got, naive = gradients(f, inputs), _through(view.naive, inputs, None)
    complaints: dict[str, Complaint | None] = {}
    for name, truth in _through(view.truth, inputs, torch.float64).items():
        most = allowed(naive[name], truth, GRADIENT)
        if inputs.dtype == torch.float64:
            most = max(most, 4 * IN_FLOAT32 * max(1.0, truth.abs().max().item()))
        if view.norm is not None:
            most += 1e-4 * truth.abs().max().item()
        if view.rotary is not None:
            most += 1e-5 * truth.abs().max().item()
        off = error(got[name], truth)
        said, allow = apart(off, most)
        words = f"the gradient of {name} is off by {said}, {allow} is allowed"
        complaints[name] = (
            None if off <= most else Complaint(words, got[name], truth.to(got[name].dtype), gradient_lines(name))
        )
    return complaints


def with_gradients(inputs: Inputs) -> Inputs:
    """The same numbers, as leaves that gather gradients."""
    return inputs.having(**{name: getattr(inputs, name).clone().requires_grad_() for name in ("q", "k", "v")})


def upstream(x: Tensor) -> Tensor:
    """A fixed gradient from above, different for every entry."""
    return torch.linspace(-1, 2, x.numel(), dtype=torch.float64).reshape(x.shape).sin().to(x.dtype)


def gradients(f: Findings, inputs: Inputs) -> dict[str, Tensor]:
    return _through(f.subject, inputs, None)


def _through(run: object, inputs: Inputs, dtype: torch.dtype | None) -> dict[str, Tensor]:
    assert callable(run)
    leaves = [getattr(inputs, name).to(dtype or inputs.dtype).clone().requires_grad_() for name in ("q", "k", "v")]
    out = run(replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2]))
    grads = torch.autograd.grad(out, leaves, upstream(out), materialize_grads=True)
    return dict(zip(("q", "k", "v"), grads, strict=True))


_GRADIENTS = {
    "q": ("how the question would have to change", "q detached or cast on the way, or a backward pass of one's own"),
    "k": ("how the keys would have to change", "shared key heads whose query heads are not all summed; k detached"),
    "v": ("how the values would have to change", "weights dropped or masked forward and not backward; v detached"),
}
for _name, (_words, _cause) in _GRADIENTS.items():
    fact(
        FACTS,
        f"gradient-of-{_name}",
        student=f"Learning follows the gradient, which says {_words}: it belongs to the very answer that was given.",
        engineer=f"The gradient of {_name} is at most 3x as far from float64 as the naive method's, plus one ulp.",
        cause=f"{_cause} (pytorch#158212, #146377)",
        explained_by=("outputs", "inputs-changed", "gradient-mode"),
    )(partial(_gradient, name=_name))


@fact(
    FACTS,
    "dropout",
    student="What is dropped in training is made up for by what stays: on average nothing changes.",
    engineer="With dropout p, or in train(), a share p of weights is zero and the others are divided by 1 - p.",
    cause="weights dropped without scaling, dropout on scores, values or the output, or on whole keys",
)
def dropout(f: Findings) -> Failure | None:
    name = f.subject.dropout_argument
    if name is None:
        return _dropped_in_training(f)
    inputs = f.subject.draw(31, 31, b=3, c=8)
    flat = replace(inputs, q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    seeded(0)
    try:
        columns = f.subject(flat, **{name: DROPPED}).detach().double()
    except Exception as refused:
        raise NotApplicableError(f"{name}={DROPPED} is refused: {str(refused).splitlines()[0]}") from refused
    dropped = columns[..., 0]
    mean = dropped.mean().item()
    if bool((columns - dropped[..., None]).abs().max() > 1e-3):
        shows = _dropping(name, "apart = bool((out - sums[..., None]).abs().max() > 1e-3)")
        words = f"{name}={DROPPED} falls on values or on the output, not on weights: columns of equal values differ"
        return Failure(words, example(f.subject, flat, True, False, shows, {}))
    if abs(mean - 1) > 0.1 and (whole := _dropped_whole(f, flat, name)) is not None:
        return whole  # so few are drawn then that their mean is a matter of luck
    if abs(mean - 1) > 0.1 and not f.declared.sink:
        words = f"with {name}={DROPPED} the weights of a row sum to {mean:.2f} on average, not to 1"
        return Failure(words, example(f.subject, flat, mean, 1.0, _dropping(name, "mean = sums.mean().item()"), {}))
    if not bool((dropped - 1).abs().max() > 0.05):
        shows = _dropping(name, "changes = bool((sums - 1).abs().max() > 0.05)")
        words = (
            f"{name}={DROPPED} {'falls on scores, not on weights' if _drops(f, inputs, name) else 'changes nothing'}"
        )
        return Failure(words, example(f.subject, flat, False, True, shows, {}))
    return _dropped_whole(f, flat, name)


def _dropped_in_training(f: Findings) -> Failure | None:
    """The complaint about a module in training, which drops a share that it does not tell."""
    module = f.subject.probe.module
    if module is None:
        raise NotApplicableError("it has no dropout argument")
    inputs = f.subject.draw(15, 15, b=3)
    flat = inputs.having(q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    exact, whole = f.subject.weights(flat), f.subject(flat).detach()
    read = []
    with training_mode(module, training=True):
        seeded(0)
        first = f.subject(flat).detach()
        for seed in range(4):
            seeded(seed)
            read.append(f.subject.weights(flat))
    if all(equal(weights, exact) for weights in read):
        raise NotApplicableError("it has no dropout argument, and drops no weight in training")
    if bool((first - first[..., :1]).abs().max() > 1e-3):
        raise NotApplicableError("in training its output is dropped too, so that what happens to weights does not show")
    seen = exact > 0
    times = torch.stack(read).double() / torch.where(seen, exact, 1.0).double()
    gone = (times == 0) & seen
    kept = times[~gone & seen.expand_as(gone)]
    if not bool(gone.any()) or not len(kept) or bool((kept - kept.median()).abs().max() > 1e-3 * kept.median()):
        raise NotApplicableError("it is random in training, but not by weights that are dropped")
    share, larger = (gone.sum() / seen.expand_as(gone).sum()).item(), kept.median().item()
    if abs(1 - 1 / larger - share) <= 5 * _luck(gone, seen) + 1e-3:
        return None

    def show(ask: Ask) -> list[str]:
        return [*_switched_on(ask), "torch.manual_seed(0)", f"mean = {ask()}.double().mean().item()"]

    words = (
        f"in training about {share:.0%} of the weights are zero and the others {larger:.4g} times as large, not "
        f"{1 / (1 - share):.3g} times, so that rows do not sum to 1 on average"
    )
    mean, wanted = (x.double().mean().item() for x in (first, whole))
    return Failure(words, example(f.subject, flat, mean, wanted, show, {}))


def _luck(gone: Tensor, seen: Tensor) -> float:
    """By how much the share of dropped weights may be off by chance, be they dropped one by one or together."""
    off: list[float] = []
    for axes in ((3,), (4,), (3, 4)):
        share = gone.sum(axes).double() / seen.sum([axis - 1 for axis in axes]).clamp(min=1)
        off.append(share.std().item() / share.numel() ** 0.5)
    return max(off)


def _switched_on(ask: Ask) -> list[str]:
    """The lines that make what is asked one in training."""
    made = [line.replace(".eval()", ".train()") for line in ask.before if line.startswith("attend = ")]
    return made or ["probe.module.train()"]


def _drops(f: Findings, inputs: Inputs, name: str) -> bool:
    """Whether dropout changes an ordinary answer."""
    seeded(0)
    return error(f.subject(inputs, **{name: DROPPED}).detach(), f.subject(inputs).detach()) > 1e-3


def _dropped_whole(f: Findings, flat: Inputs, name: str) -> Failure | None:
    """The complaint about weights that are dropped together, or not in the share that was asked for."""
    part = "[..., -5:, :16]"  # what a causal mask shows too
    if bool((f.subject.weights(flat)[..., -5:, :16] == 0).any()):
        return None
    seeded(0)
    gone = f.subject.weights(flat, **{name: DROPPED})[..., -5:, :16] == 0
    # where v has a fixed width, weights are read in several calls, each of which drops others
    for axis, what in ((3, "rows"), (2, "keys")) if f.subject.free_widths else ():
        if bool((gone.all(axis) == gone.any(axis)).all()):
            last = f"whole = bool((gone.all({axis}) == gone.any({axis})).all())"
            words = f"{name}={DROPPED} drops whole {what}, not each weight by itself"
            return Failure(words, example(f.subject, flat, True, False, _gone(name, part, last), {}))
    share = gone.double().mean().item()
    if abs(share - DROPPED) <= 0.12:
        return None
    shows = _gone(name, part, "share = gone.double().mean().item()")
    words = f"{name}={DROPPED} makes {share:.0%} of the weights zero"
    return Failure(words, example(f.subject, flat, share, DROPPED, shows, {}))


def _gone(name: str, part: str, last: str) -> Shows:
    """How the weights that were dropped are written."""

    def show(ask: Ask) -> list[str]:
        return ["torch.manual_seed(0)", f"gone = {ask.weights(f'{name}={DROPPED}')}{part} == 0", last]

    return show


def _dropping(name: str, last: str) -> Shows:
    """How the sums of what is left of the weights are written."""

    def show(ask: Ask) -> list[str]:
        out = f"out = {ask('q', 'k', 'v', f'{name}={DROPPED}')}.double()"
        return ["torch.manual_seed(0)", out, "sums = out[..., 0]", last]

    return show


@fact(
    FACTS,
    "train-and-eval-differ",
    student="With nothing to drop, training and use give the same answer.",
    engineer="A module with dropout 0 gives the same numbers after train() and after eval().",
    cause="a fast path that is taken in eval() only and computes something else (pytorch#97111)",
)
def train_and_eval(f: Findings) -> Failure | None:
    module = f.subject.probe.module
    if module is None:
        raise NotApplicableError("it is a function")
    inputs = f.subject.draw(7, 7)
    outs = []
    for training, seed in ((True, 0), (True, 1), (False, 0)):
        with training_mode(module, training=training):
            seeded(seed)
            outs.append(f.subject(inputs).detach())
    if not torch.equal(outs[0], outs[1]):
        raise NotApplicableError("it is random in training, as with dropout, so both differ on purpose")
    off = error(outs[0], outs[2])
    words = f"train() and eval() are {off:.1e} apart"

    def judge(inputs: Inputs) -> Complaint | None:
        outs = []
        for training in (True, False):
            with training_mode(module, training=training):
                outs.append(f.subject(inputs).detach())
        if error(*outs) <= 1e-5:
            return None
        return Complaint(words, outs[1], outs[0], lambda ask: [*_in_training(ask), f"out = {ask()}"])

    return None if off <= 1e-5 else failure(f.subject, inputs, judge, words) or Failure(words)


def _in_training(ask: Ask) -> list[str]:
    """The lines that ask the same in training, to be compared with."""
    made = [line for line in ask.before if line.startswith("attend = ")]
    return [
        *(line.replace("attend = ", "training = ").replace(".eval()", ".train()") for line in made),
        f"expected = {ask().replace('attend(', 'training(', 1)}",
        *made,
    ]


@fact(
    FACTS,
    "compile",
    student="A faster way to compute the same thing computes the same thing.",
    engineer="torch.compile (traced whole or in parts, run eagerly) gives the numbers that the plain call gives.",
    cause="a branch on torch.compiler.is_compiling(), Python state read while tracing",
    slow=True,
)
def compiled(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7)
    plain = f.subject(inputs).detach()
    given = f.subject.causal_given(inputs.causal)
    if inputs.k.shape[1] < inputs.q.shape[1] and "enable_gqa" in f.subject.probe.parameters:
        given["enable_gqa"] = True
    torch._dynamo.reset()
    try:
        fast = torch.compile(f.subject.probe.call, backend="aot_eager")(inputs.q, inputs.k, inputs.v, **given).detach()
    except Exception as refused:
        raised = Raised.of(refused)
        words = f"torch.compile raises {raised.kind}: {raised.words}"
        return Failure(words, drawn_example(f.subject, inputs, raised, None, _compiling, 1000 * f.subject.seed))
    finally:
        torch._dynamo.reset()
    off = error(fast, plain)
    if off <= 1e-5:
        return None
    words = f"the compiled call is {off:.1e} away from the plain one"
    return Failure(words, drawn_example(f.subject, inputs, fast, plain, _compiling, 1000 * f.subject.seed))


def _compiling(ask: Ask) -> list[str]:
    compiled = f'torch.compile({ask.name}, backend="aot_eager")'
    return [f"expected = {ask()}", f"out = {compiled}{ask().removeprefix(ask.name)}"]
