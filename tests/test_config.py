"""Where values come from, who wins, and that table, dataclasses and documentation say the same (D29)."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import cli_config
from tierkv.config import (
    Config,
    HostConfig,
    LimitsConfig,
    NvmeConfig,
    ValkeyConfig,
    WeightsConfig,
    load_config,
)
from tierkv.config_kinds import SIZE, TIME
from tierkv.config_sidecar import SidecarConfig
from tierkv.config_table import MAX_SETTINGS, SETTINGS, Setting, markdown_table, region_bytes
from tierkv.tiers.valkey_url import parse_address
from tierkv.units import ALIGN_BYTES, GIB, KIB, MIB

ROOT = Path(__file__).parent.parent
DATACLASSES = {
    "host": HostConfig,
    "nvme": NvmeConfig,
    "valkey": ValkeyConfig,
    "limits": LimitsConfig,
    "sidecar": SidecarConfig,
    "weights": WeightsConfig,
}
LEFT, MIDDLE, RIGHT = "left", "middle", "right"

# For each setting three values that differ from each other and from the default: what is written, what comes out.
SAMPLES: dict[str, list[tuple[Any, Any]]] = {
    "host.capacity": [("512 MiB", 512 * MIB), ("300MB", 300_000_000), (400 * MIB, 400 * MIB)],
    "host.region": [("8 MiB", 8 * MIB), ("4 MiB", 4 * MIB), (2 * MIB, 2 * MIB)],
    "host.populate": [(False, False)] * 3,
    "host.low_watermark": [(0.05, 0.05), (0.15, 0.15), (0, 0.0)],
    "host.pin_budget": [("64 MiB", 64 * MIB), ("0", 0), (MIB, MIB)],
    "host.eviction": [("lru", "lru")] * 3,
    "host.promotion": [("break_even", "break_even")] * 3,
    "nvme.capacity": [("1 GiB", GIB), ("512 MiB", 512 * MIB), (2 * GIB, 2 * GIB)],
    "nvme.min_free": [("2 MiB", 2 * MIB), ("0", 0), (5, 5)],
    "nvme.recovery": [("none", "none"), ("strict", "strict"), ("none", "none")],
    "nvme.workers": [(3, 3), (4, 4), (5, 5)],
    "nvme.write": [("through", "through"), ("never", "never"), ("through", "through")],
    "nvme.admission": [("seen_twice", "seen_twice")] * 3,
    "nvme.codec": [("lz4", "lz4")] * 3,
    "nvme.eviction": [("lru", "lru")] * 3,
    "valkey.ttl": [("1 h", 3600.0), ("90 s", 90.0), (1.5, 1.5)],
    "valkey.connections": [(1, 1), (2, 2), (16, 16)],
    "valkey.timeout": [("100 ms", 0.1), ("1 min", 60.0), (3, 3.0)],
    "valkey.embedded_memory": [("16 MiB", 16 * MIB), ("32 MiB", 32 * MIB), (64 * MIB, 64 * MIB)],
    "valkey.write": [("through", "through"), ("never", "never"), ("through", "through")],
    "valkey.admission": [("seen_twice", "seen_twice")] * 3,
    "valkey.codec": [("lz4", "lz4")] * 3,
    "limits.queue": [("1 MiB", MIB), ("2 MiB", 2 * MIB), (8 * KIB, 8 * KIB)],
    "limits.tenant_share": [(0.5, 0.5), (0.25, 0.25), (0.9, 0.9)],
    "limits.max_blocks": [(10, 10), (20, 20), (30, 30)],
    "limits.load_deadline": [("1 s", 1.0), ("10 ms", 0.01), (2.5, 2.5)],
    "limits.lease_deadline": [("1 s", 1.0), ("2 min", 120.0), (2.5, 2.5)],
    "limits.shutdown_deadline": [("1 s", 1.0), ("2 min", 120.0), (2.5, 2.5)],
    "sidecar.mode": [("0660", 0o660), ("666", 0o666), ("0o640", 0o640)],
    "sidecar.group": [("1", 1), (2, 2), ("3", 3)],
    "sidecar.http": [(f"unix:///{word}", f"unix:///{word}") for word in "abc"],
}


def samples(setting: Setting, tmp_path: Path) -> list[tuple[Any, Any]]:
    """Paths and addresses need a place of their own."""
    match setting.key:
        case "valkey.url":
            return [(f"valkey://{word}:1", word) for word in (LEFT, MIDDLE, RIGHT)]
        case "valkey.password":
            return [(word, word) for word in (LEFT, MIDDLE, RIGHT)]
        case "nvme.path" | "weights.cache" | "sidecar.socket" | "sidecar.token_file":
            return [(str(tmp_path / word), tmp_path / word) for word in (LEFT, MIDDLE, RIGHT)]
        case "valkey.ca" | "valkey.cert" | "valkey.key":
            for word in (LEFT, MIDDLE, RIGHT):
                (tmp_path / word).touch()
            return [(str(tmp_path / word), tmp_path / word) for word in (LEFT, MIDDLE, RIGHT)]
    return SAMPLES[setting.key]


def company(setting: Setting, tmp_path: Path) -> dict[str, str]:
    """What else must be set, in the weakest place (the file), for the setting to be allowed."""
    match setting.key:
        case "nvme.path" | "valkey.url":
            return {} if setting.section == "valkey" else {"nvme.capacity": "1 MiB", "nvme.min_free": "0"}
        case "valkey.embedded_memory":
            return {"valkey.url": "embedded"}
        case "valkey.ca":
            return {"valkey.url": "valkeys://h"}
        case "valkey.cert" | "valkey.key":
            (tmp_path / "other").touch()
            other = "valkey.key" if setting.key == "valkey.cert" else "valkey.cert"
            return {"valkey.url": "valkeys://h", other: str(tmp_path / "other")}
    if setting.section == "nvme":
        floor = {} if setting.key == "nvme.min_free" else {"nvme.min_free": "0"}
        size = {} if setting.key == "nvme.capacity" else {"nvme.capacity": "64 MiB"}
        return {"nvme.path": str(tmp_path / "disk"), **floor, **size}
    return {"valkey.url": "valkey://h"} if setting.section == "valkey" else {}


def write_toml(path: Path, settings: dict[str, Any]) -> Path:
    lines = []
    for key, value in settings.items():
        text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
        lines.append(f"{key} = {text}")
    path.write_text("\n".join(lines))
    return path


def in_force(config: Config, setting: Setting) -> object:
    section = getattr(config, setting.section)
    if setting.key == "valkey.url":
        return parse_address(section.url).host
    if setting.key == "valkey.password":
        return parse_address(section.url).password
    return getattr(section, setting.field)


def origin(config: Config, setting: Setting) -> str:
    (found,) = (one.origin for one in config.effective if one.key == setting.key)
    return found


every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)


@every_setting
def test_d29_each_setting_by_file_environment_and_keyword(setting: Setting, tmp_path: Path) -> None:
    others = company(setting, tmp_path)
    (in_file, from_file), (in_env, from_env), (in_code, from_code) = samples(setting, tmp_path)
    if in_file != in_code:
        assert len({from_file, from_env, from_code}) == 3 or setting.kind.name.startswith("`")
    file = write_toml(tmp_path / "t.toml", others | {setting.key: in_file})
    environ = {setting.env: str(in_env)}

    config = load_config(file, environ={})
    assert (in_force(config, setting), origin(config, setting)) == (from_file, f"file {file}:{setting.key}")

    config = load_config(file, environ=environ)
    assert (in_force(config, setting), origin(config, setting)) == (from_env, f"environment {setting.env}")

    config = load_config(file, environ=environ, **{setting.keyword: in_code})
    assert (in_force(config, setting), origin(config, setting)) == (from_code, "keyword")

    # Without help from a stronger or weaker place.
    rest = write_toml(tmp_path / "rest.toml", others)
    assert in_force(load_config(rest, environ=environ), setting) == from_env
    assert in_force(load_config(rest, environ={}, **{setting.keyword: in_code}), setting) == from_code


@every_setting
def test_the_sample_is_not_the_default(setting: Setting, tmp_path: Path) -> None:
    for written, _ in samples(setting, tmp_path):
        assert written != setting.default


def test_defaults_alone_make_a_store_of_host_ram() -> None:
    config = load_config(environ={})
    assert config.host.capacity_bytes == GIB
    assert config.nvme is None
    assert config.valkey is None
    assert {one.origin for one in config.effective} == {"default"}


def test_effective_holds_every_setting_once_and_in_order() -> None:
    assert [one.key for one in load_config(environ={}).effective] == [setting.key for setting in SETTINGS]


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIERKV_HOST_CAPACITY", "256 MiB")
    monkeypatch.setenv("TIERKV_CONFIG", str(write_toml(tmp_path / "c.toml", {"limits.max_blocks": 7})))
    config = load_config()
    assert config.host.capacity_bytes == 256 * MIB
    assert config.limits.max_blocks == 7
    other = write_toml(tmp_path / "other.toml", {"limits.max_blocks": 8})
    assert load_config(other).limits.max_blocks == 8, "a file that the caller names wins over TIERKV_CONFIG"


def test_environment_has_only_text(tmp_path: Path) -> None:
    for text, value in {"true": True, "1": True, "Yes": True, "on": True, "FALSE": False, "0": False}.items():
        assert load_config(environ={"TIERKV_HOST_POPULATE": text}).host.populate is value
    config = load_config(environ={"TIERKV_LIMITS_MAX_BLOCKS": " 42 ", "TIERKV_HOST_LOW_WATERMARK": ".01"})
    assert (config.limits.max_blocks, config.host.low_watermark) == (42, 0.01)


def test_variables_of_others_are_left_alone() -> None:
    links = {
        "TIERKV_SERVICE_HOST": "10.0.0.1",
        "TIERKV_SERVICE_PORT": "7000",
        "TIERKV_SERVICE_PORT_HTTP": "7000",
        "TIERKV_PORT": "tcp://10.0.0.1:7000",
        "TIERKV_PORT_7000_TCP": "tcp://10.0.0.1:7000",
        "TIERKV_PORT_7000_TCP_ADDR": "10.0.0.1",
        "TIERKV_DAEMON_PORT_7000_UDP_PROTO": "udp",
    }
    assert load_config(environ=links | {"PATH": "/bin", "TIERKVX": "1"}) == load_config(environ={})


def test_what_can_be_unset_is_unset_by_nothing(tmp_path: Path) -> None:
    file = write_toml(tmp_path / "t.toml", {"nvme.path": str(tmp_path / "disk"), "nvme.capacity": "1 MiB"})
    off = load_config(file, environ={"TIERKV_NVME_PATH": ""})
    assert off.nvme is None
    assert "TIERKV_NVME_PATH" in off.notes[0], "settings that do nothing are said"
    assert load_config(file, environ={}, nvme_path=None).nvme is None


def test_a_mode_that_lets_nobody_in_without_a_group_is_said() -> None:
    """The daemon refused engines of other users whom the mode had let in, and the configuration seemed right."""
    (note,) = load_config(environ={}, sidecar_mode="0666").notes
    assert note.startswith("sidecar.mode = 0666 without sidecar.group: ")
    assert load_config(environ={}, sidecar_mode="0666", sidecar_group=0).notes == ()
    assert load_config(environ={}, sidecar_mode="0600").notes == ()


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    small = {"nvme.capacity": "1 MiB", "nvme.min_free": 0}
    write_toml(tmp_path / "conf" / "t.toml", {"nvme.path": "disk", **small})
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("conf/t.toml"), environ={})
    assert config.nvme is not None
    assert config.nvme.path == tmp_path / "conf" / "disk"
    config = load_config(environ={"TIERKV_NVME_PATH": "disk"}, nvme_capacity="1 MiB", nvme_min_free=0)
    assert config.nvme is not None
    assert config.nvme.path == tmp_path / "disk"
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_config(environ={}, weights_cache="~/w.json").weights.cache == Path("/somewhere/w.json")


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "/c/tierkv/weights.json"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/tierkv/weights.json"),
        ({"HOME": "/h"}, "/h/.cache/tierkv/weights.json"),
        ({}, f"{Path.home()}/.cache/tierkv/weights.json"),
    ],
)
def test_cache_of_weights_follows_xdg(environ: dict[str, str], cache: str) -> None:
    assert load_config(environ=environ).weights.cache == Path(cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that nobody knows")
def test_without_a_home_the_cache_must_be_named() -> None:
    code = (
        "import os, pwd\n"
        "from tierkv.config import load_config\n"
        "from tierkv.errors import ConfigError\n"
        "os.setuid(54321); os.environ.clear()\n"
        "print(load_config(weights_cache='/c/w.json').weights.cache)\n"
        "try: load_config()\n"
        "except ConfigError as error: print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.startswith("/c/w.json\nweights.cache = None: no home directory is known; set it")


def test_addresses_of_valkey(tmp_path: Path) -> None:
    def address(**settings: str) -> Any:
        config = load_config(environ={}, **{f"valkey_{name}": value for name, value in settings.items()})
        assert config.valkey is not None
        return parse_address(config.valkey.url)

    assert (address(url="valkeys://h:7/2").tls, address(url="valkey://h").tls) == (True, False)
    assert address(url="unix:///run/v.sock").path == "/run/v.sock"
    for url, password in (("valkey://u:p%40%3A@h", None), ("valkey://u@h", "p@:")):
        found = address(url=url, **({} if password is None else {"password": password}))
        assert (found.user, found.password, found.host) == ("u", "p@:", "h")
    found = address(url="valkey://h", password="p")
    assert (found.user, found.password) == ("", "p")


def test_secrets_are_never_shown() -> None:
    config = load_config(environ={}, valkey_url="valkey://bob@h", valkey_password="hunter2")
    assert "hunter2" not in repr(config)
    assert "hunter2" not in repr(config.effective)
    assert "hunter2" not in cli_config.as_text(config)
    config = load_config(environ={}, valkey_url="valkey://bob:hunter2@h")
    assert "hunter2" not in repr(config) + repr(config.effective) + cli_config.as_text(config)
    assert config.valkey is not None
    assert parse_address(config.valkey.url).password == "hunter2"
    config = load_config(environ={}, valkey_url="embedded")
    assert config.valkey is not None
    assert config.valkey.url == "embedded"


# Table, dataclasses and documentation.


def test_at_most_forty_settings() -> None:
    assert len(SETTINGS) <= MAX_SETTINGS
    for name in ("key", "env", "keyword"):
        assert len({getattr(setting, name) for setting in SETTINGS}) == len(SETTINGS)


@every_setting
def test_each_setting_is_well_made(setting: Setting) -> None:
    assert re.fullmatch(r"[a-z]+\.[a-z_]+", setting.key)
    assert "_" not in setting.section, "or keyword and environment could be read in two ways"
    assert setting.meaning.endswith(".")
    assert "|" not in setting.meaning
    if setting.default is not None and setting.derive is None:
        setting.kind.parse(setting.default)
    assert (setting.default is None) == setting.optional


def test_the_dataclasses_hold_the_table() -> None:
    for section, its_class in DATACLASSES.items():
        fields = [field.name for field in dataclasses.fields(its_class)]
        expected = [setting.field for setting in SETTINGS if setting.section == section]
        if section == "valkey":
            expected.remove("password")  # it is in the url
        assert fields == expected


def test_the_documentation_holds_the_table() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert markdown_table() in text
    assert cli_config.with_table(text) == text, "run: tierkv config table --into docs/configuration.md"


def test_the_documentation_s_file_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "t.toml"
    file.write_text(blocks[0].replace("/var/lib/tierkv", str(tmp_path)).replace("100 GiB", "100 MiB"))
    config = load_config(file, environ={}, nvme_min_free=0)
    assert config.valkey is not None
    assert config.valkey.ttl_s == 12 * 3600


# What derives from a capacity, and what is shown.


@given(st.integers(0, 1 << 45))
def test_regions_fill_a_capacity(capacity_bytes: int) -> None:
    region = region_bytes(capacity_bytes)
    assert region % ALIGN_BYTES == 0
    if capacity_bytes < ALIGN_BYTES:
        assert region == 0
        return
    assert ALIGN_BYTES <= region <= capacity_bytes
    used = capacity_bytes // region * region
    assert used > capacity_bytes * 0.89 or capacity_bytes - used < 16 * ALIGN_BYTES
    if capacity_bytes >= 2 * MIB:
        assert region >= MIB, "a block has 512 KiB and more"


@given(st.integers(0, 1 << 50))
def test_shown_sizes_read_back_or_say_the_bytes(size_bytes: int) -> None:
    text = str(SIZE.show(size_bytes))
    exact = re.search(r"\((\d+) bytes\)", text)
    assert (int(exact[1]) if exact else SIZE.parse(text)) == size_bytes


@given(st.integers(1, 10**6))
def test_shown_times_read_back(seconds: int) -> None:
    value = TIME.parse(TIME.show(float(seconds)))
    assert isinstance(value, float)
    assert abs(value - seconds) <= 0.01 * seconds
