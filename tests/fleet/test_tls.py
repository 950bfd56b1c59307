"""A fleet whose replicas use TLS; Envoy connects in each mode, also after certificates are replaced."""

import asyncio
import os
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from edge_envoy import edge
from fleet_load import at_rest, complete
from tls_files import Pair, authority, signed

from picker_fleet.domain.units import split_host_port
from picker_tools.local_fleet.bootstrap import PickerTls
from picker_tools.local_fleet.parts import Mode

CASES = [("standard", "native"), ("lean", "grpcio"), ("http", "native")]


class Certificates:
    """An authority's certificates for replicas and Envoy; `tls` is the replicas' configuration."""

    def __init__(self, folder: Path) -> None:
        self.authority = authority(folder, "ours")
        self.own = signed(folder, "picker", self.authority)
        self.envoy = signed(folder, "envoy", self.authority)
        files = {"cert": self.own.cert, "key": self.own.key, "client_ca": self.authority.cert}
        self.tls = {name: str(file) for name, file in files.items()}


def replace(old: Pair, new: Pair) -> None:
    for source, target in ((new.cert, old.cert), (new.key, old.key)):
        draft = target.with_suffix(".new")
        shutil.copy(source, draft)
        os.replace(draft, target)


def presented(address: str, own: Pair) -> bytes:
    """The certificate that `address` presents to a client with the certificate `own`."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(own.cert, own.key)
    with context.wrap_socket(socket.create_connection(split_host_port(address), timeout=30)) as secured:
        return secured.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize(("mode", "transport"), CASES)
async def test_a_fleet_serves_over_tls_while_its_certificates_are_replaced(
    fleet: Any, tmp_path: Path, mode: Mode, transport: str
) -> None:
    files = Certificates(tmp_path)
    config = {"extproc": {"tls": files.tls, "transport": transport}, "http": {"tls": files.tls}}
    here = fleet("--mode", mode, "--replicas", "2", "--endpoints", "1", config=config)
    ports = [each["http" if mode == "http" else "grpc"] for each in here.state["replicas"]]
    (tmp_path / "next").mkdir()
    renewed = signed(tmp_path / "next", "picker", files.authority)
    shown = ssl.PEM_cert_to_DER_cert(renewed.cert.read_text())
    before = asyncio.create_task(complete(here.url, "hi", 100))
    replace(files.own, renewed)

    async def found() -> list[bytes]:
        return [await asyncio.to_thread(presented, port, files.envoy) for port in ports]

    await here.eventually(found, lambda each: each == [shown] * 2, what="the new certificate")
    assert (await before).served
    assert all([(await complete(here.url, "hi", 3)).served for _ in range(5)])
    await at_rest(here)


async def test_an_envoy_that_verifies_replicas_connects_with_its_client_certificate(
    fleet: Any, tmp_path: Path
) -> None:
    files = Certificates(tmp_path)
    settings = {"extproc": {"tls": files.tls}}
    here = fleet("--replicas", "1", "--endpoints", "1", config=settings)
    checking = PickerTls(str(files.authority.cert), str(files.envoy.cert), str(files.envoy.key))
    with edge(here, tmp_path / "edge", settings=settings, tls=checking) as running:
        assert (await complete(running.url, "hi", 3)).served
        await at_rest(here)  # a killed Envoy would not report the request's end


async def test_a_fleet_without_certificate_files_uses_self_signed_certificates(fleet: Any) -> None:
    here = fleet("--replicas", "2", "--endpoints", "1", config={"extproc": {"tls": {}}})
    assert (await complete(here.url, "hi", 3)).served
    await at_rest(here)
