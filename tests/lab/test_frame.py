"""Results, HTML pages, errata and drawing of the lab."""

import json
import math
import re
import shlex
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import pytest
from matplotlib.collections import LineCollection

from regard.base.errors import CheckpointError, ConfigError
from regard.base.formulas import mathml
from regard.cli.settings import parse_settings, parse_value
from regard.lab import results
from regard.lab.claim import Claim, Outcome, claims
from regard.lab.drawing import make_figure, plot_shares
from regard.lab.errata import errata
from regard.lab.html_page import claims_page, errata_page, figure_svg, inline_svg, number_call, value_html
from regard.lab.results import (
    NOT_RUN,
    OUTDATED,
    Result,
    latest_result,
    load_result,
    make_result,
    save_result,
    save_shipped_results,
    verdict_word,
)
from regard.lab.templates import render
from regard.lab.verdict import Verdict, join_numbers
from tests.lab.quick import TRAINING, outcome

EVERY = list(claims())


@pytest.fixture(scope="module")
def beta() -> Claim:
    return claims()["beta"]


@pytest.fixture(scope="module")
def result(beta: Claim) -> Result:
    return make_result(beta.run(beta.setup({"pairs": 10_301}, seed=5)))


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "SHIPPED", tmp_path / "with the package.json")
    return results.SHIPPED


def setups(claim: Claim) -> list[Any]:
    default, quick = claim.module.Setup(), claim.module.SMOKE
    return [default, quick, replace(default, seed=7), replace(quick, seed=11)]


class SetupOnly:
    """A claim whose run returns its setup."""

    def __init__(self, claim: Claim) -> None:
        self.setup = claim.setup

    def run(self, setup: Any) -> Any:
        return setup


@pytest.mark.parametrize("name", EVERY)
def test_the_command_and_the_call_of_a_result_give_its_setup(name: str) -> None:
    claim = claims()[name]
    for setup in setups(claim):
        result = make_result(Outcome(claim, setup, {}, Verdict("supported", "."), 0.1))
        words = shlex.split(result.command)
        assert words[:4] == ["regard", "lab", "run", name]
        changed = [words[at + 1] for at, each in enumerate(words) if each == "--set"]
        seed = int(words[words.index("--seed") + 1]) if "--seed" in words else None
        assert claim.setup(parse_settings(changed, claim.module.Setup), seed=seed, smoke="--smoke" in words) == setup
        assert eval(result.call, {"claims": lambda: {name: SetupOnly(claim)}}) == result.setup == setup


def test_settings_in_commands_and_calls_can_be_read_again() -> None:
    diffuse = claims()["diffuse"]
    setup = replace(diffuse.module.Setup(), betas=(3.0,), seed=13)
    result = make_result(Outcome(diffuse, setup, {}, Verdict("supported", "."), 0.1))
    assert result.command == "regard lab run diffuse --set betas=3.0 --seed 13"
    assert result.call == 'claims()["diffuse"].run(claims()["diffuse"].setup({"betas": (3.0,)}, seed=13))'
    four = claims()["four-kinds"]
    infinite = replace(four.module.Setup(), betas=(0.5, math.inf))
    result = make_result(Outcome(four, infinite, {}, Verdict("supported", "."), 0.1))
    assert result.command == "regard lab run four-kinds --set betas=0.5,inf"
    setup_call = 'claims()["four-kinds"].setup({"betas": (0.5, float("inf"))})'
    assert result.call == f'claims()["four-kinds"].run({setup_call})'


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("1_000", int, 1000),
        ("x", str, "x"),
        ("12", str, "12"),
        ("true", bool, True),
        ("False", bool, False),
        ("none", int | None, None),
        ("inf", float, math.inf),
        ("3,5", tuple[int, ...], (3, 5)),
        ("3", tuple[int, ...], (3,)),
        ("()", tuple[int, ...], ()),
        ("(3, 5)", tuple[int, ...], (3, 5)),
        ("a,b", tuple[str, ...], ("a", "b")),
        ("1,-inf", tuple[float, ...], (1, -math.inf)),
        ("(1, 2), (3, 4)", tuple[tuple[int, int], ...], ((1, 2), (3, 4))),
        ("many", int, "many"),
    ],
)
def test_a_setting_is_parsed_by_its_type(text: str, hint: Any, value: Any) -> None:
    assert parse_value(text, hint) == value
    assert type(parse_value(text, hint)) is type(value)


def test_a_saved_result_can_be_loaded(tmp_path: Path, beta: Claim, result: Result) -> None:
    odd = {**result.numbers, "odd": [math.inf, -math.inf, {"a": True, "b": None}], "text": "ä <b>"}
    result = replace(result, numbers=odd, figure="f.svg")
    path = save_result(result, tmp_path / "new" / "folder")
    assert path.name == "beta.json"
    assert load_result(beta, path.parent) == result
    json.loads(path.read_text("utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(results.decode_floats(results.encode_floats(math.nan)))


def test_a_result_reproduces_its_run(beta: Claim, result: Result) -> None:
    assert result.command == "regard lab run beta --set pairs=10301 --seed 5"
    assert result.setup.pairs == 10_301
    assert (result.threads, result.current) == (1, True)
    again = eval(result.call, {"claims": claims})
    assert isinstance(again, Outcome)
    assert again.numbers == result.numbers


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, beta: Claim, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_result(result, tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match=r"beta.json cannot be written: No space left on device"):
        save_result(replace(result, seconds=9.0), tmp_path)
    assert load_result(beta, tmp_path) == result
    assert [path.name for path in tmp_path.iterdir()] == ["beta.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not a JSON object"),
        ('{"format": "regard-lab-0", "results": []}', "its format is not regard-lab-2"),
        ('{"format": "regard-lab-2"}', "results is missing"),
        ('{"format": "regard-lab-2", "results": [{"id": "beta"}]}', "'numbers'"),
    ],
)
def test_a_damaged_result_is_reported_with_what_to_do(tmp_path: Path, beta: Claim, text: str, words: str) -> None:
    (tmp_path / "beta.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"beta.json is not a result of the lab: .*; delete it") as raised:
        load_result(beta, tmp_path)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"a": {3: 1.0}}, "the numbers of beta['a'] cannot be saved as JSON: {3: 1.0}"),
        ({"a": [1.0, {2}]}, "the numbers of beta['a'][1] cannot be saved as JSON: {2}"),
    ],
)
def test_numbers_that_json_cannot_hold_are_named(beta: Claim, numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_result(Outcome(beta, beta.module.SMOKE, numbers, Verdict("supported", "."), 0.1))


def test_the_latest_result_is_the_local_one_unless_only_the_shipped_one_is_up_to_date(
    tmp_path: Path, beta: Claim, result: Result
) -> None:
    here, there = replace(result, seconds=1.0), replace(result, seconds=2.0)
    assert latest_result(beta, tmp_path, {}) is None
    assert latest_result(beta, tmp_path, {"beta": there}) == there
    save_result(here, tmp_path)
    assert latest_result(beta, tmp_path, {"beta": there}) == here
    old = replace(here, fingerprint="of older code")
    save_result(old, tmp_path)
    assert latest_result(beta, tmp_path, {"beta": there}) == there
    assert latest_result(beta, tmp_path, {"beta": replace(there, fingerprint="older still")}) == old


def test_the_verdict_word_says_why_there_is_no_verdict(beta: Claim, result: Result) -> None:
    assert verdict_word(None) == NOT_RUN
    assert verdict_word(result) == "supported"
    assert verdict_word(replace(result, fingerprint="of older code")) == OUTDATED


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_inf_or_nan_refutes_a_claim_and_its_wrong_answers(beta: Claim, result: Result, odd: float) -> None:
    """Even if the verdict does not read this number."""
    numbers = result.numbers | {"more": {"tables": [[1.0, 2.0], [3.0, odd]]}}
    sentence = f'The number "more", tables[1][1] is {odd}, but every number of a run must be finite.'
    assert beta.judge(result.numbers).word == "supported"
    assert beta.judge(numbers) == Verdict("refuted", sentence)
    verdicts = [verdict for _, verdict in replace(result, numbers=numbers).wrong_answers]
    assert verdicts == [Verdict("refuted", sentence)] * 2


CODE = """
from regard.lab.drawing import plot_lines

@dataclass(frozen=True)
class Setup:
    size: int = 3

def run(setup, attention=attend):
    return {"size": _total(setup.size).sum()}

def _total(size):
    return torch.ones(size) * 2

def verdict(numbers):
    return decide(numbers["size"] > 0, "It is so.")
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("def run", "# a comment\\ndef run"),
        ("torch.ones(size) * 2", "(\\n        torch.ones( size )*2\\n    )"),
        ("def _total(size):", 'def _total(size: int) -> Tensor:\\n    """Return the total."""'),
        ("_total", "_sum_of_ones"),
        ("attention=attend", "attention=regard_attend"),
        ("It is so.", "It is larger."),
        ("> 0", "> 1"),
        ("import plot_lines", "import plot_bars"),
    ],
)
def test_formatting_names_and_verdicts_do_not_change_the_fingerprint(old: str, new: str) -> None:
    assert results.hash_input(CODE.replace(old, new.replace("\\n", "\n"))) == results.hash_input(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= 3", "= 4"),
        ("* 2", "* 3"),
        ("* 2", "+ 2"),
        (".sum()", ".mean()"),
        ('{"size"', '{"length"'),
        ("ones", "zeros"),
    ],
)
def test_changed_code_of_a_run_changes_the_fingerprint(old: str, new: str) -> None:
    assert results.hash_input(CODE.replace(old, new)) != results.hash_input(CODE)


def test_the_fingerprint_is_that_of_the_code_that_was_imported(tmp_path: Path, beta: Claim) -> None:
    file = tmp_path / "claim.py"
    file.write_text(CODE)
    moved = replace(beta, module=type(beta.module)("moved"))
    moved.module.__file__ = str(file)
    moved.module.Setup = beta.module.Setup  # type: ignore[attr-defined]
    before = results.fingerprint(moved)
    file.write_text(CODE.replace("* 2", "* 5"))
    assert results.fingerprint(moved) == before, "the file changed after its import"
    results.fingerprint.cache_clear()  # as in another process
    assert results.fingerprint(moved) != before


def test_saving_shipped_results_keeps_others_and_removes_unknown_claims(
    result: Result, nothing_shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results.shipped_results() == {}
    save_shipped_results({"beta": replace(result, figure="here.svg"), "gone": replace(result, id="gone")})
    assert results.shipped_results()["beta"] == result, "the path of a local figure is not shipped"
    diffuse = replace(result, id="diffuse", seconds=3.0)
    save_shipped_results({"diffuse": diffuse})
    assert results.shipped_results() == {"beta": result, "diffuse": diffuse}


def test_shipped_results_use_the_default_setup_of_existing_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, result in results.shipped_results().items():
        assert name in EVERY
        assert result.command == f"regard lab run {name}", "shipped results use the default setup"


@pytest.mark.parametrize(
    ("told", "folder"),
    [("/a/b", "/a/b/regard/lab"), ("", "HOME/.cache/regard/lab"), ("no/root", "HOME/.cache/regard/lab")],
)
def test_results_are_saved_in_the_users_cache(told: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", told)
    assert str(results.default_folder()) == folder.replace("HOME", str(Path.home()))


class Reader(HTMLParser):
    """What a browser would find in a page: elements, their attributes, text, and that all are closed."""

    EMPTY = ("meta", "img", "br", "hr", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.codes: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] == "code":
            self.codes.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_a_page_loads_nothing(beta: Claim, result: Result) -> None:
    text = claims_page([(beta, result), (claims()["diffuse"], None)])
    read = Reader(text)
    assert "://" not in text, "neither a remote address nor the name of one"
    assert not {"script", "link", "iframe", "object"} & {name for name, _ in read.elements}
    (policy,) = (each["content"] for each in read.named("meta") if "http-equiv" in each)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for _, attributes in read.elements:
        for name in ("src", "href"):
            address = attributes.get(name) or "#"
            assert address.startswith(("#", "data:")), address


def test_every_link_of_a_page_has_one_target(beta: Claim, result: Result) -> None:
    maps = claims()["four-kinds"]  # whose scales of colours are one picture, four times
    text = claims_page([(beta, result), (maps, make_result(maps.run(maps.module.SMOKE)))])
    read = Reader(text)
    names = Counter(attributes["id"] for _, attributes in read.elements if "id" in attributes)
    assert max(names.values()) == 1, names.most_common(3)
    wanted = [a["href"][1:] for _, a in read.elements if (a.get("href") or "").startswith("#")]  # type: ignore[index]
    wanted += re.findall(r"url\(#([^)]+)\)", text)
    assert len(wanted) > 10
    assert set(wanted) <= set(names)


def test_a_page_shows_a_claim_and_its_result(beta: Claim, result: Result) -> None:
    text = claims_page([(beta, result)])
    read = Reader(text)
    words = " ".join(read.words)
    answers = [text for answer in beta.wrong_answers for text in (answer.quote, answer.right)]
    for wanted in (beta.question, beta.claim, beta.measures, result.verdict.sentence, *answers):
        assert re.sub(r"\bbeta\b", "β", wanted) in words
    assert mathml(beta.formula) in text
    assert {"class": "badge supported"} in read.named("span")
    assert {"class": "badge refuted"} in read.named("span")
    assert [svg["role"] for svg in read.named("svg")] == ["img"]
    assert f"Figure: {beta.question}" in read.words
    assert "@media print" in text
    assert result.command in read.codes


def test_the_python_next_to_a_number_computes_it(beta: Claim, result: Result) -> None:
    codes = [code for code in Reader(claims_page([(beta, result)])).codes if ".numbers[" in code]
    assert len(codes) == len(result.numbers)
    for code, (name, value) in zip(codes, result.numbers.items(), strict=True):
        assert code == number_call(result, name)
        first, _, last = code.rpartition("; ")
        space: dict[str, Any] = {}
        exec(f"{first}\nfound = {last}", space)
        assert space["found"] == value


def test_a_page_says_what_was_not_run_and_what_is_out_of_date(beta: Claim, result: Result) -> None:
    unrun = " ".join(Reader(claims_page([(beta, None)])).words)
    assert "1 claims: 1 not run yet." in unrun
    assert "Not run yet: regard lab run beta" in unrun
    old = claims_page([(beta, replace(result, fingerprint="of older code"))])
    assert "Run it again: regard lab run beta" in old
    assert result.verdict.sentence not in old, "a verdict on another claim is no verdict on this one"
    assert "<svg" not in old


def test_every_claim_can_be_saved_and_shown_on_a_page(tmp_path: Path) -> None:
    found = []
    quick = [name for name in EVERY if name not in TRAINING]
    for name in quick:
        claim, result = claims()[name], make_result(outcome(name))
        save_result(result, tmp_path)
        assert load_result(claim, tmp_path) == result
        found.append((claim, result))
    some = found[::4]  # tests of the explorer draw all figures
    text = claims_page(some)
    assert len(Reader(text).named("math")) == len(some) == text.count("<svg")
    assert "://" not in text


HOSTILE = "<script>alert('1 & \"2\"')</script>"


def test_texts_of_a_claim_are_escaped(beta: Claim, result: Result) -> None:
    claim = replace(beta, question=HOSTILE + "?", claim=HOSTILE, measures=HOSTILE, source=HOSTILE)
    hostile = replace(
        result,
        numbers={**result.numbers, HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
        settings={HOSTILE: HOSTILE},
    )
    read = Reader(claims_page([(claim, hostile)], title=HOSTILE))
    assert not read.named("script")
    assert read.words.count(HOSTILE) >= 6
    assert number_call(hostile, 'a "b" \\').endswith('.numbers["a \\"b\\" \\\\"]')


def test_numbers_are_rounded_with_all_digits_in_the_tooltip() -> None:
    assert value_html(1234567) == "1,234,567"
    assert value_html(True) == "True"
    assert value_html(0.1) == "<span>0.1</span>"
    assert value_html(1 / 3) == '<span title="0.3333333333333333">0.333333</span>'
    assert value_html([1, "a"]) == "1, a"
    assert value_html([]) == ""
    assert value_html([[1, 2], [3, 4]]).count("<tr>") == 2
    assert value_html(list(range(25))).startswith("<details><summary>25 values</summary>0, 1, ")
    assert value_html({"a": 5}) == "<dl><dt>a</dt><dd>5</dd></dl>"


def test_a_figure_is_the_same_text_for_the_same_numbers(beta: Claim, result: Result) -> None:
    first, second = (figure_svg(beta, result.numbers) for _ in range(2))
    assert first == second
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert "<style" not in inline_svg(beta, result.numbers), "a figure's style would reach the whole page"


def test_errata_have_the_counter_example_of_a_run(beta: Claim, result: Result) -> None:
    found, _ = errata([result])
    assert found.refuted
    assert (found.id, found.source, found.command) == ("beta", "000 1.1c", result.command)
    assert "the largest weight at beta=0.01 is 0.254" in found.counter_example
    assert found.right.startswith("A large beta makes the weights one-hot")
    text = errata_page([found])
    assert "://" not in text
    words = " ".join(Reader(text).words)
    assert found.command in words
    for part in (found.quote, found.counter_example, found.right):
        assert part.replace("beta", "β") in words


def test_an_answer_that_is_right_is_not_an_erratum(result: Result) -> None:
    agreeing = result.numbers | {"weights": [[0.0, 0.0, 0.0, 1.0]] * 5}
    found, _ = errata([replace(result, numbers=agreeing)])
    assert (found.verdict, found.refuted) == ("supported", False)


def test_error_bars_of_shares_are_cut_at_0_and_1() -> None:
    _, (axes,) = make_figure()
    plot_shares(axes, {"sure": 0.97, "seldom": 0.01}, [0.2, 0.2])
    (whiskers,) = (each for each in axes.collections if isinstance(each, LineCollection))
    ends = [segment[:, 1].tolist() for segment in whiskers.get_segments()]
    assert ends == [pytest.approx([0.77, 1.0]), pytest.approx([0.0, 0.21])]
    above = [label.xy[1] for label in axes.texts]
    assert above == pytest.approx([1.0, 0.21]), "numbers stand above the whiskers"


def test_panels_of_a_heat_map_use_the_full_colour_range() -> None:
    claim = claims()["softmax-jacobian"]
    made = claim.draw(claim.run(claim.setup(smoke=True)).numbers)
    for axes in made.axes[:2]:
        (picture,) = axes.images
        shown = picture.get_array()
        assert shown is not None
        assert picture.get_clim() == (shown.min(), shown.max())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], ""),
        ([4], "4"),
        ([0.5, 2.0], "0.5 and 2"),
        ([1, 12, 4096], "1, 12 and 4,096"),
        ([262_144, 262_144, 262_144], "262,144"),
        ([7, 7, 9], "7, 7 and 9"),
    ],
)
def test_numbers_are_joined_as_in_a_sentence(values: list[float], words: str) -> None:
    assert join_numbers(values) == words


def test_a_number_may_have_the_name_of_a_method_of_dicts():
    assert (
        render("{{ n.keys }} keys, {{ n.items|length }} items", n={"keys": 17, "items": [1, 2]}) == "17 keys, 2 items"
    )
    with pytest.raises(jinja2.UndefinedError, match="no attribute 'queries'"):
        render("{{ n.queries }}", n={"keys": 17})
