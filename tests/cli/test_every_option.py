"""Every argument and option of every command has a help text, is used in a test and is in docs/commands.md."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

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


COMMANDS = dict(iterate_commands(typer.main.get_command(app), "regard"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_short_text_and_an_example_that_parses(name):
    help_text = COMMANDS[name].help
    assert len(help_text.splitlines()) <= 20
    example = shlex.split(re.search(r"^Example: (.+)$", help_text, re.M)[1])
    words = name.removesuffix(" solve").split()
    assert example[: len(words)] == words
    COMMANDS[name].make_context(name, example[len(words) :], resilient_parsing=True)  # raises for an unknown option


@pytest.mark.parametrize("name", COMMANDS)
def test_the_common_options_are_in_the_first_20_lines_of_the_help(name):
    context = COMMANDS[name].make_context(name, [], resilient_parsing=True, terminal_width=120, max_content_width=120)
    shown = COMMANDS[name].get_help(context)
    before, options, after = shown.partition("Options:\n")
    common = before + options + after.partition("\n\n")[0]  # the others are in groups below, by `rich_help_panel`
    assert len(common.splitlines()) <= 20
    flags = [option.opts[0] for option in COMMANDS[name].params if option.opts[0].startswith("-")]
    assert not [flag for flag in flags if f"  {flag} " not in shown], "an option is missing in the help"


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{name} {option.name}" for name, option in OPTIONS])
def test_help_texts_use_the_same_words(command, option):
    text = getattr(option, "help", None) or ""
    assert not re.search(r"; default|can be repeated|repeatable|repeat for several|[Ff]or instance|for example", text)
    assert not re.search(r" \[(?!default: )[^\]]*\]$", text), "write [default: ...]"
    if option.name == "json":
        assert text == "Print JSON"
