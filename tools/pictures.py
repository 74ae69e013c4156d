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
# the file, and the state of the page
PICTURES = {
    "explorer.png": "#plane",
    "explorer-models.png": "#models?show=edit&layer=1&head=1",
}
SIZE = {"width": 1400, "height": 760}


def main() -> None:
    """Export the explorer and take every picture."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium found; install it, or set CHROMIUM to its path")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        subprocess.run([sys.executable, "-m", "regard", "explore", "--export", folder], check=True)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, state in PICTURES.items():
            page = browser.new_page(viewport=SIZE, reduced_motion="reduce")  # type: ignore[arg-type]
            page.goto((Path(folder) / "index.html").as_uri() + state)
            page.wait_for_selector("#stage[data-drawn]")
            page.wait_for_timeout(1000)  # a view that loads its model draws a moment later
            page.screenshot(path=IMAGES / name)
            print(IMAGES / name)
        browser.close()


if __name__ == "__main__":
    main()
