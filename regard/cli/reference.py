"""The reference of all commands and options as Markdown: `python -m regard.cli.reference > docs/commands.md`."""

from collections.abc import Iterator
from typing import Any


def iterate_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that can be run, with its full name, such as "regard lab run"."""
    parts = getattr(command, "commands", {})
    if not parts or command.invoke_without_command:
        yield name, command
    for part in parts.values():
        yield from iterate_commands(part, f"{name} {part.name}")


def write_reference() -> str:
    """Return the Markdown page docs/commands.md: a section per command, a row per argument and option."""
    import typer.main

    from regard.cli import app

    lines = ["# Commands", "", "Every command with its arguments and options."]
    lines += [
        "Written by `python -m regard.cli.reference` from the help texts. `regard NAME --help` prints the same; some "
        "commands show rare options only with `--help-all`.",
        "",
    ]
    for name, command in iterate_commands(typer.main.get_command(app), "regard"):
        about, _, example = " ".join((command.help or "").split()).partition("Example: ")
        lines += [f"## {name}", "", about.strip(), "", "```text", f"$ {example}", "```", ""]
        lines += ["| argument | meaning |", "|---|---|"]
        context = command.make_context(name, [], resilient_parsing=True)
        for option in command.params:
            if option.name != "help":
                flag, text = (" ".join(each.split()).replace("|", "\\|") for each in option.get_help_record(context))
                lines.append(f"| `{flag}` | {text} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(write_reference(), end="")
