"""Measure the explorer against its budgets: `python -m bench.explorer`. It needs Chromium and playwright."""

import gzip
import math
import os
import shutil
import subprocess
import sys
import time
from statistics import median
from typing import Any
from urllib.request import urlopen

from regard.explorer.page import STATIC

PORT = 8771
ADDRESS = f"http://127.0.0.1:{PORT}/"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def start_server() -> tuple[subprocess.Popen[bytes], float]:
    """Start `regard explore`. Returns the server process and the seconds until it answers."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "regard", "explore", "--no-browser", "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while time.perf_counter() - begin < 60:
        try:
            with urlopen(ADDRESS, timeout=5):  # nosec B310: our own server
                return server, time.perf_counter() - begin
        except OSError:
            time.sleep(0.02)
    server.kill()
    raise SystemExit("the server did not answer within 60 s")


def measure_view(browser: Any) -> float:
    """Return the median seconds from opening the page to its first view."""
    times = []
    for _ in range(5):
        page = browser.new_page()
        begin = time.perf_counter()
        page.goto(ADDRESS)
        page.wait_for_selector("svg.plane")
        times.append(time.perf_counter() - begin)
        page.close()
    return median(times)


def measure_drag(browser: Any) -> float:
    """Return the milliseconds of computation per mouse move while a query is dragged in the Plane view with 12 keys."""
    page = browser.new_page()
    keys = ";".join(f"{math.cos(0.5236 * at):.3f},{math.sin(0.5236 * at):.3f}" for at in range(12))
    page.goto(f"{ADDRESS}#plane?k={keys}")
    page.wait_for_selector("svg.plane")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def busy() -> float:
        found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"])

    box = page.locator('[data-handle="q"]').bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    before, steps = busy(), 60
    for step in range(steps):
        page.mouse.move(x - step, y + step / 2)
        page.wait_for_timeout(17)  # one frame
    spent = busy() - before
    page.close()
    return 1e3 * spent / steps


def measure_overview() -> tuple[float, float, int]:
    """Measure the Models page's overview of the 144 heads of a GPT-2 with random weights, at 512 tokens.

    Returns the seconds of the overview, the seconds of a forward pass alone, and the size of the response in bytes.
    """
    import json

    import torch

    from regard.explorer.views.models import OpenedModel, analyse
    from regard.models.presets import build

    model = build("gpt2", seed=0).eval()
    tokens = torch.randint(0, 50257, (1, 512), generator=torch.Generator().manual_seed(0))
    opened = OpenedModel("gpt2", model, lambda: model(tokens), [str(int(t)) for t in tokens[0]], tokens, str)
    request: dict[str, Any] = {
        "model": "gpt2",
        "text": "",
        "show": "overview",
        "edits": [],
        "position": None,
        "target": "",
        "source": "",
        "row": None,
        "brush": [],
    }
    times, forward, size = [], [], 0
    for _ in range(5):
        begin = time.perf_counter()
        answer = analyse(request, lambda text: None, lambda name, text: opened)
        times.append(time.perf_counter() - begin)
        size = len(json.dumps(answer))
        begin = time.perf_counter()
        with torch.no_grad():
            model(tokens)
        forward.append(time.perf_counter() - begin)
    return median(times), median(forward), size


def main() -> None:
    """Print each measured number next to its budget."""
    from playwright.sync_api import sync_playwright

    code = sum(path.stat().st_size for path in STATIC.iterdir())
    packed = sum(len(gzip.compress(path.read_bytes())) for path in STATIC.iterdir())
    server, answered = start_server()
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            view, drag = measure_view(browser), measure_drag(browser)
            browser.close()
    finally:
        server.terminate()
        server.wait()
    seconds, forward, size = measure_overview()
    remote = [path.name for path in STATIC.iterdir() if "://" in path.read_text().replace("http://www.w3.org/", "")]
    print("| what | measured | budget |\n|---|---|---|")
    print(f"| `regard explore` answers | {answered:.1f} s | 3 s |")
    print(f"| first view | {view:.2f} s | 1 s |")
    print(f"| one step of a drag | {drag:.1f} ms | 16 ms |")
    print(f"| overview of 144 heads at 512 tokens | {seconds:.1f} s, {size / 1e6:.1f} MB | 2 s, 10 MB |")
    print(f"| of it, the model's forward pass | {forward:.1f} s | |")
    print(f"| JavaScript and CSS | {code / 1e3:.0f} kB ({packed / 1e3:.0f} kB compressed) | 250 kB |")
    print(f"| files with a remote address | {len(remote)} | 0 |")


if __name__ == "__main__":
    main()
