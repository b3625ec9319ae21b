"""The contract of a blob tier on the real server, over TCP, a unix socket, TLS, and on the embedded server."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
import valkey

from tests.valkey_server import ValkeyServer, name_of, running_server
from tierkv.ids import BlockKey
from tierkv.testing.blob_tier import BlobTierContract
from tierkv.testing.faults.proxy import TcpProxy, proxy_before
from tierkv.tier import BlobTier
from tierkv.tiers.valkey import ValkeyTier
from tierkv.tiers.valkey_url import TlsFiles
from tierkv.units import MIB


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def proxy(server: ValkeyServer, authority: trustme.CA) -> Iterator[TcpProxy]:
    """TLS before the server, which has none of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with proxy_before(server.path, context) as proxy:
        yield proxy


class OnAServer(BlobTierContract):
    """A server of its own for the module, emptied for each tier."""

    server: ValkeyServer

    @pytest.fixture(autouse=True)
    def _server(self, server: ValkeyServer) -> None:
        self.server = server

    def tier_at_the_server(self) -> ValkeyTier:
        return ValkeyTier(self.server.address)

    def make_tier(self) -> ValkeyTier:
        self.server.do("FLUSHALL")
        return self.tier_at_the_server()

    def reopen(self, tier: BlobTier) -> ValkeyTier:
        return self.tier_at_the_server()

    def peek(self, tier: BlobTier, key: BlockKey) -> bytes | None:
        value = self.server.do("GET", name_of(key))
        assert value is None or isinstance(value, bytes)
        return value

    def poke(self, tier: BlobTier, key: BlockKey, raw: bytes) -> None:
        self.server.do("SET", name_of(key), raw)


class TestTcp(OnAServer):
    pass


class TestUnix(OnAServer):
    def tier_at_the_server(self) -> ValkeyTier:
        return ValkeyTier(self.server.unix_address)


class TestTls(OnAServer):
    @pytest.fixture(autouse=True)
    def _tls(self, proxy: TcpProxy, authority: trustme.CA, tmp_path: Path) -> None:
        self.proxy = proxy
        self.files = TlsFiles(ca_file=str(tmp_path / "ca.pem"))
        authority.cert_pem.write_to_path(self.files.ca_file)

    def tier_at_the_server(self) -> ValkeyTier:
        return ValkeyTier(f"valkeys://localhost:{self.proxy.port}", tls_files=self.files)


class TestEmbedded(BlobTierContract):
    def make_tier(self) -> ValkeyTier:
        return ValkeyTier("embedded", embedded_bytes=128 * MIB)

    def _client(self, tier: BlobTier) -> valkey.Valkey:
        return valkey.Valkey(unix_socket_path=str(tier.status()["embedded_socket"]))

    def peek(self, tier: BlobTier, key: BlockKey) -> bytes | None:
        with self._client(tier) as client:
            value = client.get(name_of(key))
            assert value is None or isinstance(value, bytes)
            return value

    def poke(self, tier: BlobTier, key: BlockKey, raw: bytes) -> None:
        with self._client(tier) as client:
            client.set(name_of(key), raw)
