"""Who may ask the studio: whoever has the token, from its own page, on this machine."""

import http.client
import json
from typing import Any

import pytest

from pipeloom.studio.server import MOST_BYTES, StudioServer

DRAW = {"words": [], "entries": [{"name": "1f1b"}]}


def api(name: str) -> str:
    return f"/api/{name}"


def asked(
    server: StudioServer, path: str, question: Any = None, *, token: bool = True, **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    given = {"X-Token": server.token} if token else {}
    body = None if question is None else json.dumps(question)
    connection.request("GET" if question is None else "POST", path, body, given | headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


@pytest.mark.parametrize(
    ("token", "headers"),
    [
        (False, {}),
        (False, {"X-Token": "guessed"}),
        (True, {"Origin": "http://example.org"}),
        (True, {"Origin": "null"}),
        (True, {"Host": "studio.example.org"}),
    ],
    ids=["no token", "a wrong token", "another page", "a page of a file", "a foreign name"],
)
def test_others_are_refused(library_server: StudioServer, token: bool, headers: dict[str, str]) -> None:
    status, text = asked(library_server, api("draw"), DRAW, token=token, **headers)
    assert status == 403 and "step_s" not in text
    path = library_server.address.rpartition(str(library_server.port))[2] if token else "/"
    status, text = asked(library_server, path, **headers)
    assert status == 403 and "<html" not in text


def test_the_page_and_its_questions_are_answered(library_server: StudioServer) -> None:
    own = f"http://127.0.0.1:{library_server.port}"
    status, text = asked(library_server, api("draw"), DRAW, Origin=own)
    assert status == 200 and json.loads(text)["drawn"][0]["figures"]["step_s"] == 33
    status, text = asked(library_server, library_server.address.removeprefix(own), token=False)
    assert status == 200 and "<html" in text
    assert asked(library_server, api("other"), DRAW)[0] == 404
    assert asked(library_server, api("draw"), [1])[0] == 400


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ({"words": [], "name": "/etc/hosts.py:found"}, "may not name files"),
        ({"words": [], "name": "other.txt"}, "may not name files"),
        ({"words": ["--times", "plan.json"], "name": "1f1b"}, "may not name files"),
        ({"words": ["-F", "-1"], "name": "1f1b"}, "not a time"),
        ({"words": ["--nonsense"], "name": "1f1b"}, "nonsense"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    library_server: StudioServer, question: dict[str, Any], word: str
) -> None:
    status, text = asked(library_server, api("path"), question)
    assert status == 422 and word in json.loads(text)["error"]["message"]


def test_what_fails_is_answered_with_a_sentence(library_server: StudioServer) -> None:
    status, text = asked(library_server, api("draw"), {})
    assert status == 500 and "no fault of yours" in text and "Traceback" not in text


@pytest.mark.parametrize("chunked", [False, True])
def test_a_question_has_an_end(library_server: StudioServer, chunked: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", library_server.port)
    parts = [b" " * MOST_BYTES, b"{}"]
    body: Any = iter(parts) if chunked else b"".join(parts)
    headers = {"X-Token": library_server.token}
    connection.request("POST", api("draw"), body, headers, encode_chunked=chunked)
    assert connection.getresponse().status == 413
    connection.close()
