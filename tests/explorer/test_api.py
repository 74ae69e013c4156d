"""The server of the explorer: what it answers, and what it refuses."""

import pytest

pytest.importorskip("fastapi", reason="the extra `web` is not installed")
pytest.importorskip("httpx2", reason="the test client of starlette needs httpx2")

from fastapi.testclient import TestClient

from regard.base.errors import ConfigError
from regard.cli.exploring import open_model
from regard.explorer.api import LARGEST_BODY, create_app

HOST = "127.0.0.1:8765"


def client(token: str | None = None) -> TestClient:
    return TestClient(create_app({HOST}, token), base_url=f"http://{HOST}", follow_redirects=False)


def test_the_page_is_served_with_strict_headers() -> None:
    answer = client().get("/")
    assert answer.status_code == 200
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert '"api": true' in answer.text


def test_explain_names_the_kernel_and_the_reasons_of_others() -> None:
    answer = client().post(
        "/api/explain", json={"mask": "causal() & window(before=255)", "queries": 4096, "keys": 4096}
    )
    found = answer.json()
    assert answer.status_code == 200
    assert found["chosen"] == "blocked"
    refused = {each["kernel"]: each["reasons"] for each in found["answers"] if each["reasons"]}
    assert "needs a GPU" in refused["flex"][0]
    assert all((each["work"] is None) == bool(each["reasons"]) for each in found["answers"])


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"mask": "causl()", "queries": 5, "keys": 5}, 422, "causl"),
        ({"mask": "causal()", "queries": 0, "keys": 5}, 422, "greater than or equal to 1"),
        ({"mask": "causal()", "queries": 5, "keys": 10**9}, 422, "less than or equal"),
        ({"mask": "causal()", "queries": 5, "keys": 5, "file": "/etc/passwd"}, 422, "Extra inputs"),
        ({"mask": "__import__('os').system('true')", "queries": 5, "keys": 5}, 422, "is not a mask"),
        ({"mask": "x" * 2 * LARGEST_BODY, "queries": 5, "keys": 5}, 413, "at most"),
    ],
)
def test_a_wrong_request_gets_a_clear_message(body: dict[str, object], status: int, text: str) -> None:
    answer = client().post("/api/explain", json=body)
    assert answer.status_code == status
    assert text in answer.text
    assert "Traceback" not in answer.text


WORK = {"q": "1,0;0,1", "k": "1,0;0,1", "v": "2,0;0,4", "beta": 1.0}


def test_the_worked_solution_and_the_check_are_those_of_work() -> None:
    solved = client().post("/api/work", json={**WORK, "mask": "causal()"}).json()
    assert "0.7311" in solved["text"]
    tens = 10 / 11  # powers of ten instead of e
    answer = f"{tens:.3f},{1 - tens:.3f};{1 - tens:.3f},{tens:.3f}"
    checked = client().post("/api/work", json={**WORK, "answer": answer}).json()
    assert "10" in checked["review"]
    for beta in (3.0, 0.703):  # 1/sqrt(2) is 0.707: its numbers are not those of the page
        wrong = client().post("/api/work", json={**WORK, "beta": beta})
        assert wrong.status_code == 422
        assert "beta = 1 or" in wrong.json()["error"]
    assert "error" not in client().post("/api/work", json={**WORK, "beta": 0.707107}).json()


def test_another_host_name_is_refused() -> None:
    assert client().get("/", headers={"host": "evil.example"}).status_code == 421


def test_a_request_of_unknown_length_is_refused() -> None:
    """A chunked body has no stated length, so it could be of any size."""
    answer = client().post("/api/explain", content=iter([b"{", b"}"]))
    assert answer.status_code == 411
    assert "length" in answer.json()["error"]


@pytest.mark.parametrize("value", ["NaN", "-5", "1e400", '"x"'])
def test_a_value_that_is_no_number_is_named_and_not_repeated(value: str) -> None:
    body = '{"model": "text-gpt", "text": "a", "edits": [{"kind": "beta", "layer": 0, "value": VALUE}]}'
    body = body.replace("VALUE", value)
    answer = client().post("/api/jobs/model", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("body.edits.0.value: Input should be")


def test_a_damaged_upload_is_named_without_the_path_on_the_server() -> None:
    with pytest.raises(ConfigError, match=r"^the picture cannot be read as an image: its 3 bytes are truncated"):
        open_model("digits-vit", "data:image/png;base64,AAAA")


def test_another_page_of_the_same_browser_is_refused() -> None:
    body = {"mask": "causal()", "queries": 5, "keys": 5}
    assert client().post("/api/explain", json=body, headers={"origin": "http://evil.example"}).status_code == 403
    assert client().post("/api/explain", json=body, headers={"origin": f"http://{HOST}"}).status_code == 200


def test_a_token_is_required_and_moves_into_a_cookie() -> None:
    visitor = client("secret")
    assert visitor.get("/").status_code == 401
    assert visitor.get("/?token=wrong").status_code == 401
    first = visitor.get("/?token=secret")
    assert (first.status_code, first.headers["location"]) == (303, "/")
    assert "HttpOnly" in first.headers["set-cookie"]
    assert visitor.get("/").status_code == 200


def test_the_example_report_is_what_check_finds() -> None:
    from regard.conform.checker import check
    from regard.explorer.examples.broken_attention import attention
    from regard.explorer.views.reports import EXAMPLE, load_report

    stored = {fact["name"]: fact["status"] for fact in load_report(EXAMPLE)["facts"]}
    broken = ["scale", "finite-mask-value", "fully-masked-row", "nan-in-masked-input"]
    found = {fact.name: fact.status for fact in check(attention, only=broken).facts}
    assert {name: stored[name] for name in broken} == {name: found[name] for name in broken}
    assert client().get("/api/example_report").json()["report"]["subject"] == "attention"
