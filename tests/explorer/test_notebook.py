"""`regard.show` in a notebook: the views of the explorer in a sandboxed frame, without a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import causal, window
from regard.base.errors import ConfigError
from tests.explorer.browser import open_browser, open_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


def open_frame(browser: Any, folder: Path, shown: Any) -> tuple[Any, list[str]]:
    """The frame that a notebook shows, and the errors of its page."""
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    path = folder / "notebook.html"
    path.write_text(f"<!doctype html><title>notebook</title>{shown._repr_html_()}", encoding="utf-8")
    page.goto(path.as_uri())
    return page.frame_locator("iframe"), errors


def test_a_mask_from_ones_own_code_is_compared_in_a_frame(browser: Any, tmp_path: Path) -> None:
    own = torch.ones(9, 9).tril().bool() & torch.ones(9, 9).triu(-4).bool()
    shown = regard.show(own, against=causal() & window(before=3))
    assert "cells differ" in str(shown)
    frame, errors = open_frame(browser, tmp_path, shown)
    facts = frame.locator(".facts")
    facts.wait_for()
    assert f"{int(own.sum())} of 81 pairs visible" in facts.inner_text()
    assert "One convention explains all of it" in facts.inner_text()
    frame.locator(".cell").first.click()
    assert "query at 0" in frame.locator("#inspector").inner_text()
    assert not errors


def test_a_frame_names_the_convention_of_numbers_and_the_sequence_that_differs(browser: Any, tmp_path: Path) -> None:
    lower = torch.ones(5, 5).tril()
    frame, errors = open_frame(browser, tmp_path, regard.show(causal(), against=lower))
    facts = frame.locator(".facts")
    facts.wait_for()
    assert "They would be equal if the numbers of additive (5, 5) were factors" in facts.inner_text()
    second = torch.stack([lower, lower.flip(0)])[:, None].bool()
    frame, more = open_frame(browser, tmp_path, regard.show(causal(), against=second))
    facts = frame.locator(".facts")
    facts.wait_for()
    assert "That is in sequence 1, head 0." in facts.inner_text()
    assert not errors + more


def test_a_mask_from_a_script_is_saved_and_opened(browser: Any, tmp_path: Path) -> None:
    distance = torch.arange(600)[:, None] - torch.arange(600)
    shown = regard.show((distance >= 0) & (distance <= 256), against=causal() & window(before=255))
    path = shown.save(tmp_path / "mask.html")
    page = open_page(browser, path.as_uri(), allowed=tmp_path.as_uri())
    assert page.get_by_label("Compare with").input_value() == "causal() & window(before=255)"
    facts = page.locator(".facts").inner_text()
    assert "344 cells differ. The first: the query at 256 sees key 0 in the first mask" in facts
    assert "the window counts the query itself in one of them" in facts
    assert not page.locator(".growth").count()  # a matrix has one length
    assert not page.errors
    with pytest.raises(ConfigError, match="up to 4096 keys"):
        regard.show(causal(), queries=4097).save(tmp_path / "large.html")


def test_a_recorded_pass_is_shown_with_its_heads(browser: Any, tmp_path: Path) -> None:
    model, tokens = regard.load("induction-gpt").eval(), torch.tensor([[43, 88, 23, 77, 43, 88]])
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens)
    shown = regard.show(seen, tokens=tokens)
    assert "blocks.0.attention" in str(shown)
    frame, errors = open_frame(browser, tmp_path, shown)
    frame.locator('[data-head="1.0"]').click()
    frame.locator(".as-table summary").click()
    cell = frame.locator(".as-table tbody tr").nth(5).locator("td").nth(1)
    assert float(cell.inner_text().replace("e\N{MINUS SIGN}", "e-")) == pytest.approx(
        float(seen.records[1].weights()[0, 0, 5, 1]), abs=6e-4
    )
    assert not errors
    with pytest.raises(ConfigError, match="labels"):
        regard.show(seen, tokens=["a"])


def test_a_report_is_shown(browser: Any, tmp_path: Path) -> None:
    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v

    frame, errors = open_frame(
        browser, tmp_path, regard.show(regard.check(broken, only=["softmax-over-the-other-axis"]))
    )
    frame.locator(".finding").wait_for()
    assert "softmax-over-the-other-axis" in frame.locator(".finding h3").inner_text()
    assert not errors


def test_the_frame_is_sandboxed() -> None:
    html = regard.show(causal())._repr_html_()  # type: ignore[union-attr]
    assert 'sandbox="allow-scripts allow-downloads"' in html
    assert "allow-same-origin" not in html
