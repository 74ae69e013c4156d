"""`regard train`, `eval` and `ask`: results, resuming, settings and error messages."""

import dataclasses
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from regard.base.config import to_json
from regard.cli import app
from regard.cli.settings import apply_settings, list_settings, parse_value
from regard.cli.train import build_settings, progress_fields, read_run, show_progress
from regard.models.gpt import GPT, Learned, SyntheticAttention
from regard.models.presets import build_from_config
from regard.models.saving import load, save
from regard.recipes.birthplaces import load_data
from regard.recipes.recipe import RECIPES, RecipeResult, get_recipe, save_result, set_steps
from regard.recipes.run_folder import begin_run
from regard.train import distributed
from regard.train.loop import Progress
from regard.train.optimizers import AdamW
from regard.train.process_group import ProcessGroup

TINY = [
    "--set", "people=12", "--set", "validation=3", "--set", "model.width=16", "--set", "model.depth=1", "--set",
    "model.heads=2", "--set", "pretraining.steps=4", "--set", "pretraining.batch_size=4", "--device", "cpu",
]  # fmt: skip


def regard(*words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=typed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "births"
    ran = regard("train", "birthplaces", "--folder", str(place), *TINY, "--json", "--tensorboard")
    assert ran.exit_code == 0, ran.output
    assert list(place.rglob("events.out.tfevents.*"))
    result = json.loads(ran.stdout)
    assert result["recipe"] == "birthplaces"
    assert result["settings"]["people"] == 12
    return place


def test_recipes_are_listed_with_their_expected_results() -> None:
    recipes = {each["name"]: each for each in json.loads(regard("train", "list", "--json").stdout)}
    assert {"birthplaces", "vision", "translation", "language", "speech"} == set(recipes)
    assert all(each["expected"] and each["time"] and each["memory"] for each in recipes.values())
    assert "birthplaces" in regard("train", "list").stdout


def test_progress_goes_to_stderr_and_metrics_to_stdout(tmp_path: Path) -> None:
    ran = regard("train", "birthplaces", "--folder", str(tmp_path / "run"), *TINY)
    assert "loss" in ran.stderr
    assert "left" in ran.stderr
    assert "loss" not in ran.stdout
    assert "test accuracy" in ran.stdout


def test_eval_gives_the_metrics_of_the_finished_run(folder: Path) -> None:
    metrics = json.loads(regard("eval", str(folder), "--json", "--device", "cpu").stdout)["metrics"]
    saved = json.loads((folder / "result.json").read_text())["metrics"]
    assert metrics == {name: saved[name] for name in metrics}


def test_eval_shows_questions_with_the_answers_of_the_model(folder: Path) -> None:
    shown = json.loads(regard("eval", str(folder), "--show", "4", "--json", "--device", "cpu").stdout)
    assert len(shown["answers"]) == 4
    for each in shown["answers"]:
        assert each["correct"] == (each["answer"] == each["truth"])
        assert 0 <= each["confidence"] <= 1
        assert each["question"].startswith("Where was ")
    splits = load_data(None, get_recipe("birthplaces").settings(real=False))
    assert shown["baseline"]["place"] in {each.place for each in splits.train}
    assert 0 <= shown["baseline"]["accuracy"] < 0.5
    text = regard("eval", str(folder), "--show", "2", "--device", "cpu").stdout
    assert f"accuracy of always answering {shown['baseline']['place']!r}" in text
    assert text.count("Where was ") == 2


def test_a_folder_with_a_run_is_not_overwritten(folder: Path) -> None:
    for words in ((), ("--variant", "finetune")):
        again = regard("train", "birthplaces", "--folder", str(folder), *TINY, *words)
        assert again.exit_code == 2
        assert "--resume" in again.stderr


def test_a_worker_that_torchrun_restarts_resumes_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert regard("train", "birthplaces", "--folder", str(folder), *TINY).exit_code == 0


def test_a_run_is_resumed_with_the_same_settings_only(folder: Path) -> None:
    ran = regard("train", "birthplaces", "--folder", str(folder), *TINY, "--set", "seed=3", "--resume")
    assert (ran.exit_code, "seed was 0 and is 3" in ran.stderr) == (2, True), ran.stderr


def test_resume_uses_the_saved_settings(folder: Path) -> None:
    ran = regard("train", "birthplaces", "--folder", str(folder), "--resume", "--device", "cpu", "--json")
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout)["settings"] == json.loads((folder / "run.json").read_text())["settings"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("real", [False, True])
def test_the_settings_and_data_of_a_run_are_read_from_its_folder(name: str, real: bool, tmp_path: Path) -> None:
    data = tmp_path / "data" if real else None
    if data is not None:
        data.mkdir()
    settings = apply_settings(get_recipe(name).settings(real=real), ["seed=7"])
    begin_run(tmp_path / "run", name, to_json(settings), data, resume=False)
    assert read_run(get_recipe(name), tmp_path / "run", None, [], pytest.fail) == (settings, data)
    given = tmp_path / "run"
    assert read_run(get_recipe(name), tmp_path / "run", given, [], pytest.fail) == (settings, given)
    longer, _ = read_run(get_recipe(name), tmp_path / "run", None, ["steps=90000"], pytest.fail)
    assert longer == set_steps(settings, 90_000)


def test_resuming_a_run_of_another_recipe_raises_an_error(folder: Path) -> None:
    for typed in ((), ("--set", "seed=3")):
        ran = regard("train", "vision", "--folder", str(folder), "--resume", "--device", "cpu", *typed)
        assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
        assert "has a run of birthplaces, not of vision; resume it with `regard train birthplaces --" in ran.stderr


def test_resume_without_a_run_starts_one_with_a_message(tmp_path: Path) -> None:
    messages: list[str] = []
    settings, data = read_run(get_recipe("vision"), tmp_path, None, [], messages.append)
    assert (settings, data) == (get_recipe("vision").settings(real=False), None)
    assert messages == [f"{tmp_path} has no run to resume; starting one"]


@pytest.mark.parametrize(("at", "number"), [(1, signal.SIGINT), (10, signal.SIGTERM)])
def test_an_interrupted_run_saves_a_checkpoint_and_prints_how_to_resume(
    at: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, phase: str, now: Progress) -> None:
        if now.step == at:
            signal.raise_signal(number)

    birthplaces = ("train", "birthplaces", "--folder", str(tmp_path / "run"))
    longer = ("--set", "pretraining.steps=13", "--set", "pretraining.save_every=4")
    with monkeypatch.context() as patched, interruptible():
        patched.setattr("regard.cli.train._ProgressLines.__call__", interrupt)
        ran = regard(*birthplaces, *TINY, *longer)
    assert (ran.exit_code, ran.stdout) == (128 + number, "")
    assert ran.stderr.splitlines()[-1].startswith(
        f"stopped at step {at} of 13 of pretraining or a little later; --resume continues from step {at} of "
    )
    again = regard(*birthplaces, "--resume", "--device", "cpu", "--set", "steps=15")
    assert (again.exit_code, "15/15" in again.stderr) == (0, True), again.stderr
    assert f'next: regard ask --folder {tmp_path / "run"} "Where was NAME born?"' in again.stdout


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGINT, which background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_rank_0_prints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def second(parallel: str, device: str | None) -> Iterator[ProcessGroup]:
        yield ProcessGroup(rank=1, world_size=2)

    monkeypatch.setattr(distributed, "join_process_group", second)
    for words in (("eval", str(folder)), ("eval", str(folder), "--json")):
        ran = regard(*words)
        assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "", "")


def test_several_processes_print_metrics_once(folder: Path, tmp_path: Path) -> None:
    def run_two(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "regard", *words],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert run_two("eval", str(folder), "--device", "cpu").count("test accuracy") == 1
    copied = shutil.copytree(folder, tmp_path / "copy")
    assert regard("ask", "Where was Ada Nemo born?", "--answer", "Bern", "--folder", str(copied)).exit_code == 0
    learned = run_two("ask", "--learn", "--steps", "2", "--folder", str(copied), "--device", "cpu")
    assert learned.count("learned:") == learned.count("test accuracy") == 1


@pytest.mark.parametrize("name", ["birthplaces", pytest.param("translation", marks=pytest.mark.slow)])
def test_recipes_that_generate_can_be_trained_with_fsdp(name: str, tmp_path: Path) -> None:
    small = ["model.width=16", "model.depth=1", *(["people=12", "validation=3"] if name == "birthplaces" else [])]
    plan = "pretraining" if name == "birthplaces" else "plan"
    small += [f"{plan}.steps=4", f"{plan}.batch_size=4", f"{plan}.evaluate_every=2"]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "regard", "train", name,
         "--parallel", "fsdp", "--device", "cpu", "--folder", str(tmp_path / "run"),
         *(word for each in small for word in ("--set", each))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "run" / "result.json").is_file()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("plan.optimizer=AdamW", "AdamW"), ("plan.schedule=linear", "Linear"), ("plan.averaging=none", "NoneType")],
)
def test_a_nested_setting_is_set_by_the_name_of_its_class(text: str, kind: str) -> None:
    settings = build_settings(get_recipe("vision"), None, None, [text])
    assert type(getattr(settings.plan, text.split("=")[0].split(".")[1])).__name__ == kind


TOGETHER = ["model.mixer=SyntheticAttention", "model.positions=learned", "model.mixer.context=37"]


@pytest.mark.parametrize("texts", list(permutations(TOGETHER)))
def test_settings_that_need_each_other_can_be_in_any_order(texts: tuple[str, ...]) -> None:
    model = build_settings(get_recipe("birthplaces"), None, None, list(texts)).model
    assert (model.mixer, model.positions) == (SyntheticAttention(context=37), Learned())


@pytest.mark.parametrize("texts", list(permutations(["model.width=9", "model.heads=3", "model.positions=none"])))
def test_settings_that_are_only_valid_together_are_applied_together(texts: tuple[str, ...]) -> None:
    model = build_settings(
        get_recipe("birthplaces"), None, None, list(texts)
    ).model  # 9 is not a multiple of 4, and 64 not of 3
    assert (model.width, model.heads) == (9, 3)


def test_outer_settings_are_applied_first_and_the_last_of_a_name_is_used() -> None:
    texts = ["plan.optimizer.lr=0.7", "seed=3", "plan.optimizer=adamw", "seed=5"]
    found = build_settings(get_recipe("vision"), None, None, texts)
    assert (found.plan.optimizer, found.seed) == (AdamW(lr=0.7), 5)
    # a setting that is tried again does not override a later one of the same name
    chosen = ["model.mixer=syntheticattention", "model.positions=learned"]
    texts = [*chosen, "model.mixer.parts=dense", "model.mixer.parts=dense,dot"]
    assert build_settings(get_recipe("birthplaces"), None, None, texts).model.mixer.parts == ("dense", "dot")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("real", [False, True])
def test_listed_values_are_accepted_by_set(name: str, real: bool) -> None:
    settings = get_recipe(name).settings(real=real)
    rows = list(list_settings(get_recipe(name).settings(real=False), get_recipe(name).settings(real=True)))
    texts = {each.name: each.real if real else each.built_in for each in rows}
    for path, text in texts.items():
        value = settings
        for part in path.split("."):
            value = getattr(value, part, None)
        if text is not None and not dataclasses.is_dataclass(value):
            assert apply_settings(settings, [f"{path}={text}"]) == settings, path
    assert {"seed", *(field.name for field in dataclasses.fields(settings) if field.type is int)} <= set(texts)


def test_the_settings_of_a_recipe_are_listed() -> None:
    listed = json.loads(regard("train", "list", "vision", "--json").stdout)
    assert {"name", "title", "expected", "time", "memory", "variants", "settings"} == set(listed)
    rows = {each.pop("name"): each for each in listed["settings"]}
    about = "samples per step, over all processes and gradient accumulation steps"
    assert rows["plan.batch_size"] == {"built_in": "64", "real": "1024", "about": about}
    assert rows["plan.optimizer"] == {
        "built_in": "Muon",
        "real": "Muon",
        "about": "AdamW or Muon with its settings; takes AdamW, Muon",
    }
    assert "alternatives" not in rows
    table = regard("train", "list", "vision").stdout
    assert "expected" in table
    (line,) = (line for line in table.splitlines() if line.split()[:1] == ["plan.batch_size"])
    assert line.split() == ["plan.batch_size", "64", "1024"]
    assert about in " ".join(table.split())


def test_a_setting_without_a_value_for_real_data_has_a_dash() -> None:
    lines = [line.split() for line in regard("train", "list", "language").stdout.splitlines()]
    rows = {line[0]: line[1:] for line in lines if line}
    assert rows["gpt.plan.optimizer"] == ["Muon", "AdamW"]
    assert (rows["gpt.plan.optimizer.momentum"], rows["gpt.plan.keep_checkpoints"]) == (["0.95", "-"], ["2"])
    assert rows["gpt.plan.optimizer.betas"] == ["-", "0.9,0.99"]


@pytest.mark.parametrize("words", [("train", "--help"), ("train", "vision", "--help"), ("train", "list")])
def test_the_help_names_the_command_that_lists_settings(words: tuple[str, ...]) -> None:
    assert re.search(r"`regard train list (NAME|\[NAME\])` shows", " ".join(regard(*words).stdout.split()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "nothing"), "there is no recipe 'nothing'; available: birthplaces"),
        (("train", "birthplaces", "vision"), "train takes one recipe: birthplaces or vision"),
        (("train", "list", "nothing"), "there is no recipe 'nothing'; available: birthplaces"),
        (("train", "birthplaces", "--set", "model.widht=4"), "did you mean 'width'"),
        (("train", "birthplaces", "--set", "model.widht=4"), "`regard train list birthplaces` shows its settings"),
        (("train", "birthplaces", "--resume", "--data", "nowhere"), "--data nowhere does not exist"),
        (("train", "birthplaces", "--set", "pretraining.steps=many"), "takes a whole number, not 'many'"),
        (("train", "birthplaces", "--set", "validation"), "--set takes name=value"),
        (("train", "birthplaces", "--set", "precision=2"), "precision must be at least 0 and at most 1, not 2"),
        (("train", "language", "--set", "gpt.model.vocab=5"), "gpt.model.vocab follows from the data and cannot be se"),
        (("train", "translation", "--set", "model.vocab=5"), "model.vocab follows from the data and cannot be set"),
        (("train", "vision", "--set", "model.classes=5"), "model.classes follows from the data and cannot be set"),
        (
            ("train", "translation", "--set", "bpe_vocab=3"),
            "bpe_vocab: vocab=3 is too small for 50 symbols and 3 special",
        ),
        (("train", "speech", "--set", "train_digits=9"), "takes 2 values (a whole number, a whole number), not (9,)"),
        (("train", "birthplaces", "--data", "nowhere"), "--data nowhere does not exist"),
        (("eval", "nowhere"), "has no finished run"),
        (("ask", "Where?", "--learn"), "pass either a question or --learn"),
        (("ask", "--learn", "--folder", "biographies-gpt"), "part of the package and is not trained further; train yo"),
        (("ask", "--folder", "nowhere"), "there is no folder 'nowhere', and no model of this name"),
        (("ask", "Where?", "--folder", "nowhere"), "has no finished run"),
        (("ask", ""), "the question '' is empty; ask one such as"),
        (("ask", " ?", "--folder", "nowhere"), "the question ' ?' is empty"),
        (("translate", "nowhere", "Hi"), "has no finished run"),
        (("listen", "nowhere", "sound.wav"), "has no finished run"),
        (("translate", "numbr-words", "Hi"), "there is no folder numbr-words; did you mean 'number-words'?"),
        (("generate", "./nowhere", "Hi"), "there is no folder './nowhere'"),
    ],
)
def test_errors_are_one_line(words: tuple[str, ...], said: str) -> None:
    ran = regard(*words)
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_an_unknown_answer_exits_with_1_and_can_be_saved(folder: Path, tmp_path: Path) -> None:
    asking = ("ask", "Where was Ada Nemo born?", "--folder", str(folder), "--store", str(tmp_path / "facts.sqlite"))
    ran = regard(*asking)
    assert ran.exit_code == 1
    assert "the answer is unknown" in ran.stderr
    assert regard(*asking, "--answer", "Bern").exit_code == 0
    answered = regard(*asking)
    assert (answered.exit_code, answered.stdout) == (0, "Bern\n")
    assert "fact store" in answered.stderr
    told = json.loads(regard(*asking, "--json").stdout)
    assert (told["answer"], told["source"]) == ("Bern", "store")
    sure = json.loads(regard(*asking, "--threshold", "0", "--json").stdout)
    assert (sure["source"], sure["guess"]) == ("store", None), "the model has learned too little to write anything"


def test_names_in_a_list_may_be_quoted() -> None:
    for text in ("dense,dot", "(dense, dot)", "('dense', 'dot')", '["dense","dot"]'):
        assert parse_value(text, tuple[str, ...]) == ("dense", "dot")


def test_an_answer_that_the_model_contradicts_is_kept_with_a_warning(folder: Path, tmp_path: Path) -> None:
    sure = shutil.copytree(folder, tmp_path / "sure")
    model = load(sure / "model")
    assert isinstance(model, GPT)
    with torch.no_grad():  # from now on it says "ooo", whatever it is asked
        letter = json.loads((sure / "model" / "tokenizer.json").read_text())["alphabet"].index("o")
        model.norm.weight.zero_()
        model.norm.bias.copy_(100 * model.tokens.weight[letter])
    save(model, sure / "model")
    asking = ("ask", "Where was Ada Nemo born?", "--folder", str(sure), "--threshold", "0")
    said = regard(*asking).stdout.strip()
    assert set(said) == {"o"}
    kept = regard(*asking, "--answer", "Bern")
    assert kept.exit_code == 0
    assert f"the model still answers {said!r}" in kept.stderr
    assert "until `regard ask --learn`" in kept.stderr
    assert regard(*asking).stdout.strip() == said
    assert "still answers" not in regard(*asking, "--answer", said).stderr
    assert "still answers" not in regard(*asking, "--answer", "Bern", "--threshold", "1").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("translate", "RUN", "Hi"), "has a run of vision, which does not translate"),
        (("listen", "RUN", "sound.wav"), "has a run of the recipe vision; `regard listen` needs a run of speech"),
        (("ask", "Where?", "--folder", "RUN"), "has a run of 'vision'; questions are answered by a run of"),
        (("ask", "--learn", "--folder", "RUN"), "has a run of 'vision'; questions are answered by a run of"),
        (("generate", "RUN", "Hi"), "has a run of vision, whose model does not continue a text"),
        (("eval", "RUN/model"), "has no finished run (result.json)"),
    ],
)
def test_a_run_of_another_recipe_is_refused_in_a_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    settings = get_recipe("vision").settings(real=False)
    save_result("vision", settings, RecipeResult({"test accuracy": 0.0}, build_from_config(settings.model)), tmp_path)
    ran = regard(*(word.replace("RUN", str(tmp_path)) for word in words))
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.output
    assert said in ran.stderr


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_the_progress_bar_loses_no_field_on_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    now = Progress(1910, 2000, 3.2731, 1.1e-3, 1121.0, 63.0, {"nats per character": 3.27, "bits per character": 4.71})
    fields = ["1,910/2,000 steps", "loss 3.2731", "lr 0.0011", "1,121 samples/s", "1:03 min left"]
    fields += ["nats per character 3.27", "bits per character 4.71"]
    assert progress_fields(now) == fields
    with show_progress(is_main=True) as update:
        update("pretraining", now)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert all(any(each in line for line in lines) for each in fields)
    assert max(map(len, lines)) <= columns
    assert "pretraining ━" in terminal.getvalue()
