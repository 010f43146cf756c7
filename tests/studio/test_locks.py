"""Who may ask the studio: whoever has the token, from its own page, on this machine."""

import http.client
import json
from typing import Any

import pytest

from pipeloom.studio.server import StudioServer

DRAW = {"words": [], "entries": [{"name": "1f1b"}]}


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
    status, text = asked(library_server, "/api/draw", DRAW, token=token, **headers)
    assert status == 403 and "step_s" not in text
    path = library_server.address.rpartition(str(library_server.port))[2] if token else "/"
    status, text = asked(library_server, path, **headers)
    assert status == 403 and "<html" not in text


def test_the_page_and_its_questions_are_answered(library_server: StudioServer) -> None:
    own = f"http://127.0.0.1:{library_server.port}"
    status, text = asked(library_server, "/api/draw", DRAW, Origin=own)
    assert status == 200 and json.loads(text)["drawn"][0]["figures"]["step_s"] == 33
    status, text = asked(library_server, library_server.address.removeprefix(own), token=False)
    assert status == 200 and "<html" in text
    assert asked(library_server, "/api/other", DRAW)[0] == 404
    assert asked(library_server, "/api/draw", [1])[0] == 400


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ({"words": [], "entries": [{"name": "/etc/hosts.py:found"}]}, "may not name files"),
        ({"words": [], "entries": [{"name": "other.txt"}]}, "may not name files"),
        ({"words": ["--times", "plan.json"], "entries": [{"name": "1f1b"}]}, "may not name files"),
        ({"words": ["-F", "-1"], "entries": [{"name": "1f1b"}]}, "not a time"),
        ({"words": ["--nonsense"], "entries": [{"name": "1f1b"}]}, "nonsense"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    library_server: StudioServer, question: dict[str, Any], word: str
) -> None:
    status, text = asked(library_server, "/api/draw", question)
    assert status == 422 and word in json.loads(text)["error"]["message"]
