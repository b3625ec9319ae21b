"""Certificates for a TLS proxy: good ones, ones of an authority that nobody trusts, ones for another host.

Needs the package ``trustme``, which the extra ``testing`` brings.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from tierkv.tiers.valkey_url import TlsFiles

HOST = "localhost"


class Authority:
    """An authority of a test's own; its files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ours, self._stranger = trustme.CA(), trustme.CA()
        self._ours.cert_pem.write_to_path(folder / "ours.pem")
        self._stranger.cert_pem.write_to_path(folder / "stranger.pem")

    def server(self, name: str = HOST) -> ssl.SSLContext:
        """For ``TcpProxy(tls=...)``: a server with a certificate for ``name``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ours.issue_cert(name).configure_cert(context)
        return context

    def client(self, server_name: str = "") -> TlsFiles:
        """What a client needs that trusts this authority."""
        return TlsFiles(ca_file=str(self._folder / "ours.pem"), server_name=server_name)

    def client_with_bad_ca(self, server_name: str = "") -> TlsFiles:
        """What a client has that trusts another authority."""
        return TlsFiles(ca_file=str(self._folder / "stranger.pem"), server_name=server_name)
