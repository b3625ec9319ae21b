"""The description of the HTTP face says what is there: paths, words, answers. A fuzzer (schemathesis) has the last
word; it runs with ``make torture`` where it is installed."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from tests.client_support import chain_of, payloads_of
from tests.daemon_load import open_space
from tests.daemon_process import PATIENCE_S, ROOT, Daemon
from tests.page_support import TOKEN, watched_daemon
from tests.valkey_server import eventually
from tierkv.daemon.http_events import MOST_IN_ONE, MOST_LISTENERS
from tierkv.daemon.openapi import description
from tierkv.daemon.operator import QUESTIONS

DOCUMENT = description()


class Stocked(NamedTuple):
    daemon: Daemon
    client: Any
    space: Any
    chain: Any


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stocked]:
    with watched_daemon(tmp_path_factory.mktemp("openapi")) as daemon, daemon.client() as client:
        space = open_space(client)
        chain = chain_of(space, 4)
        client.put(chain, payloads_of(chain))
        yield Stocked(daemon, client, space, chain)


def test_the_file_is_what_the_code_says() -> None:
    kept = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert kept == DOCUMENT, "renew it: python -m tierkv.daemon.openapi > docs/openapi.json"


def test_every_question_is_described_with_its_words() -> None:
    for name, question in QUESTIONS.items():
        (operation,) = DOCUMENT["paths"][f"/v1/{name}"].values()
        if name == "status":
            assert "requestBody" not in operation
            continue
        schemas = operation["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
        assert {word for one in schemas for word in one["properties"]} == question.words, name


def test_every_path_is_described_and_there(stocked: Stocked) -> None:
    routes = set()
    for path, methods in DOCUMENT["paths"].items():
        for method in ("get", "post", "put", "delete", "patch"):
            if path == "/v1/events":
                continue
            status, answer = stocked.daemon.ask(
                path, b"" if method == "post" else None, method=method.upper()
            )
            assert (status == 405) == (method not in methods), (method, path, answer)
            routes.add((method, path))
    for path in ("/v1/nothing", "/v1", "/openapi.json"):
        assert stocked.daemon.ask(path)[0] == 404
    status, served = stocked.daemon.ask("/v1/openapi.json")
    assert (status, served) == (200, json.loads(json.dumps(DOCUMENT)))


def check(path: str, method: str, status: int, answer: object) -> None:
    """Raises when an answer is not as described."""
    told = DOCUMENT["paths"][path][method]["responses"][str(status)]
    schema = told["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer)


def test_answers_are_as_described(stocked: Stocked) -> None:
    daemon, chain = stocked.daemon, stocked.chain
    digest = stocked.space.namespace.digest.hex()
    prompt = {"namespace": digest, "hashes": [one.hex() for one in chain.hashes]}
    missing = {"namespace": digest, "tokens": list(range(100))}
    with stocked.client.load(chain):
        for path, body in {
            "/healthz": None,
            "/readyz": None,
            "/v1/status": None,
            "/v1/match": prompt,
            "/v1/explain": missing,
            "/v1/prefetch": {**prompt, "timeout_s": 5},
            "/v1/pin": {**prompt, "ttl_s": 60},
            "/v1/unpin": prompt,
            "/v1/clear": {"tenant_salt": "nobody's"},
        }.items():
            status, answer = daemon.ask(path, body)
            assert status == 200, answer
            check(path, "get" if body is None else "post", status, answer)
    assert daemon.ask("/v1/status")[1]["hot"], "the answer has an example of each"
    for path, body in (("/v1/match", {}), ("/v1/match", {**missing, "namespace": "f" * 64})):
        status, answer = daemon.ask(path, body)
        check(path, "post", status, answer)
    status, answer = daemon.ask("/v1/status", token="wrong")
    check("/v1/status", "get", status, answer)
    with pytest.raises(jsonschema.ValidationError):
        check("/v1/match", "post", 200, {"blocks": 1})


# ---- events


@contextmanager
def listening(daemon: Daemon, query: str = "", **headers: str) -> Iterator[http.client.HTTPResponse]:
    with closing(daemon.connect_http()) as connection:
        connection.request(
            "GET", f"/v1/events{query}", headers={"Authorization": f"Bearer {TOKEN}", **headers}
        )
        with closing(connection.getresponse()) as answer:
            assert answer.status == 200, answer.read()
            assert answer.headers["Content-Type"] == "text/event-stream"
            yield answer


def messages(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any, int]]:
    """Name, data and id of each, as they come."""
    fields: dict[str, str] = {}
    while True:
        line = answer.readline().decode().rstrip("\n")
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], json.loads(fields["data"]), int(fields["id"])
            fields = {}


def test_d28_events_come_as_they_happen_once_each_and_in_order(stocked: Stocked) -> None:
    daemon, client = stocked.daemon, stocked.client
    with listening(daemon) as answer:
        chain = chain_of(stocked.space, 3, seed=77)
        client.put(chain, payloads_of(chain))
        told = []
        for name, data, last in messages(answer):
            assert name == "blocks"
            told += data
            assert last == told[-1]["seq"]
            if len([one for one in told if one["kind"] == "stored"]) == 3:
                break
        mine = [one for one in told if one["hash"] in {its.hex() for its in chain.hashes}]
        assert [one["kind"] for one in mine if one["tier"] in (None, "host")] == ["arrived", "stored"] * 3
        assert [one["seq"] for one in told] == list(range(told[0]["seq"], told[0]["seq"] + len(told)))
        assert mine[0]["parent"] is None
        assert mine[-1]["parent"] == chain.hashes[1].hex()
    for how in (
        {"query": f"?after={told[0]['seq']}"},
        {"Last-Event-ID": str(told[0]["seq"])},
    ):
        with listening(daemon, **how) as answer:
            _, again, _ = next(messages(answer))
            assert again[: len(told) - 1] == told[1:]


def test_what_is_left_out_is_said(stocked: Stocked) -> None:
    last = stocked.client.events()[-1].seq
    with listening(stocked.daemon, "?after=0&most=2") as answer:
        heard = messages(answer)
        name, data, _ = next(heard)
        assert (name, data["missed"]) == ("gap", last - 2)
        name, data, number = next(heard)
        assert (name, len(data), number) == ("blocks", 2, last)


def test_who_asks_for_everything_gets_it_in_pieces(stocked: Stocked) -> None:
    """One message of all that is kept, megabytes of it, took the loop from everybody, probes too, for seconds."""
    with stocked.daemon.client() as client:
        space = open_space(client)
        for seed in range(1000, 1004):
            chain = chain_of(space, 200, seed=seed)
            client.put(chain, payloads_of(chain))
    last = stocked.client.events()[-1].seq
    told = []
    with listening(stocked.daemon, "?after=0") as answer:
        for name, data, number in messages(answer):
            if name == "blocks":
                assert len(data) <= MOST_IN_ONE
                assert number == data[-1]["seq"]
                told += [one["seq"] for one in data]
            if number >= last:
                break
    assert len(told) > 2 * MOST_IN_ONE
    assert told == list(range(told[0], told[0] + len(told)))


def test_a_browser_that_connects_again_hears_nothing_twice(stocked: Stocked) -> None:
    """It asks with the first address once more, and says what it heard last beside it."""
    last = stocked.client.events()[-1].seq
    with listening(stocked.daemon, "?after=0", **{"Last-Event-ID": str(last - 1)}) as answer:
        _, data, _ = next(messages(answer))
    assert data[0]["seq"] == last


@pytest.mark.parametrize("query", ["?after=x", "?after=-1", "?most=1e3", "?after=" + "9" * 30])
def test_a_number_that_is_none_is_refused(stocked: Stocked, query: str) -> None:
    status, answer = stocked.daemon.ask(f"/v1/events{query}")
    assert (status, answer["error"]["kind"]) == (400, "bad_question")
    check("/v1/events", "get", status, answer)


def test_listeners_are_bounded_and_leave(stocked: Stocked) -> None:
    with ExitStack() as crowd:

        def one_more() -> bool:
            try:
                crowd.enter_context(listening(stocked.daemon))
            except AssertionError:  # those of another test are still leaving
                return False
            return True

        for _ in range(MOST_LISTENERS):
            eventually(one_more, "there is room", PATIENCE_S)
        status, answer = stocked.daemon.ask("/v1/events")
        assert (status, answer["error"]["kind"]) == (503, "busy")

    def room_again() -> bool:
        try:
            with listening(stocked.daemon):
                return True
        except AssertionError:
            return False

    eventually(room_again, "those who left are not counted any more", PATIENCE_S)


# ---- the fuzzer


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_the_fuzzer_finds_nothing(stocked: Stocked, tmp_path: Path) -> None:
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install 'schemathesis>=4'")
    digest = stocked.space.namespace.digest.hex()
    text = json.dumps(DOCUMENT).replace(
        '"pattern": "^[0-9a-fA-F]{8,64}$"', f'"enum": ["{digest}", "ffffffff"]'
    )
    assert digest in text, "the fuzzer does not know a namespace that is there"
    document = tmp_path / "openapi.json"
    document.write_text(text)
    connection = stocked.daemon.connect_http()
    seconds = os.environ.get("FUZZ_S", "120")
    ran = subprocess.run(
        [
            *(Path(sys.executable).parent / "st", "run", document),
            *("--url", f"http://{connection.host}:{connection.port}", "-H", f"Authorization: Bearer {TOKEN}"),
            *("--checks", "all", "--exclude-path", "/v1/events", "--max-time", seconds, "--request-timeout", "30"),
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(ran.stdout[-2000:])
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert stocked.daemon.ask("/readyz")[0] == 200
