"""Count the code lines of each folder of a package, without blank lines, comments and docstrings.

`python -m tools.code_lines [FOLDER]` counts in a folder, by default in the package regard.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def count_code_lines(source: str) -> int:
    """Return the number of lines that hold code; every line of a text over several lines counts.

    >>> count_code_lines("x = 1  # one\\n\\n# two\\ny = (\\n    2\\n)\\n")
    4
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for token in tokens if token.type not in NOT_CODE for n in range(token.start[0], token.end[0] + 1)}
    return len(lines - {n for each in docstrings for n in range(each.lineno, (each.end_lineno or each.lineno) + 1)})


def main() -> None:
    package = Path(sys.argv[1] if len(sys.argv) > 1 else "regard")
    counts: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        folder = file.relative_to(package).parts[0] if file.parent != package else "."
        counts[folder] += count_code_lines(file.read_text(encoding="utf-8"))
    for folder in sorted(counts):
        print(f"{folder:14}{counts[folder]:>7,}")
    print(f"{'all':14}{counts.total():>7,}")


if __name__ == "__main__":
    main()
