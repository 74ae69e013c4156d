"""`regard explore`: the explorer, a web page that shows attention and masks."""

import secrets
import socket
import webbrowser
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from regard.base.atomic_write import write_atomically
from regard.base.errors import ConfigError


def command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one")] = 8765,
    host: Annotated[str, typer.Option(help="Address to listen on; others need a token")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser")] = True,
    export: Annotated[Path | None, typer.Option(help="Write the page into this folder instead, and stop")] = None,
) -> None:
    """Open the web page that shows attention and masks."""
    from regard.explorer.page import build_page

    if export is not None:
        export.mkdir(parents=True, exist_ok=True)
        write_atomically(export / "index.html", lambda path: path.write_text(build_page(), encoding="utf-8"))
        typer.echo(f"{export / 'index.html'}: open it in a browser; it needs no server")
        return
    serve(host, port, browser)


def serve(host: str, port: int, browser: bool) -> None:
    """Serve the explorer until Ctrl-C, and print its address."""
    try:
        import uvicorn

        from regard.explorer.api import create_app
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server of the explorer needs {error.name}: pip install 'regard[web]'. "
            "Without it, `regard explore --export FOLDER` writes the page as a file"
        ) from None
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
    server = uvicorn.Server(uvicorn.Config(create_app(hosts, token), log_level="warning", server_header=False))
    server.run(sockets=[listener])


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
