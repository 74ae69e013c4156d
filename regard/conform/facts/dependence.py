"""Facts about how numbers flow: which entries an answer may depend on, and how."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.base.registry import Registry
from regard.conform.conventions import LONG, Findings
from regard.conform.example import Ask, ending
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import equal, refusal
from regard.conform.inputs import Inputs
from regard.conform.shrink import Complaint, failure
from regard.conform.tolerance import error, same
from regard.see.measure.probes.hooked_layers import MEMORIES
from regard.see.measure.probes.probe import first_tensor
from regard.see.measure.probes.projections import known_projections

FACTS: Registry[Fact] = Registry("fact")


@fact(
    FACTS,
    "softmax-over-the-other-axis",
    student="Each query shares out one whole among the keys, not each key among the queries.",
    engineer="Weights of a row sum to one over j, and no other axis (b, h, i) is the one that sums to one.",
    cause="softmax(dim=-2), softmax(dim=1), or F.softmax without dim (detr#247)",
    fatal=True,
)
def softmax_axis(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7, b=3)

    def judge(inputs: Inputs) -> Complaint | None:
        weights = f.subject.weights(inputs)
        if sums_to_one(weights.sum(-1)):
            return None
        for axis, name in ((2, "queries"), (1, "heads"), (0, "batch entries")):
            if weights.shape[axis] > 1 and sums_to_one(weights.sum(axis)):
                return Complaint(
                    f"weights sum to one over the {name}, not over the keys",
                    weights.sum(-1),
                    torch.ones_like(weights.sum(-1)),
                    lambda ask: [f"weights = {ask.weights()}", "sums = weights.sum(-1)"],
                )
        return None

    return failure(f.subject, inputs, judge)


@fact(
    FACTS,
    "keys-ignored",
    student="The key decides how much of a value is taken; the value itself does not.",
    engineer="The output changes with k; weights are made of q and k, not of v.",
    cause="attend(q, v, v): one name mistyped, or the key projection assigned twice",
    fatal=True,
)
def keys_ignored(f: Findings) -> Failure | None:
    return _changes(f, "k")


@fact(
    FACTS,
    "queries-ignored",
    student="The answer depends on the question.",
    engineer="The output changes with q.",
    cause="attend(k, k, v): one name mistyped; scores made of k and k",
    fatal=True,
)
def queries_ignored(f: Findings) -> Failure | None:
    return _changes(f, "q")


@fact(
    FACTS,
    "values-ignored",
    student="What is looked up are the values.",
    engineer="The output changes with v.",
    cause="attend(q, k, k): one name mistyped, or the value projection made of the weights of keys",
    fatal=True,
)
def values_ignored(f: Findings) -> Failure | None:
    return _changes(f, "v")


@fact(
    FACTS,
    "k-and-v-swapped",
    student="The key is compared and the value is taken, not the other way round.",
    engineer="The output is linear in v, and made of scores of q and k: not linear in k, with scores of q and v.",
    cause="q, v, k = qkv.chunk(3): unpacked in another order; arguments in another order",
    fatal=True,
)
def values_swapped(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7)

    def judge(inputs: Inputs) -> Complaint | None:
        if inputs.k.shape != inputs.v.shape or _off_linear(f, inputs, "k") or not _off_linear(f, inputs, "v"):
            return None
        return Complaint(
            "the output is linear in k, and v is compared with q",
            True,
            False,
            lambda ask: [f"twice = {ask('q', '2 * k', 'v')}", f"swapped = bool(torch.allclose(twice, 2 * {ask()}))"],
        )

    return failure(f.subject, inputs, judge)


def _off_linear(f: Findings, inputs: Inputs, name: str) -> bool:
    """Whether the output is not linear in k, or in v."""
    x = getattr(inputs, name)
    other = x.flip(2) * 1.5
    together, one, two = (f.subject(inputs.having(**{name: y})).detach() for y in (8 * x - 4 * other, x, other))
    return not same(together, 8 * one - 4 * two)


def _changes(f: Findings, name: str) -> Failure | None:
    inputs = f.subject.draw(7, 7)

    def judge(inputs: Inputs) -> Complaint | None:
        other = inputs.having(**{name: getattr(inputs, name).flip(-2) * 2 + 1})
        before, after = f.subject(inputs).detach(), f.subject(other).detach()
        # inputs for which the right answer would be the same show nothing
        moves = error(_plainly(other), _plainly(inputs)) > 1e-2
        if not moves or not equal(before, after):
            return None
        arguments = [f"{x}.flip(-2) * 2 + 1" if x == name else x for x in ("q", "k", "v")]
        return Complaint(
            f"another {name} gives the same output",
            True,
            False,
            lambda ask: [f"out = {ask()}", f"other = {ask(*arguments)}", "same = torch.equal(out, other)"],
        )

    return failure(f.subject, inputs, judge, square=True)


def _plainly(inputs: Inputs) -> Tensor:
    """The last row of attention to all keys, which every convention lets it see."""
    k, v = (x.repeat_interleave(inputs.q.shape[1] // x.shape[1], 1).double() for x in (inputs.k, inputs.v))
    return (inputs.q.double()[:, :, -1:] @ k.mT).softmax(-1) @ v


@fact(
    FACTS,
    "linear-in-v",
    student="Twice the values, twice the answer: attention only mixes values.",
    engineer="f(q, k, 3 v - u / 2) = 3 f(q, k, v) - f(q, k, u) / 2.",
    cause="an activation, clamp or norm on v or on the output, v used among the scores, an output bias",
    fatal=True,
)
def linear_in_v(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7)

    def judge(inputs: Inputs) -> Complaint | None:
        other = inputs.v.flip(2) * 1.5
        together = f.subject(replace(inputs, v=8 * inputs.v - 4 * other)).detach()
        apart = 8 * f.subject(inputs).detach() - 4 * f.subject(replace(inputs, v=other)).detach()
        if same(together, apart) or _rounds(f, inputs, together, apart):
            return None
        return Complaint(
            "f(8 v - 4 u) is not 8 f(v) - 4 f(u), where u is 1.5 v.flip(2)",
            together,
            apart,
            lambda ask: [
                "u = v.flip(2) * 1.5",
                f"expected = 8 * {ask()} - 4 * {ask('q', 'k', 'u')}",
                f"out = {ask('q', 'k', '8 * v - 4 * u')}",
            ],
        )

    return failure(f.subject, inputs, judge)


def _rounds(f: Findings, inputs: Inputs, together: Tensor, apart: Tensor) -> bool:
    """Whether only rounding is between two results: it keeps zero and powers of two, and is small. Of outputs."""
    off = (together.double() - apart.double()).abs().max().item()
    if not off <= 0.02 * apart.double().abs().max().item():
        return False
    nothing, out = (f.subject(replace(inputs, v=x * inputs.v)).detach() for x in (0, 1))
    return not bool(nothing.any()) and equal(f.subject(replace(inputs, v=4 * inputs.v)).detach(), 4 * out)


@fact(
    FACTS,
    "weights-sum-to-one",
    student="The weights are shares: together they make one whole.",
    engineer="With V = 1 the output is 1 in every row that sees a key, at 7 keys, at 67 and at 301.",
    cause="exp() without division by its sum, a mask applied after the softmax, a sink that nobody declared; block by "
    "block, what was gathered not rescaled when a larger score comes",
    fatal=True,
)
def weights_sum(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7)
    if f.declared.sink:
        if sums_to_one(f.subject(replace(inputs, v=torch.ones_like(inputs.v))).detach()):
            return Failure("weights of a row sum to 1, but a sink was declared, which takes some of it")
        raise NotApplicableError("declared to have a sink, which takes some of the weight")

    def judge(inputs: Inputs) -> Complaint | None:
        out = f.subject(replace(inputs, v=torch.ones_like(inputs.v))).detach()
        if sums_to_one(out):
            return None
        return Complaint(
            f"weights of a row sum to {_farthest(out):.4g}, not to 1",
            out,
            torch.ones_like(out),
            lambda ask: [f"out = {ask('q', 'k', 'torch.ones_like(v)')}"],
        )

    if (found := failure(f.subject, inputs, judge)) is not None:
        return replace(found, declare="sink=True") if _sunk(f, inputs) else found
    for n, h in ((67, 6), (LONG, 1)):
        longer = f.subject.draw(n, n, b=1, h=h, dtype=torch.float32)
        if refusal(f, longer) is None and (found := failure(f.subject, longer, judge)) is not None:
            return found
    return None


def _sunk(f: Findings, inputs: Inputs) -> bool:
    """Whether a sink explains the weight that is missing: one more score, the same for every query."""
    told = Findings(replace(f.subject, declared=replace(f.declared, sink=True)))
    try:
        return error(f.subject(inputs).detach(), told.view(inputs).truth(inputs)) <= 1e-4
    except Exception:
        return False  # something else is broken, so that nothing can be measured


@fact(
    FACTS,
    "batch-mixed",
    student="Sentences of one batch know nothing of each other.",
    engineer="Changing q, k and v of one batch entry leaves the others bit for bit as they were.",
    cause="a mean, norm or softmax over axis 0; reshape(b * n, ...) in the wrong order; batch_first=True forgotten, or "
    "another layout than (b h n c)",
    fatal=True,
)
def batch_mixed(f: Findings) -> Failure | None:
    found = _mixed(f, 0, "batch entry", ("q", "k", "v"))
    if found is None or not f.subject.fitting:
        return found
    told = f"{found.found}; as ({f.subject.fitting}), time before the batch, it would mix nothing"
    return replace(found, found=told, declare=f"layout={f.subject.fitting!r}")


@fact(
    FACTS,
    "heads-mixed",
    student="Heads look separately. What one sees, the others do not.",
    engineer="Changing q, k and v of one head leaves the outputs of others bit for bit as they were.",
    cause="reshape(b, h, n, c) where view(b, n, h, c).transpose(1, 2) was meant, or the same on the way back",
    fatal=True,
)
def heads_mixed(f: Findings) -> Failure | None:
    return _mixed(f, 1, "head", ("q", "k", "v"))


@fact(
    FACTS,
    "q-and-k-swapped",
    student="The query asks and the key answers, not the other way round.",
    engineer="score[i, j] = q_i . k_j, not k_i . q_j.",
    cause="k @ q.transpose(-2, -1), or the arguments in another order",
    fatal=True,
)
def swapped(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7, b=1)
    if inputs.q.shape[1] != inputs.k.shape[1]:
        raise NotApplicableError("grouped heads cannot be exchanged")

    def judge(inputs: Inputs) -> Complaint | None:
        other = replace(inputs, q=inputs.k, k=inputs.q)
        weights = f.subject.weights(inputs)
        fits = [_log_correlation(weights, x.q @ x.k.mT) for x in (inputs, other)]
        if not fits[1] > 0.999 > 0.9 > fits[0]:
            return None
        right = (inputs.q @ inputs.k.mT * f.expected_scale(inputs)).masked_fill(weights == 0, -torch.inf).softmax(-1)
        words = "the weights follow k_i . q_j, not q_i . k_j"
        return Complaint(words, weights, right, lambda ask: [f"weights = {ask.weights()}"])

    return failure(f.subject, inputs, judge, square=True)


def _log_correlation(weights: Tensor, products: Tensor) -> float:
    """How well products explain the logarithms of weights, from -1 to 1, row by row."""
    seen = weights > 0
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    x, y = (
        torch.where(seen, a - (a * seen).sum(-1, keepdim=True) / count, 0.0)
        for a in (products.double(), torch.where(seen, weights, 1.0).double().log())
    )
    return ((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt().clamp(min=1e-30)).item()


@fact(
    FACTS,
    "queries-mixed",
    student="Every question is answered for itself.",
    engineer="Changing one row of q leaves the other rows of the output bit for bit as they were.",
    cause="a softmax, norm or mean over the rows; a mask or bias taken from another row",
    fatal=True,
)
def queries_mixed(f: Findings) -> Failure | None:
    if f.subject.probe.square:
        raise NotApplicableError("queries and keys come from one sequence, so a query cannot be changed alone")
    return _mixed(f, 2, "row", ("q",))


def _mixed(f: Findings, axis: int, name: str, changed: tuple[str, ...]) -> Failure | None:
    inputs = f.subject.draw(5, 5, b=3)
    if inputs.q.shape[axis] < 2:
        raise NotApplicableError(f"there is only one {name}")

    def judge(inputs: Inputs) -> Complaint | None:
        if inputs.q.shape[axis] < 2:
            return None
        size, share = inputs.q.shape[axis], inputs.q.shape[axis] // inputs.k.shape[axis] if axis == 1 else 1
        other = {x: getattr(inputs, x).clone() for x in changed}
        for x in other.values():
            x.select(axis, x.shape[axis] - 1).mul_(-2).add_(0.5)
        # the last key head serves the last query heads, or each last of a round where heads are tiled
        own = torch.zeros(size, dtype=torch.bool)
        own[-share:] = True
        if axis == 1 and share > 1:
            own[inputs.k.shape[1] - 1 :: inputs.k.shape[1]] = True
        kept = (~own).nonzero()[:, 0]
        before, after = (f.subject(x).detach().index_select(axis, kept) for x in (inputs, inputs.having(**other)))
        if same(after, before):
            return None
        last = f"[{':, ' * axis}-1]"

        def show(ask: Ask) -> list[str]:
            lines = [f"kept = torch.tensor({kept.tolist()})"]
            for x in changed:
                lines += [f"other_{x} = {x}.clone()", f"other_{x}{last} = {x}{last} * -2 + 0.5"]
            arguments = [f"other_{x}" if x in changed else x for x in ("q", "k", "v")]
            return [
                *lines,
                f"expected = {ask()}.index_select({axis}, kept)",
                f"out = {ask(*arguments)}.index_select({axis}, kept)",
            ]

        return Complaint(f"changing the last {name} changes the output of others", after, before, show)

    return failure(f.subject, inputs, judge)


@fact(
    FACTS,
    "batch-size",
    student="An answer does not depend on how many others are asked for at the same time.",
    engineer="A batch of nine and nine batches of one agree to rounding.",
    cause="another path for large batches, padding to a common size, statistics over the batch (transformers#26869)",
    explained_by=("batch-mixed",),
)
def batch_size(f: Findings) -> Failure | None:
    if (f.declared.causal or f.subject.asks_causal or f.causal) and f.leaking is not None:
        raise NotApplicableError("some sequences see later keys, which is another fact")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = f.subject.draw(7, 7, b=9, dtype=dtype)
        if refusal(f, inputs) is not None:
            continue  # a dtype it does not take

        def judge(inputs: Inputs, dtype: torch.dtype = dtype) -> Complaint | None:
            count = inputs.q.shape[0]
            together = f.subject(inputs).detach()
            alone = torch.cat([f.subject(inputs.cut("b", torch.tensor([n]))).detach() for n in range(count)])
            # rounding once more at the end is what a sum in another order may cost
            largest = alone.abs().nan_to_num().max().item()
            most = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * largest
            off = (together.double() - alone.double()).abs()
            apart = torch.where(together.isnan() & alone.isnan(), 0.0, off).max().item()
            if apart <= most:
                return None
            words = f"{count} sequences in one batch are {apart:.1e} away from one at a time, in {dtype}"
            one = [f"{x}[n : n + 1]" for x in ("q", "k", "v")]
            return Complaint(
                words,
                together,
                alone,
                lambda ask: [f"expected = torch.cat([{ask(*one)} for n in range({count})])", f"out = {ask()}"],
            )

        if (found := failure(f.subject, inputs, judge, square=True)) is not None:
            return found
    return None


@fact(
    FACTS,
    "memory-ignored",
    student="Who is handed another text to look at looks at that one.",
    engineer="Where a layer takes a memory beside x, keys and values come from it: outputs change with it, and no "
    "row of the output with another row of x.",
    cause="context = x, k or v projected from x: what was handed over is dropped on the way",
)
def memory_ignored(f: Findings) -> Failure | None:
    name = memory_argument(f)
    if name is None:
        raise NotApplicableError("it takes no memory beside x, or refuses it")
    asked = _Memory(f, name)
    x, memory, other = asked.drawn(5, 0), asked.drawn(7, 1), asked.drawn(5, 2)
    if torch.equal(asked(x, memory), asked(x, 2 * memory + 1)):
        lines = [f"out = {asked.written('x', name)}", f"other = {asked.written('x', f'2 * {name} + 1')}"]
        words = f"another {name} gives the same output"
        return Failure(words, asked.example(7, [*lines, "same = torch.equal(out, other)"], True, False))
    changed = x.clone()
    changed[:, -1] += 1
    before, after = (asked(y, other)[:, :-1] for y in (x, changed))
    if torch.allclose(before, after, atol=1e-5):
        return None
    lines = ["changed = x.clone()", "changed[:, -1] += 1"]
    lines += [f"out, other = {asked.written('x', name)}[:, :-1], {asked.written('changed', name)}[:, :-1]"]
    words = f"beside {name}, rows of x are still attended to"
    return Failure(words, asked.example(5, [*lines, "same = torch.allclose(out, other, atol=1e-5)"], False, True))


def memory_argument(f: Findings) -> str | None:
    """The argument by which a layer that also attends to itself takes another sequence, where it does take one."""
    probe = f.subject.probe
    name = next((name for name in MEMORIES if name in probe.parameters), None)
    if name is None or probe.module is None or known_projections(probe.module) is None or "b n" not in probe.layout:
        return None
    asked = _Memory(f, name)
    try:
        return name if asked(asked.drawn(5, 0), asked.drawn(7, 1)).shape[:2] == (2, 5) else None
    except Exception:
        return None


@dataclass(frozen=True)
class _Memory:
    """A layer, with its own projections, asked with a sequence and a memory."""

    f: Findings
    name: str

    @property
    def module(self) -> nn.Module:
        module = self.f.subject.probe.module
        assert module is not None
        return module

    def width(self, projection: int) -> int:
        known = known_projections(self.module)
        assert known is not None
        part = self.module.get_submodule(known.names[projection])
        weight = next(x for x in part.parameters() if x.ndim == 2)
        return weight.shape[0] if hasattr(part, "nf") else weight.shape[1]

    def drawn(self, n: int, seed: int) -> Tensor:
        """A sequence; one with the seed 0 is x, and others are memories."""
        torch.manual_seed(seed)
        own = next(self.module.parameters())
        return torch.randn(2, n, self.width(0 if not seed else -1)).to(own)

    def __call__(self, x: Tensor, memory: Tensor) -> Tensor:
        with torch.no_grad():
            return first_tensor(self.module(x, **{self.name: memory}))

    def written(self, x: str, memory: str) -> str:
        with torch.no_grad():
            out = self.module(self.drawn(5, 0), **{self.name: self.drawn(7, 1)})
        return f"module({x}, {self.name}={memory}){'' if isinstance(out, Tensor) else '[0]'}"

    def example(self, n: int, lines: list[str], got: object, expected: object) -> str:
        """The Python, with a memory of n."""
        own = next(self.module.parameters())
        cast = "" if own.dtype == torch.float32 else f".to({own.dtype})"
        seeds = {"x": (5, 0), self.name: (n, 1 if n == 7 else 2)}
        made = [f"# module: what was handed to check, {self.f.subject.probe.name}", "module.eval()"]
        for name, (length, seed) in seeds.items():
            made += [f"torch.manual_seed({seed})"]
            made += [f"{name} = torch.randn(2, {length}, {self.width(0 if not seed else -1)}){cast}"]
        return "\n".join([*made, *lines, *ending(lines[-1], got, expected)])


def sums_to_one(x: Tensor) -> bool:
    """Whether all are 1, NaN and zeros aside: such rows saw nothing, which is another fact."""
    kept = x[~x.isnan() & (x != 0)].double()
    return bool(((kept - 1).abs() < 1e-4).all()) and bool(len(kept))


def _farthest(x: Tensor) -> float:
    kept = x[~x.isnan()]
    return kept[(kept - 1).abs().argmax()].item() if len(kept) else float("nan")
