"""Addresses: what they mean, what is refused, and that no secret is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from tierkv.errors import ConfigError
from tierkv.tiers.valkey import ValkeyTier
from tierkv.tiers.valkey_url import Address, TlsFiles, parse_address, redacted, tls_context


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("valkey://cache", Address(host="cache")),
        ("valkey://cache:7000", Address(host="cache", port=7000)),
        ("valkey://cache:7000/3", Address(host="cache", port=7000, database=3)),
        ("valkey://[::1]:7000/", Address(host="::1", port=7000)),
        ("valkey://[fe80::1]", Address(host="fe80::1")),
        ("valkeys://cache:7000", Address(host="cache", port=7000, tls=True)),
        ("valkey://ann:s3cret@cache", Address(host="cache", user="ann", password="s3cret")),
        ("valkey://:s3cret@cache", Address(host="cache", password="s3cret")),
        ("valkey://a%3Ab:p%40s%2Fs@cache", Address(host="cache", user="a:b", password="p@s/s")),
        ("valkey://ann:p@s/w:d@cache:1/2", Address(host="cache", port=1, database=2, user="ann", password="p@s/w:d")),
        ("unix:///run/valkey.sock", Address(path="/run/valkey.sock")),
        ("unix://ann:s3cret@/run/v%20k", Address(path="/run/v k", user="ann", password="s3cret")),
    ],
)  # fmt: skip
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    shown = f"{address} {address!r}"
    for secret in filter(None, (address.user, address.password)):
        assert secret not in shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cache:6379", "use valkey://"),
        ("redis://cache", "use valkey://"),
        ("valkey://", "no host"),
        ("valkey://:6379", "no host"),
        ("valkey://ann:s3cret@cache:port", "port is a number"),
        ("valkey://ann:s3cret@cache:0", "port is a number"),
        ("valkey://ann:s3cret@cache:65536", "port is a number"),
        ("valkey://ann:s3cret@cache:1/x", "database is a number"),
        ("valkey://ann:s3cret@cache:1/-1", "database is a number"),
        ("valkey://ann:s3cret@cache?db=1", "no ?query"),
        ("valkey://ann:s3cret@::1", "brackets"),
        ("valkey://ann:s3cret@[::1", "brackets"),
        ("valkey://ann@cache", "needs a password"),
        ("valkey://ann:s3cret@a:1,b:2", "clusters are not supported"),
        ("valkey-cluster://ann:s3cret@a:1", "clusters are not supported"),
        ("unix://ann:s3cret@run/valkey.sock", "absolute path"),
        ("unix:///" + "x" * 107, "at most 107 bytes"),
        ("ann:s3cret@cache", "use valkey://"),
    ],
)
def test_d29_bad_addresses(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ValkeyTier(text)
    message = str(caught.value)
    assert says in message
    assert message.startswith("valkey.url = ")
    assert "s3cret" not in message
    assert "ann" not in message


def test_redacted_leaves_what_is_no_secret() -> None:
    assert redacted("valkey://u:p@h:1/2") == "valkey://***@h:1/2"
    assert redacted("valkey://h:1/2") == "valkey://h:1/2"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (TlsFiles(ca_file="/does/not/exist"), "valkey.ca = '/does/not/exist'"),
        (TlsFiles(ca_file=__file__), "valkey.ca"),
        (TlsFiles(client_cert_file="/does/not/exist"), "valkey.cert = '/does/not/exist'"),
        (TlsFiles(client_key_file="/some/key"), "set valkey.cert"),
    ],
)
def test_d29_bad_tls_files(files: TlsFiles, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ValkeyTier("valkeys://cache", tls_files=files)


def test_tls_checks_host_and_certificate_with_a_ca_of_our_own(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    context = tls_context(TlsFiles(ca_file=str(tmp_path / "ca.pem")))
    assert context.check_hostname
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("workers", 0, "connections"),
        ("ttl_s", 0.0, "ttl"),
        ("ttl_s", float("nan"), "ttl"),
        ("connect_timeout_s", -1.0, "connect_timeout_s"),
    ],
)
def test_d29_bad_options(option: str, value: float, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"valkey.{key} = "):
        ValkeyTier("valkey://cache", **{option: value})  # type: ignore[arg-type]


def test_d29_an_embedded_server_needs_room() -> None:
    with pytest.raises(ConfigError, match=r"valkey.embedded_memory = 1000"):
        ValkeyTier("embedded", embedded_bytes=1000)
