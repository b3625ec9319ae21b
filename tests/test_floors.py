"""The floors of the design: a module imports only from lower floors, and from its own without a cycle.

Imports inside functions and under TYPE_CHECKING count like any other, and so does `import_module("tierkv.x")`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up; names are relative to `tierkv`, and "x.*" is the package x with all of its modules.
FLOORS = {
    "ground": "errors ids units clock logs",
    "types": "layout keys frame codec codec_numbers codec_planes codec_scaled tier policy retention",
    "mechanisms": "tuning pages slot_table arena handles loans tenancy index turns jobs flights quote guard "
    "bounded_lock stretch_copies copier executor due supervision digest departures differences explanation "
    "ceiling hot timing traffic page_runs streams routes stream_jobs filling stream_copier "
    "cuda.* any_copier",
    "plug-ins": "tiers.* policies.*",
    "machine": "store awaited flushes residency fallback scrub health reaper picking events metrics registry "
    "staging arriving parting exiting catalog room quotas entering intake edges expiring landing "
    "loading demotion leaving outgrowing paging leases upkeep clearing probing prefetching flush "
    "reading announcing watching writing explaining totals pins retaining config config_table "
    "config_kinds config_check config_memory config_sidecar",
    "faces": "client aio tracing arguments namespaces assembly cli_version cli_config cli_ask cli_prompts "
    "cli_status cli_top cli_top_picture cli_doctor cli_probes cli_record daemon.* engines.* cli demo.* replay.* "
    "testing.*",
}
ORDER = list(FLOORS)
PLUGIN_MAY_IMPORT = {"ground", "types"}  # besides its own package and these modules:
PLUGIN_MAY_ALSO_IMPORT = {"tierkv.arena"}
FRONT = "tierkv"  # the package itself: above all floors, so nobody imports from it but its version


def sources() -> dict[str, Path]:
    """Every product module by its dotted name; tierkv/tiers and tierkv/policies are links, hence the two skips."""
    found = {}
    for folder, prefix in (("tierkv", "tierkv"), ("tiers", "tierkv.tiers"), ("policies", "tierkv.policies")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "tierkv" and inside.parts[0] in ("tiers", "policies"):
                continue
            parts = [part for part in inside.with_suffix("").parts if part != "__init__"]
            found[".".join([prefix, *parts])] = path
    return found


def floor_of(module: str) -> str | None:
    for floor, names in FLOORS.items():
        for name in names.split():
            full = f"tierkv.{name.removesuffix('.*')}"
            if module == full or (name.endswith(".*") and module.startswith(f"{full}.")):
                return floor
    return None


def imports(module: str, tree: ast.AST, modules: set[str], *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, imported module) for each import of ours, as exact as can be told: `from tierkv import arena` is
    an import of tierkv.arena, `from tierkv.arena import Arena` too, `from tierkv import Client` one of tierkv."""
    package = module if is_package else module.rpartition(".")[0]

    def resolve(base: str, name: str) -> str:
        return f"{base}.{name}" if f"{base}.{name}" in modules else base

    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=base, names=aliases, level=level):
                if level:
                    up = package.split(".")[: len(package.split(".")) - level + 1]
                    base = ".".join([*up, base] if base else up)
                assert base is not None
                names = [resolve(base, alias.name) for alias in aliases if alias.name != "__version__"]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names = [name]
        for name in names:
            if name.split(".")[0] == "tierkv":
                yield node.lineno, name


def verdict(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`, or None when it may."""
    if module == FRONT:
        return None
    if imported == FRONT:
        return "imports from the front `tierkv`, which is above all floors: name the module instead"
    mine, theirs = floor_of(module), floor_of(imported)
    if mine is None or theirs is None:
        return f"{module if mine is None else imported} is on no floor: give it one in FLOORS"
    if mine == "plug-ins":
        own_package = ".".join(module.split(".")[:2])
        if (
            theirs in PLUGIN_MAY_IMPORT
            or imported in PLUGIN_MAY_ALSO_IMPORT
            or f"{imported}.".startswith(f"{own_package}.")
        ):
            return None
        return f"a plug-in imports ground, types, arena and its own package, not {imported} ({theirs})"
    if ORDER.index(theirs) > ORDER.index(mine):
        return f"{mine} imports {imported}, which is on the higher floor {theirs}"
    return None


@cache
def edges() -> tuple[tuple[str, int, str], ...]:
    found = sources()
    return tuple(
        (module, line, imported)
        for module, path in found.items()
        for line, imported in imports(
            module, ast.parse(path.read_text()), set(found), is_package=path.name == "__init__.py"
        )
        if imported != module
    )


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return None
        for other in sorted(graph.get(node, ())):
            if cycle := walk(other, [*trail, node]):
                return cycle
        done.add(node)
        return None

    for start in sorted(graph):
        if cycle := walk(start, []):
            return cycle
    return None


def test_every_module_is_on_a_floor() -> None:
    homeless = [module for module in sources() if module != FRONT and floor_of(module) is None]
    assert not homeless, f"on no floor, give them one in FLOORS: {homeless}"


def test_nothing_imports_upwards() -> None:
    wrong = {
        f"{module}:{line}: {why}": None
        for module, line, imported in edges()
        if (module == FRONT or floor_of(module)) and (why := verdict(module, imported))
    }
    assert not wrong, "\n".join(wrong)


def test_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for module, _, imported in edges():
        if module != FRONT:
            graph.setdefault(module, set()).add(imported)
    cycle = find_cycle(graph)
    assert cycle is None, " -> ".join(cycle or [])


def test_plugin_folders_are_linked_and_flat() -> None:
    for folder in ("tiers", "policies"):
        link = ROOT / "tierkv" / folder
        assert link.is_symlink(), f"{link} is no symlink"
        assert str(link.readlink()) == f"../{folder}"
        nested = [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT / folder]
        assert not nested, f"{folder}/ stays flat: {nested}"


# The test's own teeth.


@pytest.mark.parametrize(
    ("module", "code", "refused"),
    [
        ("tierkv.ids", "from tierkv.keys import BlockKey", True),
        ("tierkv.ids", "def f():\n    import tierkv.store", True),
        ("tierkv.ids", "if TYPE_CHECKING:\n    from tierkv import store", True),
        ("tierkv.ids", "from . import store", True),
        ("tierkv.ids", "from .keys import BlockKey", True),
        ("tierkv.ids", "importlib.import_module('tierkv.store')", True),
        ("tierkv.store", "from tierkv import Client", True),
        ("tierkv.cli", "from tierkv import __version__", False),
        ("tierkv.store", "from tierkv.tiers.host import HostTier", False),
        ("tierkv.keys", "from tierkv.ids import Part\nimport numpy", False),
        ("tierkv.tiers.host", "from tierkv.arena import Arena", False),
        ("tierkv.tiers.host", "from .helper import x", False),
        ("tierkv.tiers.host", "from tierkv.index import Index", True),
        ("tierkv.tiers.host", "from tierkv.policies.lru import Lru", True),
        ("tierkv.engines.hf", "from ..client import Client", False),
        ("tierkv.engines.hf", "from ..unheard_of import x", True),
    ],
)
def test_verdicts(module: str, code: str, refused: bool) -> None:
    known = {"tierkv.store", "tierkv.keys", "tierkv.ids"}
    found = list(imports(module, ast.parse(code), known, is_package=False))
    assert any(verdict(module, imported) for _, imported in found) == refused


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}}) is None
