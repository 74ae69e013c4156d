"""A folder knows which run is in it, and where its data came from."""

import os
from pathlib import Path

import pytest

from regard.base.errors import CheckpointError, ConfigError, DataError, TrainingError
from regard.recipes.recipe import RESULT_FILE, RunLocation, get_recipe, load_finished_run
from regard.recipes.run_folder import RUN_FILE, begin_run, check_can_begin, find_data, fingerprint, has_restarted

SETTINGS = {"seed": 1, "plan": {"steps": 5}}


def test_a_folder_is_begun_once_and_gone_on_with_as_it_was(tmp_path: Path) -> None:
    begin_run(tmp_path, "vision", SETTINGS, None, resume=False)
    begin_run(tmp_path, "vision", SETTINGS, None, resume=True)
    with pytest.raises(ConfigError, match="has a run already; continue it with --resume"):
        begin_run(tmp_path, "vision", SETTINGS, None, resume=False)
    with pytest.raises(ConfigError, match=r"is different: seed was 1 and is 2. Resume"):
        begin_run(tmp_path, "vision", {"seed": 2, "plan": {"steps": 6}}, None, resume=True)
    with pytest.raises(ConfigError, match="recipe was 'vision' and is 'speech'"):
        begin_run(tmp_path, "speech", SETTINGS, None, resume=True)


def test_whether_a_run_may_begin_is_known_before_its_data_are_read(tmp_path: Path) -> None:
    check_can_begin(tmp_path / "none yet", "vision", SETTINGS, resume=False)
    assert not (tmp_path / "none yet").exists()
    begin_run(tmp_path, "vision", SETTINGS, None, resume=False)
    check_can_begin(tmp_path, "vision", SETTINGS, resume=True)
    with pytest.raises(ConfigError, match="has a run already; continue it with --resume"):
        check_can_begin(tmp_path, "vision", SETTINGS, resume=False)
    with pytest.raises(ConfigError, match="is different: seed was 1 and is 2"):
        check_can_begin(tmp_path, "vision", {**SETTINGS, "seed": 2}, resume=True)


def test_a_folder_is_not_taken_by_a_run_whose_data_are_bad(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    chosen = get_recipe("translation")
    with pytest.raises(DataError):
        chosen.run(chosen.settings(real=True), RunLocation(data=data, folder=folder))
    assert not (folder / RUN_FILE).exists()
    check_can_begin(folder, "translation", {}, resume=False)


def test_only_the_torchrun_that_began_a_run_goes_on_with_it_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("abc", "none"):  # torchrun says none where nobody named it
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        folder = tmp_path / name
        assert not has_restarted(folder)
        begin_run(folder, "vision", SETTINGS, None, resume=False)
        assert not has_restarted(folder)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert has_restarted(folder)
        assert not has_restarted(tmp_path / "another")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
        assert not has_restarted(folder)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr("os.getppid", lambda: -1)
    assert not has_restarted(tmp_path / "none")


def test_data_are_remembered_and_recognised(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    (data / "a.txt").write_text("one")
    begin_run(folder, "vision", SETTINGS, data, resume=False)
    assert find_data(folder, None) == data
    assert find_data(folder, tmp_path) == tmp_path
    moved = data.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="which do not exist any more; pass --data"):
        find_data(folder, None)
    begin_run(folder, "vision", SETTINGS, moved, resume=True)
    assert find_data(folder, None) == moved
    (moved / "a.txt").write_text("two")  # of the same size
    with pytest.raises(ConfigError, match="its data are different"):
        begin_run(folder, "vision", SETTINGS, moved, resume=True)
    assert find_data(tmp_path, None) is None


def test_files_of_the_system_and_of_the_run_itself_are_no_data(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "data" / "run"
    data.mkdir()
    (data / "a.txt").write_text("one")
    begin_run(folder, "vision", SETTINGS, data, resume=False)
    (folder / "log.jsonl").write_text("{}")
    (data / ".DS_Store").write_text("")
    begin_run(folder, "vision", SETTINGS, data, resume=True)
    (data / "b.txt").write_text("")
    with pytest.raises(ConfigError, match="its data are different"):
        begin_run(folder, "vision", SETTINGS, data, resume=True)


def test_a_folder_that_cannot_be_written_and_files_that_are_damaged_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in (
        ("file", "there is a file of that name"),
        ("file/run", r".*Not a directory.*"),
        ("x" * 300, ".*"),
    ):
        with pytest.raises(TrainingError, match=f"the run cannot be saved in .*{folder}: {why}; fix this or choose"):
            begin_run(tmp_path / folder, "vision", SETTINGS, None, resume=False)
    (tmp_path / RUN_FILE).write_text('{"recipe": "vis')
    with pytest.raises(CheckpointError, match=f"{RUN_FILE}, line 1, column 12 is not JSON: "):
        begin_run(tmp_path, "vision", SETTINGS, None, resume=True)
    (tmp_path / RUN_FILE).write_text('{"recipe": "vision"}')
    with pytest.raises(CheckpointError, match=r"Resume the unfinished one with `regard train vision --resume --folder"):
        load_finished_run(tmp_path)
    (tmp_path / RUN_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{RUN_FILE} is damaged: data is missing"):
        find_data(tmp_path, None)
    (tmp_path / RESULT_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{RESULT_FILE} is damaged: recipe is missing"):
        load_finished_run(tmp_path)
    (tmp_path / RESULT_FILE).write_text('{"recipe": "vision", "settings": {}}')
    with pytest.raises(CheckpointError, match=f"{RESULT_FILE} is damaged: metrics is missing"):
        load_finished_run(tmp_path)


def test_pipes_and_links_in_a_circle_are_no_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    os.mkfifo(data / "pipe")
    with pytest.raises(DataError, match="data cannot be read: it is a device or a pipe"):
        fingerprint(data, tmp_path / "run")
    (data / "pipe").unlink()
    (data / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint(data, tmp_path / "run")
    (data / "loop").unlink()
    for name in "ab":
        (data / name).symlink_to(".")
    with pytest.raises(DataError, match="a is a link to a folder that contains it; remove the link"):
        fingerprint(data, tmp_path / "run")
