"""The daemon's HTTP face, asked over TCP and over a unix socket of a real daemon."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.daemon_process import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    PATIENCE_S,
    Daemon,
    UnixConnection,
    payloads_of,
    run_tierkv,
    running_daemon,
    spec_of,
    tokens_of,
)
from tests.valkey_server import eventually
from tierkv.assembly import store_from
from tierkv.config import load_config
from tierkv.daemon import exposition, http, http_app
from tierkv.daemon.http import MOST_CONNECTIONS, HttpFace
from tierkv.daemon.http_work import Busy, Workers
from tierkv.daemon.operator import QUESTIONS, Operator
from tierkv.metrics import METRICS

TOKEN = "a-token-of-more-than-16-characters"
SALT = "the salt of a tenant"


class Stocked(NamedTuple):
    """A daemon with an engine at it, and a prompt of four blocks that it stored."""

    daemon: Daemon
    client: Any
    chain: Any
    namespace: str


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stocked]:
    folder = tmp_path_factory.mktemp("http")
    settings = {"nvme_path": str(folder / "disk"), "nvme_capacity": "64 MiB", "nvme_min_free": 0}
    with running_daemon(folder, token=TOKEN, sidecar_http="127.0.0.1:0", **settings) as daemon:
        with daemon.client() as client:
            space = client.open_namespace(spec_of(SALT))
            chain = space.chain(tokens_of(4))
            assert client.put(chain, payloads_of(4)).stored == 4
            yield Stocked(daemon, client, chain, space.namespace.digest.hex())


# ---- who may ask


@pytest.mark.parametrize(
    "path", ["/readyz", "/metrics", "/v1/status", "/v1/match", "/v1/events", "/v1/nothing", "/page"]
)
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ä" * 20])
def test_without_the_token_there_is_nothing_on_tcp(stocked: Stocked, path: str, token: str) -> None:
    stranger = Daemon(**{**vars(stocked.daemon), "token": None})
    status, answer = stranger.ask(path, token=token.encode().decode("latin-1"))
    assert (status, answer["error"]["kind"]) == (401, "wrong_token" if token else "no_token")
    assert stocked.daemon.ask("/readyz")[0] == 200


def test_the_token_is_a_bearer_token(stocked: Stocked) -> None:
    connection = stocked.daemon.connect_http()
    for scheme, status in (("Bearer", 200), ("bearer", 200), ("Basic", 401), ("", 401)):
        connection.request("GET", "/readyz", headers={"Authorization": f"{scheme} {TOKEN}"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
        assert answer.headers.get("WWW-Authenticate", "").startswith("Bearer") == (status == 401)
    connection.close()


def test_everybody_may_ask_whether_it_lives(stocked: Stocked) -> None:
    stranger = Daemon(**{**vars(stocked.daemon), "token": None})
    assert stranger.ask("/healthz") == (200, {"alive": True})


def test_on_a_unix_socket_its_mode_says_who_may_ask(tmp_path: Path) -> None:
    place = tmp_path / "h.sock"
    with running_daemon(
        tmp_path, token=TOKEN, sidecar_http=f"unix://{place}", sidecar_group=os.getgid()
    ) as daemon:
        daemon.token = None
        for path in (place, daemon.socket):
            assert path.stat().st_mode & 0o777 == 0o660
            assert path.stat().st_gid == os.getgid()
        assert daemon.ask("/v1/status")[0] == 200
        other = tmp_path / "other"
        other.mkdir()
        small = {"TIERKV_HOST_CAPACITY": "4 MiB"}
        second = run_tierkv("serve", "--socket", other / "t.sock", "--http", f"unix://{place}", **small)
        assert second.returncode == 1
        assert f"another daemon (pid {daemon.pid}) listens on it" in second.stderr.splitlines()[-1]
        assert daemon.ask("/healthz")[0] == 200
        assert daemon.stop() == 0
    assert not place.exists()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:9400"}, 200),
        ({"Origin": "http://rewritten", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:9401"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:9400", "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_a_page_of_another_host_changes_nothing(tmp_path: Path, said: dict[str, str], status: int) -> None:
    """In a browser before which somebody forwards the unix socket, where no token is needed."""
    with face_here(tmp_path), closing(UnixConnection(f"{tmp_path}/h.sock")) as connection:
        headers = {"Host": "localhost:9400", "Content-Type": "text/plain", **said}
        connection.request("POST", "/v1/clear", b'{"tenant_salt": "nobody\'s"}', headers)
        answer = connection.getresponse()
        assert answer.status == status, answer.read()
        if status != 200:
            assert json.loads(answer.read())["error"]["kind"] == "other_origin"


# ---- the questions


def test_match_takes_tokens_and_hashes_in_any_dress(stocked: Stocked) -> None:
    found = {"blocks": 4, "tokens": 64, "of_blocks": 5, "tiers": {"host": 4, "nvme": 0}}
    chain = stocked.chain.namespace.chain(tokens_of(5))
    hashes = chain.hashes
    for namespace in (stocked.namespace, stocked.namespace[:8], stocked.namespace.upper()):
        for prompt in (
            {"tokens": tokens_of(5)},
            {"tokens": [float(token) for token in tokens_of(5)]},
            {"hashes": [one.hex() for one in hashes]},
            {"hashes": [base64.b64encode(one).decode() for one in hashes]},
            {"hashes": [base64.urlsafe_b64encode(one).decode().rstrip("=") for one in hashes]},
        ):
            assert stocked.daemon.ask("/v1/match", {"namespace": namespace, **prompt}) == (200, found)


def test_extras_are_part_of_the_name(stocked: Stocked) -> None:
    question = {"namespace": stocked.namespace, "tokens": tokens_of(4)}
    for extras in ({"adapter": {"name": "a", "revision": "r"}}, {"cache_salt": "s"}):
        status, found = stocked.daemon.ask("/v1/match", {**question, **extras})
        assert (status, found["blocks"]) == (200, 0)


def test_match_and_status_count_as_no_request(stocked: Stocked) -> None:
    daemon, question = stocked.daemon, {"namespace": stocked.namespace, "tokens": tokens_of(4)}
    before = daemon.metrics()
    for path, body in (
        ("/v1/match", question),
        ("/v1/explain", question),
        ("/v1/status", None),
        ("/readyz", None),
    ):
        assert daemon.ask(path, body)[0] == 200
    after = daemon.metrics()
    changed = {name for name, _ in before if name.startswith("tierkv_") and name.endswith("_total")}
    assert {key: value for key, value in after.items() if key[0] in changed} == {
        key: value for key, value in before.items() if key[0] in changed
    }


def test_explain_says_why(stocked: Stocked) -> None:
    question = {"namespace": stocked.namespace, "tokens": tokens_of(3, first=7)}
    status, told = stocked.daemon.ask("/v1/explain", question)
    assert status == 200
    assert (told["blocks"], told["usable"], told["causes"]) == (3, 0, {"never_stored": 3})
    assert told["first_missing"]["position"] == 0
    assert "never stored" in told["text"]


def test_prefetch_brings_back_what_left_host_ram(stocked: Stocked) -> None:
    client, daemon = stocked.client, stocked.daemon
    chain = client.open_namespace(spec_of(SALT)).chain(tokens_of(3, first=1))
    client.put(chain, payloads_of(3))
    assert client.flush("nvme").result(PATIENCE_S).failed == 0
    client.evict("host")
    question = {"namespace": stocked.namespace, "tokens": tokens_of(3, first=1)}
    assert daemon.ask("/v1/match", question)[1]["tiers"] == {"host": 0, "nvme": 3}
    status, found = daemon.ask("/v1/prefetch", {**question, "timeout_s": 30})
    assert (status, found["blocks"], found["tiers"]["host"]) == (200, 3, 3)


def test_pin_unpin_and_clear(stocked: Stocked) -> None:
    client, daemon = stocked.client, stocked.daemon
    space = client.open_namespace(spec_of("another tenant"))
    digest = space.namespace.digest.hex()
    client.put(space.chain(tokens_of(2)), payloads_of(2))
    question = {"namespace": digest, "tokens": tokens_of(2)}
    status, pinned = daemon.ask("/v1/pin", {**question, "ttl_s": 3600, "timeout_s": 5})
    assert (status, pinned["pinned"], pinned["budget"]["pinned_bytes"]) == (200, 2, 2 * BLOCK_BYTES)
    leases = daemon.ask("/v1/status")[1]["leases"]
    assert [(one["owner"], one["blocks"], one["namespace"]) for one in leases["leases"]] == [
        ("pin", 2, digest)
    ]
    assert daemon.ask("/v1/unpin", question)[1]["unpinned"] == 2
    assert daemon.ask("/v1/unpin", question)[1]["unpinned"] == 0
    assert daemon.ask("/v1/pin", question)[1]["pinned"] == 2
    status, report = daemon.ask("/v1/clear", {"namespace": digest[:10]})
    assert (status, report["complete"], report["tiers"]["host"]["removed"]) == (200, True, 2)
    assert daemon.ask("/v1/match", question)[1]["blocks"] == 0
    client.put(space.chain(tokens_of(2)), payloads_of(2))
    assert daemon.ask("/v1/clear", {"tenant_salt": "another tenant"})[1]["complete"]
    assert daemon.ask("/v1/match", question)[1]["blocks"] == 0
    assert daemon.ask("/v1/match", {"namespace": stocked.namespace, "tokens": tokens_of(4)})[1]["blocks"] == 4


def test_d29_status_shows_what_is_in_force_and_no_secret(stocked: Stocked) -> None:
    status, answer = stocked.daemon.ask("/v1/status")
    assert status == 200
    settings = {one["key"]: one for one in answer["configuration"]}
    assert settings["host.capacity"]["value"] == "32 MiB"
    assert settings["host.capacity"]["origin"] == f"file {stocked.daemon.config}:host.capacity"
    assert settings["limits.lease_deadline"] == {
        "key": "limits.lease_deadline", "value": "1 min", "origin": "default"
    }  # fmt: skip
    assert answer["pid"] == stocked.daemon.pid
    assert answer["health"] == {"state": "ok", "ready": True, "reasons": []}
    assert set(answer["tiers"]) == {"host", "nvme"}
    assert set(answer["edges"]) == {"host>nvme", "nvme>host"}
    mine = [one for one in answer["sessions"]["sessions"] if one["pid"] == os.getpid()]
    assert [one["owner"] for one in mine] == ["test"]
    known = {one["digest"]: one for one in answer["namespaces"]["latest"]}
    assert known[stocked.namespace]["block_tokens"] == BLOCK_TOKENS
    assert known[stocked.namespace]["has_salt"] is True
    assert TOKEN not in json.dumps(answer)
    assert SALT not in json.dumps(answer)
    assert TOKEN not in stocked.daemon.log


# ---- what is wrong

NAMESPACE = {"namespace": "0" * 64}
HASH = "0" * 64

WRONG: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": ("match", b"{", 400, "the body, 1 bytes, is no JSON"),
    "no UTF-8": ("match", b'{"namespace": "\xff"}', 400, "is no JSON: 'utf-8' codec"),
    "not a number": ("match", b'{"namespace": NaN}', 400, "NaN is no JSON"),
    "a list": ("match", [1], 400, "the body is a list: a JSON object with adapter, cache_salt"),
    "too deep": ("match", b"[" * 60_000, 400, "the body, 60000 bytes, is no JSON"),
    "an unknown word": ("match", {"name_space": "x"}, 400, "'name_space' is not known here"),
    "nothing": ("match", b"null", 400, "the body is nothing (null): a JSON object"),
    "a text": ("clear", "x", 400, "the body is text: a JSON object with everything, namespace, tenant_salt"),
    "a namespace of null": ("match", {"namespace": None, "tokens": [1]}, 400, "namespace = None: the hex of"),
    "a namespace of a number": ("clear", {"namespace": 12345678}, 400, "namespace = 12345678: the hex of"),
    "a salt of no text": ("clear", {"tenant_salt": 8642}, 400, "tenant_salt = ***: text is expected"),
    "a cache salt of no text": (
        "pin",
        {**NAMESPACE, "tokens": [], "cache_salt": [8642]},
        400,
        "cache_salt = ***: text",
    ),
    "a short namespace": ("match", {"namespace": "abc", "tokens": [1]}, 400, "first 8 digits"),
    "no hex": ("match", {"namespace": "z" * 64, "tokens": [1]}, 400, "z': the hex of a namespace's digest"),
    "an unknown namespace": ("match", {**NAMESPACE, "tokens": [1]}, 404, "no namespace begins with"),
    "no prompt": ("match", NAMESPACE, 400, "tokens and hashes are missing"),
    "two prompts": (
        "match",
        {**NAMESPACE, "tokens": [1], "hashes": [HASH]},
        400,
        "tokens and hashes are both given",
    ),
    "tokens that are no numbers": (
        "match",
        {**NAMESPACE, "tokens": [1, "a"]},
        400,
        "tokens[1] = 'a': a list of",
    ),
    "tokens that are no whole numbers": (
        "match",
        {**NAMESPACE, "tokens": [1.5]},
        400,
        "tokens[0] = 1.5: a list",
    ),
    "tokens that are true": ("match", {**NAMESPACE, "tokens": [True]}, 400, "tokens[0] = True: a list"),
    "tokens that are no list": (
        "match",
        {**NAMESPACE, "tokens": "1 2"},
        400,
        "tokens = '1 2': a list of token ids",
    ),
    "hashes that are no list": ("match", {**NAMESPACE, "hashes": HASH}, 400, "hashes = '0000"),
    "a hash that is a number": ("match", {**NAMESPACE, "hashes": [HASH, 5]}, 400, "hashes[1] = 5: a list"),
    "a hash that is none": ("match", {**NAMESPACE, "hashes": ["?"]}, 400, "neither hex nor base64"),
    "a short hash": ("match", {**NAMESPACE, "hashes": [HASH, "abcd"]}, 400, "hashes[1] = 'abcd' has 3 bytes"),
    "extras for hashes": (
        "match",
        {**NAMESPACE, "hashes": [HASH], "cache_salt": "x"},
        400,
        "cache_salt is given beside hashes, which hold it already; leave it out",
    ),
    "an adapter without a name": (
        "match",
        {**NAMESPACE, "tokens": [], "adapter": {}},
        400,
        "adapter.name is missing: text",
    ),
    "an endless wait": (
        "prefetch",
        {**NAMESPACE, "tokens": [1], "timeout_s": 1e9},
        400,
        "timeout_s = 1000000000.0",
    ),
    "a wait of no number": (
        "prefetch",
        {**NAMESPACE, "tokens": [1], "timeout_s": "5"},
        400,
        "timeout_s = '5'",
    ),
    "a pin of no time": ("pin", {"tokens": [1], "ttl_s": -1}, 400, "ttl_s = -1"),
    "a pin for no time": (
        "pin",
        {"tokens": [1], "ttl_s": 0},
        400,
        "ttl_s = 0: more than 0 s are expected; left out",
    ),
    "clear of nothing": ("clear", {}, 400, "none of namespace, tenant_salt and everything given"),
    "clear of two things": ("clear", {**NAMESPACE, "everything": True}, 400, "namespace and everything of"),
    "clear of not everything": ("clear", {"everything": False}, 400, "none of namespace, tenant_salt"),
    "clear of an unknown one": ("clear", NAMESPACE, 404, "no namespace begins with"),
    "clear with a long text": ("clear", b" " * 70_000, 413, "65536 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(stocked: Stocked, case: str) -> None:
    path, body, wanted, text = WRONG[case]
    status, answer = stocked.daemon.ask(f"/v1/{path}", body)
    assert (status, set(answer)) == (wanted, {"error"})
    assert text in answer["error"]["message"]
    assert "8642" not in answer["error"]["message"], "it is in no message what a salt holds"


@pytest.mark.parametrize("name", [name for name, question in QUESTIONS.items() if "tokens" in question.words])
def test_a_question_about_a_prompt_names_the_word_that_it_lacks(stocked: Stocked, name: str) -> None:
    status, answer = stocked.daemon.ask(f"/v1/{name}", {"tokens": [1]})
    assert status == 400
    assert answer["error"]["message"] == (
        "namespace is missing: the hex of a namespace's digest, or at least its first 8 digits (status lists them) "
        "is expected"
    )
    for body in ({}, b""):
        status, answer = stocked.daemon.ask(f"/v1/{name}", body)
        assert (status, "namespace is missing" in answer["error"]["message"]) == (400, True)


def test_a_token_that_does_not_fit(stocked: Stocked) -> None:
    status, answer = stocked.daemon.ask("/v1/match", {"namespace": stocked.namespace, "tokens": [2**40] * 20})
    assert (status, answer["error"]["kind"]) == (400, "bad_identity")


def test_no_such_path_and_no_such_method(stocked: Stocked) -> None:
    status, answer = stocked.daemon.ask("/v2/match", {})
    assert (status, answer["error"]["kind"]) == (404, "not_found")
    assert (
        answer["error"]["message"] == "there is no path '/v2/match': /v1/openapi.json has all that there are"
    )
    status, answer = stocked.daemon.ask("/v1/match", method="GET")
    assert (status, answer["error"]["kind"]) == (405, "method_not_allowed")
    assert answer["error"]["message"] == "'/v1/match' does not take GET but POST"
    assert stocked.daemon.ask("/v1/status", {}, method="POST")[0] == 405


def test_d20_a_question_of_megabytes_is_taken(stocked: Stocked) -> None:
    chain = stocked.chain.namespace.chain(list(range(60_000 * BLOCK_TOKENS)))
    question = {"namespace": stocked.namespace, "hashes": [one.hex() for one in chain.hashes]}
    assert len(json.dumps(question)) > 4 * 10**6
    status, found = stocked.daemon.ask("/v1/match", question)
    assert (status, found["of_blocks"]) == (200, 60_000)


def test_a_body_without_a_length_is_bounded_too(stocked: Stocked) -> None:
    connection = stocked.daemon.connect_http()
    pieces = iter([b" " * 4096] * 40)
    try:
        connection.request(
            "POST", "/v1/clear", pieces, {"Authorization": f"Bearer {TOKEN}"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    except ConnectionError:  # it need not read on in order to refuse
        pass
    finally:
        connection.close()


# ---- numbers


def test_d28_an_idle_scrape_changes_nothing(stocked: Stocked) -> None:
    def counted() -> dict[Any, float]:
        moving = ("process_", "tierkv_scrub", "tierkv_scrubbed")
        return {
            key: value for key, value in stocked.daemon.metrics().items() if not key[0].startswith(moving)
        }

    counted()
    assert counted() == counted()


def test_d28_the_metrics_are_the_store_s_counters(stocked: Stocked) -> None:
    metrics, counters = stocked.daemon.metrics(), stocked.client.stats()["counters"]
    labels_of = {metric.name: metric.labels for metric in METRICS}
    assert counters["stored_blocks_total/host"] >= 4
    for path, value in counters.items():
        name, *values = path.split("/")
        if name.startswith("scrub"):
            continue
        labels = tuple(sorted(zip(labels_of[name], values, strict=True)))
        assert metrics[f"tierkv_{name}", labels] == value, path
    for gauge in exposition.GAUGES:
        if gauge.name != "edge_bytes_per_second":
            assert any(name == f"tierkv_{gauge.name}" for name, _ in metrics), gauge.name
    assert metrics["tierkv_sessions", ()] >= 1
    assert metrics["tierkv_tier_capacity_bytes", (("tier", "host"),)] == 32 * 2**20


def test_the_documentation_has_every_gauge() -> None:
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    assert "\n".join(exposition.table()) in text
    assert "\n".join(exposition.table("histogram", exposition.HISTOGRAMS)) in text
    assert "\n".join(exposition.table("of the process", exposition.PROCESS, "")) in text


def test_the_documentation_has_all_that_is_answered(stocked: Stocked) -> None:
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    for name in {name for name, _ in stocked.daemon.metrics()}:
        family = re.sub("_(bucket|sum|count)$", "", name)
        counter = family.removeprefix(exposition.PREFIX)
        assert any(f"| `{one}` |" in text for one in (family, counter)), f"{name} is not in docs/metrics.md"


# ---- crowds


def test_connections_that_say_nothing_are_bounded_and_keep_nobody_out(stocked: Stocked) -> None:
    """A probe that is refused is a daemon that is killed; and to connect takes no token."""
    daemon = stocked.daemon
    address = (daemon.connect_http().host, daemon.connect_http().port)
    with ExitStack() as open_:
        crowd = [
            open_.enter_context(socket.create_connection(address, PATIENCE_S))
            for _ in range(MOST_CONNECTIONS + 20)
        ]
        assert daemon.ask("/healthz")[0] == 200
        assert daemon.ask("/v1/status")[0] == 200
        cut = 0
        for one in crowd[:20]:
            with suppress(ConnectionResetError):
                assert one.recv(100) == b""
            cut += 1
        assert cut == 20, "the eldest have made way"
    eventually(lambda: _lives(daemon), "it answers again", PATIENCE_S)


def test_who_is_being_answered_makes_no_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "BODY_S", PATIENCE_S)
    with face_here(tmp_path) as face, ExitStack() as open_:

        def connected() -> socket.socket:
            one = open_.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(PATIENCE_S)
            one.connect(f"{tmp_path}/h.sock")
            return one

        for count in range(1, MOST_CONNECTIONS + 1):
            connected().sendall(b"POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
            eventually(lambda n=count: face.requests() == n, "it is being answered", PATIENCE_S)
        assert connected().recv(100).startswith(b"HTTP/1.1 503")


def _lives(daemon: Daemon) -> bool:
    return daemon.ask("/healthz")[0] == 200


def test_noise_does_not_flood_the_log(stocked: Stocked) -> None:
    daemon = stocked.daemon
    before = daemon.log.count("\n")
    address = (daemon.connect_http().host, daemon.connect_http().port)
    for noise in (
        b"\0" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/clear HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        for _ in range(20):
            with socket.create_connection(address, PATIENCE_S) as one:
                one.sendall(noise)
                one.shutdown(socket.SHUT_WR)
                while one.recv(4096):
                    pass
    for _ in range(20):
        assert daemon.ask("/v1/status", token="wrong")[0] == 401
    assert daemon.ask("/v1/status")[0] == 200
    assert daemon.log.count("\n") - before < 60


def test_only_so_many_calls_at_once_and_only_so_many_wait() -> None:
    async def crowd() -> list[str]:
        workers = Workers[int]("test", at_once=2, waiting=1, wait_s=PATIENCE_S)
        gate, begun = threading.Event(), threading.Semaphore(0)

        def work() -> int:
            begun.release()
            assert gate.wait(PATIENCE_S)
            return 7

        running = [asyncio.create_task(workers.run(work)) for _ in range(2)]
        for _ in running:
            assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S)
        waiting = asyncio.create_task(workers.run(work))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await workers.run(work)
        running[0].cancel()  # who asked has gone, but its thread has not
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await workers.run(work)
        gate.set()
        assert await running[1] == 7
        assert await waiting == 7
        assert await workers.run(work) == 7
        return []

    asyncio.run(crowd())


# ---- in this process, where time can be made short


@contextmanager
def face_here(tmp_path: Path) -> Iterator[HttpFace]:
    config = load_config(environ={}, host_capacity="4 MiB", sidecar_http=f"unix://{tmp_path}/h.sock")
    store = store_from(config)
    try:
        face = HttpFace(Operator(store, config, list), list, config.sidecar, None, store.clock)
        face.start()
        try:
            yield face
        finally:
            face.close()
    finally:
        store.close()


@pytest.mark.parametrize("said", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_who_falls_silent_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Before a request, in the middle of one, and after one."""
    monkeypatch.setattr(http, "QUIET_S", 0.2)
    monkeypatch.setattr(http, "LOOK_S", 0.02)
    with face_here(tmp_path), socket.socket(socket.AF_UNIX) as one:
        one.settimeout(PATIENCE_S)
        one.connect(f"{tmp_path}/h.sock")
        one.sendall(said)
        heard = b""
        try:
            while more := one.recv(4096):
                heard += more
        except ConnectionResetError:
            pass
        assert heard.startswith(b"HTTP/1.1 200" if said.endswith(b"\r\n\r\n") else b"")


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "BODY_S", 0.05)
    with face_here(tmp_path), socket.socket(socket.AF_UNIX) as one:
        one.settimeout(PATIENCE_S)
        one.connect(f"{tmp_path}/h.sock")
        one.sendall(b"POST /v1/clear HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert one.recv(4096).startswith(b"HTTP/1.1 408")


def test_long_bodies_take_a_bounded_amount_of_memory_all_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as connections, each begun and not ended, were 3 GiB."""
    monkeypatch.setattr(http_app, "BODY_S", PATIENCE_S)
    most_bytes = QUESTIONS["match"].most_bytes
    head = b"POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % most_bytes
    held = http_app.MOST_BODY_BYTES // most_bytes
    with face_here(tmp_path), ExitStack() as open_:
        crowd = [open_.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(held + 1)]
        for one in crowd:
            one.settimeout(PATIENCE_S)
            one.connect(f"{tmp_path}/h.sock")
            with suppress(ConnectionError):  # the last is refused before it has said all
                one.sendall(head + b" " * (most_bytes - 1))
        readable, _, _ = select.select(crowd, [], [], PATIENCE_S)
        (refused,) = readable
        assert refused.recv(4096).startswith(b"HTTP/1.1 503")
        with closing(UnixConnection(f"{tmp_path}/h.sock")) as connection:
            connection.request("GET", "/v1/status")
            assert connection.getresponse().status == 200, "who brings little is answered"
        for one in set(crowd) - {refused}:
            one.close()

        def room_again() -> bool:
            with closing(UnixConnection(f"{tmp_path}/h.sock")) as connection:
                connection.request("POST", "/v1/match", b" " * (most_bytes - 2) + b"{}")
                return connection.getresponse().status == 400

        eventually(room_again, "those who have left hold nothing", PATIENCE_S)


def test_what_nobody_thought_of_is_an_error_in_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_type))
    with face_here(tmp_path) as face:
        monkeypatch.setattr(face._operator, "ask", lambda name, body: 1 / 0)
        with closing(UnixConnection(f"{tmp_path}/h.sock")) as connection:
            connection.request("GET", "/v1/status")
            answer = connection.getresponse()
            assert answer.status == 500
            assert json.loads(answer.read())["error"]["kind"] == "internal"
    assert seen == [ZeroDivisionError]
