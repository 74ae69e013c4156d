"""Documentation site: gather the pages, write the generated ones, and build them with zensical.

    python -m tools.site [--explorer]

Most pages are in docs/. The API reference, the sheets with their answers and the list of decisions are generated.
CONTRIBUTING.md and CHANGELOG.md become pages too. Formulas become MathML. The site loads no files from other servers.
`--explorer` adds the explorer's static export and the page of the lab with all claims and figures.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from tools import api_reference, diagram

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "site"
# files outside docs/ that are pages of the site
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
EXPLORER_LINKS = """\
<a href="explorer/index.html">Open the explorer</a>: drag a query, look into a trained model, take a lesson.
<a href="claims.html">Open the lab</a>: every claim with its numbers and figure.
"""


def gather(folder: Path = PAGES) -> None:
    """Write the Markdown pages of the site, copied and generated ones, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    sources = {page: page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    sources |= {ROOT / name: Path(OUTSIDE[name]) for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    for source, target in sources.items():
        (folder / target).write_text(rewrite_links(source.read_text("utf-8"), source), encoding="utf-8")
    api_reference.write_pages(folder / "reference")
    for name, text in sheets():
        file = folder / "sheets" / f"{name}.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (folder / "decisions" / "index.md").write_text(list_decisions(), encoding="utf-8")
    with (folder / "index.md").open("a", encoding="utf-8") as index:
        index.write(f"\n{install_section()}")
    (folder / "images" / "architecture.svg").write_text(diagram.draw(), encoding="utf-8")
    for page in folder.rglob("*.md"):
        page.write_text(unescape_pipes(page.read_text("utf-8")), encoding="utf-8")


def install_section() -> str:
    """Return the installation section of the README, which the site includes because it is written only there."""
    (section,) = re.findall(r"(?ms)^## Install\n.*?(?=^## )", (ROOT / "README.md").read_text("utf-8"))
    return str(section)


def rewrite_links(text: str, origin: Path) -> str:
    """Return a page with its relative links adapted to the site. A link to a source file becomes its path as code.

    text    the page in Markdown
    origin  path of the page's source file
    """

    def rewrite(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        file = (origin.parent / target).resolve()
        if file.is_dir():
            file /= "index.md"
        below = ROOT / "docs"
        try:
            path = str(file.relative_to(below))
        except ValueError:
            name = str(file.relative_to(ROOT))
            if name not in OUTSIDE:
                return f"`{name}`"
            path = OUTSIDE[name]
        here = origin.parent.relative_to(below) if origin.is_relative_to(below) else Path()
        return f"[{label}]({'../' * len(here.parts)}{path}{anchor})"

    parts = re.split(r"(?ms)(^```.*?^```$)", text)
    for at in range(0, len(parts), 2):  # code is left alone
        parts[at] = re.sub(r"\[([^\]\n]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)", rewrite, parts[at])
    return "".join(parts)


def unescape_pipes(text: str) -> str:
    """Return a page with \\| replaced by | in the code of table cells, because zensical shows the backslash."""
    rows = re.compile(r"(?m)^\|.*$")
    return rows.sub(lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]), text)


def sheets() -> Iterator[tuple[str, str]]:
    """Yield the name and the Markdown of every course sheet with its answers, with formulas as MathML."""
    from regard.base.formulas import mathml, parse_latex
    from regard.lab.answers import sheet_titles

    for name, title in sheet_titles().items():
        command = [sys.executable, "-m", "regard", "lab", "sheet", name, "--markdown"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        text = re.sub(r"^(#+) ", r"#\1 ", text, flags=re.M)
        text = re.sub(r"\$\$(.+?)\$\$", lambda found: mathml(parse_latex(found[1])), text)
        yield name, f"# Sheet {name}\n\n{title}. Written by `regard lab sheet {name} --markdown`.\n\n{text}"


def list_decisions() -> str:
    """Return the Markdown page that lists the design decisions (docs/decisions) by title."""
    lines = ["# Decisions", "", "Each page has one decision: what was decided, and why.", ""]
    for file in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = file.read_text("utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({file.name})")
    return "\n".join(lines) + "\n"


def build() -> None:
    """Build the site with zensical; a warning is an error."""
    shutil.rmtree(SITE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT, check=True)
    if found := remote_addresses(SITE):
        raise SystemExit("pages load from elsewhere:\n" + "\n".join(found))
    if found := broken_links(SITE):
        raise SystemExit("links lead nowhere:\n" + "\n".join(found))


def broken_links(folder: Path) -> list[str]:
    """Return the links of built pages to a file or an anchor that does not exist."""
    pages = {page: page.read_text("utf-8") for page in sorted(folder.rglob("*.html"))}
    anchors = {page: set(re.findall(r'\bid="?([^"\s>]+)', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        # the page for missing addresses is served at any depth, and scripts hold templates of links
        text = "" if page.name == "404.html" else re.sub(r"(?s)<script.*?</script>", "", text)
        for target in set(re.findall(r'<a[^>]*\shref="?([^"\s>]+)', text)):
            address, _, anchor = unescape(unquote(target)).partition("#")
            file = (page.parent / address).resolve() if address else page
            file = file / "index.html" if file.is_dir() else file
            known = file.is_file() and (not anchor or file not in pages or anchor in anchors[file])
            if not re.match(r"[a-z]+:", target) and not known:
                broken.append(f"{page.relative_to(folder)}: {target}")
    return broken


def remote_addresses(folder: Path) -> list[str]:
    """Return the addresses of scripts, styles, fonts and pictures that a page would load from another server."""
    pattern = (
        r'<(?:script|img|iframe)[^>]+src="?(https?://[^"\s>]+)|<link[^>]+stylesheet[^>]+href="?(https?://[^"\s>]+)'
    )
    return [
        f"{page.relative_to(folder)}: {found[1] or found[2]}"
        for page in sorted(folder.rglob("*.html"))
        for found in re.finditer(pattern, page.read_text("utf-8"))
    ]


def nav_pages() -> list[str]:
    """Return the page files in the site's navigation, in order."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]

    def walk(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from walk(each)

    return list(walk(config["nav"]))


def add_explorer(folder: Path = PAGES) -> None:
    """Export the explorer and the lab into the pages, and link them from the first page."""
    with tempfile.TemporaryDirectory() as empty:  # the results of the package, not those of this machine
        for command in (
            ("explore", "--export", str(folder / "explorer")),
            ("lab", "--html", str(folder / "claims.html"), "--results", empty),
        ):
            subprocess.run([sys.executable, "-m", "regard", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    page = folder / "index.md"
    before, heading, after = page.read_text("utf-8").partition("\n![")
    page.write_text(f"{before}\n{EXPLORER_LINKS}\n{heading}{after}", encoding="utf-8")


def main() -> None:
    """Parse the options, gather the pages and build the site."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description="Build the pages into site/.")
    parser.add_argument(
        "--explorer", action="store_true", help="add the explorer and the lab, as pages without a server"
    )
    chosen = parser.parse_args()
    gather()
    if chosen.explorer:
        add_explorer()
    build()
    print(f"{SITE / 'index.html'}: open it in a browser")


if __name__ == "__main__":
    main()
