"""Pictures of the explorer in docs/images, taken in Chromium from its static export.

    python -m tools.pictures

Chromium is found as `chromium` or `google-chrome`, or named by the environment variable CHROMIUM.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent.parent / "docs" / "images"
# the file: the state of the page, the height of the picture, and a box to tick first
PICTURES = {
    "explorer.png": ("#plane", 760, None),
    "explorer-models.png": ("#models?show=edit&layer=1&head=1", 1000, "set its output to zero"),
}
WIDTH = 1400


def main() -> None:
    """Export the explorer and take every picture."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium found; install it, or set CHROMIUM to its path")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        subprocess.run([sys.executable, "-m", "regard", "explore", "--export", folder], check=True)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (state, height, box) in PICTURES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, reduced_motion="reduce")
            page.goto((Path(folder) / "index.html").as_uri() + state)
            page.wait_for_selector("#stage[data-drawn]")
            if box is not None:
                page.get_by_label(box).check()
            page.wait_for_timeout(1000)  # a view that runs its model draws a moment later
            page.screenshot(path=IMAGES / name)
            print(IMAGES / name)
        browser.close()


if __name__ == "__main__":
    main()
