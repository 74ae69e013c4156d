"""Reports of `regard check --save`, as the Check view shows them."""

from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.base.files import read_json

MOST_FACTS = 500
# the report of `regard check regard/explorer/examples/broken_attention.py:attention`
EXAMPLE = Path(__file__).parents[1] / "examples" / "broken_attention.json"
_TEXTS = ("name", "status", "reason", "grade", "student", "engineer", "found", "cause", "example", "declare")


def load_report(path: Path) -> dict[str, Any]:
    """Read a saved report; only the parts that the page shows are kept."""
    report = read_json(path, ConfigError)
    facts = report.get("facts") if isinstance(report, dict) else None
    conventions = report.get("conventions", {}) if isinstance(report, dict) else {}
    if not isinstance(facts, list) or not all(isinstance(fact, dict) and "name" in fact for fact in facts):
        raise ConfigError(f"{path} is no report; write one with `regard check TARGET --save {path.name}`")
    return {
        "subject": str(report.get("subject", path.stem)),
        "kind": str(report.get("kind", "")),
        "ok": bool(report.get("ok")),
        "conventions": {str(name): str(value) for name, value in dict(conventions).items()},
        "facts": [{name: str(fact[name]) for name in _TEXTS if fact.get(name)} for fact in facts[:MOST_FACTS]],
    }
