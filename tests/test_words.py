"""Names and words of the package: verbs or nouns for functions, one class per name, no metaphors."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "regard").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

IRREGULAR = set(
    re.findall(
        r"\w+",
        """told made drawn kept held given said seen found written shown known left met begun gone stood taken built
        sent lost won spoken heard meant felt broken chosen hidden grown thrown spelt understood worn torn""",
    )
)
NOT_PARTICIPLES = {"seed", "need", "speed", "embed", "feed"}

# words that a reader would have to have explained, and what to write instead
RIDDLES = {
    r"\b(is|was|are|were|been) told\b|\btold (from|by|apart|so|in|that)\b": "predicted, known, passed or reported",
    r"\btells? (of|from|apart|that)\b": "shows, distinguishes or reports",
    r"\banew\b": "again",
    r"\bonce more\b": "again",
    r"\boverheard?\b|\bunheard\b|\bdeaf\b": "intercepted, not recorded, disabled",
    r"\bears?\b": "hooks",
    r"\bheld against\b": "compared with",
    r"\bcomes of\b": "results from",
    r"\bgone on with\b|\bgoes on with\b": "resumed",
    r"\bhanded? (in|out|on|over|back)\b|\bhands (in|out|on|over|back)\b": "passed, returned",
    r"\bso many\b": "this number of",
    r"\bstands? (at|in|on|where|beside)\b|\bstood\b": "is at",
    r"\bthe plate\b|\bthe eye\b": "measurement",
}


def module_functions() -> list[tuple[str, str]]:
    """The file and the name of every function at the top of a module."""
    return [
        (str(path.relative_to(ROOT)), node.name)
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def is_participle(name: str) -> bool:
    """Whether a name is a bare participle, such as `_made` or `joined`."""
    word = name.strip("_").lower()
    return word not in NOT_PARTICIPLES and ("_" not in word) and (word.endswith("ed") or word in IRREGULAR)


@cache
def prose(path: Path) -> str:
    """The docstrings, comments and texts of a source file, or a page without its code blocks, on one line."""
    text = path.read_text()
    if path.suffix == ".md":
        return " ".join(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S).split())
    strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    comments = re.findall(r"#\s.*", text)
    return " ".join("\n".join([*(string for string in strings if isinstance(string, str)), *comments]).split())


def test_functions_are_verbs_or_nouns() -> None:
    found = [f"{file}: {name}" for file, name in module_functions() if is_participle(name)]
    assert len(found) <= 30, "\n".join(found)


def test_one_class_per_name() -> None:
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    classes = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    # every claim of the lab has a Setup, every recipe its Settings: they are read in their own file
    repeated = {name for name, count in classes.items() if count > 1} - {"Setup", "Settings"}
    assert len(repeated) <= 6, repeated


@pytest.mark.parametrize("pattern", RIDDLES)
def test_words_a_reader_knows(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: ...{text[max(0, hit.start() - 30) : hit.end() + 30]!r}"
        for path in [*SOURCES, *PAGES]
        for text in [prose(path)]
        for hit in re.finditer(pattern, text, re.I)
    ]
    assert not found, f"write {RIDDLES[pattern]} instead:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["told", "_made", "_drawn", "joined", "_kept"])
def test_a_bare_participle_is_found(name: str) -> None:
    assert is_participle(name)


@pytest.mark.parametrize("name", ["build_mask", "entropy", "embed", "seed", "load_checkpoint", "masked_mean"])
def test_verbs_and_nouns_are_left_alone(name: str) -> None:
    assert not is_participle(name)
