"""A fleet whose replicas speak TLS: Envoy asks them by it in each mode, and goes on with new certificates."""

import asyncio
import os
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from edge_envoy import edge
from fleet_load import at_rest, complete
from tls_files import Pair, authority, signed

from picker_tools.local_fleet.clusters import PickerTls
from picker_tools.local_fleet.parts import Mode

CASES = [("lean", "native"), ("lean", "grpcio"), ("standard", "native"), ("http", "native")]


def replace(old: Pair, new: Pair) -> None:
    for source, target in ((new.cert, old.cert), (new.key, old.key)):
        draft = target.with_suffix(".new")
        shutil.copy(source, draft)
        os.replace(draft, target)


def presented(address: str, own: Pair) -> bytes:
    """The certificate that `address` shows to a client with `own`."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(own.cert, own.key)
    with context.wrap_socket(socket.create_connection((host, int(port)), timeout=30)) as secured:
        return secured.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize(("mode", "transport"), CASES)
async def test_a_fleet_serves_over_tls_while_its_certificates_change(
    fleet: Any, tmp_path: Path, mode: Mode, transport: str
) -> None:
    ours = authority(tmp_path, "ours")
    own, client = signed(tmp_path, "picker", ours), signed(tmp_path, "envoy", ours)
    tls = {"cert": str(own.cert), "key": str(own.key), "client_ca": str(ours.cert)}
    config = {"extproc": {"tls": tls, "transport": transport}, "http": {"tls": tls}}
    here = fleet("--mode", mode, "--replicas", "2", "--endpoints", "1", config=config)
    ports = [each["http" if mode == "http" else "grpc"] for each in here.state["replicas"]]
    (tmp_path / "next").mkdir()
    renewed = signed(tmp_path / "next", "picker", ours)
    shown = ssl.PEM_cert_to_DER_cert(renewed.cert.read_text())
    async with here.client() as through:
        before = asyncio.create_task(complete(through, "hi", 100))
        replace(own, renewed)

        async def all_show_it() -> bool:
            found = [await asyncio.to_thread(presented, port, client) for port in ports]
            return found == [shown, shown]

        await here.eventually(all_show_it, what="the new certificate")
        assert (await before).whole
        assert all([(await complete(through, "hi", 3)).whole for _ in range(5)])
    await at_rest(here)


async def test_an_envoy_that_checks_the_replicas_gets_in_with_its_certificate(
    fleet: Any, tmp_path: Path
) -> None:
    ours = authority(tmp_path, "ours")
    own, client = signed(tmp_path, "picker", ours), signed(tmp_path, "envoy", ours)
    tls = {"cert": str(own.cert), "key": str(own.key), "client_ca": str(ours.cert)}
    here = fleet("--replicas", "1", "--endpoints", "1", config={"extproc": {"tls": tls}})
    checking = PickerTls(str(ours.cert), str(client.cert), str(client.key))
    with edge(here, tmp_path / "edge", picker_tls=checking) as running:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=60.0) as through:
            assert (await complete(through, "hi", 3)).whole
    await at_rest(here)


async def test_a_fleet_without_files_signs_its_certificates_itself(fleet: Any) -> None:
    here = fleet("--replicas", "2", "--endpoints", "1", config={"extproc": {"tls": {}}})
    async with here.client() as through:
        assert (await complete(through, "hi", 3)).whole
    await at_rest(here)
