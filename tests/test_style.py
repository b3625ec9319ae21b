"""Rules of style that no linter knows: short files, no blind `except`, no pickle."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 450
BLIND = {"Exception", "BaseException"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}

# (file, rule) -> why it may. Rules: "long", "blind except", "pickle".
ALLOWED: dict[tuple[str, str], str] = {}


def product_files() -> list[Path]:
    """Each file once: what is reached through the links tierkv/tiers and tierkv/policies is skipped."""
    links = [ROOT / "tierkv" / "tiers", ROOT / "tierkv" / "policies"]
    return [
        path
        for folder in ("tierkv", "tiers", "policies")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(path.is_relative_to(link) for link in links)
    ]


def names_in(handled: ast.expr | None) -> set[str]:
    match handled:
        case ast.Tuple(elts=several):
            return set().union(*map(names_in, several))
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {name}
    return set()


def offences(source: str) -> Iterator[tuple[int, str]]:
    lines = source.count("\n")
    if lines > MAX_LINES:
        yield lines, "long"
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ExceptHandler(type=handled) if handled is None or names_in(handled) & BLIND:
                yield node.lineno, "blind except"
            case ast.Import(names=aliases) if {alias.name.split(".")[0] for alias in aliases} & PICKLES:
                yield node.lineno, "pickle"
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] in PICKLES:
                yield node.lineno, "pickle"


def test_style() -> None:
    found, used = [], set()
    for path in product_files():
        name = path.relative_to(ROOT).as_posix()
        for line, rule in offences(path.read_text()):
            used.add((name, rule))
            if (name, rule) not in ALLOWED:
                found.append(f"{name}:{line}: {rule}")
    assert not found, "\n".join(found)
    assert not ALLOWED.keys() - used, f"no longer needed in ALLOWED: {ALLOWED.keys() - used}"


def test_the_rules_have_teeth() -> None:
    code = (
        "import pickle\nfrom pickle import loads\n"
        "try: ...\nexcept: ...\n"
        "try: ...\nexcept (OSError, Exception): ...\n"
        "try: ...\nexcept OSError: ...\n"
    )
    assert sorted(offences(code)) == [(1, "pickle"), (2, "pickle"), (4, "blind except"), (6, "blind except")]
    assert list(offences("\n" * (MAX_LINES + 1))) == [(MAX_LINES + 1, "long")]
