"""Read the reports of `regard check --save` for the Check view."""

import json
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.base.files import read_json

MOST_FACTS = 500
# the report of `regard check regard/explorer/examples/broken_attention.py:attention`
EXAMPLE = Path(__file__).parents[1] / "examples" / "broken_attention.json"
_TEXTS = ("name", "status", "reason", "grade", "student", "engineer", "found", "cause", "example", "declare")


def load_report(path: Path) -> dict[str, Any]:
    """Read a saved `regard check` report and return the entries that the page shows."""
    return _select(read_json(path, ConfigError), str(path), path.name)


def read_report(text: str, where: str) -> dict[str, Any]:
    """Parse the JSON text of a `regard check` report and return the entries that the page shows.

    where  name of the report in error messages
    """
    return _select(json.loads(text), where, "report.json")


def _select(report: Any, where: str, name: str) -> dict[str, Any]:
    facts = report.get("facts") if isinstance(report, dict) else None
    conventions = report.get("conventions", {}) if isinstance(report, dict) else {}
    if not isinstance(facts, list) or not all(isinstance(fact, dict) and "name" in fact for fact in facts):
        raise ConfigError(f"{where} is no report; write one with `regard check TARGET --save {name}`")
    return {
        "subject": str(report.get("subject", where)),
        "kind": str(report.get("kind", "")),
        "ok": bool(report.get("ok")),
        "conventions": {str(name): str(value) for name, value in dict(conventions).items()},
        "facts": [{name: str(fact[name]) for name in _TEXTS if fact.get(name)} for fact in facts[:MOST_FACTS]],
    }
