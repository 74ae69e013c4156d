"""Run a lab claim for the explorer's page."""

import base64
from typing import Any

from regard.explorer.worker import Progress
from regard.lab.claim import claims
from regard.lab.html_page import figure_svg


def run_claim(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run a lab claim with its full setup and return the verdict, the seconds and the figure as an SVG data URL."""
    claim = claims()[request["claim"]]
    progress(f"running; it takes about {claim.budget:.0f} s")
    outcome = claim.run(claim.setup())
    return {
        "verdict": outcome.verdict.word,
        "sentence": outcome.verdict.sentence,
        "seconds": outcome.seconds,
        "figure": svg_data_url(figure_svg(claim, outcome.numbers, "none")),
    }


def svg_data_url(svg: str) -> str:
    """Return an SVG picture as a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
