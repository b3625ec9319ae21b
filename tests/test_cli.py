"""The command line, as a user runs it: real processes, their output and their exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv import __version__, cli
from tierkv.config_table import SETTINGS, markdown_table

ROOT = Path(__file__).parent.parent


def tierkv(*words: str, code: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `tierkv WORDS`, after ``code`` in the same interpreter."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
    script = f"import sys\n{code}\nfrom tierkv.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=clean | environ,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.toml"
    path.write_text('[host]\ncapacity = "512 MiB"\n[valkey]\nurl = "valkey://bob:hunter2@h"\nttl = "2 h"\n')
    return path


def test_version() -> None:
    assert tierkv("version").stdout == f"tierkv {__version__}\n"
    assert tierkv("--version").stdout == f"tierkv {__version__}\n"
    assert json.loads(tierkv("version", "--json").stdout)["tierkv"] == __version__


def test_d29_config_check_prints_values_and_origins(file: Path) -> None:
    done = tierkv("config", "check", str(file), TIERKV_VALKEY_CONNECTIONS="7")
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["host.capacity"] == ["host.capacity", "512", "MiB", "file", f"{file}:host.capacity"]
    assert rows["valkey.connections"][1:] == ["7", "environment", "TIERKV_VALKEY_CONNECTIONS"]
    assert rows["host.populate"][1:] == ["true", "default"]
    assert rows["valkey.ca"][1:] == ["unset", "default"]
    assert "nvme: off" in done.stdout
    assert "nvme.path" not in done.stdout
    assert "hunter2" not in done.stdout


def test_d29_config_check_as_json(file: Path) -> None:
    found = json.loads(tierkv("config", "check", "--json", TIERKV_CONFIG=str(file)).stdout)
    assert found["ok"] is True
    assert list(found["settings"]) == [setting.key for setting in SETTINGS]
    assert found["settings"]["valkey.ttl"] == {"value": "2 h", "origin": f"file {file}:valkey.ttl"}
    assert found["settings"]["valkey.url"]["value"] == "valkey://***@h"
    assert found["settings"]["nvme.path"] == {"value": None, "origin": "default"}


def test_d29_config_check_refuses_in_one_line() -> None:
    done = tierkv("config", "check", TIERKV_HOST_CAPACITY="4 XB")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("tierkv config: host.capacity = '4 XB': ")
    done = tierkv("config", "check", "--json", TIERKV_HOST_CAPACITY="4 XB")
    assert done.returncode == 2
    wrong = json.loads(done.stdout)
    assert wrong["ok"] is False
    assert wrong["error"]["key"] == "host.capacity"
    assert wrong["error"]["value"] == "4 XB"
    assert "GiB" in wrong["error"]["hint"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nonsense",),
        ("config",),
        ("config", "nonsense"),
        ("config", "check", "a", "b"),
        ("config", "check", "--jason"),
        ("version", "now"),
        ("config", "check", "/nowhere.toml"),
        ("config", "table", "--into", "/nowhere.md"),
    ],
)
def test_wrong_usage_is_status_2(words: tuple[str, ...]) -> None:
    done = tierkv(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(("usage: tierkv", "tierkv config: "))


def test_table(tmp_path: Path) -> None:
    assert tierkv("config", "table").stdout == markdown_table()
    page = tmp_path / "page.md"
    text = (ROOT / "docs" / "configuration.md").read_text()
    page.write_text(text.replace("| `1 GiB` |", "| `2 GiB` |"))
    assert page.read_text() != text
    assert tierkv("config", "table", "--into", str(page)).returncode == 0
    assert page.read_text() == text
    page.write_text("no marks")
    done = tierkv("config", "table", "--into", str(page))
    assert done.returncode == 2
    assert "it needs the two lines" in done.stderr
    assert page.read_text() == "no marks"


def test_help_names_every_command() -> None:
    done = tierkv("--help")
    assert done.returncode == 0
    for command in cli.COMMANDS:
        assert command.name in done.stdout


HELPS = [
    [],
    *([command.name] for command in cli.COMMANDS),
    ["config", "check"],
    ["config", "table"],
    ["doctor", "vllm"],
]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_is_plain_text(words: list[str]) -> None:
    done = tierkv(*words, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: tierkv")
    assert "`" not in done.stdout, "marks of Markdown or reStructuredText"
    assert "**" not in done.stdout


# A stand-in for the module of `demo`: what the command line does with what a command does.
STANDIN = "import types; fake = types.ModuleType('tierkv.demo'); sys.modules['tierkv.demo'] = fake\n"


def test_the_demo_gets_the_rest_of_the_line() -> None:
    code = STANDIN + "fake.main = lambda argv: print(argv) or 3"
    done = tierkv("demo", "--fast", "--", "x", "--help", code=code)
    assert done.stdout == "['--fast', '--', 'x', '--help']\n"
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        ("from tierkv.errors import TierError as E", 1, "tierkv demo: it broke"),
        ("from tierkv.errors import ClosedError as E", 1, "tierkv demo: it broke"),
        ("E = KeyboardInterrupt", 130, "tierkv demo: interrupted"),
    ],
)
def test_what_goes_wrong_is_one_line(raised: str, status: int, line: str) -> None:
    code = f"{STANDIN}{raised}\ndef main(argv): raise E('it\\nbroke')\nfake.main = main"
    done = tierkv("demo", code=code)
    assert done.returncode == status
    assert done.stderr == f"{line}\n"


def test_a_missing_package_is_named_with_its_extra() -> None:
    code = f"{STANDIN}def main(argv):\n    import torch_of_nobody.nn\nfake.main = main"
    done = tierkv("demo", code=code)
    assert done.returncode == 2
    assert done.stderr == (
        "tierkv demo: the package 'torch_of_nobody' is not installed; install it with: "
        "pip install 'tierkv-store[demo]' (in a clone of the repository: pip install '.[demo]')\n"
    )


def test_a_fault_of_ours_is_not_hidden() -> None:
    code = f"{STANDIN}def main(argv): import tierkv.no_such_module\nfake.main = main"
    done = tierkv("demo", code=code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    done = tierkv("demo", code=f"{STANDIN}def main(argv): raise ValueError('ours')\nfake.main = main")
    assert "Traceback" in done.stderr


def test_a_reader_that_leaves_is_no_traceback() -> None:
    script = "import sys; from tierkv.cli import main; sys.stdin.read(); sys.exit(main(['config', 'table']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()  # it leaves before the first line is written
    process.stdout = None
    _, wrong = process.communicate(b"", timeout=60)
    assert wrong == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("output", "status", "told"),
    [
        ("> /dev/full", 1, "tierkv config: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(output: str, status: int, told: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m tierkv.cli config table {output}'],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, told)


def test_a_name_that_the_encoding_lacks_is_written_with_escapes() -> None:
    code = STANDIN + r"fake.main = lambda argv: print('gr\xf6\xdfe \udcff') or 0"
    done = tierkv("demo", code=code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "gr\\xf6\\xdfe \\udcff\n")


def test_the_command_line_is_light() -> None:
    code = "import atexit; atexit.register(lambda: print([n for n in HEAVY if n in sys.modules]))"
    heavy = ("numpy", "torch", "aiohttp", "valkey", "msgpack", "lz4", "xxhash", "tierkv.config")
    done = tierkv("version", code=f"HEAVY = {heavy!r}\n{code}")
    assert done.stdout.splitlines()[-1] == "[]"
    done = tierkv("config", "check", code=f"HEAVY = {heavy[:-1]!r}\n{code}")
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_file_of_the_token_is_read_by_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tierkv.toml"
    config.write_text(f'sidecar.http = "127.0.0.1:9400"\nsidecar.token_file = "{tmp_path / "token"}"\n')
    assert cli.main(["config", "check", str(config)]) == 2
    assert "sidecar.token_file" in capsys.readouterr().err
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    assert cli.main(["config", "check", str(config)]) == 0
