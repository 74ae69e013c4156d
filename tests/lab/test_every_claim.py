"""What must hold for every claim of the lab."""

import ast
import dataclasses
import inspect
import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from regard.base.errors import ConfigError
from regard.base.formulas import mathml, text
from regard.lab.claim import claims
from regard.lab.results import make_result, shipped_results
from regard.lab.verdict import REFUTED, SUPPORTED, UNCLEAR
from tests.lab import test_attention, test_heads, test_language_claims, test_transformers
from tests.lab.quick import NEEDS_FULL_RUN, TRAINING, Fault, claim, fault_cases, numbers, outcome

CLAIMS = list(claims())
SEVERAL_SEEDS = [name for name, result in shipped_results().items() if "repeats" in result.numbers]
FAULTS: list[Fault] = [
    *((name, {"attention": fault}) for name, faults in test_attention.FAULTS.items() for fault in faults),
    *(fault for chapter in (test_heads, test_transformers, test_language_claims) for fault in chapter.FAULTS),
]
WITH_FAULTS = {name for name, _ in FAULTS}


def test_every_claim_has_a_fault_that_refutes_it() -> None:
    missing = [name for name in CLAIMS if name not in WITH_FAULTS]
    assert not missing, f"add a fault for {', '.join(missing)} to FAULTS of its chapter in tests/lab"
    assert set(CLAIMS) >= TRAINING | WITH_FAULTS


def test_every_claim_has_a_shipped_result_that_is_up_to_date_and_supports_it() -> None:
    shipped = shipped_results()
    missing = [name for name in CLAIMS if name not in shipped or not shipped[name].current]
    assert not missing, f"run `regard lab run {' '.join(missing)} --save-shipped`"
    assert set(shipped) == set(CLAIMS)
    assert {result.verdict.word for result in shipped.values()} == {SUPPORTED}


@pytest.mark.parametrize(("name", "fault", "settings"), fault_cases(FAULTS))
def test_a_fault_refutes_the_claim(name: str, fault: dict[str, Any], settings: dict[str, Any]) -> None:
    faulty = claim(name).run(claim(name).setup(settings, smoke=True), **fault)
    if name in NEEDS_FULL_RUN:
        assert faulty.verdict.word != SUPPORTED, faulty.verdict.sentence
    else:
        assert faulty.verdict.word == REFUTED, faulty.verdict.sentence


@pytest.mark.parametrize("name", CLAIMS)
def test_the_formula_can_be_parsed(name: str) -> None:
    assert not re.search(r"[\\{}]|\s{4}", text(claim(name).formula))
    ElementTree.fromstring(mathml(claim(name).formula))


@pytest.mark.parametrize("name", CLAIMS)
def test_a_short_run_supports_the_claim_and_refutes_its_wrong_answers(name: str) -> None:
    if name in NEEDS_FULL_RUN:
        assert outcome(name).verdict.word != REFUTED, outcome(name).verdict.sentence
        return
    assert outcome(name).verdict.word == SUPPORTED, outcome(name).verdict.sentence
    for answer, verdict in outcome(name).wrong_answers:
        assert verdict.word == REFUTED, f"{answer.source}: {verdict.sentence}"
    assert ("repeats" in numbers(name)) == (name in SEVERAL_SEEDS)


@pytest.mark.parametrize("name", CLAIMS)
def test_sentences_have_no_python_lists_and_numbers_are_json(name: str) -> None:
    sentences = [outcome(name).verdict.sentence, *(verdict.sentence for _, verdict in outcome(name).wrong_answers)]
    assert [found for each in sentences for found in re.findall(r"\[[^a-zA-Z]*\]|\{|0e\+00", each)] == []
    assert json.loads(json.dumps(numbers(name), allow_nan=False)) == numbers(name)


TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.S)


def typed_numbers(name: str) -> set[float]:
    """The numbers that the texts of a claim repeat whatever the setup: in its finding, its errata and its figure."""
    texts = [claim(name).finding, *(each.counter for each in claim(name).wrong_answers if each.when == "true")]
    drawing = ast.walk(ast.parse(inspect.getsource(claim(name).module.draw)))
    texts += [node.value for node in drawing if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {
        float(number)
        for each in texts
        for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", TEMPLATE.sub("", each))
    }


@pytest.mark.parametrize("name", CLAIMS)
def test_texts_do_not_repeat_the_value_of_a_setting(name: str) -> None:
    """A text that did would be wrong for every other setup."""
    settings = {key: value for key, value in dataclasses.asdict(claim(name).setup()).items() if key != "seed"}
    constants = {0.0, 1.0, 2.0, 3.0, 0.5}  # too common to be settings
    typed = typed_numbers(name) - constants
    repeated = {key: value for key, value in settings.items() if isinstance(value, int | float) and value in typed}
    assert repeated == {}, "write {{ n.name }} instead"


def unusual(value: Any) -> list[Any]:
    """Other values of a setting: a smaller one, an extreme one, and a larger one."""
    if isinstance(value, bool | str) or value is None:
        return []
    if isinstance(value, int):
        return [max(value // 2, 1), 2, 2 * value + 1]
    if isinstance(value, float):
        return [value / 2, 1e-9, 3 * value]
    return [value[:-1], value[::-1], (*value, 2 * value[-1])] if isinstance(value, tuple) else []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(0, id="smaller"),
        pytest.param(1, id="extreme"),
        pytest.param(2, id="larger", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", [name for name in CLAIMS if name not in TRAINING | {"synthesizer"}])
def test_unusual_settings_are_followed_or_refused(name: str, change: int) -> None:
    """No setting refutes a true claim or supports a wrong answer, and no run ends in an error."""
    for key, value in dataclasses.asdict(claim(name).setup(smoke=True)).items():
        for other in unusual(value)[change : change + 1] if key not in ("seed", "repeats") else ():
            try:
                setup = claim(name).setup({key: other}, smoke=True)
            except ConfigError:
                continue
            found = claim(name).run(setup)
            verdicts = [found.verdict, *(verdict for _, verdict in found.wrong_answers)]
            assert found.verdict.word in (SUPPORTED, UNCLEAR), f"{key}={other}: {found.verdict.sentence}"
            assert {each.word for each in verdicts[1:]} <= {REFUTED}, f"{key}={other}: {verdicts}"
            claim(name).draw(found.numbers)


# settings under which the claim cannot show itself, and a word of what is missing; none may refute or support it
UNDECIDED: list[tuple[str, dict[str, Any], str]] = [
    ("sparse-patterns", {"lengths": (16, 64), "reach": 100, "small": 16}, "much longer"),
    ("sparse-patterns", {"lengths": (64, 256), "tokens": 64}, "much longer"),
    ("streaming", {"depths": (1,)}, "two depths"),
    ("streaming", {"look_ahead": 0}, "a look-ahead"),
    ("running-linear", {"width": 1, "out": 1}, "only weights of 0"),
    ("layer-norm", {"depths": (1,)}, "at least 8 layers"),
    ("layer-norm", {"factor": 1.0}, "factor"),
    ("layer-norm", {"gains": (0.1, 0.2)}, "above and below 1"),
    ("byte-pairs", {"other": "日本語"}, "no pair"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("query-nudge", {"queries": 1, "query": 0}, "queries is 1, but must be at least 2"),
    ("why-same-size", {"outputs": (24,)}, "outputs must contain the width, 24, and another"),
    ("softmax-jacobian", {"divided_by": 0.01}, "must differ by at most 400"),
    ("byte-pairs", {"text": ""}, "a pair of letters twice"),
    ("byte-pairs", {"text": "abc"}, "a pair of letters twice"),
    ("byte-pairs", {"other": ""}, "other must not be empty"),
    ("positions", {"distance": 11}, "distance must be at most half of length"),
    ("positions", {"vocab": 2}, "vocab is 2, but must be at least 4"),
    ("bert-tasks", {"hidden": 0.0}, "hidden must be a share of words"),
]


@pytest.mark.parametrize(("name", "settings", "missing"), UNDECIDED)
def test_settings_that_show_nothing_decide_nothing(name: str, settings: dict[str, Any], missing: str) -> None:
    found = claim(name).run(claim(name).setup(settings, smoke=True)).verdict
    assert found.word == UNCLEAR
    assert missing in found.sentence.partition("This setup does not decide: ")[2]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_settings_without_a_result_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        claim(name).setup(settings, smoke=True)


@pytest.mark.parametrize("name", ["encoder-decoder", "synthesizer"])
def test_models_that_were_hardly_trained_refute_nothing(name: str) -> None:
    found = claim(name).run(claim(name).setup({"steps": 2, "repeats": 2}, smoke=True))
    assert found.verdict.word == make_result(found).verdict.word == UNCLEAR
    assert "This setup does not decide: it needs at least" in found.verdict.sentence
    assert found.wrong_answers == []


def widen(found: Any) -> Any:
    """Return intervals too wide to decide anything."""
    if isinstance(found, dict):
        return {name: widen(value) for name, value in found.items()}
    return [widen(value) for value in found] if isinstance(found, list) else 100 * found + 5


@pytest.mark.parametrize("name", SEVERAL_SEEDS)
def test_wide_intervals_over_seeds_make_the_verdict_unclear(name: str) -> None:
    wide = {each: widen(value) for each, value in numbers(name).items() if each.startswith("interval")}
    assert wide
    assert claim(name).module.verdict(numbers(name) | wide).word == UNCLEAR


@pytest.mark.parametrize("name", CLAIMS)
def test_the_figure_has_titles_and_axis_labels(name: str) -> None:
    figure = claim(name).draw(numbers(name))
    assert isinstance(figure, Figure)
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert panels
    for axes in panels:
        assert axes.get_title()
        assert axes.get_ylabel()
        assert axes.get_xlabel() or all(label.get_text() for label in axes.get_xticklabels())  # bars have names
    figure.draw_without_rendering()


def without_seconds(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if "seconds" not in name}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TRAINING | {"synthesizer"})) for name in CLAIMS]
)
def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    assert without_seconds(claim(name).run(claim(name).setup(smoke=True)).numbers) == without_seconds(numbers(name))


@pytest.mark.parametrize("name", CLAIMS)
def test_the_full_run_supports_the_claim_and_refutes_its_wrong_answers(name: str) -> None:
    assert claim(name).budget <= 120, "at most two minutes on two cores"
    full = claim(name).run(claim(name).setup())
    assert full.verdict.word == SUPPORTED, full.verdict.sentence
    assert all(verdict.word == REFUTED for _, verdict in full.wrong_answers)
