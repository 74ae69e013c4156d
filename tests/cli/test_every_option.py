"""Every argument and option of every command has a help text, is used in a test and is in docs/commands.md."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.reference import iterate_commands, write_reference

ROOT = Path(__file__).parent.parent.parent
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
OPTIONS = [
    (name, option)
    for name, command in iterate_commands(typer.main.get_command(app), "regard")
    for option in command.params
    if option.name != "help"
]


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{name} {option.name}" for name, option in OPTIONS])
def test_an_option_is_explained_and_tested(command, option):
    assert getattr(option, "help", None), "help= is missing"
    # the options of `check` are the arguments of regard.check, which are tested there
    names = [*option.opts, option.name] if command == "regard check" else [*option.opts, *option.secondary_opts]
    assert any(f'"{name}' in TESTS or f"{name} " in TESTS or f"{name}=" in TESTS for name in names), "no test uses it"


def test_the_reference_is_up_to_date():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == write_reference(), "run python -m regard.cli.reference > docs/commands.md"


def test_the_reference_has_defaults_and_choices():
    page = write_reference()
    assert "| `--host <str>` | Address; all but 127.0.0.1 need a token [default: 127.0.0.1] |" in page
    assert r"| `--dtype <float32\|float64\|float16\|bfloat16>` | dtype of q, k and v [default: float32] |" in page


COMMANDS = dict(iterate_commands(typer.main.get_command(app), "regard"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_short_text_and_an_example_that_parses(name):
    help_text = COMMANDS[name].help
    example = shlex.split(re.search(r"^Example: (.+)$", help_text, re.M)[1])
    words = name.removesuffix(" solve").split()
    assert example[: len(words)] == words
    COMMANDS[name].make_context(name, example[len(words) :], resilient_parsing=True)  # raises for an unknown option


def help_of(name: str, *flags: str) -> str:
    """Run a command with a flag such as --help and return what it prints."""
    result = CliRunner().invoke(app, [*name.split()[1:], *flags])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_at_most_20_lines(name):
    # on a terminal of 80 columns, two of which stay empty
    context = COMMANDS[name].make_context(name, [], resilient_parsing=True, terminal_width=78)
    shown = COMMANDS[name].get_help(context)
    assert shown.startswith("Usage: ")
    assert "Example: " in shown
    assert len(shown.splitlines()) <= 20, "move rare options into a group with rich_help_panel="


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_help_or_in_help_all(name):
    groups = {group for option in COMMANDS[name].params if (group := getattr(option, "rich_help_panel", None))}
    assert ("--help-all" in help_of(name, "--help")) == bool(groups)
    shown = help_of(name, "--help-all" if groups else "--help")
    flags = [option.opts[0] for option in COMMANDS[name].params if option.opts[0].startswith("-")]
    assert not [flag for flag in flags if f"  {flag} " not in shown], "an option is missing in the help"
    assert not [group for group in groups if f"\n{group}:\n" not in shown]


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{name} {option.name}" for name, option in OPTIONS])
def test_help_texts_use_the_same_words(command, option):
    text = getattr(option, "help", None) or ""
    assert not re.search(r"; default|can be repeated|repeatable|repeat for several|[Ff]or instance|for example", text)
    assert not re.search(r" \[(?!default: )[^\]]*\]$", text), "write [default: ...]"
    if option.name == "json":
        assert text == "Print JSON"
