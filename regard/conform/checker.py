"""`regard.check`: measure the conventions of an attention or a decoder, then test every fact on it."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.base.errors import ConfigError
from regard.base.registry import Registry
from regard.conform.attention_under_test import (
    CAUSAL_NAMES,
    DOCUMENT_NAMES,
    GROUPED_NAME,
    TRAINING_NAMES,
    WIDTHS,
    find_abilities,
)
from regard.conform.conventions import WIDE, MeasuredAttention
from regard.conform.decoder import DecoderUnderTest, make_decoder, takes_tokens
from regard.conform.example import Raised, find_call_code
from regard.conform.fact import POLICY, Fact, Failure, NotApplicableError
from regard.conform.facts import ATTENTION, DECODER
from regard.conform.facts.behaviour import raised_by
from regard.conform.facts.dependence import memory_argument
from regard.conform.inputs import AttentionInputs
from regard.conform.options import CheckOptions
from regard.conform.report import DIFFERS, EXPLAINED, FAILED, NOT_APPLICABLE, PASSED, Convention, FactResult, Report
from regard.conform.reset_state import find_reset
from regard.conform.shrink import Violation, failure_of
from regard.see.adapters import Probe, as_probe
from regard.see.measure.mask_argument import MaskArgument
from regard.see.measure.read_weights import training_mode

Progress = Callable[[str], None]
RAISING_FACTS = ("one-query", "odd-lengths", "memory-layout", "inputs-changed")  # explain exceptions of later facts


def check(fn: object, *, progress: Progress | None = None, **options: Any) -> Report:
    """Test an attention or a decoder and return a report.

    An attention is a function of q, k and v or an attention module; a decoder maps tokens to logits. Each
    tested property, such as the scale of an attention, is called a fact.

    fn        the attention or decoder
    progress  function that is called with the name of each fact before the fact is tested
    options   the fields of `regard.conform.options.CheckOptions`: sizes, facts to test, and conventions that fn
              is declared to follow, such as causal=True, window_before=4 or grouping="tile"

    >>> check(torch.nn.functional.scaled_dot_product_attention, only=["scale"]).ok
    True
    >>> check(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, only=["scale"]).failures[0].failure.found
    'q . k is multiplied by 1 (none), not by 1/sqrt(c)'
    """
    plan = plan_check(fn, **options)
    module = fn if isinstance(fn, nn.Module) else None
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        _no_exit(fn),
        training_mode(module, training=False),
    ):
        warnings.simplefilter("ignore")  # warnings of the checked code are not reported
        if plan.kind == "decoder":
            decoder = make_decoder(fn, plan.options)
            results = _run_facts(plan.facts, decoder, progress)
            return Report(decoder.name, plan.kind, results, decoder.conventions(), *find_source(fn))
        probe_options = plan.options.probe_options
        reset = find_reset(fn, lambda: as_probe(fn, **probe_options))
        probe = as_probe(fn, **probe_options)
        with training_mode(probe.module, training=False):
            attention = find_abilities(MeasuredAttention(probe, plan.options, reset=reset))
            attention = replace(attention, code=find_call_code(fn, attention))
            results = _run_facts(plan.facts, attention, progress)
            found = [Convention("note", probe.note)] if probe.note else []
            values = [f"{name} = {probe.filled_values.get(name, None)}" for name in probe.filled_in]
            found += [Convention("filled in", "; ".join(values))] if values else []
            if not any(result.status == FAILED and result.fact.fatal for result in results):
                found += [*describe_conventions(attention), *_untested_arguments(attention)]
            return Report(probe.name, plan.kind, results, tuple(found), *find_source(fn))


def find_source(fn: object) -> tuple[str | None, int]:
    """Return the file and the line where a function, or the class of an object, is defined.

    The path is relative if the file is below the current folder. The result is (None, 1) if the source code is not
    found.
    """
    code = inspect.unwrap(fn) if inspect.isroutine(fn) else type(getattr(fn, "module", None) or fn)
    try:
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):  # a builtin, or a function that was typed in
        return None, 1
    here = Path.cwd()
    return None if file is None else str(Path(file).relative_to(here) if here in Path(file).parents else file), line


check.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *list(inspect.signature(check).parameters.values())[:2],
        *(
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(CheckOptions)
        ),
    ],
    return_annotation=Report,
)


@contextmanager
def _no_exit(fn: object) -> Iterator[None]:
    """Context manager: convert sys.exit() in the checked code to a ConfigError.

    Otherwise sys.exit() would end the check with exit code 0, which means that all facts hold.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as ended:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ConfigError(
            f"{name} could not be checked: it raised {type(ended).__name__}({ended}), which ends the program; remove "
            "the call of sys.exit(), or raise an ordinary error"
        ) from ended


class CheckPlan(NamedTuple):
    """The validated arguments of a check.

    kind     "attention" or "decoder"
    facts    the facts to test
    options  the options of the check
    """

    kind: str
    facts: list[Fact]
    options: CheckOptions


def plan_check(fn: object, **options: Any) -> CheckPlan:
    """Validate the options of a check and choose the facts to test.

    Invalid options raise ConfigError before any test runs.
    """
    known = CheckOptions.from_keywords(options)
    if not isinstance(fn, Probe) and not callable(fn):
        raise ConfigError(f"check takes a function of q, k and v, an nn.Module or a decoder, not {fn!r}")
    if isinstance(fn, type):
        raise ConfigError(f"{fn.__name__} is a class; pass an instance, as {fn.__name__}(...)")
    kind = known.kind
    if kind is None:
        with _no_exit(fn):  # a module is run to see what it embeds
            kind = "decoder" if takes_tokens(fn) else "attention"
    return CheckPlan(kind, _choose_facts(DECODER if kind == "decoder" else ATTENTION, known), known)


def _choose_facts(registry: Registry[Fact], options: CheckOptions) -> list[Fact]:
    def names(given: Iterable[str]) -> list[str]:
        return [registry[name].name for name in ([given] if isinstance(given, str) else given)]

    only, without = names(options.only), names(options.without)
    # a slow fact that the user names is always tested
    chosen = [
        registry[name]
        for name in registry
        if name not in without and (name in only if only else not (options.quick and registry[name].slow))
    ]
    if not chosen:
        raise ConfigError(f"no fact is left to test: `without` excludes {', '.join(without)}, and `only` all others")
    return chosen


def _run_facts(
    facts: list[Fact], tested: MeasuredAttention | DecoderUnderTest, progress: Progress | None
) -> tuple[FactResult, ...]:
    """Test the facts in order and return their results.

    If a fact fails because another fact failed, its result is marked as explained by the other fact. After a
    fatal failure, the remaining facts are not tested.

    progress  function that is called with the name of each fact before the fact is tested
    """
    results: list[FactResult] = []
    causes: dict[str, str] = {}  # each broken fact, with the fact that explains it: itself, or another
    fatal: str | None = None
    for fact in facts:
        if progress is not None:
            progress(fact.name)
        if fatal is not None:
            results.append(FactResult(fact, EXPLAINED, f"explained by {fatal}"))
            continue
        start = perf_counter()
        result = _run_fact(fact, tested, causes)
        results.append(replace(result, seconds=perf_counter() - start))
        ends = fact.fatal or (result.failure is not None and result.failure.fatal)
        fatal = causes[fact.name] if ends and fact.name in causes else None
    return tuple(results)


def _run_fact(fact: Fact, tested: MeasuredAttention | DecoderUnderTest, causes: dict[str, str]) -> FactResult:
    """Test one fact and return its result.

    causes  dictionary from the name of each failed fact to the name of the fact that explains the failure: another fact
            or the fact itself. If `fact` fails, its name is added
    """
    cause = next((causes[name] for name in fact.explained_by.split() if name in causes), None)
    try:
        failure = fact.test(tested)
    except NotApplicableError as reason:
        return FactResult(fact, NOT_APPLICABLE, str(reason))
    except NotImplementedError as refusal:
        return FactResult(fact, NOT_APPLICABLE, f"not implemented: {Raised.from_error(refusal).message}")
    except Exception as error:  # the function of the user may raise any exception
        cause = cause or next((name for name in RAISING_FACTS if name in causes), None)
        failure = _raising_failure(tested, f"the call raises {Raised.from_error(error)}")
    if failure is None:
        return FactResult(fact, PASSED)
    causes[fact.name] = cause or fact.name
    if cause is not None:
        return FactResult(fact, EXPLAINED, f"explained by {cause}")
    return FactResult(fact, DIFFERS if (failure.grade or fact.grade) == POLICY else FAILED, failure.found, failure)


def _raising_failure(tested: MeasuredAttention | DecoderUnderTest, words: str) -> Failure:
    """Return a `Failure` for a fact whose test raised an error.

    Its example repeats the last call of the attention, with inputs that are as small as possible. There is no example
    for a decoder, or if the call does not raise an error again.

    words  describes the error
    """
    if isinstance(tested, DecoderUnderTest) or not tested.last_inputs:
        return Failure(words)

    def detect(inputs: AttentionInputs) -> Violation | None:
        raised = raised_by(tested, inputs)
        return None if raised is None else Violation(words, raised)

    return failure_of(tested, tested.last_inputs[0], detect, words)


def describe_conventions(a: MeasuredAttention) -> Iterator[Convention]:
    """Yield the measured conventions of an attention, described in words.

    Conventions that cannot be measured are left out.
    """
    declared = a.declared
    alone = "" if a.causal_works_alone else ", raises without a mask"

    def longer() -> str:
        memory = memory_argument(a)
        return "" if memory is None else f", unless {memory} is passed"

    described: dict[str, tuple[Callable[[], str | None], object]] = {
        "visible keys": (lambda: str(a.band or "not a band"), None),
        "causal argument": (lambda: a.causal_argument and f"{a.causal_argument}=True{alone}", None),
        "alignment": (lambda: _alignment_words(a), declared.alignment),
        "scale": (lambda: a.scale_name if a.scores_fit else None, declared.scale),
        "grouped heads": (lambda: a.grouping, declared.grouping),
        "rotary pairing": (lambda: _rotary_words(a), declared.rotary),
        "soft-cap": (lambda: f"{declared.softcap:g}" if declared.softcap and a.scores_fit else None, declared.softcap),
        "norm of q and k": (lambda: declared.qk_norm if a.scores_fit else None, declared.qk_norm),
        "sink": (lambda: _sink_words(a), declared.sink),
        "bias": (lambda: a.bias_name if a.bias_name != "none" else None, declared.bias),
        "mask": (lambda: _mask_words(a.mask), declared.mask_polarity),
        "padding": (lambda: _mask_words(a.padding), declared.mask_polarity),
        "mask and causal": (lambda: "a mask replaces the causal one" if a.mask_replaces_causal else None, None),
        "fully masked row": (lambda: a.fully_masked_rows, declared.fully_masked_rows),
        "lengths": (lambda: None if a.free_lengths else f"as many queries as keys{longer()}", None),
        "value width": (lambda: None if a.free_widths else "equal to the width of keys", None),
        "head widths": (lambda: f"{_list(a.widths)} of {_list(WIDTHS)}" if a.widths else None, None),
        "layout": (lambda: None if a.probe.layout == "b h n c" else a.probe.layout, None),
        "memory argument": (lambda: memory_argument(a), None),
        "gradients": (lambda: None if a.has_gradients else "none", None),
    }
    for name, (describe, wanted) in described.items():
        try:
            value = describe()
        except Exception:  # something is broken, so that this cannot be measured  # nosec B112
            continue
        if value is not None:
            yield Convention(name, value, None if wanted is None else str(wanted))


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _untested_arguments(a: MeasuredAttention) -> Iterator[Convention]:
    """Yield one `Convention` that lists the arguments of the attention that no test used; nothing if all were used."""
    used: set[str | None] = {*CAUSAL_NAMES, GROUPED_NAME, *(a.declared.extra or {}), *a.probe.filled_in}
    padding = None if a.padding is None else a.padding.name
    scale = a.scale_argument if a.scale_argument and _accepts_scale(a, a.scale_argument) else None
    mask = None if a.mask is None else a.mask.name
    training = a.find_parameter(TRAINING_NAMES) if a.dropout_argument else None
    used |= {mask, padding, scale, a.dropout_argument, training, memory_argument(a), a.find_parameter(DOCUMENT_NAMES)}
    unused = [name for name in a.probe.parameters if name not in used]
    if unused:
        advice = "" if a.mask is not None else "; declare mask_argument=... if one is a mask"
        yield Convention("untested arguments", f"{', '.join(unused)}{advice}")


def _accepts_scale(a: MeasuredAttention, name: str) -> bool:
    try:
        a(a.random_inputs(5, 5), **{name: 1.7})
    except Exception:  # the function of the user may raise any exception
        return False
    return True


def _alignment_words(a: MeasuredAttention) -> str | None:
    """Describe how queries are aligned with a larger number of keys, such as "bottom-right".

    The alignment is that of the mask or, if the mask shows none, that of the rotary positions. Returns None if neither
    of them shows an alignment.
    """
    if a.alignment is not None or a.rotary_alignment is None:
        return a.alignment
    return f"{a.rotary_alignment}, by rotary positions"


def _rotary_words(a: MeasuredAttention) -> str | None:
    if a.rotary is None:
        return None
    share = a.rotary.width / a.measurement(c=WIDE).raw.reader.c
    scheme = a.rotary_scheme or "frequencies of no known scheme"
    return f"{a.rotary.pairing}, {scheme}" + ("" if share == 1.0 else f", {share:.0%} of the coordinates")


def _sink_words(a: MeasuredAttention) -> str | None:
    found = a.measurement().bias.sink if a.declared.sink else None
    return None if found is None else f"logits {', '.join(f'{logit:.4g}' for logit in found)}"


def _mask_words(argument: MaskArgument | None) -> str | None:
    if argument is None:
        return None
    one = "1" if argument.values == "ones" else "True"
    meanings = {"keep": f"{one} keeps", "drop": f"{one} drops", "transposed": "transposed", None: "hides nothing"}
    added = argument.works and argument.values == "additive"
    return f"{argument.name} ({argument.axes}), {'added to scores' if added else meanings[argument.polarity]}"


def list_facts() -> dict[str, list[Fact]]:
    """Return all facts that `check` can test, for "attention" and for "decoder"."""
    return {
        kind: [registry[name] for name in registry]
        for kind, registry in (("attention", ATTENTION), ("decoder", DECODER))
    }
