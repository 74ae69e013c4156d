"""The command line as a whole: its help, its speed, its errors, its exit codes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import regard
from regard.base.errors import ConfigError, kernel_refused
from regard.cli import app, print_errors

COMMANDS = ("tour", "masks", "explain", "count", "generate", "look", "check", "lab", "work", "bench", "doctor")
run = CliRunner()


def shell(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m regard` as a user types it, in a folder that holds the package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8"
    )


def test_help_names_every_command() -> None:
    result = run.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout
    assert "..." not in result.stdout.split("Commands:")[1], "a summary was cut: make it shorter"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    result = run.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_the_version_is_printed() -> None:
    result = run.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"regard {regard.__version__}\n")


def test_the_shell_completes_commands_and_options(root: Path, tmp_path: Path) -> None:
    for typed, expected in (("regard do", "doctor"), ("regard doctor --js", "--json")):
        asked = {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        result = subprocess.run(
            [sys.executable, "-m", "regard"], cwd=root, env=os.environ | asked, capture_output=True, text=True
        )
        assert result.stdout.split() == [expected]
    bash = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    for option in ("--show-completion", "--install-completion"):
        command = [sys.executable, "-m", "regard", option, "bash"]
        result = subprocess.run(command, cwd=root, env=bash, capture_output=True, text=True)
        assert result.returncode == 0
        assert "complet" in result.stdout
    assert "_regard_completion" in (tmp_path / ".bash_completions" / "regard.sh").read_text()


def test_help_imports_no_torch(root: Path) -> None:
    result = shell("-X", "importtime", "-m", "regard", "--help", cwd=root)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
    assert "regard.cli" in imported
    assert not imported & {"torch", "numpy", "matplotlib", "jaxtyping"}


def test_a_bare_copy_of_the_package_runs(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "regard", tmp_path / "regard", ignore=shutil.ignore_patterns("__pycache__"))
    result = shell("-m", "regard", "masks", "causal()", "--queries", "3", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "██ · ·\n████ ·\n██████\n" in result.stdout


def test_a_usage_error_is_exit_code_2_without_a_trace(root: Path) -> None:
    result = shell("-m", "regard", "masks", "casual()", cwd=root)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("regard: unknown mask 'casual'; did you mean 'causal'?\n")
    assert result.stderr.count("\n") == 1


def test_unknown_commands_and_options_are_exit_code_2() -> None:
    for words in (["mask"], ["masks", "--size", "3"], ["explain", "--dtype", "int8"], ["masks", "--queries", "0"]):
        result = run.invoke(app, words)
        assert result.exit_code == 2
        assert result.stdout == ""


def test_an_error_of_several_lines_is_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    @print_errors
    def command() -> None:
        raise kernel_refused("sdpa", ["it is Monday", "it rains"], ["eager"])

    with pytest.raises(Exception) as raised:
        command()
    assert getattr(raised.value, "exit_code", None) == 2
    words = "regard: kernel 'sdpa' refuses this call: - it is Monday - it rains kernel=None would run 'eager'\n"
    assert capsys.readouterr().err == words


def test_an_error_that_is_not_ours_keeps_its_trace() -> None:
    @print_errors
    def command() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        command()


def test_a_command_keeps_its_own_name_and_words() -> None:
    @print_errors
    def command() -> None:
        """Words."""
        raise ConfigError("never raised here")

    assert (command.__name__, command.__doc__) == ("command", "Words.")


def test_a_terminal_without_the_shades_of_a_drawing_shows_something(root: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "regard", "masks", "causal()", "--queries", "2"],
        cwd=root,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert "????" in result.stdout


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["generate", "text-gtp"], "text-gpt"),
        (["look", "induction-gtp"], "induction-gpt"),
        (["translate", "number-word"], "number-words"),
        (["listen", "tone-digit"], "tone-digits"),
        (["count", "digit-vit"], "digits-vit"),
    ],
)
def test_a_mistyped_model_without_an_input_suggests_the_model(words: list[str], near: str) -> None:
    done = run.invoke(app, words)
    assert done.exit_code == 2
    assert (
        done.stderr == f"regard: there is no folder {words[1]!r}, and no model of this name; did you mean {near!r}?\n"
    )


@pytest.mark.parametrize("words", [["train", "visoin"], ["train", "list", "visoin"], ["plan", "visoin"]])
def test_a_mistyped_recipe_suggests_the_recipe(words: list[str]) -> None:
    assert run.invoke(app, words).stderr == "regard: there is no recipe 'visoin'; did you mean 'vision'?\n"


def test_an_error_of_the_system_that_names_a_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def read_a_long_name() -> None:
        Path("x" * 300).read_text()

    def write_to_a_closed_pipe() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(typer.Exit):
        print_errors(read_a_long_name)()
    assert capsys.readouterr().err == f"regard: {'x' * 300} cannot be used: File name too long\n"
    with pytest.raises(BrokenPipeError):
        print_errors(write_to_a_closed_pipe)()
