"""The page as a file: self-contained, small, with a strict policy."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from regard.explorer.page import STATIC, build_page, bundle_modules

SOURCES = sorted(STATIC.glob("*.js"))


def test_script_and_style_are_allowed_by_their_hash_and_nothing_else() -> None:
    page = build_page()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "unsafe" not in policy[1]
    assert policy[1].startswith("default-src 'none'")
    for kind in ("script", "style"):
        content = re.search(rf"<{kind}>(.*?)</{kind}>", page, re.S)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]


def test_data_cannot_end_its_element() -> None:
    page = build_page({"token": "</script><script>alert(1)</script>"})
    assert page.count("</script>") == 2
    assert "\\u003c/script>" in page


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 250_000


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_modules_have_no_remote_address_no_markup_and_no_unseeded_randomness(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"']+", source))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
    unsafe = r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|\beval\(|new Function|Math\.random"
    assert not re.search(unsafe, source)


def test_every_module_is_in_the_bundle() -> None:
    script = bundle_modules("main.js")
    for path in SOURCES:
        assert f"const ${path.stem} = (() =>" in script
