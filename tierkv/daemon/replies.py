"""What a daemon answers, as the client's side understands it: results, and errors as exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from tierkv.daemon.wire import WireError
from tierkv.errors import (
    Away,
    ConfigError,
    HandleError,
    IdentityError,
    LayoutError,
    TierError,
    TierKVError,
)

T = TypeVar("T")

_ERRORS: Final[dict[str, type[TierKVError]]] = {
    "HandleError": HandleError,
    "IdentityError": IdentityError,
    "LayoutError": LayoutError,
    "TierError": TierError,
    "TierUnavailable": TierError,
    "WireError": WireError,
}


class NotKnown(TierKVError):
    """The daemon does not know a namespace or a handle (any more)."""


class VersionError(TierKVError):
    """Client and daemon speak different versions of the protocol."""


def result_of(reply: Any) -> dict[str, Any]:
    """The words of a reply. Raises what the daemon says, and ``Away`` for what is no reply."""
    if type(reply) is list and len(reply) == 2 and reply[0] == "ok" and type(reply[1]) is dict:
        return reply[1]
    match reply:
        case ["error", "UnknownNamespace" | "UnknownHandle", str(text)]:
            raise NotKnown(text)
        case ["error", "ClosedError" | "TimeoutError", str(text)]:
            raise Away(f"the daemon could not answer: {text}")
        case ["error", "VersionError", str(text)]:
            raise VersionError(f"{text}; use the same release of tierkv on both sides")
        case ["error", "ConfigError", str(key), value, str(hint)]:
            raise ConfigError(key, value, hint)
        case ["error", str(kind), str(text)]:
            raise _ERRORS.get(kind, TierKVError)(text)
    raise Away("the daemon's answer is no reply", asked=True)


def heard(hear: Callable[[dict[str, Any]], T], reply: dict[str, Any]) -> T:
    """What the words of a reply say. Raises ``Away`` where they cannot be understood: who calls has done nothing wrong
    when a daemon of another release leaves one out."""
    try:
        return hear(reply)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, WireError) as error:
        raise Away(f"the daemon's answer makes no sense: {error!r}", asked=True) from error
