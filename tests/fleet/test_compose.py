"""Checks docker-compose.yml as Docker Compose parses it, and runs its services as local processes."""

import asyncio
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from compose_stack import ROOT, TOKEN, Stack
from crowd import http_client

ASK = {"model": "llama", "prompt": "Tell me of queues.", "max_tokens": 4}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services in the output of `docker-compose config`."""
    compose = shutil.which("docker-compose")
    assert compose is not None, "docker-compose is missing: .ci/packages installs its Debian package"
    done = subprocess.run([compose, "config"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return found


def test_every_service_is_unprivileged_and_has_limits_and_a_health_check(services: dict[str, Any]) -> None:
    assert services.keys() == {"redis", "picker", "simulator", "envoy", "prometheus", "grafana", "locust"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}, name
        assert "privileged" not in service, name
        assert "container_name" not in service, name
        for needed in service.get("depends_on", {}).values():
            assert needed == {"condition": "service_healthy"}, name
        assert "user" in service or service["build"]["target"] in ("picker", "edge", "load"), name
        assert not str(service.get("user", "")).startswith("0"), name
    assert "ports" not in services["picker"]
    assert "noeviction" in services["redis"]["command"]


def test_every_mounted_file_exists(services: dict[str, Any]) -> None:
    mounts = [Path(mount.split(":")[0]) for each in services.values() for mount in each.get("volumes", [])]
    assert not [path for path in mounts if path.name != "locust" and not path.exists()]


def test_images_have_no_root_user_and_no_build_tools() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = {match[2]: match[0] for match in re.finditer(r"FROM (\S+) AS (\S+)\n(?:(?!FROM ).*\n?)*", text)}
    assert list(stages)[-1] == "picker"
    for name in ("picker", "edge", "load"):
        assert stages[name].startswith("FROM base ")
        assert " install " not in stages[name]
        assert "apt" not in stages[name]
        users = re.findall(r"^USER (\S+)$", stages[name], re.MULTILINE)
        assert not users or users[-1] == "10001:10001"
    assert re.findall(r"^USER (\S+)$", stages["base"], re.MULTILINE)[-1] == "10001:10001"
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert kept & {source, str(Path(source).parent)}, source


async def _loaded(client: httpx.AsyncClient, stats: str) -> None:
    """Wait until ten of Locust's requests have been answered; assert that none fails."""
    count = 0
    async with asyncio.timeout(60):
        while count < 10:
            await asyncio.sleep(0.2)
            page = (await client.get(stats)).json()
            assert page["errors"] == []
            count = sum(each["num_requests"] for each in page["stats"] if each["name"] != "Aggregated")


async def _operators_reach_the_fleet(client: httpx.AsyncClient, admin: str) -> None:
    """Assert that Envoy's operator listener serves the dashboard and, with the token, the API."""
    bearer = {"authorization": f"Bearer {TOKEN}"}
    state = (await client.get(f"{admin}/api/v1/state", headers=bearer)).json()
    assert state["ready_backends"] == 3
    assert "<html" in (await client.get(f"{admin}/")).text
    for method, path in (("GET", "state"), ("POST", "pause")):
        refused = await client.request(method, f"{admin}/api/v1/{path}")
        assert (refused.status_code, refused.json()["code"]) == (401, "token_needed")
    for change in ("pause", "resume"):
        done = await client.post(f"{admin}/api/v1/{change}", headers=bearer)
        assert done.status_code == 200


@pytest.mark.timeout(240)
async def test_the_services_of_compose_serve_requests_and_survive_a_killed_replica(tmp_path: Path) -> None:
    stack = Stack(tmp_path, {"redis": 1, "simulator": 3, "picker": 2, "envoy": 1, "locust": 1})
    try:
        await asyncio.to_thread(stack.start)
        envoy = f"http://{stack.of('envoy')[0].address}:8080"
        async with http_client(envoy) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=ASK) for _ in range(40)))
            assert [answer.status_code for answer in answers] == [200] * 40
            assert len({answer.headers["x-served-by"] for answer in answers}) == 3
            for picker in stack.of("picker"):
                page = (await client.get(f"http://{picker.address}:8081/metrics")).text
                assert re.search(r'^epp_requests_total\{.*code="ok".*\} [1-9]', page, re.MULTILINE)
                assert "epp_live_replicas 2.0" in page
            await _operators_reach_the_fleet(client, f"http://{stack.of('envoy')[0].address}:8081")
            load = f"http://{stack.of('locust')[0].address}:8089"
            users = {"user_count": 4, "spawn_rate": 4, "user_classes": "SteadyUser", "host": envoy}
            begun = await client.post(f"{load}/swarm", data=users)
            assert begun.json()["success"], stack.of("locust")[0].output
            await _loaded(client, f"{load}/stats/requests")
            assert (await client.post(f"{load}/stop")).is_success
            stack.of("picker")[0].process.kill()
            stack.of("picker")[0].process.wait()
            answers = await asyncio.gather(*(client.post("/v1/completions", json=ASK) for _ in range(20)))
            assert [(answer.status_code, answer.text) for answer in answers if not answer.is_success] == []
    finally:
        codes = await asyncio.to_thread(stack.stop)
    assert codes.pop(stack.of("picker")[0].folder.name) == -signal.SIGKILL
    assert list(codes.values()) == [0] * (len(stack.containers) - 1)
