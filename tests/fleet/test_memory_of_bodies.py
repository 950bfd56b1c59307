"""A replica that buffers large bodies stays within the memory limit of the Kubernetes manifests; with many
connections it stays within its limit of open files."""

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml
from crowd import http_client
from extproc_client import body, headers, parts, trailers
from fleet_load import total
from metrics_page import samples_of
from own_replica import PATIENT_S, Replica, served
from redis_servers import Server
from script_fleet import until

from picker_fleet.domain.config import parse
from picker_fleet.domain.units import split_host_port

MIB = 1024 * 1024
PEAK_MIB = 400
CHUNK = MIB  # the chunk size that Envoy sends
LARGEST = parse({}).extproc.max_body_bytes
BOUND = parse({}).extproc.max_buffered_bytes
MODES = ("lean", "standard")
MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "deployment.yaml"


def limit_mib() -> int:
    """The memory limit of a replica's container, in MiB."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    deployment = next(each for each in documents if each["kind"] == "Deployment")
    limits = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["memory"].endswith("Mi")
    return int(limits["memory"].removesuffix("Mi"))


@contextlib.asynccontextmanager
async def limited(redis_url: str, folder: Path, *, requests_at_once: int) -> AsyncIterator[Replica]:
    """A replica with the manifests' memory limit; `requests_at_once` requests run, others queue."""
    limit_bytes = limit_mib() * MIB

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (MIB, MIB))  # RLIMIT_DATA counts each thread's whole stack
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    config = {
        "redis": {"url": redis_url, "silence": "5s"},
        "request_queue_controller": {"watermark_per_backend": requests_at_once},
        # On a busy machine the test takes minutes. This process answers no scrape while it makes bodies.
        "fair_request_queue": {"queue_ttl": "5m", "queue_without_endpoints": True},
    }
    async with served(redis_url, folder, config=config, preexec_fn=limit) as replica:
        await replica.ready()
        yield replica


def mib(replica: Replica, what: str) -> int:
    """The replica's current memory (`VmRSS`) or its peak (`VmHWM`), in MiB."""
    lines = Path(f"/proc/{replica.process.pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(what))) // 1024


async def page(replica: Replica) -> str:
    return (await replica.admin.get("/metrics")).text


async def buffered(replica: Replica) -> float:
    return total(await page(replica), "epp_buffered_bytes")


async def at_rest(replica: Replica) -> None:
    """Wait until the replica buffers no body."""

    async def is_empty() -> bool:
        return await buffered(replica) == 0

    await until(is_empty, PATIENT_S)


async def talk(replica: Replica, text: bytes, mode: str, *, trailed: bool = False) -> None:
    """Send a request until the replica stops reading, and read the replica's whole answer."""
    call = replica.exchange()
    sending = asyncio.create_task(_send(call, text, mode, trailed=trailed))
    try:
        answer = await call.read()
        is_placed = answer.HasField("request_headers")
        whole = not is_placed or answer.request_headers.response.HasField("body_mutation")
        while not whole:
            answer = await call.read()
            whole = answer.request_body.response.body_mutation.streamed_response.end_of_stream
    except grpc.aio.AioRpcError:
        pass  # the replica refused the request and ended the stream while the test wrote
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        call.cancel()


async def _send(call: Any, text: bytes, mode: str, *, trailed: bool) -> None:
    await call.write(headers(mode, {} if trailed else {"content-length": str(len(text))}))
    for at in range(0, len(text), CHUNK):
        await call.write(body(text[at : at + CHUNK], ended=not trailed and at + CHUNK >= len(text)))
    if trailed:
        await call.write(trailers())


def hostile_bodies() -> list[bytes]:
    """Bodies of the maximum size that need the most memory to decode."""
    return [
        b'{"model":"llama","z":[%s[]]}' % (b"[[[]],[[]]]," * (LARGEST // 12 - 10)),
        b'{"model":"llama",%s"z":0}' % b"".join(b'"k%07d":0,' % n for n in range(LARGEST // 14)),
        b'{"model":"%s"}' % (b"\\u0061" * (LARGEST // 6 - 10)),
        b'{"model":"llama","%s":1}' % (b"k" * (LARGEST - 100) + "\N{PILE OF POO}".encode()),
        b'{"model":"llama","messages":[%s{}]}' % (b"{}," * (LARGEST // 3 - 20)),
        b'{"model":"llama","max_tokens":%s}' % (b"9" * (LARGEST - 100)),
    ]


async def test_a_replica_under_64_hostile_bodies_at_once_stays_under_400_mib(
    valkey: Server, tmp_path: Path
) -> None:
    async with limited(valkey.url, tmp_path, requests_at_once=1000) as replica:
        bodies = hostile_bodies()
        assert all(LARGEST * 0.9 < len(each) <= LARGEST for each in bodies)
        # Every kind of body, in both modes that read bodies, with and without trailers.
        hostile = [
            asyncio.create_task(talk(replica, bodies[at % 6], MODES[at // 6 % 2], trailed=at % 4 == 0))
            for at in range(64)
        ]
        for _ in range(20):
            assert parts([await replica.decide()]) == ["request_headers"]
        async with asyncio.timeout(60):
            await asyncio.gather(*hostile)
        await at_rest(replica)
        assert replica.process.returncode is None
        assert mib(replica, "VmHWM") < PEAK_MIB
        codes = Counter[str]()
        for (name, *labels), count in samples_of(await page(replica)).items():
            if name == "epp_requests_total":
                codes.update({label: int(count) for label in labels if label.startswith("code=")})
        assert codes.total() == 20 + 64
        assert codes.keys() == {"code=ok", "code=bad_request", "code=buffer_full"}


async def test_forty_large_queued_bodies_stay_within_max_buffered_bytes(
    valkey: Server, tmp_path: Path
) -> None:
    async with limited(valkey.url, tmp_path, requests_at_once=1) as replica:
        idle_mib = mib(replica, "VmRSS")
        assert parts([await replica.decide()]) == ["request_headers"]
        text = b'{"model":"llama","prompt":"%s"}' % (b"x" * (LARGEST - 100))
        waiting = [asyncio.create_task(talk(replica, text, "lean")) for _ in range(40)]
        queued = refused = 0

        async def each_waits_or_is_refused() -> bool:
            nonlocal queued, refused
            now = await page(replica)
            queued = int(total(now, "epp_queue_length"))
            refused = int(total(now, "epp_requests_total", code="buffer_full"))
            return queued + refused == len(waiting)

        await until(each_waits_or_is_refused, PATIENT_S)
        # The heap may take twice the size of the bodies.
        assert 4 <= queued <= BOUND // len(text)
        assert await buffered(replica) == queued * len(text)
        assert mib(replica, "VmRSS") < idle_mib + 2 * BOUND / MIB
        assert mib(replica, "VmHWM") < PEAK_MIB
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await at_rest(replica)


async def test_connections_to_one_port_leave_open_files_for_the_others(
    valkey: Server, tmp_path: Path
) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))

    async with (
        served(valkey.url, tmp_path, preexec_fn=limit) as replica,
        contextlib.AsyncExitStack() as opened,
    ):
        assert psutil.Process(replica.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (512, 512)
        for _ in range(600):
            _, writer = await asyncio.open_connection(*split_host_port(replica.bound["grpc"]))
            opened.callback(writer.close)
        async with http_client(replica.bound["admin"]) as another:
            assert (await another.get("/healthz")).status_code == 200
