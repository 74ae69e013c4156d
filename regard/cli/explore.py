"""`regard explore`: the explorer, a web page that shows attention, masks, models, lessons and the sheets."""

import secrets
import socket
import threading
import webbrowser
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.base.atomic_write import write_output
from regard.base.errors import ConfigError
from regard.base.extras import import_optional

# the matrices of `regard work three-tokens`, with which the Attention view opens
WORKED: dict[str, Any] = {
    "q": "1,3;-1,1;2.5,-2", "k": "3,-0.5;2,-1.5;-2.5,3.5", "v": "2.5,-1.5;-1,3;-2,-3", "mask": "full()", "beta": 1,
    "heads": 1, "step": "weights", "answer": "",
}  # fmt: skip


def command(
    model: Annotated[str | None, typer.Argument(help="A pretrained model or a folder")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one")] = 8765,
    host: Annotated[str, typer.Option(help="Address; all but 127.0.0.1 need a token")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser")] = True,
    lesson: Annotated[Path | None, typer.Option(help="A lesson of your own, a Markdown file")] = None,
    report: Annotated[Path | None, typer.Option(help="A report of `regard check --save`")] = None,
    export: Annotated[Path | None, typer.Option(help="Write a page that needs no server into this folder")] = None,
) -> None:
    """Open the explorer: attention, masks and models on a web page.

    Example: regard explore digits-vit
    """
    from regard.explorer.views.lessons import load_lesson

    if lesson is not None:
        load_lesson(lesson)  # an error in it is shown here, with its line
    if export is not None:
        if model is not None or report is not None:
            raise ConfigError(
                "--export writes the shipped models and their stored results; open MODEL and --report with the server, "
                "or save one recorded model with regard.show(seen).save(path)"
            )
        write_export(export, lesson)
        return
    if model is not None:
        from regard.cli.exploring import check_model

        check_model(model)
    serve(host, port, browser, model, lesson, report)


def write_export(folder: Path, lesson: Path | None) -> None:
    """Write the explorer as a web page that needs no server.

    The page has the lessons, the course sheets, the lab claims and a model that runs in the browser.

    folder  where the page is written
    lesson  a lesson of the user, a Markdown file
    """
    from rich.console import Console
    from rich.progress import track

    from regard.explorer.page import build_page
    from regard.explorer.views.browser_model import load_browser_model
    from regard.explorer.views.lessons import load_lessons
    from regard.explorer.views.reports import EXAMPLE, load_report
    from regard.explorer.views.sheets import build_claims, build_sheets, figure_address

    claims = build_claims()
    models, stored = build_stored()
    data: dict[str, Any] = {
        "models": models,
        "stored": stored,
        "example_report": {"report": load_report(EXAMPLE)},
        "sheets": build_sheets(),
        "claims": claims,
        "lessons": load_lessons(lesson),
        "browser_model": load_browser_model(),
        "start": "lessons" if lesson else "",
    }
    for claim in track(claims, "figures", console=Console(stderr=True), transient=True):
        if claim["sentence"]:
            data[f"figures/{claim['id']}"] = {"address": figure_address(claim["id"])}
    folder.mkdir(parents=True, exist_ok=True)
    write_output(folder / "index.html", lambda path: path.write_text(build_page(data), encoding="utf-8"))
    typer.echo(f"{folder / 'index.html'}: open it in a browser; it needs no server")


def build_stored() -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Compute the results that the exported page shows without a server.

    Returns the shipped models, and the stored server responses. The responses are those for the example of each model,
    for the mask gallery and for the worked example.
    """
    from regard.cli.exploring import list_offered, tasks
    from regard.explorer.views.browser_model import BROWSER_MODEL
    from regard.explorer.views.kernels import explain_kernels
    from regard.explorer.views.stored import store_kernels, store_model, store_worked

    models = [each for each in list_offered(None) if each.get("example")]
    stored = store_kernels(lambda mask, length: explain_kernels(mask, length, length))
    for model in models:
        if model["name"] != BROWSER_MODEL:  # this model is computed by the page itself
            stored |= dict(store_model(model["name"], model["example"], tasks()["model"]))
    return models, stored | store_worked([WORKED])


def serve(
    host: str,
    port: int,
    browser: bool,
    model: str | None = None,
    lesson: Path | None = None,
    report: Path | None = None,
) -> None:
    """Start the web server of the explorer, print its address, and run until Ctrl-C.

    model   name or folder of the model to open; None for none
    lesson  a lesson of the user, a Markdown file
    report  a report saved by `regard check --save`
    """
    purpose = "`regard explore --export FOLDER` writes the page as a file; its server"
    uvicorn = import_optional("uvicorn", "web", purpose)
    api = import_optional("regard.explorer.api", "web", purpose)
    from regard.cli.exploring import list_offered, tasks
    from regard.explorer.views.browser_model import load_browser_model
    from regard.explorer.views.reports import load_report

    if report is not None:
        load_report(report)
    content = api.Content(models=partial(list_offered, model), own=model, tasks=tasks, lesson=lesson, report=report)
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    token = None if local else secrets.token_urlsafe(16)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    names = {name, "127.0.0.1", "localhost", "[::1]"} if local else {name}
    hosts = {f"{each}:{port}" for each in names}
    address = f"http://{name}:{port}/" + (f"?token={token}" if token else "")
    typer.echo(f"{address}  (Ctrl-C stops it)")
    if browser and _has_browser():
        webbrowser.open(address)
    app = api.create_app(hosts, token, content)
    # the page is shown while torch, which takes seconds, is imported beside it
    threading.Thread(target=load_browser_model, daemon=True).start()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False))
    try:
        server.run(sockets=[listener])
    finally:
        app.state.worker.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # requests wait from now on, while the server still starts
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); try --port 0 for a free port") from None
    return listener


def _has_browser() -> bool:
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
