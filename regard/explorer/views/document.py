"""Markdown as a tree of elements that the page builds.

The page never reads HTML: a text stays text, and only elements of a fixed list are created. A node is a text or
`[tag, attributes, children]`. Besides Markdown a document can have

    $$ formula $$              a formula, as MathML
    ```regard VIEW name=value  a live view of the explorer in this state; the lines inside are its caption
    ```question before|after   a question with the answers `- [ ] wrong` and `- [x] right`; the last lines explain
"""

import re
import shlex
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree  # nosec B405: it parses our own MathML only

from markdown_it.tree import SyntaxTreeNode

from regard.base.errors import ConfigError, RegardError
from regard.base.formulas import mathml, parse_latex
from regard.base.markdown import markdown_parser
from regard.core.masks.expression import parse_mask

Node = str | list[Any]
LONGEST = 200_000  # characters of a document
MOST_QUESTIONS = 5  # before and after a lesson, each
_NUMBER = r"-?(\d+(\.\d*)?|\.\d+)(e-?\d+)?"
_POINT = rf"{_NUMBER},{_NUMBER}"
_ROW = rf"{_NUMBER}(,{_NUMBER})*"
_POSITIVE = _NUMBER.removeprefix("-?")
# the form of a setting's value: a regular expression, and how an error describes it
_FORMS = {
    "point": (_POINT, "a point, such as 1,0.5"),
    "points": (rf"{_POINT}(;{_POINT})*", "points, such as 1,0;0,1"),
    "matrix": (rf"{_ROW}(;{_ROW})*", "rows of numbers, such as 1,0,2;0,1,1"),
    "beta": (rf"inf|{_POSITIVE}", "a number from 0, or inf"),
    "positive": (_POSITIVE, "a number from 0"),
    "whole": (r"\d+", "a whole number from 0"),
    "flag": (r"[01]", "0 or 1"),
    "nudge": (rf"(q|k\d+):{_POINT}", "q or k0, k1, ... and a point, such as k0:0.3,0.2"),
    "positions": (r"none|sinusoidal|rotary|alibi|t5|shaw", "none, sinusoidal, rotary, alibi, t5 or shaw"),
    "show": (r"overview|head|edit|flow|generate", "overview, head, edit, flow or generate"),
    "edit": (
        rf"(ablate|mean|patch):\d+\.(\d+|all)|(beta|hide):\d+\.(\d+|all):{_POSITIVE}", "such as ablate:1.0, layer.head"
    ),
    "mask": (r".+", "a mask expression, such as causal()"),
    "text": (r".+", "a text"),
}  # fmt: skip
# settings of a live view: the name a lesson uses -> its name in the address of the page, and the form of its value
VIEWS: dict[str, dict[str, tuple[str, str]]] = {
    "plane": {
        "query": ("q", "point"), "second": ("q2", "point"), "keys": ("k", "points"), "values": ("v", "points"),
        "beta": ("b", "beta"), "tie": ("tie", "flag"), "projections": ("proj", "flag"), "noise": ("spread", "positive"),
        "varying": ("along", "whole"), "length": ("len", "positive"), "nudge": ("nudge", "nudge"),
        "seed": ("seed", "whole"),
    },
    "attention": {
        "queries": ("q", "matrix"), "keys": ("k", "matrix"), "values": ("v", "matrix"), "beta": ("b", "beta"),
        "mask": ("mask", "mask"), "positions": ("pos", "positions"), "heads": ("heads", "whole"),
        "head": ("head", "whole"), "columns": ("columns", "flag"),
    },
    "masks": {
        "mask": ("mask", "mask"), "against": ("against", "mask"), "queries": ("queries", "whole"),
        "keys": ("keys", "whole"),
    },
    "models": {
        "model": ("model", "text"), "text": ("text", "text"), "layer": ("layer", "whole"), "head": ("head", "whole"),
        "edit": ("edit", "edit"), "show": ("show", "show"),
    },
}  # fmt: skip
FARTHEST = 3.1  # coordinate of a point that the plane shows
PREDICTIONS = ("weights",)
_SAME = {"paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "list_item": "li", "blockquote": "blockquote",
         "strong": "strong", "em": "em", "table": "table", "thead": "thead", "tbody": "tbody", "tr": "tr", "th": "th",
         "td": "td", "hr": "hr", "hardbreak": "br"}  # fmt: skip


def parse_document(source: str, where: str = "the document") -> list[Node]:
    """Parse a Markdown document into nodes: strings, and lists [tag, attributes, children].

    where  name of the document in error messages
    """
    if len(source) > LONGEST:
        raise ConfigError(f"{where} has {len(source)} characters; at most {LONGEST} are read")
    tree = SyntaxTreeNode(markdown_parser().parse(source))
    nodes = [node for each in tree.children for node in _convert(each, where)]
    for when in ("before", "after"):
        count = sum(isinstance(node, list) and node[0] == "question" and node[1]["when"] == when for node in nodes)
        if count > MOST_QUESTIONS:
            raise ConfigError(f"{where} has {count} questions {when}; at most {MOST_QUESTIONS} are allowed")
    return nodes


def formula_node(latex: str) -> Node:
    """Convert a LaTeX formula to a MathML node."""
    return _from_xml(ElementTree.fromstring(mathml(parse_latex(latex.strip()))))  # nosec B314: our own text


def plain_text(nodes: list[Node]) -> str:
    """Return the text of document nodes without the markup."""
    return "".join(node if isinstance(node, str) else plain_text(node[2]) for node in nodes)


def _from_xml(element: ElementTree.Element) -> Node:
    children: list[Node] = [element.text] if element.text else []
    for each in element:
        children.append(_from_xml(each))
        if each.tail and each.tail.strip():
            children.append(each.tail)
    attributes = {name: value for name, value in element.attrib.items() if name in ("display", "width")}
    return [element.tag.rpartition("}")[2], attributes, children]


def _convert(node: SyntaxTreeNode, where: str) -> list[Node]:
    kind = node.type
    if kind == "paragraph" and node.children[0].content.startswith("$$"):
        # the text as it was written: a formula may hold what Markdown reads as emphasis
        return [formula_node(latex) for latex in re.findall(r"\$\$(.+?)\$\$", node.children[0].content, re.S)]
    children: list[Node] = [made for each in node.children for made in _convert(each, where)]
    if kind in ("inline", "root"):
        return children
    if kind == "text":
        return [node.content]
    if kind == "softbreak":
        return [" "]
    if kind == "code_inline":
        return [["code", {}, [node.content]]]
    if kind == "heading":
        # the title is the page's first heading
        return [[f"h{min(max(int(node.tag[1]), 2), 4)}", {}, children]]
    if kind == "link":
        href = str(node.attrs.get("href", ""))
        # the page loads nothing, so only links into it are links; other addresses are shown
        return [["a", {"href": href}, children]] if href.startswith("#") else [*children, f" ({href})"]
    if kind == "image":
        raise ConfigError(f"{where}: pictures are not shown; use a live view (```regard plane ...) instead")
    if kind in ("fence", "code_block"):
        return [_fence(node, where)]
    if kind in _SAME:
        return [[_SAME[kind], {}, children]]
    raise ConfigError(f"{where}: {kind.replace('_', ' ')} is not supported")


def _fence(node: SyntaxTreeNode, where: str) -> Node:
    line = f"{where}, line {node.map[0] + 1}" if node.map else where
    name, _, rest = node.info.strip().partition(" ")
    if name == "regard":
        return _view(rest, node.content, line)
    if name == "question":
        return _question(rest.strip() or "after", node.content, line)
    return ["pre", {}, [["code", {}, [node.content]]]]


def _view(settings: str, caption: str, where: str) -> Node:
    """Create the node of an interactive view that a lesson embeds with a ```regard block.

    settings  name of the view and name=value pairs, such as `masks mask=causal()`; predict=... asks the learner
              first
    caption   text below the view
    where     name and line of the document in error messages
    """
    try:
        name, *pairs = shlex.split(settings)
    except ValueError as error:
        raise ConfigError(f"{where}: write ```regard VIEW name=value ...: {error}") from None
    if name not in VIEWS:
        raise ConfigError(f"{where}: there is no view {name!r}; there are {', '.join(VIEWS)}")
    state, predict = {}, ""
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key == "predict" and value in PREDICTIONS and name == "plane":
            predict = value
        elif equals and key in VIEWS[name]:
            address, form = VIEWS[name][key]
            _check_value(pair, value, form, where)
            state[address] = value
        else:
            known = ", ".join([*VIEWS[name], *(["predict=weights"] if name == "plane" else [])])
            raise ConfigError(f"{where}: the view {name} has no setting {pair!r}; it takes name=value with {known}")
    return ["view", {"view": name, "state": urlencode(state), "predict": predict}, [caption.strip()]]


def _check_value(setting: str, value: str, form: str, where: str) -> None:
    """Check that the page can read the value of a setting, else raise an error.

    Without this check the page would replace an unreadable value by the default.
    """
    pattern, expected = _FORMS[form]
    # several edits are separated by semicolons
    if not all(re.fullmatch(pattern, part) for part in (value.split(";") if form == "edit" else [value])):
        raise ConfigError(f"{where}: {setting!r} should be {expected}")
    if form in ("point", "points") and any(abs(float(x)) > FARTHEST for x in re.split("[,;]", value)):
        raise ConfigError(f"{where}: {setting!r} has a coordinate beyond {FARTHEST}, the edge of the plane")
    if form == "mask":
        try:
            parse_mask(value)
        except RegardError as error:
            raise ConfigError(f"{where}: {setting!r}: {error}") from None


def _question(when: str, content: str, where: str) -> Node:
    if when not in ("before", "after"):
        raise ConfigError(f"{where}: a question comes before or after the lesson, not {when!r}")
    lines = content.strip().splitlines()
    answers = [
        {"text": found[2].strip(), "right": found[1] == "x"}
        for line in lines
        if (found := re.match(r"- \[([ x])\] (.+)", line))
    ]
    first = next((at for at, line in enumerate(lines) if line.startswith("- [")), len(lines))
    last = max((at for at, line in enumerate(lines) if line.startswith("- [")), default=len(lines) - 1)
    asked, explained = " ".join(lines[:first]).strip(), " ".join(lines[last + 1 :]).strip()
    if not asked or len(answers) < 2 or sum(bool(each["right"]) for each in answers) != 1:
        raise ConfigError(
            f"{where}: a question has a text, two or more lines `- [ ] answer` and one line `- [x] answer`"
        )
    return ["question", {"when": when, "answers": answers, "explanation": explained}, [asked]]
