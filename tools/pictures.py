"""Pictures of the explorer in docs/images, taken in Chromium from its static export: every view in four sizes.

    python -m tools.pictures [VIEW ...]

Chromium is found as `chromium` or `google-chrome`, or named by the environment variable CHROMIUM.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parent.parent / "docs" / "images"
# the name of a view in its files: the state of the page, and what is shown when it is drawn
VIEWS = {
    "plane": ("#plane", ".plane .output"),
    "attention": ("#attention", ".picture .cell"),
    "masks": (
        "#masks?mask=causal() %26 window(before%3D4)&keys=16&against=causal() %26 window(before%3D3)",
        ".facts .warn",
    ),
    "models": ("#models?show=edit&layer=1&head=1&edit=ablate:1.1", ".signed-bar"),
    "head": ("#models?show=head&layer=1&head=1", ".maps .cell"),
    "check": ("#check", ".finding svg"),
    "sheet": ("#sheets?q=002+1.2a", ".prose math"),
    "lesson": ("#lessons?name=what-attention-computes", ".live .plane"),
}
# the ending of a file: width, height, colour scheme, and whether type is enlarged
SIZES: dict[str, tuple[int, int, Literal["light", "dark"], bool]] = {
    "": (1400, 900, "light", False),
    "-dark": (1400, 900, "dark", False),
    "-phone": (390, 844, "light", False),
    "-projector": (1920, 1080, "light", True),
}
FIRST = {"plane": "explorer"}  # the picture at the top of the README
LARGEST = 3_000_000  # bytes of all pictures together


def main(names: list[str]) -> None:
    """Export the explorer and take a picture of every view, or of the views named in `names`."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium found; install it, or set CHROMIUM to its path")
    unknown = set(names) - set(VIEWS)
    if unknown:
        raise SystemExit(f"no view {', '.join(sorted(unknown))}; there are {', '.join(VIEWS)}")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        subprocess.run([sys.executable, "-m", "regard", "explore", "--export", folder], check=True)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in names or VIEWS:
            state, drawn = VIEWS[name]
            for ending, (width, height, scheme, present) in SIZES.items():
                page = browser.new_page(
                    viewport={"width": width, "height": height}, reduced_motion="reduce", color_scheme=scheme
                )
                page.goto((Path(folder) / "index.html").as_uri() + state)
                take(page, IMAGES / f"{_file_name(name, ending)}.png", drawn, present)
                page.close()
        browser.close()
    total = sum(path.stat().st_size for path in IMAGES.glob("explorer*.png"))
    print(f"{total:,} bytes in all")
    if total > LARGEST:
        raise SystemExit(f"the pictures may have {LARGEST:,} bytes in all")


def take(page: "Page", path: Path, drawn: str, present: bool) -> None:
    """Wait until the page shows an element, then save a picture of the page.

    drawn    CSS selector of the element
    """
    if "#check" in page.url:
        page.get_by_role("button", name="Open an example").click()
    if present:
        page.keyboard.press("t")
    page.wait_for_selector(drawn)
    page.wait_for_timeout(500)  # a view that runs its model draws a moment later
    page.evaluate("scrollTo(0, 0)")
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    # the palette covers rare colours too: a small arrow keeps its own
    picture = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    print(path)


def _file_name(name: str, ending: str) -> str:
    return FIRST.get(name, f"explorer-{name}") if not ending else f"explorer-{name}{ending}"


if __name__ == "__main__":
    main(sys.argv[1:])
