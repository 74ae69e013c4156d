"""The views in a headless browser, by mouse and by keyboard; numbers on the page equal torch's."""

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest
import torch

import regard
from regard.cli.exploring import open_model, tasks
from regard.explorer.page import STATIC, build_page
from regard.explorer.views.browser_model import load_browser_model
from regard.explorer.views.lessons import load_lessons
from regard.explorer.views.reports import EXAMPLE as EXAMPLE_REPORT, load_report
from regard.explorer.views.sheets import VIEWS as ANSWER_VIEWS, build_claims, build_sheets, figure_address
from regard.explorer.views.stored import store_model
from regard.models.cards import read_card
from tests.explorer.browser import open_browser, open_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("explorer") / "index.html"
    claims = [claim for claim in build_claims() if claim["id"] == "multi-head"]
    data = {
        "lessons": load_lessons(),
        "browser_model": load_browser_model(),
        "sheets": build_sheets(),
        "claims": claims,
        "example_report": {"report": load_report(EXAMPLE_REPORT)},
    }
    data["figures/multi-head"] = {"address": figure_address("multi-head")}
    path.write_text(build_page(data), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Any]:
    """Open a view of the static page; afterwards nothing may have failed or been asked of another address."""
    pages = []

    def opened(state: str, **size: int) -> Any:
        pages.append(open_page(browser, address + state, allowed=Path("/").as_uri(), **size))
        return pages[-1]

    yield opened
    for page in pages:
        assert not page.errors
        assert not page.refused
        page.context.close()


def wait_until(page: Any, holds: Callable[[], bool]) -> None:
    """Wait until a condition holds. The policy of the page forbids conditions written in JavaScript."""
    for _ in range(200):
        if holds():
            return
        page.wait_for_timeout(25)
    pytest.fail(f"it did not happen; the address is {page.url}")


def numbers(page: Any, selector: str) -> list[float]:
    """The numbers that the page shows."""
    texts = page.locator(selector).all_inner_texts()
    return [float(text.replace(MINUS, "-").replace("∞", "inf")) for text in texts]


def copy_python(page: Any) -> str:
    """The text that Copy Python puts on the clipboard."""
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.get_by_role("button", name="Copy Python").click()
    return str(page.evaluate("window.copied"))


MINUS = "\N{MINUS SIGN}"
PLANE = "#plane?q=1.2,0.8&k=1,0;0,1;-0.8,-0.6&v=2,-0.6;0.4,2.2;-2.2,0.8&b="


@pytest.mark.parametrize("beta", ["0", "0.5", "2", "inf"])
def test_the_plane_shows_the_weights_of_attend(visit: Any, beta: str) -> None:
    page = visit(PLANE + beta)
    k, v = torch.tensor([[1, 0], [0, 1], [-0.8, -0.6]]).double(), torch.tensor([[2, -0.6], [0.4, 2.2], [-2.2, 0.8]])
    q = torch.tensor([[1.2, 0.8]]).double()
    out = regard.attend(q[None, None], k[None, None], v.double()[None, None], beta=float(beta))[0, 0, 0]
    assert numbers(page, ".sentence > .number") == pytest.approx(out.tolist(), abs=5.1e-4)


def test_dragging_the_query_moves_the_output(visit: Any) -> None:
    page = visit(PLANE + "2")
    before = numbers(page, ".sentence > .number")
    box = page.locator('[data-handle="q"]').bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 200, y + 150, steps=5)
    page.mouse.up()
    wait_until(page, lambda: numbers(page, ".sentence > .number") != before)


def test_arrow_keys_move_a_key_and_keep_it_chosen(visit: Any) -> None:
    page = visit(PLANE + "2")
    handle = page.locator('[data-handle="k1"]')
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(40)
    assert "at 0.300, 1" in page.locator('[data-handle="k1"]').get_attribute("aria-label")
    assert page.evaluate("document.activeElement.dataset.handle") == "k1"


def test_the_theme_switches_with_one_key_and_the_maps_follow(visit: Any) -> None:
    page = visit("#attention?b=0")
    colour = 'document.querySelector(\'[data-why="a.0.0"] rect\').getAttribute("fill")'
    light = page.evaluate(colour)
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(colour) != light
    page.keyboard.press("d")
    assert page.evaluate(colour) == light
    assert "b=0" in page.url


def test_reload_and_back_restore_the_state(visit: Any) -> None:
    page = visit(PLANE + "2")
    page.get_by_label("Inverse temperature").fill("200")  # the right end is infinity
    wait_until(page, lambda: "b=inf" in page.url)
    page.reload()
    page.wait_for_selector("#stage[data-drawn]")
    assert page.locator("output").first.inner_text() == "β = ∞"
    page.keyboard.press("2")
    page.wait_for_selector("svg.attention")
    page.go_back()
    page.wait_for_selector("svg.plane")
    assert page.locator("output").first.inner_text() == "β = ∞"


def test_why_this_number_unfolds_down_to_products_and_goes_back(visit: Any) -> None:
    page = visit(PLANE + "2")
    page.locator(".sentence > .number").first.focus()
    page.keyboard.press("Enter")
    inspector = page.locator("#inspector")
    assert "output x" in inspector.inner_text()
    inspector.locator("[data-into]").first.click()
    assert "weight a1" in inspector.locator(".result").inner_text()
    inspector.locator("[data-into]").first.click()
    assert "score s1" in inspector.locator(".result").inner_text()
    assert "1.200" in inspector.inner_text()
    page.keyboard.press("Backspace")
    assert "weight a1" in inspector.locator(".result").inner_text()


def test_enter_goes_down_and_backspace_returns_to_the_number(visit: Any) -> None:
    page = visit(PLANE + "2")
    result = page.locator("#inspector .result")
    page.locator('[data-why="o.0"]').focus()
    for step in ("output x", "weight a1", "score s1"):
        page.keyboard.press("Enter")
        assert step in result.inner_text()
    for step in ("weight a1", "output x"):
        page.keyboard.press("Backspace")
        assert step in result.inner_text()
    page.keyboard.press("Backspace")
    assert page.locator(':focus[data-why="o.0"]').count() == 1
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator(':focus[data-why="o.0"]').count() == 1


@pytest.mark.parametrize(
    ("state", "selector", "key"),
    [
        ("#plane", "text=Add a key", "Enter"),
        ("#plane", "label:has-text('Second head') input", " "),
        ("#attention", "label:has-text('Positions') + select", "ArrowDown"),
        ("#masks", "label:has-text('Keys') + input", "ArrowUp"),
        ("#models", "role=tab[name='Flow']", "Enter"),
        ("#models?show=edit", "[data-head='1.2']", "Enter"),
        ("#models?show=edit", "label:has-text('set its output') input", " "),
        ("#models?show=generate", "text=Draw one of", "Enter"),
        ("#lessons", "button:has-text('Temperature, hard and soft')", "Enter"),
    ],
)
def test_what_is_used_by_keyboard_keeps_the_focus(visit: Any, state: str, selector: str, key: str) -> None:
    page = visit(state)
    page.wait_for_selector(selector)
    page.locator(selector).focus()
    before, drawn = page.url, page.locator("#stage").get_attribute("data-drawn")
    page.keyboard.press(key)
    wait_until(page, lambda: page.url != before and page.locator("#stage").get_attribute("data-drawn") != drawn)
    assert page.locator(selector).evaluate("(element) => element === document.activeElement")


def test_a_text_in_the_address_may_hold_a_question_mark(visit: Any) -> None:
    page = visit("#models?text=Is?Is?&show=flow")
    page.wait_for_selector(".lens")
    assert page.get_by_label("Text", exact=True).input_value() == "Is?Is?"


def test_a_key_in_the_direction_of_the_query_is_drawn_on_its_arrow(visit: Any) -> None:
    page = visit("#plane?q=2,0&k=1,0;0,1&v=2,0;0,2&b=1")
    lines = page.evaluate("[...document.querySelectorAll('line.arrow')].map((line) => line.getAttribute('class'))")
    assert lines == ["arrow query", "arrow key", "arrow key"]


def test_the_python_of_the_plane_prints_the_weights_and_the_output(visit: Any, capsys: Any) -> None:
    page = visit(PLANE + "2&nudge=k1:0.4,-0.3")
    exec(copy_python(page), {})
    printed = [float(number) for number in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    shown = numbers(page, ".bars .number") + numbers(page, ".sentence > .number")
    nudged = re.findall(r"\d\.\d+", page.locator(".sentence .help").inner_text())[:4]  # predicted, true
    assert printed == pytest.approx([*shown, *map(float, nudged)], abs=6e-4)


@pytest.mark.parametrize("second", ["", "&q2=-0.4,1"])
def test_the_python_of_the_plane_prints_the_noise_and_the_nudge_of_all_heads(
    visit: Any, capsys: Any, second: str
) -> None:
    page = visit(f"{PLANE}2&tie=1&spread=0.1&along=1&len=0.5&seed=3&nudge=q:0.4,-0.3{second}")
    exec(copy_python(page), {})
    printed = [abs(float(number)) for number in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    texts = [*page.locator(".cloud-text").all_inner_texts(), page.locator(".sentence .help").inner_text()]
    shown = [float(number) for text in texts for number in re.findall(r"\d\.\d+", text)]
    deviations = 2 if second else 1
    assert len(shown) == deviations + 5  # predicted, true, and how far apart
    assert printed[-4 - deviations :] == pytest.approx(shown[:-1], abs=6e-4)


@pytest.mark.parametrize("keys", ["3,3;0,1", "-3,-3;-3,-2.9"])
def test_a_weight_of_large_scores_is_explained_without_overflow(visit: Any, keys: str) -> None:
    page = visit(f"#plane?q=3,3&k={keys}&b=100&v=1,0;0,1")
    page.locator('[data-why="w.1.0"]').click()
    text = page.locator("#inspector").inner_text()
    assert f"exp(β (s1 {MINUS} max))" in text
    assert "∞" not in text
    assert "(0 + 0)" not in text


def test_a_pinned_state_is_compared_and_is_in_the_address(visit: Any) -> None:
    page = visit(PLANE + "2")
    page.keyboard.press("p")
    page.wait_for_selector(".difference table")
    page.locator("section:not(.pinned)").get_by_label("Inverse temperature").first.fill("0")
    wait_until(page, lambda: "b=0&" in page.url and "pin=" in page.url)
    rows = page.locator(".difference tbody tr")
    first = rows.nth(1).locator("td").all_inner_texts()  # weight of key 1
    old, new, change = (float(text.replace(MINUS, "-")) for text in first)
    assert change == pytest.approx(new - old, abs=2e-3)
    assert new == pytest.approx(1 / 3, abs=1e-3)


def test_a_difference_of_attention_maps_hatches_what_both_states_hide(visit: Any) -> None:
    page = visit(f"#attention?mask=causal()&b=1&pin={quote('mask=causal() & window(before=1)&b=0.2')}")
    wait_until(page, lambda: page.locator(".difference-map").count() == 2)
    cells = page.locator(".difference-map").first.locator("rect")
    fills = [cells.nth(at).get_attribute("fill") for at in range(9)]
    texts = [cells.nth(at).locator("title").text_content() for at in range(9)]
    hidden = [j > i for i in range(3) for j in range(3)]  # the window hides one more cell, in one state only
    assert [fill.startswith("url(#hatch") for fill in fills] == hidden
    assert [text.endswith(": hidden") for text in texts] == hidden
    assert page.locator(".definitions pattern").get_attribute("id") in fills[1]


def test_attention_shows_the_worked_example(visit: Any) -> None:
    page = visit("#attention?mask=causal()")
    q = torch.tensor([[1, 3], [-1, 1], [2.5, -2]]).double()
    k = torch.tensor([[3, -0.5], [2, -1.5], [-2.5, 3.5]]).double()
    v = torch.tensor([[2.5, -1.5], [-1, 3], [-2, -3]]).double()
    out = regard.attend(q[None, None], k[None, None], v[None, None], mask=regard.causal(), beta=1.0)[0, 0]
    page.locator(".as-table summary").click()
    cells = numbers(page, ".as-table tbody tr td")
    rows = [cells[5 * i + 3 : 5 * i + 5] for i in range(3)]
    assert torch.tensor(rows).flatten().tolist() == pytest.approx(out.flatten().tolist(), abs=5.1e-4)
    assert page.locator(".cell text.hidden-value").count() == 6  # three hidden cells, in scores and weights


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi", "t5", "shaw"])
def test_the_python_that_is_copied_gives_the_numbers_on_the_page(visit: Any, positions: str) -> None:
    matrices = "q=1,2,0,-1;0,1,1,1;2,0,1,0&k=1,0,2,0;0,1,0,1;1,1,0,0&v=1,2,3,4;0,1,0,1;2,2,0,1"
    page = visit(f"#attention?mask=causal()%20|%20prefix(2)&pos={positions}&b=0.7&heads=2&{matrices}")
    code = copy_python(page).replace("print(", "found = (")
    scope: dict[str, Any] = {}
    exec(code, scope)
    page.locator(".as-table summary").click()
    cells = numbers(page, ".as-table tbody tr td")
    shown = [cells[7 * i + 3 : 7 * i + 7] for i in range(3)]
    assert torch.tensor(shown).flatten().tolist() == pytest.approx(scope["found"].flatten().tolist(), abs=5.1e-4)


def test_matrices_have_the_width_of_a_phone(visit: Any) -> None:
    for width, rows in ((360, 4), (1280, 2)):
        page = visit("#attention", width=width)
        tops = {round(box.bounding_box()["y"]) for box in page.locator("svg.attention .matrix text.title").all()}
        assert len(tops) == rows
        assert page.locator("svg.attention .label").first.bounding_box()["height"] > 10
        assert page.get_by_text("Scroll the matrices").is_hidden()


def test_wide_matrices_on_a_phone_are_below_each_other_and_readable(visit: Any) -> None:
    rows = ";".join(["1,2,0,-1"] * 6)
    page = visit(f"#attention?q={rows}&k={rows}&v={rows}&mask=causal()", width=360)
    tops = {round(box.bounding_box()["y"]) for box in page.locator("svg.attention .matrix text.title").all()}
    assert len(tops) == 6
    assert page.locator("svg.attention .hidden-value").first.bounding_box()["height"] > 9


def test_names_of_states_reach_a_screen_reader(visit: Any) -> None:
    page = visit(PLANE + "2")
    assert page.locator('nav a[aria-current="page"]').inner_text() == "Plane"
    slider = page.get_by_label("Inverse temperature")
    assert slider.get_attribute("aria-valuetext") == "β = 2"
    slider.fill("0")
    wait_until(page, lambda: page.locator("output").first.inner_text() == "β = 0")
    assert slider.get_attribute("aria-valuetext") == "β = 0"


def test_the_difference_of_two_states_is_below_the_pinned_one(visit: Any) -> None:
    page = visit(PLANE + "2&pin=" + quote(PLANE.partition("?")[2] + "0"), width=1400)
    a, b = (page.locator(f".pair > :nth-child({at})").bounding_box() for at in (1, 2))
    difference = page.locator(".difference").bounding_box()
    assert difference["x"] == a["x"] < b["x"]
    assert difference["y"] < b["y"] + b["height"] / 2
    assert page.locator(".pair > :nth-child(2) svg.plane").bounding_box()["width"] > 500


def test_a_page_without_a_server_names_the_scales_of_a_worked_solution(visit: Any) -> None:
    page = visit("#attention?b=3")
    page.get_by_text("As worked solution").click()
    page.get_by_role("button", name="Work it out").click()
    assert "1/√c" in page.locator(".worked .script").inner_text()
    page.get_by_role("button", name="Use 1/√c").click()
    page.get_by_role("button", name="Work it out").click()
    wait_until(page, lambda: page.locator(".worked .script").inner_text().endswith("--scaled"))


def test_masks_count_and_name_the_convention_that_differs(visit: Any) -> None:
    page = visit("#masks?mask=causal()%20%26%20window(before=3)&keys=12&against=causal()%20%26%20window(before=4)")
    facts = page.locator(".facts").inner_text()
    assert f"{(regard.causal() & regard.window(before=3)).count(12)} of 144 pairs visible" in facts
    assert "The first: the query at 4 does not see key 0 in the first mask, but in the second" in facts
    assert "one more earlier key" in facts


@pytest.mark.parametrize(
    ("mask", "against", "name"),
    [
        ("causal() & window(before=3)", "causal() & window(before=4)", "one more earlier key"),
        ("causal() & window(before=4)", "causal() & window(before=3)", "one earlier key fewer"),
        ("causal()", "causal() & ~window()", "one later key fewer"),
        ("causal() & ~window()", "causal()", "one later key more"),
        ("causal()", "~causal()", "inverted"),
        ("causal()", "window(before=0, after=None)", "transposed"),
    ],
)
def test_the_convention_that_differs_is_named(visit: Any, mask: str, against: str, name: str) -> None:
    page = visit(f"#masks?mask={quote(mask)}&keys=9&against={quote(against)}")
    assert name in page.locator(".facts").inner_text()


def test_more_queries_than_keys_in_the_address_become_as_many(visit: Any) -> None:
    page = visit("#attention?q=1,2;3,4&k=1,2&v=1,2")
    assert page.locator('[data-matrix="s"] .cell').count() == 4


def test_growth_is_measured_up_to_the_length_that_is_shown(visit: Any) -> None:
    page = visit(f"#masks?mask={quote('causal() & window(before=4095)')}&keys=65536")
    growth = page.locator(".help", has_text="Pairs grow")
    assert f"{(regard.causal() & regard.window(before=4095)).count(65536):,} at 65,536" in growth.inner_text()
    assert numbers(page, '[data-why="g"]')[0] < 1.1
    assert page.locator("svg.masks .label").first.text_content() == "0"
    assert "57344" in page.locator("svg.masks").text_content()
    # too many runs of keys at the longer lengths
    page = visit(f"#masks?mask={quote('dilated(2)')}&keys=6000")
    assert "at 4,096" in page.locator(".help", has_text="Pairs grow").inner_text()


def test_the_python_of_a_comparison_counts_the_cells_that_differ(visit: Any, capsys: Any) -> None:
    page = visit(f"#masks?mask={quote('causal() & window(before=4)')}&keys=9&against={quote('causal()')}")
    exec(copy_python(page), {})
    printed = capsys.readouterr().out
    assert "10 cells differ" in printed
    assert "10 cells differ" in page.locator(".facts").inner_text()
    assert "tensor([[5, 0]])" in printed
    page = visit(f"#masks?mask={quote('causal()')}&keys=65536&against={quote('full()')}")
    code = copy_python(page)
    assert "dense" not in code  # of 4 GiB
    exec(code, {})
    assert f"{65536 * 65535 // 2} cells differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mask", "against", "sentence"),
    [
        ("~causal()", "", "1 query sees nothing"),
        ("~window(before=1)", "~window()", "cells differ. The first"),
        ("causal() & ~window(before=1)", "", "2 queries see nothing"),
        ("causal() | prefix(2)", "causal()", "1 cell differs. The first"),
    ],
)
def test_facts_of_a_mask_are_sentences(visit: Any, mask: str, against: str, sentence: str) -> None:
    page = visit(f"#masks?mask={quote(mask)}&keys=7&against={quote(against)}")
    assert sentence in page.locator(".facts").inner_text()


def test_a_wrong_mask_is_named_in_place_and_the_picture_stays(visit: Any) -> None:
    page = visit("#masks?keys=8")
    page.get_by_label("Mask", exact=True).fill("causl()")
    page.wait_for_selector(".error:visible")
    assert "did you mean causal?" in page.locator(".error").inner_text()
    assert page.locator("svg.masks .cell").count() == 64


def test_the_mask_box_completes_names_and_settings(visit: Any) -> None:
    page = visit("#masks?mask=causal()&keys=8")
    box = page.get_by_label("Mask", exact=True)
    box.fill("causal() & win")
    page.locator(".completions button", has_text="window").click()
    assert box.input_value() == "causal() & window("
    page.locator(".completions button", has_text="before=").click()
    page.keyboard.type("2)")
    assert box.input_value() == "causal() & window(before=2)"
    wait_until(page, lambda: "21 of 64 pairs visible" in page.locator(".facts").inner_text())


def test_cells_are_painted_by_keyboard(visit: Any) -> None:
    page = visit("#masks?mask=causal()&keys=8")
    page.locator(".cell").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press(" ")
    wait_until(page, lambda: "painted=0.1" in page.url)
    assert "37 of 64 pairs visible" in page.locator(".facts").inner_text()


def test_cells_are_painted_by_mouse(visit: Any) -> None:
    page = visit("#masks?mask=causal()&keys=8")
    at = [page.locator(f'[data-row="2"][data-column="{key}"]').bounding_box() for key in (3, 6)]
    page.get_by_label("Paint").check()
    page.mouse.move(at[0]["x"] + 9, at[0]["y"] + 9)
    page.mouse.down()
    page.mouse.move(at[1]["x"] + 9, at[1]["y"] + 9, steps=12)
    page.mouse.up()
    wait_until(page, lambda: "40 of 64 pairs visible" in page.locator(".facts").inner_text())
    page.mouse.click(at[0]["x"] + 9, at[0]["y"] + 9)  # again: it is hidden as before
    wait_until(page, lambda: "39 of 64 pairs visible" in page.locator(".facts").inner_text())
    assert page.locator("#inspector .result").count() == 0
    page.get_by_label("Paint").uncheck()
    page.mouse.click(at[0]["x"] + 9, at[0]["y"] + 9)
    assert "39 of 64" in page.locator(".facts").inner_text()
    assert "query at 2, key at 3" in page.locator("#inspector .result").inner_text()


def test_a_finger_on_a_picture_scrolls_the_page_and_on_an_arrow_drags_it(visit: Any) -> None:
    page = visit("#plane", width=360)
    touch = "(element) => getComputedStyle(element).touchAction"
    assert page.locator("svg.plane").evaluate(touch) == "auto"
    assert page.locator(".grip").first.evaluate(touch) == "none"


def test_the_python_of_a_painted_mask_counts_the_painted_pairs(visit: Any, capsys: Any) -> None:
    page = visit("#masks?mask=causal()&keys=7&queries=5&painted=0.3,0.4,4.0")
    exec(copy_python(page), {})
    pairs = regard.causal().count(5, 7) + 2 - 1  # the last painted cell was visible
    assert f"{pairs} visible pairs" in capsys.readouterr().out
    assert numbers(page, "[data-why=c]") == [pairs]


VIEWS = ["#plane", "#attention", "#masks", "#models", "#models?show=edit&layer=1&head=1", "#models?show=flow", "#check",
         "#sheets?q=002+1.2a", "#lessons"]  # fmt: skip


@pytest.mark.parametrize("width", [360, 1920])
def test_nothing_is_wider_than_the_screen(visit: Any, address: str, width: int) -> None:
    page = visit("#plane", width=width)
    for state in VIEWS:
        page.goto(address + state)
        page.wait_for_timeout(250)  # views that load their model or text draw a moment later
        assert page.evaluate("document.documentElement.scrollWidth") <= width, state


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_contrast_and_names_pass_the_accessibility_rules(browser: Any, address: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    # the rules run as a script in the page, which its policy would refuse
    context = browser.new_context(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    page = context.new_page()
    found = []
    pinned = quote(f"model=induction-gpt&text={EXAMPLE}&show=head&layer=1&head=1")
    others = ["#models?show=head&layer=1&head=1", "#models?show=generate", "#plane?b=4&pin=b%3D1",
              f"#models?show=head&layer=1&head=1&edit=ablate:0.2&pin={pinned}"]  # fmt: skip
    for state in [*VIEWS, *(others if scheme == "light" else others[:1])]:
        page.goto(address + state)
        page.reload()
        page.wait_for_selector("#stage[data-drawn]")
        page.wait_for_timeout(250)
        problems = axe.Axe().run(page).response["violations"]
        found += [f"{state}: {each['id']}: {each['nodes'][0]['html'][:150]}" for each in problems]
    context.close()
    assert not found, "\n".join(found)


EXAMPLE = read_card("induction-gpt").example


def test_the_model_in_the_page_predicts_what_torch_predicts(visit: Any) -> None:
    page = visit("#models")
    page.wait_for_selector(".predictions")
    assert page.get_by_label("Text", exact=True).input_value() == EXAMPLE
    model = regard.load("induction-gpt")
    tokens = torch.tensor([[ord(letter) - 32 for letter in EXAMPLE]])
    with torch.no_grad():
        share = model(tokens)[0, -1].softmax(-1)
    best = share.topk(3)
    assert page.locator(".predictions tbody th").all_inner_texts()[:3] == [chr(int(at) + 32) for at in best.indices]
    shown = [float(text) for text in page.locator(".predictions tbody td:nth-child(2)").all_inner_texts()[:3]]
    assert shown == pytest.approx(best.values.tolist(), abs=6e-4)


def test_the_overview_says_what_the_numbers_of_the_heads_are(visit: Any) -> None:
    page = visit("#models")
    page.wait_for_selector(".tile")
    assert "Its number is the spread" in page.locator(".model-overview .help").inner_text()


def test_ablating_the_induction_heads_changes_the_prediction_and_the_script(visit: Any) -> None:
    page = visit("#models?show=edit&layer=1&head=1")
    page.wait_for_selector(".predictions")
    before = page.locator(".predictions tbody th").first.inner_text()
    assert before == "P"
    for head in range(3):
        page.locator(f'[data-head="1.{head}"]').click()
        page.wait_for_selector(f"legend:has-text('layer 2 head {head + 1}')")
        page.get_by_label("set its output to zero").check()
        wait_until(page, lambda count=head + 1: page.locator(".edits li").count() == count)  # type: ignore[misc]
    row = page.locator(".predictions tbody tr").filter(has=page.locator("code", has_text="P")).first
    old, new = (float(text) for text in row.locator("td").all_inner_texts()[:2])
    assert old > 0.8
    assert new < 0.3
    heads = page.locator(".predictions thead th").all_inner_texts()
    assert heads == ["token", "probability before", "probability after", "change", "logit after"]
    assert "edit.ablate(1, heads=[2]" in page.locator(".script").inner_text()
    wait_until(page, lambda: "edit=ablate" in page.url)
    # the script on the page does the same
    scope: dict[str, Any] = {}
    exec(page.locator(".script").inner_text(), scope)
    after = scope["after"][0, -1].softmax(-1)[ord("P") - 32]
    assert float(after) == pytest.approx(new, abs=6e-4)


def test_a_copied_script_prints_the_numbers_of_the_page(visit: Any, capsys: Any) -> None:
    page = visit("#models?show=edit&layer=1&head=1&edit=ablate:1.1")
    page.wait_for_selector(".predictions")
    wait_until(page, lambda: "topk" in page.locator(".script").inner_text())
    shown = [
        [cell.inner_text() for cell in row.locator("th, td").all()]
        for row in page.locator(".predictions tbody tr").all()
    ]
    exec(page.locator(".script").inner_text(), {})
    printed = {name: numbers for name, *numbers in (line.split() for line in capsys.readouterr().out.splitlines()[-8:])}
    assert len(printed) == 8
    for token, old, new, *_ in shown[:5]:
        assert printed[repr(token)] == [old, new]


def test_arrow_keys_move_between_the_cells_of_a_head(visit: Any) -> None:
    page = visit("#models?show=head&layer=1&head=1")
    page.locator(".maps .cell").first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    assert "weight 73 \N{RIGHTWARDS ARROW} K1" in page.locator("#inspector .result").inner_text()


def test_generation_draws_appends_and_removes_whole_tokens(visit: Any) -> None:
    page = visit("#models?show=generate")
    text = page.locator(".generated code")
    page.get_by_role("button", name="Append").click()
    wait_until(page, lambda: text.inner_text() == EXAMPLE + "P")
    page.get_by_role("button", name="Remove the last token").click()
    wait_until(page, lambda: text.inner_text() == EXAMPLE)
    shown = page.locator(".predictions tbody th").all_inner_texts()
    page.get_by_role("button", name="Draw one of the 8 likeliest").click()
    wait_until(page, lambda: len(text.inner_text()) == len(EXAMPLE) + 1)
    assert text.inner_text()[-1] in shown


def test_bars_and_lens_numbers_unfold(visit: Any) -> None:
    page = visit("#models?show=edit")
    page.locator(".signed-bar .number").first.click()
    inspector = page.locator("#inspector")
    assert "minus the logit as it is" in inspector.inner_text()
    inspector.locator("[data-into]").click()
    assert "logit of P" in inspector.locator(".result").inner_text()
    page.get_by_role("tab", name="Flow").click()
    page.locator(".lens .number").first.click()
    assert "log \N{GREEK CAPITAL LETTER SIGMA} exp(logits)" in inspector.inner_text()


def test_brushed_heads_are_compared_alone_and_together(visit: Any) -> None:
    page = visit("#models?show=edit")
    page.wait_for_selector(".predictions")
    tiles = [page.locator(f'[data-head="1.{head}"]').bounding_box() for head in range(3)]
    page.mouse.move(tiles[0]["x"] + 20, tiles[0]["y"] + 20)
    page.mouse.down()
    for box in tiles[1:]:
        page.mouse.move(box["x"] + 20, box["y"] + 20, steps=4)
    page.mouse.up()
    wait_until(page, lambda: "brush=1.0" in page.url)
    page.locator('[data-head="1.2"]').click(modifiers=["Shift"])  # it leaves the brush again
    wait_until(page, lambda: page.locator(".signed-bar").count() == 3)
    texts = page.locator(".signed-bar").all_inner_texts()
    assert sum("all 2 together" in text for text in texts) == 1
    page.get_by_role("button", name="Set them to zero").click()
    wait_until(page, lambda: page.locator(".edits li").count() == 2)


def test_pinned_models_are_compared_head_by_head(visit: Any) -> None:
    pin = quote(f"model=induction-gpt&text={EXAMPLE}&show=head&layer=1&head=1")
    page = visit(f"#models?show=head&layer=1&head=1&edit=ablate:0.2&pin={pin}")
    wait_until(page, lambda: page.locator(".difference-map").count() == 3)
    fills = page.evaluate(
        "[...document.querySelectorAll('.difference-map rect')].map((cell) => cell.getAttribute('fill'))"
    )
    assert len(set(fills)) > 10  # the ablation of an earlier head changes what this one sees
    n = round((len(fills) / 3) ** 0.5)
    hatched = [fill.startswith("url(#hatch") for fill in fills]
    assert hatched == 3 * [j > i for i in range(n) for j in range(n)]  # hidden in both, which is no difference of zero
    assert "hidden in both" in page.locator(".difference .scale").first.inner_text()
    page.keyboard.press("s")
    wait_until(page, lambda: "sinks=1" in page.url)


@pytest.mark.parametrize("state", ["#models", "#sheets?claim=multi-head", "#models?show=head&layer=1"])
def test_views_without_one_picture_are_saved_too(visit: Any, state: str) -> None:
    page = visit(state)
    page.wait_for_selector(".tile, .card, svg.picture")
    page.locator(".menu summary").click()
    for kind, start in [("SVG", b"<svg"), ("PNG", b"\x89PNG")]:
        with page.expect_download() as download:
            page.get_by_role("button", name=kind, exact=True).click()
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(start)
        assert len(content) > 1000


def test_a_logit_unfolds_to_heads_weights_scores_and_products(visit: Any) -> None:
    page = visit("#models")
    page.wait_for_selector(".predictions")
    page.locator(".predictions .number").first.click()
    inspector = page.locator("#inspector")
    for expected in ("layer 2 head 1", "weight", "score"):
        inspector.locator("[data-into]").filter(visible=True).nth(0 if expected != "layer 2 head 1" else 4).click()
        assert expected.split()[0] in inspector.locator(".result").inner_text()
    assert "k[0]" in inspector.inner_text()


def test_an_export_shows_stored_results_of_models_and_says_what_needs_python(browser: Any, tmp_path: Path) -> None:
    name, text = "text-gpt", "The for"
    stored = dict(store_model(name, text, tasks()["model"]))
    data = {"models": [{"name": name, "what": "", "example": text}], "stored": stored}
    path = tmp_path / "stored.html"
    path.write_text(build_page(data), encoding="utf-8")
    page = open_page(browser, f"{path.as_uri()}#models?model={name}", allowed=tmp_path.as_uri())
    page.wait_for_selector(".predictions")
    opened = open_model(name, text)
    with torch.no_grad(), regard.watch(opened.model) as seen:
        share = opened.run()[0, -1].softmax(-1)
    shown = [float(cell) for cell in page.locator(".predictions tbody td:nth-child(2)").all_inner_texts()[:3]]
    assert shown == pytest.approx(share.topk(3).values.tolist(), abs=6e-4)
    page.locator('[data-head="2.1"]').click()
    page.locator(".as-table summary").click()
    weights = seen.records[2].weights()[0, 1]
    row = page.locator(".as-table tbody tr").last.locator("td").all_inner_texts()
    assert [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in row] == pytest.approx(weights[-1].tolist(), abs=6e-4)
    for tab in ("Edit and rerun", "Flow", "Generate"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_selector(".predictions" if tab != "Flow" else ".lens")
    page.get_by_label("Text", exact=True).fill("Another text")
    page.wait_for_selector(".error")
    assert "regard explore text-gpt" in page.locator(".error").inner_text()
    assert not page.errors
    assert not page.refused


@pytest.mark.parametrize("edit", ["", "&edit=ablate:0.2", "&edit=hide:1.2:6", "&edit=beta:1.2:0.1"])
def test_the_python_of_a_head_prints_its_weights(visit: Any, capsys: Any, edit: str) -> None:
    page = visit(f"#models?show=head&layer=1&head=2{edit}")
    page.wait_for_selector(".maps .cell")
    exec(copy_python(page).replace("print(seen.records", "weights = (seen.records"), scope := {})
    page.locator(".as-table summary").click()
    row = page.locator(".as-table tbody tr").last.locator("td").all_inner_texts()
    shown = [float(cell.replace(MINUS, "-")) for cell in row]
    assert scope["weights"][-1].tolist() == pytest.approx(shown, abs=6e-4)


def test_the_python_of_the_flow_prints_the_parts_of_the_logit(visit: Any, capsys: Any) -> None:
    page = visit("#models?show=flow&edit=ablate:1.0")
    page.wait_for_selector(".lens")
    exec(copy_python(page), {})
    out = capsys.readouterr().out
    printed = dict(re.findall(r"blocks\.1\.attention head (\d) (\S+)", out))
    lens = numbers(page, ".lens .number")
    first = torch.tensor([float(number) for number in re.findall(r"\d\.\d+e?-?\d*", out.split("values=")[1])[:12]])
    assert first.tolist() == pytest.approx(lens, abs=6e-4)
    for row in page.locator(".signed-bar", has_text="layer 2 head").all():
        name, value = row.inner_text().split("\n")[0], row.locator(".number").inner_text()
        assert float(printed[str(int(name[-1]) - 1)]) == pytest.approx(float(value.replace(MINUS, "-")), abs=1.1e-3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [("patch:0.0", "Patching needs the other text"), ("hide:0.0:16", "There is no key 17 to hide: the text has 16")],
)
def test_an_edit_that_cannot_be_made_is_named(visit: Any, edit: str, message: str) -> None:
    page = visit(f"#models?show=edit&edit={edit}")
    page.wait_for_selector(".error")
    assert message in page.locator(".error").inner_text()
    page.get_by_role("button", name="Undo all edits").click()
    page.wait_for_selector(".predictions")
    assert page.get_by_label("patch its output").is_disabled()


@pytest.mark.parametrize(("causal", "caption"), [(True, "Next token after"), (False, "Token at")])
def test_an_encoder_predicts_the_token_at_a_position(browser: Any, tmp_path: Path, causal: bool, caption: str) -> None:
    name, text = "text-gpt", "The for"
    stored = {key: {**answer, "causal": causal} for key, answer in store_model(name, text, tasks()["model"])}
    path = tmp_path / "stored.html"
    data = {"models": [{"name": name, "what": "", "example": text}], "stored": stored}
    path.write_text(build_page(data), encoding="utf-8")
    page = open_page(browser, f"{path.as_uri()}#models?model={name}", allowed=tmp_path.as_uri())
    page.wait_for_selector(".predictions")
    wanted = f"{caption} \N{LEFT DOUBLE QUOTATION MARK}\N{OPEN BOX}for\N{RIGHT DOUBLE QUOTATION MARK}"
    assert page.locator(".predictions caption").inner_text() == wanted
    assert page.get_by_role("tab", name="Generate").count() == causal


def test_an_image_model_shows_where_a_patch_looks_and_generates_nothing(browser: Any, tmp_path: Path) -> None:
    name, text = "digits-vit", "example.png"
    data = {
        "models": [{"name": name, "what": "", "example": text}],
        "stored": dict(store_model(name, text, tasks()["model"])),
    }
    path = tmp_path / "stored.html"
    path.write_text(build_page(data), encoding="utf-8")
    page = open_page(browser, f"{path.as_uri()}#models?model={name}&show=generate", allowed=tmp_path.as_uri())
    page.wait_for_selector(".tile")  # the overview, since a classifier has no next token
    assert page.get_by_role("tab").all_inner_texts() == ["Overview", "Head", "Edit and rerun", "Flow"]
    page.locator('[data-head="0.0"]').click()
    page.locator(".patch-hit").nth(5).focus()
    assert "row 2, column 2" in page.locator("#stage").inner_text()
    opened = open_model(name, text)
    with torch.no_grad(), regard.watch(opened.model) as seen:
        opened.run()
    largest = float(seen.records[0].weights()[0, 0, 5].max())
    assert numbers(page, ".scale span:nth-of-type(2)") == [pytest.approx(largest, abs=6e-4)]
    assert page.locator("svg.image-head image").count() == 2  # one of them without the weights
    exec(copy_python(page).replace("print(seen.records", "weights = (seen.records"), scope := {})
    assert torch.equal(scope["weights"], seen.records[0].weights()[0, 0])
    assert not page.errors


@pytest.mark.parametrize("show", ["overview", "edit"])
def test_hidden_cells_of_the_tiles_are_hatched_and_not_the_colour_of_zero(visit: Any, show: str) -> None:
    page = visit(f"#models?show={show}&text=abcdef")
    page.wait_for_selector(".tile canvas")
    opaque = """[...document.querySelectorAll(".tile canvas")].map((map) =>
        [...map.getContext("2d").getImageData(0, 0, map.width, map.height).data].filter((_, at) => at % 4 === 3))"""
    wanted = (255 * torch.ones(6, 6).long().tril()).flatten().tolist()
    assert page.evaluate(opaque) == [wanted] * page.locator(".tile").count()
    ground = "getComputedStyle(document.querySelector('.tile canvas')).backgroundImage"
    assert page.evaluate(ground).startswith("repeating-linear-gradient")
    assert "hatched: hidden" in page.locator(".scale").first.inner_text()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("edit=ablate:9.9", "There is no layer 10 head 10: induction-gpt has 2 layers"),
        ("brush=0.9", "There is no layer 1 head 10"),
        ("edit=ablat:1.0", "cannot be read: ablat:1.0."),
        ("edit=ablate:1.x", "cannot be read: ablate:1.x."),
        ("edit=beta:1.0", "cannot be read: beta:1.0."),
    ],
)
def test_a_wrong_edit_in_the_address_is_named_and_can_be_undone(visit: Any, edit: str, message: str) -> None:
    page = visit(f"#models?show=edit&{edit}")
    page.wait_for_selector(".error")
    assert message in page.locator(".error").inner_text()
    page.get_by_role("button", name="Undo all edits").click()
    page.wait_for_selector(".predictions")
    assert page.locator(".error").count() == 0


def test_text_outside_the_vocabulary_is_named(visit: Any) -> None:
    page = visit("#models")
    page.get_by_label("Text", exact=True).fill("naïve")
    page.wait_for_selector(".error")
    assert "ï" in page.locator(".error").inner_text()


def test_a_lesson_asks_shows_and_explains(visit: Any) -> None:
    page = visit("#lessons?name=what-attention-computes")
    page.wait_for_selector(".quiz")
    page.get_by_label("nearly the mean of the two values").check()
    assert "Right." in page.locator(".quiz").first.inner_text()
    page.locator(".live .sentence .number").first.click()
    assert "output x" in page.locator("#inspector").inner_text()


def test_a_prediction_is_judged_and_the_mistake_is_named(visit: Any) -> None:
    page = visit("#lessons?name=what-attention-computes")
    page.wait_for_selector(".predict")
    caption = page.locator("figcaption", has_text="divided by their sum")
    assert caption.is_hidden()  # it says the answer
    for name, value in (("key 1", "0.33"), ("key 2", "0.33"), ("key 3", "0.34")):
        page.get_by_label(f"Your weight of {name}").fill(value)
    page.get_by_role("button", name="Compare").click()
    text = page.locator(".predict").inner_text()
    assert "as if every score were the same" in text
    assert caption.is_visible()
    assert "0.867" in text


def test_a_sheet_question_shows_formula_errata_and_the_figure(visit: Any) -> None:
    page = visit("#sheets?q=002+1.2a")
    page.wait_for_selector(".prose math")
    assert any("Partly right." in text for text in page.locator(".erratum").all_inner_texts())
    page.get_by_role("button", name="I predict: supported").click()
    page.wait_for_selector(".card figure img")
    assert "Your prediction was right." in page.locator(".card").inner_text()


@pytest.mark.parametrize("state", ["#sheets?q=002+1.2a", "#sheets?claim=multi-head"])
def test_the_python_of_a_claim_runs_it(visit: Any, capsys: Any, state: str) -> None:
    page = visit(state)
    page.wait_for_selector(".card")
    exec(copy_python(page), {})
    printed = capsys.readouterr().out
    assert printed.startswith("supported")
    assert "torch.nn.MultiheadAttention" in page.locator(".card code").first.inner_text()


class _DyingServer(BaseHTTPRequestHandler):
    """Serves the page and one claim, and closes the connection in the middle of a computation."""

    def do_GET(self) -> None:
        answers = {"/": build_page({"api": True}), "/api/sheets": "[]", "/api/claims": json.dumps(build_claims()[:1])}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answers.get(self.path, "{}").encode())

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'event: progress\ndata: {"text": "running"}\n\n')

    def log_message(self, *args: Any) -> None:
        pass


def test_a_server_that_ends_during_a_computation_is_named(browser: Any) -> None:
    with HTTPServer(("127.0.0.1", 0), _DyingServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/"
        page = open_page(browser, f"{place}#sheets?claim={build_claims()[0]['id']}", allowed=place)
        page.get_by_role("button", name="Run it now").click()
        wait_until(page, lambda: "Is regard explore still running?" in page.locator(".card").inner_text())
        server.shutdown()
        page.context.close()


def test_long_formulas_of_the_sheets_have_the_width_of_the_window(visit: Any) -> None:
    page = visit("#sheets?q=002+1.3b", width=1440)
    page.wait_for_selector(".formula-box")
    boxes = page.evaluate("[...document.querySelectorAll('.formula-box')].map((e) => [e.scrollWidth, e.clientWidth])")
    assert max(wanted for wanted, _ in boxes) > 1000  # wider than the text beside it
    assert all(wanted <= shown for wanted, shown in boxes)
    assert page.locator(".prose > h1").bounding_box()["width"] < 800


def test_an_answer_links_to_the_state_that_shows_it(visit: Any) -> None:
    questions = {each["place"]: each for sheet in build_sheets() for each in sheet["questions"]}
    presets = re.findall(r'sheet: "([^"]+)"', (STATIC / "plane.js").read_text(encoding="utf-8"))
    assert {place for each in presets for place in each.split(", ")} <= set(questions)
    assert set(ANSWER_VIEWS.values()) <= {each["view"] for each in questions.values()}
    # sheet 002 asks what sheet 000 asks, so both lead to its preset
    page = visit("#sheets?q=002+1.1e")
    page.get_by_role("link", name="See it in the explorer").click()
    wait_until(page, lambda: "nudge=k0" in page.url)
    assert page.locator("select").first.locator("option:checked").inner_text().startswith("Nudge a key")
    page = visit("#sheets?q=003+12.8")
    page.get_by_role("link", name="See it in the explorer").click()
    page.wait_for_selector(".facts")
    assert page.get_by_label("Mask", exact=True).input_value() == "window(before=8, after=8) | global_tokens(2)"
    page = visit("#sheets?q=003+12.7")
    page.get_by_role("link", name="See it in the explorer").click()
    page.wait_for_selector(".facts")
    assert "12 of 12 pairs visible" in page.locator(".facts").inner_text()


def test_two_reports_are_compared(visit: Any, tmp_path: Path) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v

    for name, function in (("a", attention), ("b", broken)):
        report = regard.check(function, only=["softmax-over-the-other-axis"])
        (tmp_path / f"{name}.json").write_text(report.json(), encoding="utf-8")
    page = visit("#check")
    page.get_by_label("A report", exact=True).set_input_files(tmp_path / "b.json")
    page.wait_for_selector(".finding")
    assert "softmax-over-the-other-axis" in page.locator(".finding h3").inner_text()
    page.get_by_label("Another report, to compare").set_input_files(tmp_path / "a.json")
    wait_until(page, lambda: "attention" in page.locator("h2").nth(1).inner_text())
    page.get_by_label("A report", exact=True).set_input_files(
        {"name": "x.json", "mimeType": "application/json", "buffer": b"<script>alert(1)</script>"}
    )
    wait_until(page, lambda: "no JSON" in page.locator(".error").first.inner_text())


def test_the_smallest_input_of_a_finding_is_drawn_and_explained(visit: Any) -> None:
    page = visit("#check")
    page.get_by_role("button", name="Open an example").click()
    page.wait_for_selector(".finding svg.example")
    card = page.locator("#fact-nan-in-masked-input")
    assert "NaN" in card.locator("svg.example").text_content()
    card.locator(".cell").first.focus()
    page.keyboard.press("Enter")
    assert "smallest example" in page.locator("#inspector").inner_text()
    # tensors of half precision and torch.full are drawn too
    assert "\N{MINUS SIGN}205" in page.locator("#fact-overflow svg.example").text_content()
    titles = page.locator("#fact-finite-mask-value svg.example .title").all_text_contents()
    assert titles == ["q", "k", "v", "mask", "gives", "should be"]
    strokes = "[...document.querySelectorAll('svg.example .title')].map((text) => getComputedStyle(text).stroke)"
    assert set(page.evaluate(strokes)) == {"none"}


HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "javascript:alert(1)"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(visit: Any, text: str) -> None:
    page = visit(f"#attention?t={quote(text)}&mask={quote(text)}")
    visit(f"#masks?mask={quote(text)}&against={quote(text)}")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_files_are_saved_and_the_saved_page_opens_with_its_state(visit: Any, tmp_path: Path) -> None:
    page = visit("#masks?mask=causal()&keys=5")
    for kind, start in [("SVG", b"<svg"), ("PNG", b"\x89PNG"), ("CSV", b"query,"), ("HTML", b"<!doctype")]:
        if not page.locator(".menu[open]").count():
            page.locator(".menu summary").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=kind, exact=True).click()
        path = tmp_path / f"saved.{kind.lower()}"
        download.value.save_as(path)
        assert path.read_bytes().startswith(start)
    saved = open_page(page.context.browser, (tmp_path / "saved.html").as_uri(), allowed=Path("/").as_uri())
    assert "15 of 25 pairs visible" in saved.locator(".facts").inner_text()
    assert not saved.errors
