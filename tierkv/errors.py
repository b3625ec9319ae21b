"""Every error that tierkv raises on purpose.

A cache may always answer "miss": inside an engine's step nothing here is raised. These errors reach whoever
starts, configures or misuses tierkv.

    TierKVError
    ├── ConfigError            a setting is unknown, impossible or contradicts another
    │   └── MissingDependency  a feature needs a package that is not installed
    ├── ArgumentError          a verb was given something of the wrong kind (also a TypeError)
    ├── LayoutError            a declared KV layout is impossible
    ├── IdentityError          what names the bytes (weights, adapter, salt ...) is missing or contradictory
    ├── FrameError             a stored frame does not prove itself (also an outcome: CORRUPT)
    ├── CodecError             stored bytes cannot be decoded
    │   └── CodecAbsent        not by this process, which lacks the codec or its package: others may
    ├── HandleError            a handle was used after it was consumed, or by the wrong owner
    ├── TierError              a tier cannot start or answer
    │   ├── TierUnavailable    it is down, cut off or its breaker is open
    │   ├── DirectoryInUse     another process owns the directory
    │   └── FormatError        the stored format is from the future, or not ours
    ├── AddressInUse           another process listens where a daemon should
    ├── SidecarError           the private sidecar of an engine cannot be started
    ├── Away                   the daemon does not answer
    ├── ClosedError            the store was closed
    └── ForkError              an object was used in a child of the process that made it
"""

from __future__ import annotations


class TierKVError(Exception):
    """Base of all errors that tierkv raises on purpose."""


class ConfigError(TierKVError, ValueError):
    """A setting is wrong. The message names the key, the value and the way out."""

    def __init__(self, key: str, value: object, hint: str) -> None:
        super().__init__(f"{key} = {value!r}: {hint}")
        self.key = key
        self.value = value
        self.hint = hint


class MissingDependency(ConfigError):
    """A feature was asked for whose package is not installed. ``value`` is what the setting ``key`` holds; ``origin``
    says where that was set."""

    def __init__(self, key: str, value: object, package: str, extra: str, origin: str = "") -> None:
        super().__init__(key, value, not_installed(package, extra) + origin)
        self.package = package
        self.extra = extra


def not_installed(package: str, extra: str) -> str:
    """The hint for a package that an extra of tierkv brings."""
    return (
        f"the package {package!r} is not installed; install it with: pip install 'tierkv-store[{extra}]' "
        f"(in a clone of the repository: pip install '.[{extra}]')"
    )


class ArgumentError(TierKVError, TypeError):
    """A verb was given something of the wrong kind; nothing was done. The message names the verb, the argument, the
    value and what it should be."""

    def __init__(self, verb: str, argument: str, value: object, should_be: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{verb}: {argument} = {shown}: give {should_be}")
        self.argument = argument
        self.value = value


class LayoutError(TierKVError, ValueError):
    """A declared KV layout is impossible."""


class IdentityError(TierKVError, ValueError):
    """What names the bytes is missing or contradictory, so the bytes must not be cached under it."""


class FrameError(TierKVError):
    """A stored frame does not prove itself; ``reason`` is one word for the metrics."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class CodecError(TierKVError):
    """Stored bytes cannot be decoded into the expected length."""


class CodecAbsent(CodecError):
    """The block may be sound, but this process lacks its codec, or the package that the codec needs."""


class HandleError(TierKVError, RuntimeError):
    """A handle was used after it was consumed."""


class TierError(TierKVError):
    """A tier cannot start or answer."""


class TierUnavailable(TierError):
    """The tier is down, cut off, or its breaker is open."""


class DirectoryInUse(TierError):
    """Another process owns the directory."""

    def __init__(self, path: str, owner_pid: int | None) -> None:
        who = f"process {owner_pid}" if owner_pid is not None else "another process"
        super().__init__(
            f"{path} is owned by {who}; one process owns a directory: stop it or choose another path"
        )
        self.path = path
        self.owner_pid = owner_pid


class FormatError(TierError):
    """A directory or frame has a format version that this release does not read."""


class AddressInUse(TierKVError):
    """Another process listens where this daemon should. That is no mistake of the configuration's: it may end."""

    def __init__(self, key: str, value: str, hint: str) -> None:
        super().__init__(f"{key} = {value!r}: {hint}")


class SidecarError(TierKVError):
    """The private sidecar of an engine cannot be started."""


class Away(TierKVError):
    """The daemon does not answer: a call that loads or stores is a miss then, one of people raises this. ``asked``: it
    may have got the question."""

    def __init__(self, text: str, *, asked: bool = False) -> None:
        super().__init__(text)
        self.asked = asked


class ClosedError(TierKVError, RuntimeError):
    """The store was closed."""


class ForkError(TierKVError, RuntimeError):
    """An object was used in a child of the process that made it."""
