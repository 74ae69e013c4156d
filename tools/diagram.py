"""Architecture diagram: the packages of regard in rows, each package above the packages that it imports.

python -m tools.diagram > docs/images/architecture.svg
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "regard"
BOX, GAP, HEIGHT = 118, 14, 44  # pixels


def imported_packages(name: str) -> set[str]:
    """Return the packages of regard that a package imports in any of its files, also inside functions."""
    found = set()
    for file in (PACKAGE / name).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {module.split(".")[1] for module in modules if module.startswith("regard.")}
    return found - {name}


def rows() -> list[list[str]]:
    """Return the rows of the diagram from bottom to top: lists of package names.

    A package is one row above the highest package that it imports.
    """
    names = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))
    below = {name: imported_packages(name) & set(names) for name in names}
    levels: list[list[str]] = []
    while below:
        free = [name for name, needed in below.items() if not needed & below.keys()]
        if not free:
            raise ValueError(f"packages import each other in a circle: {sorted(below)}")
        levels.append(free)
        for name in free:
            del below[name]
    return levels


def draw() -> str:
    """Return the diagram as SVG text."""
    levels = rows()
    width = max(map(len, levels)) * (BOX + GAP) + GAP
    height = len(levels) * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        ' font-family="sans-serif" font-size="15">',
        "<title>Packages of regard: each imports only packages in rows below it</title>",
    ]
    for number, names in enumerate(reversed(levels)):
        y = GAP + number * (HEIGHT + GAP)
        left = (width - len(names) * (BOX + GAP) + GAP) / 2
        for place, name in enumerate(names):
            x = left + place * (BOX + GAP)
            parts.append(
                f'<rect x="{x:g}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6" fill="#e8eef7" stroke="#4a6fa5"/>'
                f'<text x="{x + BOX / 2:g}" y="{y + HEIGHT / 2 + 5:g}" text-anchor="middle" fill="#123">{name}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(draw(), end="")
