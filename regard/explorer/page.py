"""The explorer as one self-contained HTML page: scripts, style sheet and data, with a Content-Security-Policy.

The page loads no other files: the policy allows only its own script and style, by their hashes. The same page is
served by `regard explore` and written by `regard explore --export`.
"""

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from regard.explorer.views.stored import GALLERY

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{ ([^}]*) \} from "\./(\w+\.js)";$', re.M)
_EXPORT = re.compile(r"^export (async function|function|class|const) (\w+)", re.M)
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>regard</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def build_page(data: dict[str, Any] | None = None) -> str:
    """Return the explorer as one HTML page with its style, script and data.

    data  JSON data for the views, added to the built-in gallery of masks
    """
    style, script = (STATIC / "style.css").read_text(encoding="utf-8"), bundle_modules("main.js")
    # a closing tag inside a text must not end the element
    embedded = json.dumps({"gallery": GALLERY, **(data or {})}, allow_nan=False).replace("<", "\\u003c")
    return _HEAD.format(policy=content_policy(style, script), style=style, script=script, data=embedded)


def content_policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy for a page with this style sheet and this script.

    The policy allows this script, this style, images in data: and blob: URLs, and requests to the page's own server.
    """
    hashes = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in
              (("style", style), ("script", script))}  # fmt: skip
    return (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def bundle_modules(entry: str) -> str:
    """Bundle an ES module in `static` and the modules that it imports into one script.

    Each module becomes a function that returns its exports.
    """
    order: list[str] = []
    sources: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in sources:
            return
        sources[name] = (STATIC / name).read_text(encoding="utf-8")
        for _, imported in _IMPORT.findall(sources[name]):
            visit(imported)
        order.append(name)

    visit(entry)
    return '"use strict";\n' + "\n".join(_wrap_module(name, sources[name]) for name in order)


def _wrap_module(name: str, source: str) -> str:
    names = [found for _, found in _EXPORT.findall(source)]
    body = _IMPORT.sub(lambda hit: f"const {{ {hit[1]} }} = {_variable(hit[2])};", source)
    body = _EXPORT.sub(r"\1 \2", body)
    left = re.search(r"^(import|export)\b.*$", body, re.M)
    if left:
        raise ValueError(f'{name}: cannot bundle {left[0]!r}; write import {{ a, b }} from "./file.js" on one line')
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(names)} }};\n}})();"


def _variable(name: str) -> str:
    return "$" + name.removesuffix(".js")
