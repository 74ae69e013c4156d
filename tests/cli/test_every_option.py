"""Every argument and option of every command has a help text, is used in a test and is in docs/commands.md."""

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
