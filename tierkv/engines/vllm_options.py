"""What ``kv_connector_extra_config`` may say, and what a request may say in its ``kv_transfer_params``.

The table of all options is in ``docs/engines/vllm.md``. Wrong ones are refused when the engine starts; in a request,
which somebody else may have written, they are logged and passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tierkv.config_table import BY_KEYWORD
from tierkv.daemon.tenant import tenant_of
from tierkv.errors import ConfigError
from tierkv.retention import KEEP, Retention

EXTRA = "kv_connector_extra_config"
PARAMS = "tierkv"
"""The key in ``kv_transfer_params`` under which a request's wishes are."""

MOST_TIMEOUT_S: Final = 600.0
"""Of a request, which anybody may write: a thread waits so long for its blocks."""


@dataclass(frozen=True)
class Options:
    """Of one engine; the same in all its processes."""

    socket: str | None = None
    """``unix:///path`` of a shared sidecar; ``None``: a private one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the private sidecar, by keyword (see ``docs/configuration.md``)."""
    salt: str | None = None
    quotas: Mapping[str, Any] | None = None
    load_timeout_s: float = 2.0
    """So long a request waits for its blocks, from the question on; then it computes what has not come."""
    watch_s: float = 30.0
    """So long a request waits that was told that another engine computes its blocks."""
    grace_s: float = 1.0
    """So long it waits for that other engine to say so."""
    block_tokens: int | None = None
    """Tokens of a block in the store; ``None``: the least that makes its smallest part worth an I/O."""
    min_load_tokens: int = 1
    """Fewer than this beyond what the engine has itself are computed, not loaded."""
    save_budget: float = 0.25
    """The share of the engine's pages that may be held by copies to host RAM; beyond it a save is put off."""
    weights_revision: str | None = None
    """What names the weights where neither a folder nor a hub's commit does."""
    load: bool = True
    save: bool = True


_KINDS: Mapping[str, tuple[type, ...]] = {
    "socket": (str,),
    "salt": (str,),
    "quotas": (dict,),
    "load_timeout_s": (int, float),
    "watch_s": (int, float),
    "grace_s": (int, float),
    "block_tokens": (int,),
    "min_load_tokens": (int,),
    "save_budget": (int, float),
    "weights_revision": (str,),
}


def options_of(extra: Mapping[str, Any], *, producer: bool, consumer: bool) -> Options:
    """Raises ``ConfigError`` with the option, its value and the way out."""
    if not isinstance(extra, Mapping):
        raise ConfigError(EXTRA, extra, 'it is an object of options, such as {"host_capacity": "32 GiB"}')
    own: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in extra.items():
        if name in _KINDS:
            own[name] = _checked(name, value)
        elif name in BY_KEYWORD:
            settings[name] = value
        else:
            known = ", ".join([*_KINDS, "and the settings of docs/configuration.md as host_capacity"])
            raise ConfigError(f"{EXTRA}.{name}", value, f"it is not known; there are {known}")
    if settings and "socket" in own:
        name = next(iter(settings))
        raise ConfigError(
            f"{EXTRA}.{name}", settings[name], "a shared sidecar has its own configuration; leave it out"
        )
    tenant_of(own.get("salt"), own.get("quotas"))
    return Options(**own, settings=settings, save=producer, load=consumer)


def _checked(name: str, value: Any) -> Any:
    kinds = _KINDS[name]
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{EXTRA}.{name}", value, f"it must be of the kind {wanted}")
    if int in kinds and not value > 0:
        raise ConfigError(f"{EXTRA}.{name}", value, "it must be above 0")
    if name == "save_budget" and value > 1:
        raise ConfigError(f"{EXTRA}.{name}", value, "it is a share, at most 1")
    return value


STRONG_HASHES = ("sha256", "sha256_cbor")


def check_hashes(name: str, options: Options) -> None:
    """Raises ``ConfigError`` for hashes of vLLM's that two prompts could share, in a store that others share or that
    outlives the process: those resist no collisions and begin with a random seed."""
    shared = options.socket is not None or any(
        options.settings.get(key) for key in ("nvme_path", "valkey_url")
    )
    if shared and name not in STRONG_HASHES:
        raise ConfigError(
            "prefix_caching_hash_algo",
            name,
            "its hashes are neither collision-resistant nor, without PYTHONHASHSEED, the same in two processes, and "
            f"this store is shared or outlives the process; set --prefix-caching-hash-algo {STRONG_HASHES[1]}",
        )


@dataclass(frozen=True)
class Wishes:
    """Of one request."""

    retention: Retention = KEEP
    load: bool = True
    timeout_s: float | None = None
    watch: bool = False
    """Another engine was asked to compute the prompt: wait for its blocks."""
    announce: bool = False
    """Another engine waits for the blocks of this prompt: tell it that they are coming."""


NO_WISHES = Wishes()
_RETENTION = ("priority", "ttl_s", "coldest", "no_store")


def wishes_of(params: Mapping[str, Any] | None) -> Wishes:
    """``{"tierkv": {"priority": 3, "ttl_s": 600, "no_store": true, "no_load": true, "timeout_s": 0.5},
    "do_remote_prefill": true, "do_remote_decode": true}``, all of it optional. Raises ``ConfigError``."""
    if not params:
        return NO_WISHES
    said = params.get(PARAMS) or {}
    if not isinstance(said, Mapping):
        raise ConfigError(f"kv_transfer_params.{PARAMS}", said, "it must be a map")
    unknown = set(said) - {*_RETENTION, "no_load", "timeout_s"}
    if unknown:
        raise ConfigError(
            f"kv_transfer_params.{PARAMS}", sorted(unknown), f"known are {_RETENTION}, no_load, timeout_s"
        )
    timeout_s = said.get("timeout_s")
    if timeout_s is not None and (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not 0 <= timeout_s <= MOST_TIMEOUT_S
    ):
        hint = f"give seconds, at most {MOST_TIMEOUT_S:g}"
        raise ConfigError(f"kv_transfer_params.{PARAMS}.timeout_s", timeout_s, hint)
    retention = Retention(**{name: said[name] for name in _RETENTION if name in said})
    watch, announce = (bool(params.get(name)) for name in ("do_remote_prefill", "do_remote_decode"))
    return Wishes(retention, not said.get("no_load", False), timeout_s, watch, announce)
