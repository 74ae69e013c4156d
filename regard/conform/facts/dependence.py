"""Facts about dependence: which entries of q, k and v an output may depend on, and how."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.base.registry import Registry
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, result_comments, write_weights
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import raised_by
from regard.conform.inputs import QKV, AttentionInputs
from regard.conform.shrink import Violation, smallest_failure
from regard.conform.tolerance import equal, max_error, same_up_to_rounding
from regard.see.measure.probes.hooked_layers import MEMORIES
from regard.see.measure.probes.probe import first_tensor
from regard.see.measure.probes.projections import known_projections, projection_widths
from regard.see.measure.stats import centre_rows, fit_slopes

FACTS: Registry[Fact] = Registry("fact")


@fact(FACTS, "softmax-over-the-other-axis", fatal=True)
def softmax_axis(a: MeasuredAttention) -> Failure | None:
    """The weights of each query sum to one over the keys, not those of each key over the queries.

    Weights sum to one over j, and over none of the other axes (b, h, i) instead.

    Usual causes: softmax(dim=-2), softmax(dim=1), or F.softmax without dim (detr#247)
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        weights = a.weights(inputs)
        if all_ones(weights.sum(-1)):
            return None
        for axis, name in ((2, "queries"), (1, "heads"), (0, "batch entries")):
            if weights.shape[axis] > 1 and all_ones(weights.sum(axis)):
                return Violation(
                    f"weights sum to one over the {name}, not over the keys",
                    weights.sum(-1),
                    torch.ones_like(weights.sum(-1)),
                    lambda call: [*write_weights(call), "sums = weights.sum(-1)"],
                )
        return None

    return smallest_failure(a, a.random_inputs(7, 7, b=3), detect)


@fact(FACTS, "keys-ignored", fatal=True)
def keys_ignored(a: MeasuredAttention) -> Failure | None:
    """Keys decide how much of each value is used.

    The output changes with k: scores are made of q and k, not of v.

    Usual causes: attend(q, v, v): a mistyped name, or the key projection assigned twice
    """
    return _find_ignored(a, "k")


@fact(FACTS, "queries-ignored", fatal=True)
def queries_ignored(a: MeasuredAttention) -> Failure | None:
    """The output depends on the query.

    The output changes with q.

    Usual causes: attend(k, k, v): a mistyped name; scores made of k and k
    """
    return _find_ignored(a, "q")


@fact(FACTS, "values-ignored", fatal=True)
def values_ignored(a: MeasuredAttention) -> Failure | None:
    """The output is made of the values.

    The output changes with v.

    Usual causes: attend(q, k, k): a mistyped name, or the value projection uses the weights of the key projection
    """
    return _find_ignored(a, "v")


def _find_ignored(a: MeasuredAttention, name: str) -> Failure | None:
    def detect(inputs: AttentionInputs) -> Violation | None:
        other = inputs.with_tensors(**{name: getattr(inputs, name).flip(-2) * 2 + 1})
        before, after = a(inputs).detach(), a(other).detach()
        # inputs for which the right output would be the same show nothing
        should_change = max_error(_last_row(other), _last_row(inputs)) > 1e-2
        if not should_change or not equal(before, after):
            return None
        arguments = [f"{x}.flip(-2) * 2 + 1" if x == name else x for x in QKV]
        return Violation(
            f"another {name} gives the same output",
            True,
            False,
            lambda call: [f"out = {call()}", f"other = {call(*arguments)}", "same = torch.equal(out, other)"],
        )

    return smallest_failure(a, a.random_inputs(7, 7), detect, square=True)


def _last_row(inputs: AttentionInputs) -> Tensor:
    """The last row of plain attention, which sees all keys under every convention."""
    k, v = (x.repeat_interleave(inputs.q.shape[1] // x.shape[1], 1).double() for x in (inputs.k, inputs.v))
    return (inputs.q.double()[:, :, -1:] @ k.mT).softmax(-1) @ v


@fact(FACTS, "k-and-v-swapped", fatal=True)
def k_and_v_swapped(a: MeasuredAttention) -> Failure | None:
    """Queries are compared with keys, and the output is made of values, not the other way round.

    The output is linear in v and scores are made of q and k; it is not linear in k with scores of q and v.

    Usual causes: q, v, k = qkv.chunk(3): unpacked in another order; arguments in another order
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        if inputs.k.shape != inputs.v.shape or not _is_linear(a, inputs, "k") or _is_linear(a, inputs, "v"):
            return None
        return Violation(
            "the output is linear in k, and v is compared with q",
            True,
            False,
            lambda call: [f"twice = {call('q', '2 * k', 'v')}", f"swapped = bool(torch.allclose(twice, 2 * {call()}))"],
        )

    return smallest_failure(a, a.random_inputs(7, 7), detect)


def _linear_combination(a: MeasuredAttention, inputs: AttentionInputs, name: str) -> tuple[Tensor, Tensor]:
    """f(8 x - 4 u) and 8 f(x) - 4 f(u), where x is k or v, and u is 1.5 x.flip(2)."""
    x = getattr(inputs, name)
    u = x.flip(2) * 1.5
    combined, one, two = (a(inputs.with_tensors(**{name: y})).detach() for y in (8 * x - 4 * u, x, u))
    return combined, 8 * one - 4 * two


def _is_linear(a: MeasuredAttention, inputs: AttentionInputs, name: str) -> bool:
    return same_up_to_rounding(*_linear_combination(a, inputs, name))


@fact(FACTS, "linear-in-v", fatal=True)
def linear_in_v(a: MeasuredAttention) -> Failure | None:
    """Twice the values give twice the output: attention is a weighted sum of values.

    f(q, k, 8 v - 4 u) = 8 f(q, k, v) - 4 f(q, k, u).

    Usual causes: an activation, clamp or norm on v or on the output, v used in the scores, an output bias
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        combined, expected = _linear_combination(a, inputs, "v")
        if same_up_to_rounding(combined, expected) or _only_rounds(a, inputs, combined, expected):
            return None
        return Violation(
            "f(8 v - 4 u) is not 8 f(v) - 4 f(u), where u is 1.5 v.flip(2)",
            combined,
            expected,
            lambda call: [
                "u = v.flip(2) * 1.5",
                f"expected = 8 * {call()} - 4 * {call('q', 'k', 'u')}",
                f"out = {call('q', 'k', '8 * v - 4 * u')}",
            ],
        )

    return smallest_failure(a, a.random_inputs(7, 7), detect)


def _only_rounds(a: MeasuredAttention, inputs: AttentionInputs, combined: Tensor, expected: Tensor) -> bool:
    """Whether outputs are rounded to few digits: the difference is small, and zero and powers of two are exact."""
    if not max_error(combined, expected) <= 0.02 * expected.double().abs().max().item():
        return False
    zero, one, four = (a(inputs.with_tensors(v=factor * inputs.v)).detach() for factor in (0, 1, 4))
    return not bool(zero.any()) and equal(four, 4 * one)


@fact(FACTS, "weights-sum-to-one", fatal=True)
def weights_sum(a: MeasuredAttention) -> Failure | None:
    """The weights of a query sum to one.

    With V = 1 the output is 1 in every row that sees a key, at 7, 67 and 301 keys.

    Usual causes: exp() without division by its sum, a mask applied after the softmax, an undeclared sink; in a
    blockwise softmax, a running sum that is not rescaled when a larger score comes
    """
    inputs = a.random_inputs(7, 7)
    if a.declared.sink:
        if all_ones(row_sums(a, inputs)):
            return Failure("the weights of a row sum to 1, but a sink was declared, which takes some of it")
        raise NotApplicableError("a sink was declared, which takes some of the weight")

    def detect(inputs: AttentionInputs) -> Violation | None:
        out = row_sums(a, inputs)
        if all_ones(out):
            return None
        return Violation(
            f"the weights of a row sum to {_farthest_from_one(out):.4g}, not to 1",
            out,
            torch.ones_like(out),
            lambda call: [f"out = {call('q', 'k', 'torch.ones_like(v)')}"],
        )

    if (found := smallest_failure(a, inputs, detect)) is not None:
        return replace(found, declare="sink=True") if _has_sink(a, inputs) else found
    for n, h in ((67, 6), (LONG, 1)):
        longer = a.random_inputs(n, n, b=1, h=h, dtype=torch.float32)
        if raised_by(a, longer) is None and (found := smallest_failure(a, longer, detect)) is not None:
            return found
    return None


def row_sums(a: MeasuredAttention, inputs: AttentionInputs) -> Tensor:
    """The output for V = 1, which is the sum of the weights of a row."""
    return a(replace(inputs, v=torch.ones_like(inputs.v))).detach()


def _has_sink(a: MeasuredAttention, inputs: AttentionInputs) -> bool:
    """Whether a sink explains the missing weight: one more score, the same for every query."""
    with_sink = replace(a, declared=replace(a.declared, sink=True))
    try:
        return max_error(a(inputs).detach(), with_sink.reference(inputs)) <= 1e-4
    except Exception:  # something else is broken, so that nothing can be measured
        return False


@fact(FACTS, "batch-mixed", fatal=True)
def batch_mixed(a: MeasuredAttention) -> Failure | None:
    """Sequences of a batch do not affect each other.

    Changing q, k and v of one batch entry does not change the outputs of others.

    Usual causes: a mean, norm or softmax over axis 0; reshape(b * n, ...) in the wrong order; batch_first=True
    missing, or another layout than (b h n c)
    """
    found, layout = _find_mixing(a, 0, "batch entry", QKV), a.probe.other_layout
    if found is None or not layout:
        return found
    return replace(
        found, found=f"{found.found}; in the layout ({layout}) it mixes nothing", declare=f"layout={layout!r}"
    )


@fact(FACTS, "heads-mixed", fatal=True)
def heads_mixed(a: MeasuredAttention) -> Failure | None:
    """Heads are independent: the inputs of one do not affect the others.

    Changing q, k and v of one head does not change the outputs of others.

    Usual causes: reshape(b, h, n, c) in place of view(b, n, h, c).transpose(1, 2), or the same on the way back
    """
    return _find_mixing(a, 1, "head", QKV)


@fact(FACTS, "q-and-k-swapped", fatal=True)
def q_and_k_swapped(a: MeasuredAttention) -> Failure | None:
    """Row i of the output belongs to query i, not to key i.

    score[i, j] = q_i . k_j, not k_i . q_j.

    Usual causes: k @ q.transpose(-2, -1), or the arguments in another order
    """
    inputs = a.random_inputs(7, 7, b=1)
    if inputs.q.shape[1] != inputs.k.shape[1]:
        raise NotApplicableError("there are fewer key heads than query heads, so q and k cannot be swapped")

    def detect(inputs: AttentionInputs) -> Violation | None:
        weights = a.weights(inputs)
        residuals = [_residual(weights, q @ k.mT) for q, k in ((inputs.q, inputs.k), (inputs.k, inputs.q))]
        if not residuals[1] < 0.045 < 0.43 < residuals[0]:  # correlations of 0.999 and 0.9
            return None
        right = (inputs.q @ inputs.k.mT * a.expected_scale(inputs)).masked_fill(weights == 0, -torch.inf).softmax(-1)
        return Violation("the weights follow k_i . q_j, not q_i . k_j", weights, right, write_weights)

    return smallest_failure(a, inputs, detect, square=True)


def _residual(weights: Tensor, products: Tensor) -> float:
    """The relative residual of centred log weights as a multiple of products; 1 if the factor is not positive."""
    visible = weights > 0
    logs = torch.where(visible, weights, 1.0).double().log()
    x, y = (centre_rows(each.double(), visible).reshape(1, 1, 1, -1) for each in (products, logs))
    (factor,), residual = fit_slopes(y, x)
    return residual if factor > 0 else 1.0


@fact(FACTS, "queries-mixed", fatal=True)
def queries_mixed(a: MeasuredAttention) -> Failure | None:
    """Queries do not affect each other.

    Changing one row of q does not change other rows of the output.

    Usual causes: a softmax, norm or mean over the rows; a mask or bias taken from another row
    """
    if a.probe.square:
        raise NotApplicableError("queries and keys come from one sequence, so a query cannot be changed alone")
    return _find_mixing(a, 2, "row", ("q",))


def _find_mixing(a: MeasuredAttention, axis: int, name: str, changed: tuple[str, ...]) -> Failure | None:
    """The failure if a change of the last entry of an axis changes the outputs of others."""
    inputs = a.random_inputs(5, 5, b=3)
    if inputs.q.shape[axis] < 2:
        raise NotApplicableError(f"there is only one {name}")

    def detect(inputs: AttentionInputs) -> Violation | None:
        if inputs.q.shape[axis] < 2:
            return None
        size, share = inputs.q.shape[axis], inputs.q.shape[axis] // inputs.k.shape[axis] if axis == 1 else 1
        other = {x: getattr(inputs, x).clone() for x in changed}
        for x in other.values():
            x.select(axis, x.shape[axis] - 1).mul_(-2).add_(0.5)
        # the last key head serves the last query heads, or every g-th one if heads are tiled
        own = torch.zeros(size, dtype=torch.bool)
        own[-share:] = True
        if axis == 1 and share > 1:
            own[inputs.k.shape[1] - 1 :: inputs.k.shape[1]] = True
        others = (~own).nonzero()[:, 0]
        before, after = (a(x).detach().index_select(axis, others) for x in (inputs, inputs.with_tensors(**other)))
        if same_up_to_rounding(after, before):
            return None
        last = f"[{':, ' * axis}-1]"

        def lines(call: CallWriter) -> list[str]:
            written = [f"others = torch.tensor({others.tolist()})"]
            for x in changed:
                written += [f"changed_{x} = {x}.clone()", f"changed_{x}{last} = {x}{last} * -2 + 0.5"]
            arguments = [f"changed_{x}" if x in changed else x for x in QKV]
            return [
                *written,
                f"expected = {call()}.index_select({axis}, others)",
                f"out = {call(*arguments)}.index_select({axis}, others)",
            ]

        return Violation(f"changing the last {name} changes the output of others", after, before, lines)

    return smallest_failure(a, inputs, detect)


@fact(FACTS, "batch-size", explained_by=("batch-mixed",))
def batch_size(a: MeasuredAttention) -> Failure | None:
    """An output does not depend on the size of the batch.

    A batch of nine and nine batches of one agree up to rounding.

    Usual causes: another code path for large batches, padding to a common size, statistics over the batch
    (transformers#26869)
    """
    if (a.declared.causal or a.uses_causal_argument or a.causal) and a.leak_in_batch is not None:
        raise NotApplicableError("some sequences see later keys: the fact `causality`")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = a.random_inputs(7, 7, b=9, dtype=dtype)
        if raised_by(a, inputs) is not None:
            continue  # a dtype that it does not accept

        def detect(inputs: AttentionInputs, dtype: torch.dtype = dtype) -> Violation | None:
            count = inputs.q.shape[0]
            together = a(inputs).detach()
            alone = torch.cat([a(inputs.select("b", torch.tensor([n]))).detach() for n in range(count)])
            # a sum in another order may round again at the end
            most = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * alone.abs().nan_to_num().max().item()
            off = (together.double() - alone.double()).abs()
            error = torch.where(together.isnan() & alone.isnan(), 0.0, off).max().item()
            if error <= most:
                return None
            words = f"{count} sequences in one batch differ by {error:.1e} from one at a time, in {dtype}"
            one = [f"{x}[n : n + 1]" for x in QKV]
            return Violation(
                words,
                together,
                alone,
                lambda call: [f"expected = torch.cat([{call(*one)} for n in range({count})])", f"out = {call()}"],
            )

        if (found := smallest_failure(a, inputs, detect, square=True)) is not None:
            return found
    return None


@fact(FACTS, "memory-ignored")
def memory_ignored(a: MeasuredAttention) -> Failure | None:
    """A layer that is given another sequence to attend to attends to that one.

    If a layer takes a memory besides x, keys and values come from it: outputs change with it, and no row of the
    output changes with another row of x.

    Usual causes: context = x, or k or v projected from x: the memory is not passed on
    """
    name = memory_argument(a)
    if name is None:
        raise NotApplicableError("it takes no memory besides x")
    layer = _LayerWithMemory(a, name)
    x, memory, other = layer.random_sequence(5, 0), layer.random_sequence(7, 1), layer.random_sequence(5, 2)
    if torch.equal(layer(x, memory), layer(x, 2 * memory + 1)):
        lines = [f"out = {layer.code('x', name)}", f"other = {layer.code('x', f'2 * {name} + 1')}"]
        words = f"another {name} gives the same output"
        return Failure(words, layer.example(7, [*lines, "same = torch.equal(out, other)"], True, False))
    changed = x.clone()
    changed[:, -1] += 1
    before, after = (layer(y, other)[:, :-1] for y in (x, changed))
    if torch.allclose(before, after, atol=1e-5):
        return None
    lines = ["changed = x.clone()", "changed[:, -1] += 1"]
    lines += [f"out, other = {layer.code('x', name)}[:, :-1], {layer.code('changed', name)}[:, :-1]"]
    words = f"rows of x are attended to, although {name} is passed"
    return Failure(words, layer.example(5, [*lines, "same = torch.allclose(out, other, atol=1e-5)"], False, True))


def memory_argument(a: MeasuredAttention) -> str | None:
    """The argument by which a self-attention layer takes another sequence, if it accepts one."""
    probe = a.probe
    name = a.find_parameter(MEMORIES)
    if name is None or probe.module is None or known_projections(probe.module) is None or "b n" not in probe.layout:
        return None
    layer = _LayerWithMemory(a, name)
    try:
        return name if layer(layer.random_sequence(5, 0), layer.random_sequence(7, 1)).shape[:2] == (2, 5) else None
    except Exception:  # a foreign function may raise anything
        return None


@dataclass(frozen=True)
class _LayerWithMemory:
    """A layer with its own projections, called with a sequence and a memory."""

    attention: MeasuredAttention
    name: str

    @property
    def module(self) -> nn.Module:
        module = self.attention.probe.module
        assert module is not None
        return module

    def width(self, seed: int) -> int:
        """The width of x, which has the seed 0, or of a memory."""
        known = known_projections(self.module)
        assert known is not None
        return projection_widths(self.module.get_submodule(known.names[0 if not seed else -1]))[0]

    def random_sequence(self, n: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.randn(2, n, self.width(seed)).to(next(self.module.parameters()))

    def __call__(self, x: Tensor, memory: Tensor) -> Tensor:
        with torch.no_grad():
            return first_tensor(self.module(x, **{self.name: memory}))

    def code(self, x: str, memory: str) -> str:
        """The call as code."""
        with torch.no_grad():
            out = self.module(self.random_sequence(5, 0), **{self.name: self.random_sequence(7, 1)})
        return f"module({x}, {self.name}={memory}){'' if isinstance(out, Tensor) else '[0]'}"

    def example(self, n: int, lines: list[str], got: object, expected: object) -> str:
        """The example, with a memory of length n."""
        dtype = next(self.module.parameters()).dtype
        cast = "" if dtype == torch.float32 else f".to({dtype})"
        written = [f"# module: what was passed to check, {self.attention.probe.name}", "module.eval()"]
        for name, length, seed in (("x", 5, 0), (self.name, n, 1 if n == 7 else 2)):
            written += [f"torch.manual_seed({seed})", f"{name} = torch.randn(2, {length}, {self.width(seed)}){cast}"]
        return "\n".join([*written, *lines, *result_comments(lines[-1], got, expected)])


def all_ones(x: Tensor) -> bool:
    """Whether all entries are 1, apart from NaN and zeros, which belong to rows that see no key."""
    known = x[~x.isnan() & (x != 0)].double()
    return bool(((known - 1).abs() < 1e-4).all()) and bool(len(known))


def _farthest_from_one(x: Tensor) -> float:
    known = x[~x.isnan()]
    return known[(known - 1).abs().argmax()].item() if len(known) else float("nan")
