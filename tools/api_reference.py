"""API reference: pages in Markdown from the signatures and docstrings of public names.

    python -m tools.api_reference FOLDER

Public names are the names that the modules in MODULES export. A docstring has a first line, an explanation, arguments
as `name  what it is`, and an example. The tests run the examples after the code in SETUP.
"""

import argparse
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# the module, and what its page says first
MODULES = {
    "regard": "Attention, masks, score terms, positions, caches, models, and the tools that look at them.",
    "regard.nn": "Modules with parameters.",
    "regard.see": "What a model attends to: statistics, records, relevance. The guide is [Seeing inside](../see.md).",
    "regard.data": "Data sets and tokenizers of the recipes. The guide is [Training](../training.md).",
    "regard.integrations.huggingface": "Hugging Face models: [the guide](../integrations.md#hugging-face).",
    "regard.integrations.torch": "Attention of `torch.nn`: [the guide](../integrations.md#torchnn).",
}

SETUP = """\
import torch
import regard
from regard import *

q, k, v = torch.randn(3, 1, 4, 5, 8)  # b h n c
model = regard.build("birthplace", depth=2).eval()
tokens = torch.tensor([list(b"the cat and the mat")])
"""

# lines that the examples of a page need besides
MORE_SETUP = {
    "regard": "",
    "regard.data": "import json, wave\nfrom pathlib import Path\nfrom PIL import Image\nfrom regard.data import *",
    "regard.integrations.huggingface": "import transformers",
}
# what else these modules define is called by transformers, not by users
ONLY = {"regard.integrations.huggingface": ["register"]}


@dataclass(frozen=True)
class Entry:
    """A public name of the API: its module, the name and the object."""

    module: str
    name: str
    value: Any

    @property
    def title(self) -> str:
        return f"{self.module}.{self.name}"


def setup(module: str) -> str:
    """Return the code that runs before the examples of a module, such as imports."""
    return (SETUP + MORE_SETUP.get(module, f"from {module} import *")).rstrip()


def public_names(module: str) -> list[str]:
    """Return the names that a module exports, without submodules, sorted without regard to case."""
    if module in ONLY:
        return ONLY[module]
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name, value in vars(found).items() if getattr(value, "__module__", "").startswith(module)
    ]
    own = [name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(found, name))]
    return sorted(own, key=str.lower)


def entries(module: str) -> Iterator[Entry]:
    """Yield the public names of a module, except names that the page of `regard` has already."""
    found = importlib.import_module(module)
    root = importlib.import_module("regard")
    for name in public_names(module):
        value = getattr(found, name)
        if module == "regard" or value is not getattr(root, name, None):
            yield Entry(module, name, value)


def signature(entry: Entry) -> str:
    """Return the signature of a function or class as text, without annotations."""
    try:
        found = inspect.signature(entry.value)
    except (TypeError, ValueError):
        return entry.name
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = entry.name + str(inspect.Signature(plain))
    indent = " " * (len(entry.name) + 1)
    return textwrap.fill(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def parse_example(entry: Entry) -> doctest.DocTest:
    """Return the example in a docstring, parsed by doctest."""
    text = inspect.getdoc(entry.value) or ""
    return doctest.DocTestParser().get_doctest(text, {}, entry.title, None, 0)


def example_lines(entry: Entry) -> list[str]:
    """Return the example in a docstring as lines of an interpreter session; empty if there is no example."""
    lines = []
    for each in parse_example(entry).examples:
        first, *rest = re.sub(r"\s*# doctest: .*", "", each.source.rstrip("\n")).split("\n")
        lines += [f">>> {first}", *(f"... {line}" for line in rest), *each.want.rstrip("\n").splitlines()]
    return lines


def write_entry(entry: Entry) -> str:
    """Return the Markdown section of a public name: signature, docstring with a list of the arguments, and example."""
    text = (inspect.getdoc(entry.value) or "").partition(">>>")[0].rstrip()
    lines = [f"## {entry.name}", "", "```text", signature(entry), "```", ""]
    for paragraph in re.split(r"\n\s*\n", text):
        rows = re.findall(r"^(\S.*?)(?:  +|\n +)(\S.*(?:\n  +.*)*)", paragraph, re.M)
        if rows and re.match(r"[\w*, ]+(  +|\n {4,})\S", paragraph):
            lines += [f"- `{name.strip()}`: {escape(' '.join(words.split()))}" for name, words in rows] + [""]
        else:
            lines += [escape(paragraph), ""]
    if inspect.isclass(entry.value):
        lines += write_methods(entry)
    if shown := example_lines(entry):
        lines += ["```pycon", *shown, "```", ""]
    return "\n".join(lines)


def write_methods(entry: Entry) -> list[str]:
    """Return the lines of a Markdown table of a class's public methods and properties, with their summary lines."""
    rows = []
    for name, value in sorted(vars(entry.value).items()):
        value = getattr(value, "__func__", value)
        described = inspect.isfunction(value) or isinstance(value, property)
        words = (inspect.getdoc(value) or "").partition("\n")[0]
        if described and words and not name.startswith("_"):
            call = name + "(...)" if inspect.isfunction(value) else name
            rows.append(f"| `{call}` | " + escape(words).replace("|", r"\|") + " |")
    return ["| member | |", "|---|---|", *rows, ""] if rows else []


def escape(text: str) -> str:
    """Escape the characters of a docstring that Markdown would interpret as HTML or emphasis; code stays unchanged."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts)


def write_page(module: str) -> str:
    """Return the reference page of a module as Markdown."""
    parts = [f"# {module}", "", MODULES[module], "", "Examples begin with:", "", "```python", setup(module), "```", ""]
    return "\n".join(parts) + "\n" + "\n".join(write_entry(entry) for entry in entries(module))


def write_pages(folder: Path) -> list[str]:
    """Write the page of every module into a folder. Returns the file names."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in MODULES:
        (folder / f"{module}.md").write_text(write_page(module), encoding="utf-8")
    return [f"{module}.md" for module in MODULES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.api_reference", description="Write the API reference.")
    parser.add_argument("folder", type=Path, help="folder of the pages")
    print("\n".join(write_pages(parser.parse_args().folder)))
