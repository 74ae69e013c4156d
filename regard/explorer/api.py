"""The web server of the explorer: the page, and what needs Python.

It answers this machine only, unless it is started with a token. Requests must name a host that was allowed, and come
from the page itself: another web page that the same browser has open gets no answer.
"""

import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from regard.base.errors import RegardError
from regard.core.attend import explain
from regard.core.masks.expression import parse_mask
from regard.explorer.page import build_page

LARGEST_BODY = 1 << 16  # bytes
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
}
_COOKIE = "regard-token"


class ExplainRequest(BaseModel):
    """A call of `attend` to be explained: its mask and sizes."""

    model_config = ConfigDict(extra="forbid")
    mask: Annotated[str, Field(max_length=5000)]
    queries: Annotated[int, Field(ge=1, le=1 << 20)]
    keys: Annotated[int, Field(ge=1, le=1 << 20)]
    heads: Annotated[int, Field(ge=1, le=256)] = 8
    width: Annotated[int, Field(ge=1, le=1024)] = 64


class KernelResponse(BaseModel):
    """One kernel: whether it runs this call, why it refuses, and its cost."""

    kernel: str
    reasons: list[str]
    work: float | None  # None if it refuses
    memory: float


class ExplainResponse(BaseModel):
    """Every kernel for a call, and the one that runs."""

    chosen: str | None
    answers: list[KernelResponse]


def create_app(hosts: set[str], token: str | None = None) -> FastAPI:
    """The application.

    hosts  values of the Host header that are answered, such as "127.0.0.1:8765"
    token  a secret that the first address must carry; None answers everybody who reaches it
    """
    app = FastAPI(title="regard explorer", docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = _refuse(request, hosts, token)
        answer = await call(request) if refusal is None else refusal
        answer.headers.update(_HEADERS)
        return answer

    @app.exception_handler(RegardError)
    async def show_error(request: Request, error: RegardError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=422)

    @app.get("/", response_class=HTMLResponse)
    def page(request: Request) -> Response:
        if token is not None and "token" in request.query_params:
            # the secret moves into a cookie, so that shared addresses do not carry it
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return answer
        return HTMLResponse(build_page({"api": True}))

    @app.post("/api/explain")
    def explain_call(asked: ExplainRequest) -> ExplainResponse:
        import torch

        q = torch.zeros(()).expand(1, asked.heads, asked.queries, asked.width)
        k = torch.zeros(()).expand(1, asked.heads, asked.keys, asked.width)
        found = explain(q, k, k, mask=parse_mask(asked.mask))
        answers = [
            KernelResponse(
                kernel=answer.kernel,
                reasons=list(answer.reasons),
                work=answer.work if answer.able else None,
                memory=answer.memory,
            )
            for answer in found.answers
        ]
        return ExplainResponse(chosen=found.chosen, answers=answers)

    return app


def _refuse(request: Request, hosts: set[str], token: str | None) -> Response | None:
    """The answer to a request that is not the page's own, or None."""
    if request.headers.get("host", "") not in hosts:
        return JSONResponse({"error": "this host is not served; open the address that was printed"}, status_code=421)
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc not in hosts:
        return JSONResponse({"error": "requests from other pages are refused"}, status_code=403)
    if int(request.headers.get("content-length") or 0) > LARGEST_BODY:
        return JSONResponse({"error": f"a request may have at most {LARGEST_BODY} bytes"}, status_code=413)
    if token is not None:
        given = request.query_params.get("token") or request.cookies.get(_COOKIE) or ""
        if not secrets.compare_digest(given.encode(), token.encode()):
            return JSONResponse({"error": "open the address with its token, as it was printed"}, status_code=401)
    return None
