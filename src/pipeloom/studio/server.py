"""The studio's server: one page and its questions, on the loopback address, for whoever has the token.

Three locks, because any page that a browser shows may send requests to this machine. Each request carries the
token, which only the printed address has. It names this server as its host: a foreign name that resolves to
the loopback address is refused. And where a browser says which page asked, that page is this one.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ..ir.errors import ConfigError, PipeloomError
from ..viewer.html import environment

Answer: TypeAlias = Callable[[dict[str, Any]], Any]
"""Answers one question of the page; its errors are shown there."""

LOOPBACK = "127.0.0.1"
MOST_BYTES = 8 << 20
"""Of a question: rows of large schedules are sent along."""

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def studio_app(page: str, answers: Mapping[str, Answer], *, token: str, port: int) -> Any:
    """The application that answers GET with the page, and a POST to the name of a question with its answer.
    A refusal is a sentence of plain text."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    hosts = {f"{LOOPBACK}:{port}", f"localhost:{port}"}

    def refusal(request: Request, given: str) -> str:
        if request.headers.get("host") not in hosts:
            return "this address is not the studio's"
        if (origin := request.headers.get("origin")) and origin.removeprefix("http://") not in hosts:
            return "another page may not ask the studio"
        if not secrets.compare_digest(given.encode(), token.encode()):
            return "this request lacks the token of the address that `pipeloom studio` printed"
        return ""

    def refused(text: str) -> Response:
        return Response(text, status_code=403, media_type="text/plain", headers=HEADERS)

    def show(request: Request) -> Response:
        why = refusal(request, request.query_params.get("token", ""))
        return refused(why) if why else Response(page, media_type="text/html", headers=HEADERS)

    async def answer(request: Request) -> Response:
        if why := refusal(request, request.headers.get("x-token", "")):
            return refused(why)
        asked = answers.get(request.path_params["name"])
        if asked is None:
            return Response("there is no such question", status_code=404, headers=HEADERS)
        content = bytearray()
        async for part in request.stream():  # which need not say before how much will come
            content += part
            if len(content) > MOST_BYTES:
                return Response("the question is too long", status_code=413, headers=HEADERS)
        try:
            question = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            return Response(f"not JSON: {error}", status_code=400, headers=HEADERS)
        body, status = await run_in_threadpool(_answered, asked, question)
        return Response(body, status_code=status, media_type="application/json", headers=HEADERS)

    def failed(request: Request, error: Exception) -> Response:
        """Starlette raises the error again, so that its traceback stands where the studio was started."""
        text = f"the studio failed ({type(error).__name__}), no fault of yours: see where it was started"
        return Response(text, status_code=500, media_type="text/plain", headers=HEADERS)

    routes = [Route("/", show, methods=["GET"]), Route("/api/{name}", answer, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={Exception: failed})


def _answered(asked: Answer, question: dict[str, Any]) -> tuple[bytes, int]:
    try:
        return msgspec.json.encode(asked(question)), 200
    except PipeloomError as error:
        return msgspec.json.encode({"error": {"message": error.message, "hint": error.hint}}), 422


class StudioServer:
    """A server that listens, on the loopback address only. `address`: with its token.

    port: 0 for any that is free.
    Raises: ConfigError if the port is taken, or Starlette and uvicorn are not installed.
    """

    def __init__(self, start: Mapping[str, Any], answers: Mapping[str, Answer], *, port: int = 0) -> None:
        try:
            import uvicorn
        except ModuleNotFoundError:
            raise ConfigError(
                "the studio needs Starlette and uvicorn, which are not installed",
                hint="pip install 'pipeloom[studio]'",
            ) from None
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
            self._socket.listen()  # a page that is opened before `run` waits for its answer
        except OSError as error:
            raise ConfigError(f"port {port}: {error.strerror}", hint="choose another --port") from None
        self.port, self.token = self._socket.getsockname()[1], secrets.token_urlsafe(24)
        self.address = f"http://{LOOPBACK}:{self.port}/?token={self.token}"
        templates = environment(Path(__file__).parent / "templates")
        page = templates.get_template("studio.html").render(start=start)
        app = studio_app(page, answers, token=self.token, port=self.port)
        self._server: Any = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))

    def run(self) -> None:
        """Answer until `stop`, or Ctrl-C in the main thread."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True
