"""What is built and installed: the wheel holds everything, needs only its own dependencies, and is light."""

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = (
    "LICENSE", "README.md", "pyproject.toml", "setup.py", "tierkv", "tiers", "policies",
)  # fmt: skip
pytestmark = pytest.mark.timeout(900)  # it downloads
HEAVY = ("numpy", "torch", "aiohttp", "valkey", "msgpack", "lz4", "xxhash", "transformers")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )


def must(*command: str | Path, cwd: Path) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, f"{command} failed\n{result.stdout}\n{result.stderr}"
    return result.stdout


def pip_install(python: Path, what: str | Path, *, cwd: Path) -> None:
    must(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what, cwd=cwd)


def modules_in(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    paths = [Path(name).with_suffix("") for name in names if name.endswith(".py")]
    return sorted({".".join(part for part in path.parts if part != "__init__") for path in paths})


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is shipped, links kept, so that a build leaves nothing in the checkout."""
    target = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def built(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    must(sys.executable, "-m", "build", "--outdir", out, copy, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("tierkv_store-*.whl")
    return found


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel and its dependencies, and nothing else."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    pip_install(python, wheel, cwd=home)
    return python


@pytest.mark.wheel
def test_wheel_holds_every_file(copy: Path, wheel: Path) -> None:
    expected = set()
    for folder, inside in (("tierkv", "tierkv"), ("tiers", "tierkv/tiers"), ("policies", "tierkv/policies")):
        for path in (copy / folder).rglob("*"):
            if (
                path.suffix in {".py", ".txt", ".md", ".html", ".js", ".css", ".svg"}
                or path.name == "py.typed"
            ):
                expected.add(f"{inside}/{path.relative_to(copy / folder).as_posix()}")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"tierkv/__init__.py", "tierkv/py.typed", "tierkv/tiers/__init__.py"} <= names
    assert "tierkv/policies/__init__.py" in names
    missing = sorted(expected - names)
    assert not missing, f"no __init__.py in the package, or not named in package-data: {missing}"
    assert not [name for name in names if name.split("/")[0] in {"tiers", "policies", "tests", "bench"}]


@pytest.mark.wheel
def test_wheel_from_the_checkout_is_the_wheel_from_the_sdist(copy: Path, wheel: Path, tmp_path: Path) -> None:
    must(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, copy, cwd=tmp_path)
    (direct,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(direct).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def imports_that_fail(python: Path, modules: list[str], cwd: Path) -> dict[str, str]:
    script = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""
    failed: dict[str, str] = json.loads(must(python, "-c", script, *modules, cwd=cwd).splitlines()[-1])
    return failed


@pytest.mark.wheel
def test_every_module_imports_in_a_clean_environment(clean_python: Path, wheel: Path, tmp_path: Path) -> None:
    modules = modules_in(wheel)
    assert "tierkv.tiers" in modules
    failed = imports_that_fail(clean_python, modules, tmp_path)
    extras = re.findall(r"^Provides-Extra: (\S+)", metadata(wheel), re.MULTILINE)
    unclear = {
        name: why
        for name, why in failed.items()
        if not any(f"tierkv-store[{extra}]" in why for extra in extras)
    }
    # Who inherits a contract has pytest, so those modules need not explain it; but the extra must be enough.
    contracts = [name for name in unclear if name.startswith("tierkv.testing.")]
    if contracts:
        pip_install(clean_python, f"{wheel}[testing]", cwd=tmp_path)
        assert not imports_that_fail(clean_python, contracts, tmp_path)
    unclear = {name: why for name, why in unclear.items() if name not in contracts}
    # vLLM loads its connector itself, so whoever has a use for it has vLLM.
    of_vllm = [name for name in unclear if name.startswith("tierkv.engines.vllm")]
    unclear = {
        name: why
        for name, why in unclear.items()
        if name not in of_vllm or why.partition(".")[0].rstrip("'") != "No module named 'vllm"
    }
    assert not unclear, f"must import, or name the missing extra as 'tierkv-store[extra]': {unclear}"


@pytest.mark.wheel
def test_installed_version_and_command(clean_python: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import tierkv, importlib.metadata as m; print(tierkv.__version__, m.version('tierkv-store'))"
    ours, installed = must(clean_python, "-c", code, cwd=tmp_path).split()
    assert ours == installed
    assert (clean_python.parent / "tierkv").exists()
    if "tierkv.cli" in modules_in(wheel):
        assert "demo" in must(clean_python.parent / "tierkv", "--help", cwd=tmp_path)


@pytest.mark.wheel
def test_wheel_imports_from_the_zip(wheel: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import tierkv.tiers, tierkv.policies"
    must(sys.executable, "-S", "-c", code, cwd=tmp_path)


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


@pytest.mark.parametrize("folder", ["tiers", "policies"])
def test_bare_folder_refuses_to_be_imported(folder: str) -> None:
    result = run(sys.executable, "-c", f"import {folder}", cwd=ROOT)
    assert result.returncode != 0
    assert f"import 'tierkv.{folder}' instead" in result.stderr
    must(sys.executable, "-c", f"import tierkv.{folder}", cwd=ROOT)


def test_import_is_light() -> None:
    code = f"import sys, tierkv; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert must(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"
