"""`regard lab`: listing, running, showing, errata."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result as Done
from typer.testing import CliRunner

from regard.base.formulas import text
from regard.base.registry import Registry
from regard.cli import lab
from regard.lab import answers, claim as frame, errata, html_page, results
from regard.lab.claim import Claim, claims
from regard.lab.errata import WrongAnswer

# imported before claims are planted, so that they keep the real ones
assert answers.claims is html_page.claims is frame.claims

app = typer.Typer()
app.add_typer(lab.app, name="lab")

PLANTED = '''"""Is {name} true?

Claim: {name} holds.
Measures: Nothing much.
Finding: The size is {{{{ n.size|short }}}}.
Budget: 1 second
Source: 009 9.{name}
"""

from dataclasses import dataclass

from regard.lab.drawing import make_figure, plot_bars
from regard.lab.verdict import Decision

MATHS = r"x = \\frac{{1}}{{2}}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    size: int = 5
    word: str = "a"
    seed: int = 0


SMOKE = Setup(size=3)


def run(setup):
    return {{"size": setup.size / {divisor}, "seed": setup.seed, "word": setup.word}}


def verdict(numbers):
    return Decision("{word}", {{}})


def draw(numbers):
    figure, (axes,) = make_figure()
    plot_bars(axes, {{"size": numbers["size"]}})
    return figure
'''


def planted(folder: Path, name: str, word: str, divisor: int, patch: pytest.MonkeyPatch) -> Claim:
    """A claim whose verdict is known beforehand."""
    path = folder / f"{name}.py"
    path.write_text(PLANTED.format(name=name, word=word, divisor=divisor))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)  # where a dataclass looks up its own module
    spec.loader.exec_module(module)
    return frame._parse_claim("heads", module)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder: nothing was run and nothing is shipped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "SHIPPED", tmp_path / "shipped.json")
    return tmp_path


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[Claim]:
    """Claims that come out each way, one of which cannot be run."""
    folder = tmp_path / "planted"
    folder.mkdir()
    known: Registry[Claim] = Registry("claim")
    for name, word, divisor in (
        ("holding", "supported", 1),
        ("broken", "supported", 0),
        ("failing", "refuted", 1),
        ("doubtful", "unclear", 1),
    ):
        known.add(name)(planted(folder, name, word, divisor, monkeypatch))
    for module in (frame, results):
        monkeypatch.setattr(module, "claims", lambda: known)
    wrong = tuple(seven(name) for name in known)
    for module in (frame, errata):
        monkeypatch.setattr(module, "wrong_answers", lambda: wrong)
    return known


def seven(name: str) -> WrongAnswer:
    """A wrong answer about a planted claim."""
    return WrongAnswer(
        claim=name,
        source=f"009 9.{name}",
        place="first line",
        quote="It is seven.",
        says="The size is 7.",
        status="wrong",
        refuted="n.size != 7",
        counter="It is {{ n.size|short }}.",
        right="It is 5.",
    )


def ran(*words: str) -> Done:
    return CliRunner().invoke(app, ["lab", *words])


def flat(text: str) -> str:
    return " ".join(text.split())


def as_json(*words: str) -> Any:
    return json.loads(ran(*words, "--json").stdout)


def test_loading_the_command_loads_no_torch(root: Path) -> None:
    code = "import sys, regard.cli.lab; print(sorted({'torch', 'numpy', 'matplotlib', 'pygments'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ}, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("words", [[], ["run"], ["show"], ["sheet"], ["errata"]])
def test_each_command_has_help_that_is_not_cut(words: list[str]) -> None:
    done = ran(*words, "--help")
    assert done.exit_code == 0
    assert "--json" in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]


def test_every_real_claim_is_listed() -> None:
    done = ran()
    assert done.exit_code == 0
    for name in claims():
        assert re.search(rf"^  {name} +not run yet", done.stdout, re.MULTILINE)
    assert f"{len(claims())} claims: {len(claims())} not run yet." in done.stdout


def test_the_list_as_json_has_question_source_and_verdict(four: Registry[Claim]) -> None:
    ran("run", "holding", "failing")
    found = as_json()
    assert [(each["id"], each["verdict"]) for each in found] == [
        ("holding", "supported"), ("broken", "not run yet"), ("failing", "refuted"), ("doubtful", "not run yet"),
    ]  # fmt: skip
    assert found[0] == {
        "id": "holding",
        "chapter": "heads",
        "question": "Is holding true?",
        "source": "009 9.holding",
        "verdict": "supported",
        "sentence": "The size is 5.",
        "command": "regard lab run holding",
    }
    assert found[1]["sentence"] is found[1]["command"] is None


def test_the_list_shows_the_options_of_a_run_and_what_is_out_of_date(four: Registry[Claim]) -> None:
    ran("run", "holding", "--smoke", "--seed", "4")
    listed = flat(ran().stdout)
    assert "Heads and self-attention" in listed
    assert "with --smoke --seed 4" in listed
    assert '4 claims: 1 supported, 3 not run yet (1 from quick or changed settings, marked "with").' in listed
    path = Path(str(four["holding"].module.__file__))
    path.write_text(path.read_text().replace("setup.size", "2 * setup.size"))
    results.fingerprint.cache_clear()  # as in another process
    assert as_json()[0]["verdict"] == "to be run again"
    assert "to be run again" in ran().stdout
    shown = ran("show", "holding").stdout
    assert "The size is 3" not in shown, "a verdict on an older claim is none on this one"
    assert "regard lab run holding" in shown


def test_a_real_claim_runs_and_its_result_is_saved(tmp_path: Path) -> None:
    done = ran("run", "beta", "--smoke")
    assert done.exit_code == 0
    assert done.stdout.startswith("supported  beta (")
    assert 'refuted sheet 000 1.1c, third paragraph of the answer (partly right): "When β is set' in flat(done.stdout)
    assert done.stderr == "running beta (1 of 1)\n"
    (saved,) = json.loads((tmp_path / "cache/regard/lab/beta.json").read_text("utf-8"))["results"]
    assert {"numbers", "seconds", "version", "fingerprint", "settings"} <= set(saved)
    shown = as_json("show", "beta")
    assert (shown["verdict"], shown["command"]) == ("supported", "regard lab run beta --smoke")
    assert {"setup", "call"} <= set(shown["result"])


def test_settings_and_seed_reach_the_run(four: Registry[Claim]) -> None:
    (found,) = as_json("run", "holding", "--set", "size=41", "--set", "word=12", "--seed", "9")
    assert found["result"]["numbers"] == {"size": 41.0, "seed": 9, "word": "12"}
    assert found["result"]["setup"] == {"size": 41, "seed": 9, "word": "12"}
    assert found["command"] == "regard lab run holding --set size=41 --set word=12 --seed 9"
    (answer,) = found["wrong_answers"]
    assert (answer["source"], answer["quote"], answer["right"]) == ("009 9.holding", "It is seven.", "It is 5.")
    assert (answer["verdict"], answer["counter_example"]) == ("refuted", "It is 41.")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["run", "holdin"], "unknown claim 'holdin'; did you mean 'holding'?"),
        (["run", "xyzzy"], "(regard lab lists them)"),
        (["run", "holding", "all"], "all means every claim, but holding is named too"),
        (["run", "three-tokens"], "three-tokens is a worked example, not a claim of the lab; see regard work"),
        (["show", "udl-12-1"], "see regard work udl-12-1"),
        (["show", "holdin"], "unknown claim 'holdin'; did you mean 'holding'?"),
        (["run", "holding", "--set", "sise=3"], "Setup has no setting 'sise'; did you mean 'size'?"),
        (["run", "holding", "--set", "size=big"], "Setup.size takes a whole number, not 'big'"),
        (["run", "holding", "--set", "size"], "--set takes name=value, as in --set seed=1, not 'size'"),
        (["run", "all", "--smoke", "--save-shipped"], "--save-shipped works with the default setups only"),
        (["run", "holding", "--html", "no/such/page.html"], "there is no folder no/such"),
        (["run", "holding", "--results", "planted/holding.py"], "results cannot be saved in planted/holding.py"),
        (["run", "holding", "--figures", "planted/holding.py"], "figures cannot be saved in planted/holding.py"),
        (["show", "holding", "--figures", "figures"], "no result to draw; run the claim first: regard lab run holding"),
        (["--json", "run", "holding"], "--json goes after the command: regard lab run ... --json"),
        (["errata", "--html", "no/such/page.html"], "there is no folder no/such"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(words: list[str], error: str, four: Registry[Claim]) -> None:
    done = ran(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert error in done.stderr
    assert done.stderr.startswith("regard: ")
    assert done.stderr.count("\n") == 1, "nothing was run before"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert ran("rnu").exit_code == ran("run").exit_code == ran("show").exit_code == 2


@pytest.mark.parametrize(("name", "code"), [("holding", 0), ("failing", 1), ("doubtful", 1), ("broken", 1)])
def test_a_claim_that_is_not_supported_is_exit_code_1(name: str, code: int, four: Registry[Claim]) -> None:
    assert ran("run", name).exit_code == code


def test_run_all_goes_on_after_a_claim_that_fails_and_says_so_at_the_end(four: Registry[Claim]) -> None:
    done = ran("run", "all")
    assert done.exit_code == 1
    verdicts = [
        line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ") and "sheet" not in line
    ]
    assert verdicts == ["supported", "refuted", "unclear"]
    assert "running broken (2 of 4; its budget is 1 s)\nTraceback" in done.stderr
    assert done.stderr.endswith(
        "1 of 4 supported\nnot supported: failing, doubtful\nfailed: broken: ZeroDivisionError: division by zero\n"
    )
    assert [each["verdict"] for each in as_json()] == ["supported", "not run yet", "refuted", "unclear"]
    found = as_json("run", "all")
    assert [each["id"] for each in found] == ["holding", "failing", "doubtful", "broken"]
    assert found[-1] == {"id": "broken", "error": "ZeroDivisionError: division by zero"}


def test_a_file_edited_during_its_run_is_out_of_date(four: Registry[Claim], monkeypatch: pytest.MonkeyPatch) -> None:
    module = four["holding"].module
    original = module.run

    def edited(setup: Any) -> Any:
        Path(str(module.__file__)).write_text("another = 1\n")
        return original(setup)

    monkeypatch.setattr(module, "run", edited)
    assert ran("run", "holding").exit_code == 0
    results.fingerprint.cache_clear()  # as in another process
    assert as_json()[0]["verdict"] == "to be run again"


def test_a_claim_named_twice_runs_once(four: Registry[Claim]) -> None:
    assert ran("run", "holding", "failing", "holding").stderr.count("running holding") == 1


def test_results_can_be_saved_in_another_folder(four: Registry[Claim], tmp_path: Path) -> None:
    ran("run", "holding", "--results", "mine/too")
    assert (tmp_path / "mine/too/holding.json").is_file()
    assert not (tmp_path / "cache").exists()
    assert as_json("--results", "mine/too")[0]["verdict"] == "supported"
    assert as_json()[0]["verdict"] == "not run yet"


def test_the_shipped_result_is_shown_until_the_claim_runs_here(four: Registry[Claim], tmp_path: Path) -> None:
    assert ran("run", "all", "--save-shipped", "--results", "a").exit_code == 1
    saved = json.loads((tmp_path / "shipped.json").read_text())["results"]
    assert [each["id"] for each in saved] == ["doubtful", "failing", "holding"]
    assert as_json()[0]["verdict"] == "supported"
    ran("run", "holding", "--set", "size=7")
    assert as_json()[0]["command"] == "regard lab run holding --set size=7"


def test_pages_and_figures_are_written(four: Registry[Claim], tmp_path: Path) -> None:
    done = ran("run", "holding", "failing", "--html", "report.html", "--figures", "new/figures")
    assert "wrote report.html, " in done.stderr
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "Is holding true?" in text
    assert "Is failing true?" in text
    assert "Is doubtful true?" not in text
    assert text.count("<svg") == 2
    assert (tmp_path / "new/figures/holding.svg").read_text().startswith("<?xml")
    assert as_json("show", "holding")["figure"] == str(tmp_path / "new/figures/holding.svg")
    (tmp_path / "new/figures/holding.svg").unlink()
    assert as_json("show", "holding")["figure"] is None
    assert as_json("show", "holding", "--figures", "again")["figure"] == str(tmp_path / "again/holding.svg")
    assert (tmp_path / "again/holding.svg").is_file()
    ran("--html", "every.html")
    assert "4 claims: 1 supported, 2 not run yet, 1 refuted." in (tmp_path / "every.html").read_text("utf-8")


def test_show_prints_a_claim_in_full() -> None:
    ran("run", "beta", "--smoke")
    beta = claims()["beta"]
    done = ran("show", "beta")
    assert done.exit_code == 0
    words = flat(done.stdout)
    for wanted in (
        beta.question,
        beta.claim,
        beta.measures,
        beta.source,
        "5 seconds on two cores",
        text(beta.formula),
    ):
        assert flat(wanted) in words
    assert inspect.getsource(beta.module.run) in done.stdout, "the code, neither wrapped nor cut"
    assert "verdict supported" in words
    assert "run regard lab run beta --smoke, " in words
    assert "figure not drawn; use --figures FOLDER" in words
    assert "number width: 64" in words
    found = as_json("show", "beta")
    assert found["maths"]["tex"] == beta.maths
    assert found["maths"]["mathml"].startswith("<math")
    assert found["code"] == inspect.getsource(beta.module.run)
    assert found["result"]["numbers"]["width"] == 64
    assert found["budget"] == 5.0


def test_on_a_terminal_there_are_colours_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    done = ran("run", "beta", "--smoke")
    assert "\x1b[32msupported" in done.stdout
    assert "running beta (1 of 1)" in done.stderr
    assert "running" not in done.stdout
    shown = ran("show", "beta").stdout
    assert "\x1b[" in shown
    code = inspect.getsource(claims()["beta"].module.run)
    assert "".join(code.split()) in "".join(re.sub(r"\x1b\[[\d;]*m", "", shown).split()), "wrapped, but not cut"


def test_show_of_a_claim_that_was_not_run_says_how_to() -> None:
    done = ran("show", "beta")
    assert done.exit_code == 0
    assert "verdict not run yet to do regard lab run beta" in flat(done.stdout)
    assert as_json("show", "beta")["result"] is None


def test_long_lists_are_shortened(four: Registry[Claim]) -> None:
    assert lab.shorten([0.5, [1, 2]]) == "[0.5, [1, 2]]"
    assert lab.shorten(list(range(9))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...] (9 in all)"
    assert lab.shorten({"a": 1 / 3}) == "a 0.333333"


def test_errata_show_the_wrong_answer_its_counter_example_and_the_correct_answer(
    four: Registry[Claim], tmp_path: Path
) -> None:
    ran("run", "holding")
    done = ran("errata", "--html", "errata.html")
    assert done.exit_code == 1, "one of the claims cannot be run"
    assert "failed: broken: ZeroDivisionError" in done.stderr
    assert (
        'sheet 009 9.holding, first line (holding) wrong "It is seven." refuted It is 5. correct It is 5. from '
        "regard lab run holding "
    ) in flat(done.stdout)
    assert 'sheet 009 9.failing, first line (failing) wrong "It is seven." refuted It is 3.' in flat(done.stdout)
    assert "running failing (quick setup)" in done.stderr
    assert "running holding" not in done.stderr, "what was run is not run again"
    assert as_json()[2]["verdict"] == "not run yet", "errata saves nothing"
    assert (tmp_path / "errata.html").read_text("utf-8").count("<article>") == 2, (
        "a claim that is unclear judges no answer"
    )


def test_errata_use_runs_with_default_settings_only(four: Registry[Claim]) -> None:
    ran("run", "holding", "--set", "size=7")
    found = as_json("errata")
    assert [(each["id"], each["verdict"], each["command"]) for each in found] == [
        (name, "refuted", f"regard lab run {name} --smoke") for name in ("holding", "failing")
    ]
    assert set(found[0]) == {
        *("id", "question", "source", "place", "quote", "says", "status"),
        *("verdict", "counter_example", "right", "command"),
    }  # fmt: skip


def test_an_answer_that_is_not_refuted_is_reported(four: Registry[Claim], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errata, "wrong_answers", lambda: (seven("holding"), seven("failing")))
    assert ran("errata").exit_code == 0
    module = four["holding"].module
    monkeypatch.setattr(module, "SMOKE", module.Setup(size=7))
    done = ran("errata")
    assert done.exit_code == 1
    assert "not refuted: holding, sheet 009 9.holding: The size is 7." in done.stderr


@pytest.fixture
def with_shipped_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SHIPPED", Path(results.__file__).parent / "results.json")


def test_sheets_and_their_questions_are_listed() -> None:
    assert "002 26 questions. A later version of the homework 000" in flat(ran("sheet").stdout)
    assert set(as_json("sheet")) == {"000", "001", "002", "003", "004"}
    listed = ran("sheet", "003").stdout
    assert re.search(r"^12\.9 +DaViT", listed, re.MULTILINE)
    assert listed.index("12.9 ") < listed.index("12.10 ")


def test_the_command_for_figures_quotes_a_question_of_two_words(with_shipped_results: None) -> None:
    assert 'regard lab sheet 001 "review 3" --figures FOLDER' in flat(ran("sheet", "001", "review 3").stdout)
    assert "regard lab sheet 001 1a --figures FOLDER" in flat(ran("sheet", "001", "1a").stdout)
    assert ran("sheet", "001", "review", "3").stdout == ran("sheet", "001", "review 3").stdout


def test_an_answer_is_assembled_from_claims_and_errata(with_shipped_results: None, tmp_path: Path) -> None:
    done = ran("sheet", "000", "1.1c", "--html", "answer.html")
    assert done.exit_code == 0, done.stderr
    words = flat(done.stdout)
    assert words.startswith("Sheet 000 1.1c: When does the output preserve the value vectors")
    assert "hard attention" in words
    assert "With the scores 60, 30, 30 the other keys have a weight of at most 1.9e-13" in words
    assert '"Due to this A acts like an identity matrix and value vector is preserved."' in words
    assert "command regard lab run copy-value four-kinds dense-equivalent" in words
    assert "running" not in done.stderr
    page = (tmp_path / "answer.html").read_text("utf-8")
    assert page.count("<svg") == 1
    assert "<math" in page
    assert ran("show", "000 1.1c").stdout == ran("sheet", "000", "1.1c").stdout
    text = ran("sheet", "000", "1.1c", "--markdown").stdout
    assert text.startswith("# Sheet 000 1.1c")
    assert "$$" in text


def test_figures_of_an_answer_are_those_of_its_claims(with_shipped_results: None, tmp_path: Path) -> None:
    done = ran("show", "000 1.1c", "--figures", "drawn")
    assert done.exit_code == 0, done.stderr
    names = {f"{name}.svg" for name in ("copy-value", "four-kinds", "dense-equivalent")}
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == names


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--html", "page.html"], "--html needs a sheet: regard lab sheet 002 --html"),
        (["--markdown"], "--markdown needs a sheet"),
        (["--figures", "drawn"], "--figures needs a sheet"),
        (["002", "--json", "--markdown"], "--json and --markdown are two forms of the same text"),
    ],
)
def test_options_of_answers_are_not_ignored(words: list[str], error: str, tmp_path: Path) -> None:
    done = ran("sheet", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert error in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_answer_as_json(with_shipped_results: None) -> None:
    found = as_json("sheet", "002", "1.2a")
    assert set(found) == {"sheet", "question", "answer", "formula", "claims", "command", "errata"}
    assert (found["sheet"], found["claims"]) == ("002", ["multi-head"])
    assert found["question"].startswith("1.2a Which operations give")
    assert "R^{c \\times n}" in found["formula"][0]
    assert [each["source"] for each in found["errata"]] == ["000 1.2a, 000 1.3a", "000 1.2a"]


def test_an_unknown_sheet_or_question_is_a_usage_error() -> None:
    for words, error in ((["sheet", "7"], "there is no sheet '7'"), (["sheet", "002", "9"], "has no question '9'")):
        done = ran(*words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert error in done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [("pairs=-1", "pairs is -1, but must be at least 10000"), ("betas=", "betas must be finite and above 0")],
)
def test_invalid_settings_are_one_line_errors(setting: str, words: str) -> None:
    done = ran("run", "beta", "--set", setting)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("regard: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_quick_run_here_does_not_hide_the_packages_full_one(four: Registry[Claim]) -> None:
    ran("run", "holding", "--save-shipped")
    ran("run", "holding", "--smoke")
    assert as_json()[0]["command"] == "regard lab run holding"
    ran("run", "holding", "--set", "size=41")
    listed = flat(ran().stdout)
    assert "with --set size=41" in listed
    assert 'supported, 3 not run yet (1 from quick or changed settings, marked "with").' in listed
