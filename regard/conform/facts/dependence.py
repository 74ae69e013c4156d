"""Facts about dependence: which entries of q, k and v an output may depend on, and how."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, result_comments, write_weights
from regard.conform.fact import INEXACT, Fact, Failure, NotApplicableError, fact, first_failure
from regard.conform.facts.behaviour import raised_by
from regard.conform.inputs import QKV, AttentionInputs
from regard.conform.shrink import Detect, Violation, detect_lines, smallest_failure
from regard.conform.tolerance import equal, max_error, same_up_to_rounding
from regard.see.measure.probes.hooked_layers import MEMORIES
from regard.see.measure.probes.probe import first_tensor
from regard.see.measure.probes.projections import known_projections, projection_widths
from regard.see.measure.stats import centre_rows, fit_slopes

FACTS: Registry[Fact] = Registry("fact")


@fact(FACTS, "softmax-over-the-other-axis", fatal=True)
def softmax_axis(a: MeasuredAttention) -> Failure | None:
    """The weights sum to one over the keys for each query, not over the queries for each key.

    Weights of shape (b, h, i, j), for i queries and j keys, sum to one over the axis j, not over another axis.

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


@fact(FACTS, "input-ignored", fatal=True)
def input_ignored(a: MeasuredAttention) -> Failure | None:
    """Queries and keys decide how much of each value is used in the output.

    The output changes with q, with k and with v. A layer computes q from the sequence passed as queries, k from the one
    passed as keys or memory, and v from the one passed as values or memory.

    Usual causes: a mistyped name, as in attend(q, v, v), attend(k, k, v) or attend(q, k, k); a projection assigned
    twice, or applied to another input
    """
    if (found := _find_wrong_source(a)) is not None:
        return found
    return first_failure(_find_ignored(a, name) for name in ("k", "q", "v"))


def _find_wrong_source(a: MeasuredAttention) -> Failure | None:
    """Return a failure if a layer computes q, k or v from the wrong argument, such as k from `query`, else None."""
    inputs = tuple(a.probe.inputs)
    if len(inputs) < 2 or inputs[-1] in ("y", "source"):  # names that do not say what attends to what
        return None
    sources = a.probe.find_sources()
    for part, right in zip("qkv", (inputs[0], inputs[1], inputs[-1]), strict=True):
        used = sources.get(part, set())
        if used and right not in used:
            words = f"{part} is computed from {' and '.join(sorted(used))}, not from {right}"
            return Failure(words, "" if any(right in each for each in sources.values()) else _ignored_code(a, right))
    return None


def _ignored_code(a: MeasuredAttention, name: str) -> str:
    """Return Python code that shows that the output of a layer does not change with the argument `name`."""
    inputs = a.probe.inputs
    lines = [f"{each} = torch.linspace(-1, 1, {math.prod(shape)}).reshape{shape}" for each, shape in inputs.items()]
    calls = [", ".join(f"{x}={f'-{x}' if other and x == name else x}" for x in inputs) for other in (False, True)]
    return "\n".join(
        [
            *lines,
            "module.eval()",
            f"out = module({calls[0]})",
            f"other = module({calls[1]})",
            "out, other = (x[0] if isinstance(x, tuple) else x for x in (out, other))",
            "same = torch.equal(out, other)",
            "# gives     True",
            "# should be False",
        ]
    )


def _find_ignored(a: MeasuredAttention, name: str) -> Failure | None:
    changed = [f"{x}.flip(-2) * 2 + 1" if x == name else x for x in QKV]
    detect_same = detect_lines(
        a,
        f"another {name} gives the same output",
        lambda call: [f"out = {call()}", f"other = {call(*changed)}", "same = torch.equal(out, other)"],
        expected=False,
    )

    def detect(inputs: AttentionInputs) -> Violation | None:
        other = inputs.with_tensors(**{name: getattr(inputs, name).flip(-2) * 2 + 1})
        # inputs for which the right output would be the same show nothing
        return detect_same(inputs) if max_error(_last_row(other), _last_row(inputs)) > 1e-2 else None

    return smallest_failure(a, a.random_inputs(7, 7), detect, square=True)


def _last_row(inputs: AttentionInputs) -> Tensor:
    """Compute the attention output of the last query, with scale 1.

    The last query is used because it sees all keys even under a causal mask.
    """
    k, v = (x.repeat_interleave(inputs.q.shape[1] // x.shape[1], 1).double() for x in (inputs.k, inputs.v))
    return (inputs.q.double()[:, :, -1:] @ k.mT).softmax(-1) @ v


@fact(FACTS, "k-and-v-swapped", fatal=True)
def k_and_v_swapped(a: MeasuredAttention) -> Failure | None:
    """Queries are compared with keys, and the output is a mean of values. Keys and values are not exchanged.

    The output is linear in v, with scores computed from q and k; it is not linear in k, with scores computed
    from q and v.

    Usual causes: projections unpacked in the wrong order, as in q, v, k = qkv.chunk(3); arguments in another order
    """

    detect_linear = detect_lines(
        a,
        "the output is linear in k, and v is compared with q",
        lambda call: [f"twice = {call('q', '2 * k', 'v')}", f"swapped = bool(torch.allclose(twice, 2 * {call()}))"],
        expected=False,
    )

    def detect(inputs: AttentionInputs) -> Violation | None:
        is_linear = inputs.k.shape != inputs.v.shape or _detect_nonlinear(a, "v")(inputs) is None
        return None if is_linear or _detect_nonlinear(a, "k")(inputs) is not None else detect_linear(inputs)

    return smallest_failure(a, a.random_inputs(7, 7), detect)


def _detect_nonlinear(a: MeasuredAttention, name: str) -> Detect:
    """Return a function of inputs that returns a violation if the output is not linear in k or v, else None.

    name  the tensor in which the output should be linear, "k" or "v"
    """

    def lines(call: CallWriter) -> list[str]:
        other, combined = ([code if x == name else x for x in QKV] for code in ("u", f"8 * {name} - 4 * u"))
        expected = f"expected = 8 * {call()} - 4 * {call(*other)}"
        return [f"u = {name}.flip(2) * 1.5", expected, f"out = {call(*combined)}"]

    words = f"f(8 {name} - 4 u) is not 8 f({name}) - 4 f(u), where u is 1.5 {name}.flip(2)"
    return detect_lines(a, words, lines, same_up_to_rounding)


@fact(FACTS, "linear-in-v", fatal=True)
def linear_in_v(a: MeasuredAttention) -> Failure | None:
    """Twice the values give twice the output: attention is a weighted sum of values.

    For two tensors of values v and u, f(q, k, 8 v - 4 u) = 8 f(q, k, v) - 4 f(q, k, u).

    Usual causes: an activation, clamp or norm on v or on the output, v used in the scores, an output bias
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        found = _detect_nonlinear(a, "v")(inputs)
        return None if found is None or _only_rounds(a, inputs, found) else found

    return smallest_failure(a, a.random_inputs(7, 7), detect)


def _only_rounds(a: MeasuredAttention, inputs: AttentionInputs, found: Violation) -> bool:
    """Return whether rounding the output to few digits explains that the output is not linear in v.

    This is the case if the difference is small, and if the outputs for values times 0 and times 4 are exact.
    """
    assert isinstance(found.got, Tensor)
    assert isinstance(found.expected, Tensor)
    if not max_error(found.got, found.expected) <= 0.02 * found.expected.double().abs().max().item():
        return False
    zero, one, four = (a(inputs.with_tensors(v=factor * inputs.v)).detach() for factor in (0, 1, 4))
    return not bool(zero.any()) and equal(four, 4 * one)


@fact(FACTS, "weights-sum-to-one", fatal=True)
def weights_sum(a: MeasuredAttention) -> Failure | None:
    """The weights of a query sum to one.

    If all values are 1, the output is 1 in every row that sees a key. This holds with 7, 67 and 301 keys.

    Usual causes: exp() without division by its sum, a mask applied after the softmax, an undeclared sink; in a
    blockwise softmax, a running sum that is not rescaled when a later block has a larger score
    """
    inputs = a.random_inputs(7, 7)
    if a.declared.sink:
        if all_ones(row_sums(a, inputs)):
            return Failure("the weights of a row sum to 1, but a sink was declared, which takes some of it")
        raise NotApplicableError("a sink was declared, which takes some of the weight")

    off = row_sums(a, inputs) - 1
    varies = bool((off > 1e-6).any() and (off < -1e-6).any())  # rounding errors have both signs

    def detect(inputs: AttentionInputs) -> Violation | None:
        out = row_sums(a, inputs)
        if all_ones(out):
            return None
        total = _farthest_from_one(out)
        rounded = varies and abs(total - 1) < 2e-3
        words = f"the weights of a row sum to {total:.{6 if abs(total - 1) < 2e-3 else 4}g}, not to 1"
        ones = "torch.ones_like(v)"
        return Violation(
            words + (", as if they were rounded to half precision" if rounded else ""),
            out,
            torch.ones_like(out),
            lambda call: [f"out = {call('q', 'k', ones)}"],
            grade=INEXACT if rounded else "",
        )

    if (found := smallest_failure(a, inputs, detect)) is not None:
        if _rotates_values(a):
            return replace(found, found=f"values are rotated by their position, not only q and k: {found.found}")
        return replace(found, declare="sink=True") if _has_sink(a, inputs) else found
    for n, h in ((67, 6), (LONG, 1)):
        longer = a.random_inputs(n, n, b=1, h=h, dtype=torch.float32)
        if raised_by(a, longer) is None and (found := smallest_failure(a, longer, detect)) is not None:
            return found
    return None


def _rotates_values(a: MeasuredAttention) -> bool:
    """Return whether the attention rotates values by position.

    A rotated value keeps its length and changes its direction.
    """
    inputs = a.random_inputs(5, 5, b=1)
    v = torch.zeros_like(inputs.v).expand(5, *inputs.v.shape[1:]).clone()
    v[range(5), :, range(5), 0] = 1.0  # in sequence n only key n has a value, which points along the first axis
    q, k = (x.expand(5, *x.shape[1:]) for x in (inputs.q, inputs.k))
    rows = a(inputs.with_tensors(q=q, k=k, v=v)).detach()[:, :, -1].double()
    kept = all_ones(rows.norm(dim=-1).sum(0))
    return kept and bool((rows[1:, :, 0].abs() < 0.999 * rows[1:].norm(dim=-1)).any())


def row_sums(a: MeasuredAttention, inputs: AttentionInputs) -> Tensor:
    """Return the output if all values are 1, which is the sum of the attention weights of each row."""
    return a(replace(inputs, v=torch.ones_like(inputs.v))).detach()


def _has_sink(a: MeasuredAttention, inputs: AttentionInputs) -> bool:
    """Return whether an attention sink explains weights that do not sum to 1.

    A sink is an extra score in the softmax, with no key and no value.
    """
    with_sink = replace(a, declared=replace(a.declared, sink=True))
    try:
        return max_error(a(inputs).detach(), with_sink.reference(inputs)) <= 1e-4
    except Exception:  # something else is broken, so that nothing can be measured
        return False


@fact(FACTS, "batch-mixed", fatal=True)
def batch_mixed(a: MeasuredAttention) -> Failure | None:
    """Sequences of a batch do not affect each other.

    Changing q, k and v of one batch entry does not change the outputs of the other entries.

    Usual causes: a mean, norm or softmax over axis 0; reshape(b * n, ...) in the wrong order; batch_first=True
    missing; inputs whose axes are not (batch, head, position, width)
    """
    found, layout = _find_mixing(a, 0, "batch entry", QKV), a.probe.other_layout
    if found is None or not layout:
        return found
    return replace(
        found, found=f"{found.found}; in the layout ({layout}) it mixes nothing", declare=f"layout={layout!r}"
    )


@fact(FACTS, "heads-mixed", fatal=True)
def heads_mixed(a: MeasuredAttention) -> Failure | None:
    """Heads are independent: the inputs of one head do not affect the outputs of the other heads.

    Changing q, k and v of one head does not change the outputs of the other heads.

    Usual causes: reshape(b, h, n, c) in place of view(b, n, h, c).transpose(1, 2), or the same mistake where the heads
    are joined
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
    """Fit log(weights) by a multiple of the products q . k, both with mean zero in each row.

    Returns the residual norm divided by the norm of the log(weights), or 1 if the fitted factor is not positive.
    """
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
    """Change the last entry along an axis; return a failure if outputs of other entries change, else None.

    axis     axis of q, k and v: 0 for the batch, 1 for heads, 2 for positions
    name     what an entry of this axis is called in the description, such as "head"
    changed  names of the tensors to change, among q, k and v
    """
    inputs, last = a.random_inputs(5, 5, b=3), f"[{':, ' * axis}-1]"
    if inputs.q.shape[axis] < 2:
        raise NotApplicableError(f"there is only one {name}")

    def lines(call: CallWriter) -> list[str]:
        q, k = call.inputs.q, call.inputs.k
        size, share = q.shape[axis], q.shape[1] // k.shape[1] if axis == 1 else 1
        # the last key head serves the last query heads, or every g-th one if heads are tiled
        own = {*range(size - share, size), *(range(k.shape[1] - 1, size, k.shape[1]) if share > 1 else ())}
        written = [f"others = torch.tensor({[each for each in range(size) if each not in own]}, dtype=torch.int64)"]
        for x in changed:
            written += [f"changed_{x} = {x}.clone()", f"changed_{x}{last} = {x}{last} * -2 + 0.5"]
        arguments = [f"changed_{x}" if x in changed else x for x in QKV]
        written += [f"expected = {call()}.index_select({axis}, others)"]
        return [*written, f"out = {call(*arguments)}.index_select({axis}, others)"]

    words = f"changing the last {name} changes the output of others"
    return smallest_failure(a, inputs, detect_lines(a, words, lines, same_up_to_rounding))


@fact(FACTS, "batch-size", explained_by="batch-mixed")
def batch_size(a: MeasuredAttention) -> Failure | None:
    """An output does not depend on the size of the batch.

    Nine sequences give the same outputs in one batch as in nine calls with one sequence each, up to rounding.

    Usual causes: another code path for large batches, padding to a common size, statistics over the batch
    (transformers#26869)
    """
    if (a.declared.causal or a.uses_causal_argument or a.causal) and a.leak_in_batch is not None:
        raise NotApplicableError("some sequences see later keys: the fact `causality`")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = a.random_inputs(7, 7, b=9, dtype=dtype)
        if raised_by(a, inputs) is not None:
            continue  # a dtype that it does not accept

        words = f"sequences in one batch differ by {{}} from one at a time, in {dtype}"
        detect = detect_lines(a, words, _one_at_a_time, partial(_same_in_batch, dtype))
        if (found := smallest_failure(a, inputs, detect, square=True)) is not None:
            return found
    return None


def _one_at_a_time(call: CallWriter) -> list[str]:
    alone = call(*(f"{x}[n : n + 1]" for x in QKV))
    return [f"expected = torch.cat([{alone} for n in range({len(call.inputs.q)})])", f"out = {call()}"]


def _same_in_batch(dtype: torch.dtype, together: Tensor, alone: Tensor) -> bool:
    # a sum in another order may round again at the end
    most = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * alone.abs().nan_to_num().max().item()
    off = (together.double() - alone.double()).abs()
    return torch.where(together.isnan() & alone.isnan(), 0.0, off).max().item() <= most


@fact(FACTS, "memory-ignored")
def memory_ignored(a: MeasuredAttention) -> Failure | None:
    """In cross-attention, keys and values come from the other sequence that is passed to the layer.

    If a layer takes a second sequence (the memory) besides its input x, keys and values are computed from the memory:
    outputs change with the memory, and no row of the output changes with another row of x.

    Usual causes: context = x, or k or v projected from x: the memory is not passed on
    """
    name = memory_argument(a)
    if name is None:
        raise NotApplicableError("it takes no memory besides x")
    call, equal_lengths = f"module(x, {name}={name})", f"{name} = {name}[:, :5]"
    first = "" if isinstance(_run_with_memory(a, name, [equal_lengths, f"out = {call}"])[0], Tensor) else "[0]"
    # a LayerNorm would remove a factor or a sum
    other, changed = call.replace(f"={name}", f"=-{name}"), call.replace("(x", "(changed")
    both = f"out, other = {call}{first}[:, :-1], {changed}{first}[:, :-1]"
    close = "same = torch.allclose(out, other, atol=1e-5)"
    ignored = [equal_lengths, f"out, other = {call}{first}, {other}{first}", "same = torch.equal(out, other)"]
    attended = [equal_lengths, "changed = x.clone()", "changed[:, -1] *= -1", both, close]
    cases = {
        f"another {name} gives the same output": (ignored, False),
        f"rows of x are attended to, although {name} is passed": (attended, True),
    }
    for words, (lines, expected) in cases.items():
        same, code = _run_with_memory(a, name, lines)
        if same != expected:
            return Failure(words, "\n".join([*code, *result_comments("", same, expected)]))
    return None


def memory_argument(a: MeasuredAttention) -> str | None:
    """Return the argument of a layer, besides its input x, that takes another sequence for keys and values, or None."""
    probe = a.probe
    name = a.find_parameter(MEMORIES)
    if name is None or probe.module is None or known_projections(probe.module) is None or "b n" not in probe.layout:
        return None
    call = f"out = module(x, {name}={name})"
    # keys of the memory and values of x, or the reverse, need equal lengths
    for lines in ([call], [f"{name} = {name}[:, :5]", call]):
        try:
            out = first_tensor(_run_with_memory(a, name, lines)[0])
        except Exception:  # the function of the user may raise any exception  # nosec B112
            continue
        return name if out.shape[:2] == (2, 5) else None
    return None


def _run_with_memory(a: MeasuredAttention, name: str, lines: list[str]) -> tuple[Any, list[str]]:
    """Execute lines of Python code that call a layer with a memory.

    In the lines, `module` is the layer and `x` is a random input. The memory is a longer random sequence, from which
    keys and values should be computed. Returns the value that the last line assigns, and all lines including those that
    create the inputs.

    name  name of the memory, as an argument of the layer and as a variable in the lines
    """
    module = a.probe.module
    known = known_projections(module) if module is not None else None
    assert module is not None
    assert known is not None
    x, memory = (projection_widths(module.get_submodule(known.names[end]))[0] for end in (0, -1))
    dtype = next(module.parameters()).dtype
    lines = [
        f"# module: what was passed to check, {a.probe.name}",
        "module.eval()",
        "torch.manual_seed(0)",
        f"x, {name} = torch.randn(2, 5, {x}).to({dtype}), torch.randn(2, 7, {memory}).to({dtype})",
        *lines,
    ]
    space: dict[str, Any] = {"torch": torch, "module": module}
    with torch.no_grad():
        exec("\n".join(lines), space)  # code written by this package, which the report shows  # nosec B102
    return space[lines[-1].partition(" = ")[0]], lines


def all_ones(x: Tensor) -> bool:
    """Return whether all entries are 1, with an error of at most 1e-4.

    Zeros and NaN, which rows without a visible key give, are ignored. The result is False if there are no other
    entries.
    """
    known = x[~x.isnan() & (x != 0)].double()
    return bool(((known - 1).abs() < 1e-4).all()) and bool(len(known))


def _farthest_from_one(x: Tensor) -> float:
    known = x[~x.isnan()]
    return known[(known - 1).abs().argmax()].item() if len(known) else float("nan")
