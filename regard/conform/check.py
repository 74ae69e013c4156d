"""`regard.check`: find out the conventions of an attention, then test every fact of attention on it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from regard.base.errors import ConfigError
from regard.base.registry import Registry
from regard.base.validation import check_integer
from regard.conform.callable_under_test import CAUSAL, DOCUMENTS, GROUPED, WIDTHS, Subject, settled
from regard.conform.conventions import Findings
from regard.conform.decoder import DecoderUnderTest, as_decoder, looks_like_a_decoder
from regard.conform.example import way_of
from regard.conform.fact import Fact, Failure, NotApplicableError
from regard.conform.facts import ATTENTION, DECODER
from regard.conform.facts.behaviour import first_line, kept_in_kind, refusal
from regard.conform.facts.dependence import memory_argument
from regard.conform.inputs import Inputs
from regard.conform.make_probe import asked, known_layout
from regard.conform.options import Declared
from regard.conform.report import EXPLAINED, FAILED, NOT_APPLICABLE, PASSED, Convention, Report, Result
from regard.conform.reset_state import anew
from regard.conform.shrink import Complaint, failure as shortest
from regard.see.adapters import Probe
from regard.see.measure.read_weights import training_mode

Progress = Callable[[str], None]
REFUSALS = ("one-query", "odd-lengths", "memory-layout", "inputs-changed")


def check(
    fn: object,
    *,
    kind: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    layout: str | None = None,
    extra: Mapping[str, object] | None = None,
    vocab: int | None = None,
    only: Iterable[str] = (),
    without: Iterable[str] = (),
    seed: int = 0,
    quick: bool = False,
    progress: Progress | None = None,
    **declared: Any,
) -> Report:
    """Test every fact of attention on a function (q, k, v), a module, or a decoder from tokens to logits.

    kind                    "attention" or "decoder"; None tells by what it takes
    heads, kv_heads, width  sizes of a module, where they cannot be read off it
    layout                  the axes of a function, "b h n c" unless it turns out otherwise; of a module around an
                            attention "b n c" (expected) or "n b c"
    extra                   arguments handed over at every call; a decoder's may be functions of the tokens
    vocab                   how many tokens a decoder knows, where its embedding does not tell
    only, without           names of facts to test alone, or to leave out
    quick                   leave out what takes seconds (torch.compile)
    progress                called with the name of each fact before it is tested
    declared                what its owner says of it: causal=True, window_before=4, grouping="tile"; see Declared
    """
    plan = planned(
        fn,
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        layout=layout,
        extra=extra,
        vocab=vocab,
        only=only,
        without=without,
        seed=seed,
        quick=quick,
        **declared,
    )
    module = fn if isinstance(fn, nn.Module) else None
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        _kept_running(fn),
        training_mode(module, training=False),
    ):
        warnings.simplefilter("ignore")  # another project's warnings are not what is being reported
        if plan.kind == "decoder":
            decoder = as_decoder(fn, plan.declared, vocab=vocab, seed=seed, extra=extra)
            results = _tested(plan.facts, decoder, progress)
            return Report(decoder.name, plan.kind, results, decoder.conventions())
        sizes = {"heads": heads, "kv_heads": kv_heads, "width": width}
        options: dict[str, Any] = {**sizes, "layout": layout, **(extra or {})}
        again = anew(fn, lambda: asked(fn, **options).probe)
        way = asked(fn, **options)
        with training_mode(way.probe.module, training=False):
            subject = replace(settled(way.probe, plan.declared, seed), fitting=way.fitting, anew=again)
            findings = Findings(replace(subject, way=way_of(fn, subject, options, way.special)))
            results = _tested(plan.facts, findings, progress)
            broken = any(result.status == FAILED and result.fact.fatal for result in results)
            noted = (Convention("asked", way.note),) if way.note else ()
            left = () if broken else _not_asked(findings, options)
            return Report(way.probe.name, plan.kind, results, noted if broken else (*noted, *named(findings), *left))


@contextmanager
def _kept_running(fn: object) -> Iterator[None]:
    """What ends a program, as sys.exit() does, is an error of what was asked: a check that ends early is no pass."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as ended:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ConfigError(
            f"{name} could not be checked: it raised {type(ended).__name__}({first_line(ended)}), which ends the "
            "program; let it raise an ordinary error, or take the call of sys.exit() out of it"
        ) from ended


@dataclass(frozen=True)
class CheckPlan:
    """What a check is going to do: what it takes the thing for, the facts to test, and what was declared."""

    kind: str
    facts: list[Fact]
    declared: Declared


def planned(
    fn: object,
    *,
    kind: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    layout: str | None = None,
    extra: Mapping[str, object] | None = None,
    vocab: int | None = None,
    only: Iterable[str] = (),
    without: Iterable[str] = (),
    seed: int = 0,
    quick: bool = False,
    **declared: Any,
) -> CheckPlan:
    """The plan of a check with these arguments. What makes no sense in them is refused here, before any work."""
    said = Declared.of(declared)
    for name, size in (("heads", heads), ("kv_heads", kv_heads), ("width", width), ("vocab", vocab)):
        if size is not None:
            check_integer(name, size, 1)
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise ConfigError(f"heads must be a multiple of kv_heads, which they share: heads={heads}, kv_heads={kv_heads}")
    check_integer("seed", seed, 0)
    if not isinstance(extra, Mapping | None):
        raise ConfigError(f"extra is a dict of arguments by name, not {extra!r}")
    known_layout(layout)
    if kind not in (None, "attention", "decoder"):
        raise ConfigError(f"kind is 'attention' or 'decoder', not {kind!r}")
    if not isinstance(fn, Probe) and not callable(fn):
        raise ConfigError(f"what is checked is a function of q, k and v, an nn.Module or a decoder, not {fn!r}")
    if isinstance(fn, type):
        raise ConfigError(f"{fn.__name__} is a class; hand over an instance, as {fn.__name__}(...)")
    if kind is None:
        with _kept_running(fn):  # a module is run to see what it embeds
            kind = "decoder" if looks_like_a_decoder(fn) else "attention"
    registry = DECODER if kind == "decoder" else ATTENTION
    return CheckPlan(kind, _chosen(registry, _names("only", only), _names("without", without), quick), said)


def _names(what: str, given: Iterable[str]) -> list[str]:
    """Names of facts; one alone need not be in a list."""
    if not isinstance(given, Iterable):
        raise ConfigError(f"{what} takes names of facts, as {what}=['scale'], not {given!r}")
    return [given] if isinstance(given, str) else list(given)


def _chosen(registry: Registry[Fact], only: list[str], without: list[str], quick: bool) -> list[Fact]:
    without = [registry[name].name for name in without]
    names = [registry[name].name for name in only] or list(registry)
    # a fact that was asked for by name is tested even if it is slow
    chosen = [
        registry[n] for n in registry if n in names and n not in without and (only or not (quick and registry[n].slow))
    ]
    if not chosen:
        raise ConfigError(
            f"no fact is left to be tested: `without` leaves out {', '.join(without)}, and `only` all else"
        )
    return chosen


def _tested(chosen: list[Fact], findings: Findings | DecoderUnderTest, progress: Progress | None) -> tuple[Result, ...]:
    results: list[Result] = []
    roots: dict[str, str] = {}  # a broken fact, and the one that explains it: itself, or another
    fatal: str | None = None
    for fact in chosen:
        if progress is not None:
            progress(fact.name)
        if fatal is not None:
            results.append(Result(fact, EXPLAINED, f"explained by {fatal}"))
            continue
        reason = next((roots[name] for name in fact.explained_by if name in roots), None)
        try:
            failure = fact.test(findings)
        except NotApplicableError as why:
            results.append(Result(fact, NOT_APPLICABLE, str(why)))
            continue
        except NotImplementedError as refusal:
            results.append(Result(fact, NOT_APPLICABLE, f"it says that it cannot: {first_line(refusal)}"))
            continue
        except Exception as error:
            # what already failed to answer at some length or layout explains that it does not answer here
            reason = reason or next((name for name in REFUSALS if name in roots), None)
            failure = _refused(findings, f"the call raises {type(error).__name__}: {first_line(error)}")
        if failure is None:
            results.append(Result(fact, PASSED))
        elif reason is not None:
            roots[fact.name] = reason
            fatal = reason if fact.fatal else None
            results.append(Result(fact, EXPLAINED, f"explained by {reason}"))
        else:
            roots[fact.name] = fact.name
            fatal = fact.name if fact.fatal else None
            results.append(Result(fact, FAILED, failure.found, failure))
    return tuple(results)


def _refused(findings: Findings | DecoderUnderTest, words: str) -> Failure:
    """The failure of a fact whose own call raised, with that call as its example where it raises again alone."""
    if isinstance(findings, DecoderUnderTest) or not findings.subject.last:
        return Failure(words)

    def judge(inputs: Inputs) -> Complaint | None:
        raised = refusal(findings, inputs)
        return None if raised is None else Complaint(words, raised)

    return shortest(findings.subject, findings.subject.last[0], kept_in_kind(judge), words) or Failure(words)


def named(f: Findings) -> tuple[Convention, ...]:
    """The conventions that were found, in words. What a broken attention does not let one find out is left out."""
    said = f.declared
    subject = f.subject
    ways: dict[str, tuple[Callable[[], str | None], object]] = {
        "sees": (lambda: str(f.band or "neither everything nor a band"), None),
        "causal by": (lambda: _causal_words(f), None),
        "alignment": (lambda: f.alignment or _aligned_by_rotary(f), said.alignment),
        "scale": (lambda: f.scale_name if f.scores_fit else None, said.scale),
        "grouped heads": (lambda: f.grouping, said.grouping),
        "rotary pairing": (lambda: _rotary_words(f), said.rotary),
        "soft cap": (lambda: f"{said.softcap:g}" if said.softcap and f.scores_fit else None, said.softcap),
        "norm of q and k": (lambda: said.qk_norm if f.scores_fit else None, said.qk_norm),
        "sink": (lambda: _sink_words(f), said.sink),
        "bias": (lambda: f.bias_name if f.bias_name != "none" else None, said.bias),
        "mask": (lambda: _mask_words(f), said.mask_polarity),
        "padding": (lambda: _padding_words(f), said.mask_polarity),
        "mask and causal": (lambda: "a mask takes the place of the causal one" if f.mask_replaces else None, None),
        "blind row": (lambda: f.blind_rows, said.blind_rows),
        "lengths": (lambda: _lengths_words(f), None),
        "widths": (lambda: None if subject.free_widths else "values as wide as queries and keys", None),
        "widths of heads": (lambda: _taken(subject.widths), None),
        "layout": (lambda: None if subject.probe.layout == "b h n c" else subject.probe.layout, None),
        "memory by": (lambda: memory_argument(f), None),
        "gradients": (lambda: None if f.carries_gradients else "none come back from its output", None),
        "filled in": (lambda: ", ".join(subject.probe.made_up) or None, None),
    }
    found = []
    for name, (find, declared) in ways.items():
        try:
            value = find()
        except Exception:
            continue
        if value is not None:
            found.append(Convention(name, value, None if declared is None else str(declared)))
    return tuple(found)


def _not_asked(f: Findings, handed: Mapping[str, Any]) -> tuple[Convention, ...]:
    """The arguments that nothing was tried with, so that nobody takes them for tested."""
    subject, asked_for = f.subject, {*CAUSAL, *GROUPED, *handed, *f.subject.probe.made_up}
    asked_for |= {subject.mask.name} if subject.mask is not None else set()
    asked_for |= {f.padding.name} if f.padding is not None and not f.padding.refused else set()
    asked_for |= {name for name in (subject.dropout_argument, memory_argument(f)) if name is not None}
    asked_for |= set(_first(DOCUMENTS, subject))
    if subject.scale_argument is not None and _takes(subject, {subject.scale_argument: 1.7}):
        asked_for.add(subject.scale_argument)
    left = [name for name in subject.probe.parameters if name not in asked_for]
    if not left:
        return ()
    advice = "" if subject.mask is not None else "; say mask_argument=... where one is a mask"
    return (Convention("not asked", f"{', '.join(left)}{advice}"),)


def _first(names: tuple[str, ...], subject: Subject) -> list[str]:
    return [name for name in names if name in subject.probe.parameters][:1]


def _takes(subject: Subject, given: Mapping[str, Any]) -> bool:
    try:
        subject(subject.draw(5, 5), **given)
    except Exception:
        return False
    return True


def _causal_words(f: Findings) -> str | None:
    if f.subject.causal_argument is None:
        return None
    return f"{f.subject.causal_argument}=True{'' if f.subject.causal_alone else ', refused without a mask'}"


def _aligned_by_rotary(f: Findings) -> str | None:
    """Where nothing is hidden, positions may still say where queries stand."""
    return None if f.rotary_alignment is None else f"{f.rotary_alignment}, by rotary positions"


def _lengths_words(f: Findings) -> str | None:
    if f.subject.free_lengths:
        return None
    memory = memory_argument(f)
    return "as many queries as keys" + (
        "" if memory is None else f", where no {memory} of another length is handed over"
    )


def _taken(widths: tuple[int, ...]) -> str | None:
    return f"{', '.join(map(str, widths))} of {', '.join(map(str, WIDTHS))}" if widths else None


def _rotary_words(f: Findings) -> str | None:
    if f.scores.rotary is None:
        return None
    part = "" if f.scores.turning == 1.0 else f", {f.scores.turning:.0%} of the coordinates"
    return f"{f.scores.rotary}, base {f.scores.base:g}{part}"


def _sink_words(f: Findings) -> str | None:
    found = f.sink()
    return None if found is None else f"logits {', '.join(f'{logit:.4g}' for logit in found.tolist())}"


def _mask_words(f: Findings) -> str | None:
    argument = f.subject.mask
    if argument is None:
        return None
    one = "1" if argument.values == "ones" else "True"
    told = {"keep": f"{one} keeps", "drop": f"{one} drops", "transposed": "transposed", None: "hides nothing"}
    added = argument.obeyed and argument.values == "additive"
    meaning = "added to scores" if added else told[argument.polarity]
    return f"{argument.name} ({argument.axes}), {meaning}"


def _padding_words(f: Findings) -> str | None:
    if f.padding is None or f.padding.polarity is None:
        return None
    return f"{f.padding.name} (b j), True {f.padding.polarity}s"


def facts() -> dict[str, list[Fact]]:
    """Every fact there is, of attentions and of decoders."""
    return {
        kind: [registry[name] for name in registry]
        for kind, registry in (("attention", ATTENTION), ("decoder", DECODER))
    }
