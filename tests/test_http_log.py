"""What strangers send to the HTTP face is no error of the daemon; it is answered like all else, and none of it stands
in the log or in the answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.daemon_process import PATIENCE_S, running_daemon
from tests.page_support import TOKEN
from tests.valkey_server import eventually

NO_HTTP = {
    "a header with a control character": b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer %s\x01\r\n\r\n"
    % TOKEN.encode(),
    "a target with one": b"GET /v1/status?token=%s\x01 HTTP/1.1\r\n\r\n" % TOKEN.encode(),
    "a version that is none": b"GET /%s HTTP/x\r\n\r\n" % TOKEN.encode(),
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_one_line_without_what_was_sent(tmp_path: Path, sent: bytes) -> None:
    with running_daemon(tmp_path, token=TOKEN, sidecar_http="127.0.0.1:0") as daemon:
        there = daemon.connect_http()
        with socket.create_connection((there.host, there.port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(sent)
            heard = b""
            while more := stranger.recv(65536):
                heard += more
        head, _, body = heard.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 400")
        assert b"\r\nServer: tierkv" in head, "which Python and which library answer is nobody's business"
        assert b"\r\nX-Content-Type-Options: nosniff" in head
        assert json.loads(body)["error"]["kind"] == "no_http"
        assert TOKEN not in heard.decode()
        eventually(lambda: "no HTTP" in daemon.log, "the log says so", PATIENCE_S)
        (line,) = (line for line in daemon.log.splitlines() if "no HTTP" in line)
        assert " WARNING " in line
        assert "from 127.0.0.1" in line
        assert "Traceback" not in daemon.log
        assert TOKEN not in daemon.log
        assert daemon.ask("/readyz")[0] == 200
