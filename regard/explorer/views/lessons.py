"""Lessons: Markdown files with live views and questions, as the page shows them."""

import re
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.base.files import read_text
from regard.explorer.views.document import LONGEST, parse_document

SHIPPED = Path(__file__).parents[1] / "lessons"


def load_lesson(path: Path) -> dict[str, Any]:
    """Read a lesson from a Markdown file; return its name, its title (the first heading) and its parsed content."""
    source = read_text(path, ConfigError, LONGEST)
    title = re.match(r"\s*# (.+)\n", source)
    if not title:
        raise ConfigError(f"{path}: a lesson starts with its title, `# What attention computes`")
    name = re.sub(r"\W+", "-", re.sub(r"^\d+-", "", path.stem)).strip("-").lower() or "lesson"
    # the title is left out; its lines are kept, so that errors name the line of the file
    text = "\n" * source[: title.end()].count("\n") + source[title.end() :]
    return {"name": name, "title": title[1].strip(), "content": parse_document(text, path.name)}


def load_lessons(own: Path | None = None) -> list[dict[str, Any]]:
    """Load the lessons of the package, in order; the user's own lesson comes first.

    own  path of the user's lesson, or None
    """
    shipped = [load_lesson(path) for path in sorted(SHIPPED.glob("*.md"))]
    return ([load_lesson(own)] if own else []) + shipped
