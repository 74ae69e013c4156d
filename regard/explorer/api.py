"""The web server of the explorer (FastAPI): the page, and the computations that need Python.

`regard explore` requires a secret token, unless it listens on an address that only this machine can reach. The Host
header of a request must be an allowed host, and the request must come from the explorer's own page: requests from other
web pages are refused.
"""

import asyncio
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlencode, urlsplit

from fastapi import FastAPI, Path as PathParameter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from regard.base.errors import RegardError
from regard.explorer.page import build_page
from regard.explorer.views.kernels import explain_kernels
from regard.explorer.worker import Task, Worker

LARGEST_BODY = 3 << 19  # bytes: an uploaded picture of 1 MiB, as base64
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
    """The HTTP request to explain which kernel runs an `attend` call with this mask and these sizes.

    queries, keys  lengths of the sequences
    width          size of each head
    """

    model_config = ConfigDict(extra="forbid")
    mask: Annotated[str, Field(max_length=5000)]
    queries: Annotated[int, Field(ge=1, le=1 << 20)]
    keys: Annotated[int, Field(ge=1, le=1 << 20)]
    heads: Annotated[int, Field(ge=1, le=256)] = 8
    width: Annotated[int, Field(ge=1, le=1024)] = 64


class KernelResponse(BaseModel):
    """The cost of one attention kernel for an `attend` call, or the reasons why the kernel cannot run it.

    reasons  why the kernel cannot run the call; empty if it can
    work     estimated number of scores to compute, weighted by the time per score; None if the kernel cannot run
             the call
    memory   bytes that the kernel needs in addition to inputs and output
    """

    kernel: str
    reasons: list[str]
    work: float | None  # None if it refuses
    memory: float


class ExplainResponse(BaseModel):
    """The responses of all attention kernels for an `attend` call.

    chosen   name of the kernel that would run; None if no kernel can run the call
    answers  the response of each kernel
    """

    chosen: str | None
    answers: list[KernelResponse]


Index = Annotated[int, Field(ge=0, le=999)]


class EditRequest(BaseModel):
    """One intervention on a layer, such as an ablation; it changes one head, or all heads if `head` is None.

    kind   "ablate" replaces the output of the head by 0, and "mean" by its mean over sequences and positions; "beta"
           multiplies the inverse temperature by `value`; "hide" hides the key with the index `value`; "patch" takes
           the output from a run on another text
    layer  index of the attention layer, from 0
    value  number for "beta" and "hide"; the other kinds need none
    """

    model_config = ConfigDict(extra="forbid")
    kind: Literal["ablate", "mean", "beta", "hide", "patch"]
    layer: Index
    head: Index | None = None
    value: Annotated[float, Field(ge=0, le=1 << 20)] | None = None


class ModelRequest(BaseModel):
    """The HTTP request of the explorer's Models page: a model, an input text, and what to show of it.

    layer, head  the head to show in detail
    edits        interventions on the model
    source       other text, from which edits of the kind "patch" take head outputs
    position     position whose prediction is shown; None takes the last
    target       the predicted token or class whose logit is explained; "" takes the most likely one
    row          query whose exact weights are shown for a long text; None takes the last
    brush        (layer, head) pairs to ablate, each alone and all together; [] ablates every head alone
    why          key of a number on the page to explain, such as "logit.TOKEN"
    """

    model_config = ConfigDict(extra="forbid")
    model: Annotated[str, Field(max_length=400)]
    text: Annotated[str, Field(max_length=LARGEST_BODY)]
    show: Literal["overview", "head", "edit", "flow", "generate", "why"] = "overview"
    layer: Index = 0
    head: Index = 0
    edits: Annotated[list[EditRequest], Field(max_length=64)] = []
    source: Annotated[str, Field(max_length=20_000)] = ""
    position: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    target: Annotated[str, Field(max_length=60)] = ""
    row: Annotated[int, Field(ge=0, le=1 << 20)] | None = None  # the exact row of a long head
    brush: Annotated[list[tuple[Index, Index]], Field(max_length=64)] = []  # heads to ablate alone and together
    why: Annotated[str, Field(max_length=60)] = ""  # the number to explain


class WorkRequest(BaseModel):
    """The HTTP request for a worked attention calculation, with a student's answer for one step.

    Matrices are strings such as `1,0;0,1`, with rows separated by semicolons.

    beta    inverse temperature: 1, or 1 / sqrt(size of a head)
    step    which step the answer is for
    answer  the student's matrix for this step; "" checks nothing
    """

    model_config = ConfigDict(extra="forbid")
    q: Annotated[str, Field(max_length=2000)]
    k: Annotated[str, Field(max_length=2000)]
    v: Annotated[str, Field(max_length=2000)]
    mask: Annotated[str, Field(max_length=500)] = "full()"
    beta: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    heads: Annotated[int, Field(ge=1, le=8)] = 1
    step: Literal["scores", "weights", "result"] = "weights"
    answer: Annotated[str, Field(max_length=2000)] = ""


class ClaimRequest(BaseModel):
    """The HTTP request to run a claim of the lab, an experiment that tests a published statement, by its name."""

    model_config = ConfigDict(extra="forbid")
    claim: Annotated[str, Field(max_length=60)]


@dataclass(frozen=True)
class Content:
    """The models, tasks and files that the explorer's server offers.

    models  function that returns the models that a client can open, as dicts with the keys "name", "what", "example"
    own     name of the model to open first; None opens the start page
    tasks   function that returns the long computations by name. It must be defined at the top level of a module,
            because the worker process imports it
    lesson  path of a lesson of the user, in Markdown
    report  path of a report that `regard check --save` wrote
    """

    models: Callable[[], list[dict[str, str]]] = list
    own: str | None = None
    tasks: Callable[[], dict[str, Task]] = dict
    lesson: Path | None = None
    report: Path | None = None


def create_app(hosts: set[str], token: str | None = None, content: Content | None = None) -> FastAPI:
    """Create the FastAPI application of the explorer.

    hosts    values of the Host header that are accepted, such as "127.0.0.1:8765"
    token    a secret that the first URL of a client must contain; None serves every client that can connect
    content  models, tasks and files to offer
    """
    app = FastAPI(title="regard explorer", docs_url=None, redoc_url=None)
    content = content or Content()
    worker = Worker(content.tasks)
    app.state.worker = worker
    busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = _refuse(request, hosts, token)
        answer = await call(request) if refusal is None else refusal
        answer.headers.update(_HEADERS)
        return answer

    @app.exception_handler(RegardError)
    async def show_error(request: Request, error: RegardError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=422)

    @app.exception_handler(RequestValidationError)
    async def show_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own answer repeats the input, which fails for NaN
        found = [f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()]
        return JSONResponse({"error": "; ".join(found[:3])}, status_code=422)

    @app.get("/", response_class=HTMLResponse)
    def page(request: Request) -> Response:
        if token is not None and "token" in request.query_params:
            # the secret moves into a cookie, so that shared addresses do not carry it
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return answer
        return HTMLResponse(build_page({"api": True, "start": start_address(content)}))

    @app.get("/api/sheets")
    def sheets() -> list[dict[str, Any]]:
        from regard.explorer.views.sheets import build_sheets

        return build_sheets()

    @app.get("/api/claims")
    def claims() -> list[dict[str, Any]]:
        from regard.explorer.views.sheets import build_claims

        return build_claims()

    @app.get("/api/figures/{claim}")
    def figure(claim: Annotated[str, PathParameter(max_length=60)]) -> dict[str, str]:
        from regard.explorer.views.sheets import figure_address

        return {"address": figure_address(claim)}

    @app.get("/api/lessons")
    def lessons() -> list[dict[str, Any]]:
        from regard.explorer.views.lessons import load_lessons

        return load_lessons(content.lesson)

    @app.get("/api/report")
    def report() -> dict[str, Any]:
        from regard.explorer.views.reports import load_report

        return {"report": load_report(content.report) if content.report else None}

    @app.get("/api/example_report")
    def example_report() -> dict[str, Any]:
        from regard.explorer.views.reports import EXAMPLE, load_report

        return {"report": load_report(EXAMPLE)}

    @app.get("/api/browser_model")
    def browser_model() -> dict[str, Any]:
        from regard.explorer.views.browser_model import load_browser_model

        return load_browser_model()

    @app.post("/api/work")
    def work(asked: WorkRequest) -> dict[str, str]:
        from regard.explorer.views.worked import work_out

        return work_out(asked.model_dump())

    @app.get("/api/models")
    def models() -> list[dict[str, str]]:
        return content.models()

    @app.post("/api/jobs/model")
    async def model_job(asked: ModelRequest, request: Request) -> Response:
        names = [each["name"] for each in content.models()]
        if asked.model not in names:
            known = ", ".join(names)
            return JSONResponse({"error": f"{asked.model[:80]} is not offered; choose from {known}"}, status_code=404)
        return await start("model", asked, request)

    @app.post("/api/jobs/claim")
    async def claim_job(asked: ClaimRequest, request: Request) -> Response:
        return await start("claim", asked, request)

    async def start(name: str, asked: BaseModel, request: Request) -> Response:
        """Start a task in the worker process and stream its messages as server-sent events.

        A client can run one task at a time; a second one is answered with status 409 after 5 seconds.
        """
        client = f"{request.client.host if request.client else ''} {request.headers.get('x-client', '')[:64]}"
        lock = busy[client]
        try:
            # a job that was just cancelled needs a moment to end
            await asyncio.wait_for(lock.acquire(), 5)
        except TimeoutError:
            return JSONResponse({"error": "your last computation still runs; cancel it first"}, status_code=409)

        async def events() -> AsyncIterator[str]:
            try:
                async for kind, said in worker.run(name, asked.model_dump(), request.is_disconnected):
                    yield f"event: {kind}\ndata: {json.dumps(said)}\n\n"
            finally:
                lock.release()
                if not lock.locked():
                    busy.pop(client, None)

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/api/explain")
    def explain_call(asked: ExplainRequest) -> ExplainResponse:
        return ExplainResponse(**explain_kernels(**asked.model_dump()))

    return app


def start_address(content: Content) -> str:
    """Return the URL fragment (after #) of the view to open first: a lesson, a report or a model, in this order."""
    if content.lesson is not None:
        return "lessons"
    if content.report is not None:
        return "check"
    return f"models?{urlencode({'model': content.own, 'text': ''})}" if content.own else ""


def _refuse(request: Request, hosts: set[str], token: str | None) -> Response | None:
    """Return an HTTP error response if a request must be refused, or None if it is accepted.

    A request is refused if it comes from another host or origin, if its size is unknown or too large, or if it
    lacks the secret token.
    """
    if request.headers.get("host", "") not in hosts:
        return JSONResponse({"error": "this host is not served; open the address that was printed"}, status_code=421)
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc not in hosts:
        return JSONResponse({"error": "requests from other pages are refused"}, status_code=403)
    length = request.headers.get("content-length")
    if length is None and "transfer-encoding" in request.headers:  # its size would be unknown until it is all here
        return JSONResponse({"error": "a request must state its length"}, status_code=411)
    if int(length or 0) > LARGEST_BODY:
        return JSONResponse({"error": f"a request may have at most {LARGEST_BODY} bytes"}, status_code=413)
    if token is not None:
        given = request.query_params.get("token") or request.cookies.get(_COOKIE) or ""
        if not secrets.compare_digest(given.encode(), token.encode()):
            return JSONResponse({"error": "open the address with its token, as it was printed"}, status_code=401)
    return None
