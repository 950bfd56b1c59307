"""`picker up`: a whole fleet of real processes, from the first output line to the exit."""

import asyncio
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from crowd import http_client

from picker_fleet import cli
from picker_fleet.state import primary
from picker_tools.local_fleet.parts import Valkey

ASK = {"model": "llama", "prompt": "Tell me of queues.", "max_tokens": 8}
SMALL = ("--replicas", "1", "--endpoints", "1")


@pytest.fixture(params=["standard", "lean"], scope="module")
def any_mode(request: pytest.FixtureRequest, shared_fleet: Any) -> Any:
    """A fleet of the default size with debug headers; in mode `lean` it is started as a user starts it."""
    quick = ("--mode", request.param, "--debug-headers", "--sim-ttft", "1", "--sim-itl", "1")
    return shared_fleet(*quick, spawned=request.param == "lean")


async def test_the_state_file_names_every_process(any_mode: Any) -> None:
    state = any_mode.state
    assert len(state["replicas"]) == 3
    assert len(state["endpoints"]) == 4
    for part in (*state["replicas"], *state["endpoints"]):
        assert psutil.pid_exists(part["pid"])
    assert len({replica["id"] for replica in state["replicas"]}) == 3
    for index in range(3):
        for page in ("/healthz", "/readyz"):
            assert (await any_mode.admin(page, index)).status_code == 200
    assert (await any_mode.envoy_admin("/ready")).text.strip() == "LIVE"
    async with any_mode.redis() as client:
        assert await client.ping()
    # Files that may contain Redis's password are private.
    private = [any_mode.state_file, *any_mode.state_file.parent.glob("**/replica-*.yaml")]
    assert len(private) > 1
    assert [file.stat().st_mode & 0o077 for file in private] == [0] * len(private)


async def test_replicas_reach_the_embedded_valkey_over_its_unix_socket(any_mode: Any) -> None:
    url = (await any_mode.admin("/api/v1/config")).json()["config"]["redis"]["url"]
    # The state file has Redis's port, but the replica uses a socket of the same server.
    assert any_mode.state["redis"].startswith("redis://127.0.0.1:")
    assert url.startswith("unix:///")
    async with any_mode.redis() as there, primary.client(url, "default") as here:
        assert (await here.info("server"))["run_id"] == (await there.info("server"))["run_id"]


def test_valkey_uses_its_port_if_its_unix_socket_path_would_be_too_long(tmp_path: Path) -> None:
    valkey = Valkey(tmp_path / ("deep" * 30))
    assert valkey.socket_url == valkey.url
    assert "--unixsocket" not in valkey.command()


def test_the_output_has_a_line_for_each_process_and_a_working_curl_command(any_mode: Any) -> None:
    output = any_mode.output
    names = [line.split()[1] for line in output.splitlines() if line.startswith("ready ")]
    parts = {"replica": 3, "endpoint": 4}
    numbered = [f"{part}-{number}" for part, count in parts.items() for number in range(1, count + 1)]
    assert sorted(names) == sorted(["valkey", *numbered, "envoy"])
    assert f"dashboard: {any_mode.admin_url()}" in output
    command = next(line.strip() for line in output.splitlines() if line.strip().startswith("curl "))
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert '"text_completion"' in said.stdout


async def test_an_http_client_gets_a_completion_from_the_first_named_endpoint(any_mode: Any) -> None:
    async with any_mode.client() as client:
        answer = await client.post("/v1/completions", json=ASK)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8
    addresses = {endpoint["address"] for endpoint in any_mode.state["endpoints"]}
    assert answer.headers["x-served-by"] in addresses
    # The response header and the metadata name the same endpoints; the first endpoint served the request.
    assert answer.headers["x-picker-header"] == answer.headers["x-picker-endpoint"]
    picked = answer.headers["x-picker-header"].split(",")
    assert {picked[0], answer.headers["x-picker-served"]} == {answer.headers["x-served-by"]}
    assert len(set(picked)) == 3
    assert set(picked) <= addresses


async def test_a_fleet_without_a_configuration_finds_its_simulators_batch_of_two(any_mode: Any) -> None:
    async def keep_asking() -> None:
        while not found.is_set():
            answer = await client.post("/v1/completions", json={**ASK, "max_tokens": 300})
            assert answer.status_code == 200

    async def limits() -> set[int]:
        return {each["limit"] for each in (await any_mode.admin("/api/v1/endpoints")).json()}

    found = asyncio.Event()
    async with any_mode.client() as client, asyncio.TaskGroup() as tasks:
        for _ in range(24):
            tasks.create_task(keep_asking())
        # Each limit begins at 8, and ends at the two requests that run and the few that wait for a place.
        await any_mode.eventually(limits, lambda seen: seen <= {2, 3, 4}, what="limits near two", within_s=30)
        found.set()
    assert 8 <= (await any_mode.admin("/api/v1/state")).json()["bounds"]["upper"] <= 20


async def test_the_openai_client_gets_the_same_answer_streamed_and_whole(any_mode: Any) -> None:
    import openai  # the import of openai takes half a second

    ask: Any = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    url = f"{any_mode.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
        whole = await client.chat.completions.create(**ask)
        usage = {"include_usage": True}
        stream = await client.chat.completions.create(**ask, stream=True, stream_options=usage)
        chunks = [chunk async for chunk in stream]
    # The streamed and the whole answer have the same text, and each has its usage.
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert usages[-1].completion_tokens == 8


async def test_a_replica_that_dies_is_started_again(fleet: Any) -> None:
    own = fleet("--replicas", "2", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    before = own.state["replicas"][0]
    own.replica(0).kill()
    # No client sees an error, and the killed replica returns at the same addresses.
    own.wait_line("DOWN  replica-1    was killed by SIGKILL")

    async with own.client() as client:
        while own.state["replicas"][0]["pid"] == before["pid"]:
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    after = own.state["replicas"][0]
    assert (after["grpc"], after["admin"]) == (before["grpc"], before["admin"])
    assert after["id"] != before["id"]
    await own.eventually(
        lambda: own.admin("/readyz"), lambda answer: answer.is_success, what="readiness of the new process"
    )


async def test_endpoints_that_prefill_are_labelled_and_serve_no_request(fleet: Any) -> None:
    own = fleet("--replicas", "1", "--endpoints", "3", "--prefill", "2", "--debug-headers")
    roles = {endpoint["address"]: endpoint["role"] for endpoint in own.state["endpoints"]}
    assert sorted(roles.values()) == ["decode", "prefill", "prefill"]
    async with http_client(own.url) as client:
        for _ in range(4):
            answer = await client.post("/v1/completions", json=ASK)
            assert (answer.status_code, roles[answer.headers["x-served-by"]]) == (200, "decode")


def test_option_prefill_must_leave_an_endpoint_that_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--endpoints", "2", "--prefill", "2"]) == 2
    assert "--prefill 2 leaves none of --endpoints 2 to decode" in capsys.readouterr().err


def test_a_state_file_that_cannot_be_written_is_refused_before_a_part_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "absent" / "state.json"):
        assert cli.main(["up", "--state-file", str(path)]) == 2
        assert capsys.readouterr().err == f"--state-file {path}: no file can be written there\n"


async def test_sigterm_to_picker_up_leaves_no_process(fleet: Any) -> None:
    own = fleet(*SMALL, unaudited="Valkey ends with the fleet", spawned=True)
    children = own.children()
    assert len(children) == 4  # one process each: Valkey, simulator, replica, Envoy
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(30) == 0
    assert not any(child.is_running() for child in children)


async def test_sigkill_of_picker_up_leaves_no_process(fleet: Any) -> None:
    own = fleet(*SMALL, spawned=True)
    children = own.children()
    own.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
