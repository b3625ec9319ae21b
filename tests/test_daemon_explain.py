"""What an engine at a daemon learns of others by ``explain``: nothing. Operators learn all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import payloads_of, spec_of
from tests.daemon_process import running_daemon

HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
"""By an engine's scheme, which knows no tenants: the first block is called the same in every namespace."""


def opened(client: Any, name: str) -> Any:
    return client.open_namespace(spec_of(engine=f"engine of {name}", salt=name, hash_scheme="vllm"))


@pytest.mark.parametrize("opened_by_bob", [False, True])
def test_explain_names_no_namespace_of_another_tenant(tmp_path: Path, opened_by_bob: bool) -> None:
    with running_daemon(tmp_path) as daemon, daemon.client() as alice, daemon.client() as bob:
        its = opened(alice, "alice").chain(engine_hashes=HASHES, num_tokens=64)
        assert alice.put(its, payloads_of(its)).stored == 4
        chain = opened(bob, "bob").chain(engine_hashes=HASHES, num_tokens=64)
        if opened_by_bob:
            opened(bob, "alice")
        told = bob.explain(chain)
        assert ("engine of alice" in str(told)) == opened_by_bob
        assert [twin.namespace for twin in told.twins] == [its.namespace.digest] * opened_by_bob
