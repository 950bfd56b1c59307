"""Discovery: each source reports its endpoints at once and on change, and keeps the last good list."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from background import until
from source_reports import Lines, watching
from tables import cases

from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints import discovery
from picker_fleet.endpoints.discovery import FileFault, Source, WatchedFile, endpoints_of, listed, source_of
from picker_fleet.endpoints.dns_source import DnsSource
from picker_fleet.endpoints.stages import serving


class Reports(asyncio.Queue[tuple[Endpoint, ...]]):
    """The endpoint lists that a source reports; the method `next` waits for the next list."""

    async def next(self) -> list[str]:
        async with asyncio.timeout(20):
            return [endpoint.address for endpoint in await self.get()]


@asynccontextmanager
async def reported(source: Source) -> AsyncIterator[Reports]:
    reports = Reports()
    async with watching(source, reports.put_nowait):
        yield reports


async def test_a_static_list_is_reported_once_or_an_empty_list_without_discovery() -> None:
    settings = parse({"discovery": {"static": [{"address": "10.0.0.1:8000", "labels": {"gpu": "a"}}]}})
    async with reported(source_of(settings.discovery)) as reports:
        assert await reports.next() == ["10.0.0.1:8000"]
        assert reports.empty()
    async with reported(source_of(parse({}).discovery)) as reports:
        assert await reports.next() == []


KINDS = {"file": ({"file": "e.yaml"}, WatchedFile), "dns": ({"dns": {"name": "m", "port": 8000}}, DnsSource)}


@cases("source, kind", KINDS)
def test_the_configuration_chooses_an_endpoint_source(source: dict[str, object], kind: type[Source]) -> None:
    assert isinstance(source_of(parse({"discovery": source}).discovery), kind)


def entries(*addresses: str) -> str:
    return json.dumps([{"address": address, "labels": {"gpu": "a"}} for address in addresses])


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


async def test_an_endpoints_file_that_is_changed_or_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("- address: 10.0.0.1:8000\n  labels: {gpu: a}\n")
    async with reported(WatchedFile(path, listed, "endpoints", recheck_s=0.2)) as reports:
        assert await reports.next() == ["10.0.0.1:8000"]
        path.write_text(entries("10.0.0.2:8000"))
        assert await reports.next() == ["10.0.0.2:8000"]
        replace(path, entries("10.0.0.3:8000", "[::1]:8000"))
        assert await reports.next() == ["10.0.0.3:8000", "[::1]:8000"]
        replace(path, "[]")
        assert await reports.next() == []


async def test_an_endpoint_has_the_request_limit_given_in_its_list_or_file() -> None:
    entry = {"address": "10.0.0.1:8000", "max_inflight": 5}
    static = parse({"discovery": {"static": [entry]}}).discovery.static
    assert static is not None
    assert [each.max_inflight for each in (*endpoints_of(static), *listed(json.dumps([entry])))] == [5, 5]
    with pytest.raises(FileFault, match=r"0\.max_inflight: "):
        listed("- {address: '10.0.0.1:8000', max_inflight: none}")


async def test_an_endpoint_entry_may_name_its_metrics_page() -> None:
    entry = {"address": "10.0.0.1:8000", "labels": {"gpu": "a"}, "metrics_port": 9100, "metrics_path": "/m"}
    (endpoint,) = listed(json.dumps([entry]))
    page = {"picker-fleet/metrics-port": "9100", "picker-fleet/metrics-path": "/m"}
    assert endpoint.labels == {"gpu": "a", **page}
    for key, value in (("metrics_port", 0), ("metrics_path", "m")):
        with pytest.raises(FileFault, match=rf"0\.{key}: "):
            listed(json.dumps([{**entry, key: value}]))


# Role -> stages of an endpoint with this role, if other endpoints of the pool only prefill and only encode.
ROLES = {
    "": "decode", "decode": "decode", "prefill-decode": "decode prefill", "both": "decode prefill",
    "encode-prefill-decode": "decode prefill encode", "encode-decode": "decode encode", "prefill": "prefill",
    "encode-prefill": "prefill encode", "encode": "encode", "router": "", "decoder": "", "Encode": "",
    "no-prefill": "", "decode-canary": "", "prefill-": "",
}  # fmt: skip


def stages_of(endpoints: Iterable[Endpoint]) -> dict[str, str]:
    """The stages of each endpoint, by address."""
    return {
        each.address: " ".join(
            ["decode"] * each.decodes + ["prefill"] * each.prefills + ["encode"] * each.encodes
        )
        for each in endpoints
    }


def reported_by(endpoints: tuple[Endpoint, ...], stages: Mapping[str, Any] = {}) -> dict[str, str]:
    reports: list[tuple[Endpoint, ...]] = []
    settings = parse({"scheduling": {"stages": stages, "endpoint_labels": {"gpu": "a"}}}).scheduling
    serving(settings.endpoint_labels, settings.stages, reports.append)(endpoints)
    return stages_of(reports[0])


def with_role(role: str) -> Endpoint:
    return Endpoint(role, {"gpu": "a"} | ({"llm-d.ai/role": role} if role else {}))


def test_roles_assign_stages_and_endpoints_without_a_stage_or_a_label_get_no_requests() -> None:
    found = reported_by((*map(with_role, ROLES), Endpoint("other", {"gpu": "b"})))
    assert found == {role: stages for role, stages in ROLES.items() if stages}


def test_endpoints_of_both_roles_prefill_for_others_only_beside_a_pure_prefill_endpoint() -> None:
    both = (with_role("both"), with_role("prefill-decode"), with_role(""))
    assert set(reported_by(both).values()) == {"decode"}
    assert reported_by((*both, with_role("prefill")))["both"] == "decode prefill"
    all_three = with_role("encode-prefill-decode")
    assert reported_by((*both, all_three))[all_three.address] == "decode"
    assert reported_by((*both, all_three, with_role("encode")))[all_three.address] == "decode encode"


def test_selectors_of_stages_take_the_place_of_roles() -> None:
    endpoints = (with_role("prefill"), with_role("decode"), Endpoint("fast", {"gpu": "a", "tier": "1"}))
    stages = {"prefill": {"selector": "tier in (1,2)"}, "decode": {"selector": "!tier"}}
    assert reported_by(endpoints, stages) == {"prefill": "decode", "decode": "decode", "fast": "prefill"}
    everywhere = {"prefill": {"selector": "gpu"}}
    assert reported_by(endpoints[1:], everywhere) == {"decode": "decode prefill", "fast": "decode prefill"}


def test_the_log_names_the_stages_once_and_after_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    report = serving({}, parse({}).scheduling.stages, lambda endpoints: None)
    for roles in ([""], ["", "prefill"], ["", "prefill"], [""]):
        report(tuple(map(with_role, roles)))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "stages: 1 endpoints decode, 1 prefill, 0 of them both; 0 encode",
        "stages: 1 endpoints decode, 0 prefill, 0 of them both; 0 encode",
    ]


async def test_a_config_map_whose_symlink_is_swapped_is_read_again(tmp_path: Path) -> None:
    for version, address in (("v1", "10.0.0.1:8000"), ("v2", "10.0.0.2:8000")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "endpoints.yaml").write_text(entries(address))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "endpoints.yaml").symlink_to("..data/endpoints.yaml")
    async with reported(
        WatchedFile(tmp_path / "endpoints.yaml", listed, "endpoints", recheck_s=0.2)
    ) as reports:
        assert await reports.next() == ["10.0.0.1:8000"]
        (tmp_path / "..data_tmp").symlink_to("v2")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
        assert await reports.next() == ["10.0.0.2:8000"]


async def test_when_a_file_breaks_the_last_good_list_stays_and_the_fault_is_logged(
    tmp_path: Path, log: Lines
) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(entries("10.0.0.1:8000"))
    async with reported(WatchedFile(path, listed, "endpoints", recheck_s=0.2)) as reports:
        await reports.next()
        replace(path, entries("model-server:8000"))
        assert str(path) in await log.saying("'model-server:8000' is no ip:port")
        path.unlink()
        await log.saying("cannot be read")
        assert reports.empty()
        replace(path, entries("10.0.0.2:8000"))
        assert await reports.next() == ["10.0.0.2:8000"]


UNUSABLE = [("e.yaml", None), ("e.yaml", ""), ("e.yaml", "- 7"), ("e.yaml", "{"), ("absent/e.yaml", None)]


@pytest.mark.parametrize(("file", "content"), UNUSABLE)
async def test_a_startup_error_names_an_unusable_file(tmp_path: Path, file: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(StartupError, match=r"e\.yaml: ") as caught:
        await WatchedFile(tmp_path / file, listed, "endpoints").watch(Reports().put_nowait)
    assert content is not None or "cannot be read" in str(caught.value)


async def test_parsing_an_endpoints_file_may_take_longer_than_the_time_limit_for_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_READ_S", 0.5)
    path = tmp_path / "endpoints.yaml"
    path.write_text(entries("10.0.0.1:8000"))

    def parsed(text: str) -> tuple[Endpoint, ...]:
        time.sleep(0.6)
        return listed(text)

    async with reported(WatchedFile(path, parsed, "endpoints")) as reports:
        assert await reports.next() == ["10.0.0.1:8000"]


def test_the_error_names_a_file_whose_read_hangs_and_the_process_can_still_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endpoints.yaml")  # opening a FIFO hangs, as on a hung network file system
    code = (
        "import asyncio, pathlib, sys; from picker_fleet.endpoints import discovery as it; it._READ_S = 0.1\n"
        "asyncio.run(it.WatchedFile(pathlib.Path(sys.argv[1]), it.listed, 'endpoints').watch(print))"
    )
    command = (sys.executable, "-c", code, str(tmp_path / "endpoints.yaml"))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr.splitlines()[-1].endswith("endpoints.yaml: cannot be read: no answer in time")


WRONG_LISTS = [
    ("", "is empty"),
    ("endpoints: []", "the list: "),
    ("- address: 10.0.0.1:8000\n- address: 10.0.0.1:8000", "10.0.0.1:8000 is listed twice"),
    ("- addres: 10.0.0.1:8000", "0."),
    ("- {address: '10.0.0.1:8000', labels: {a: 1}}", "0.labels.a: "),
]


@pytest.mark.parametrize(("text", "needle"), WRONG_LISTS)
def test_the_refusal_of_an_invalid_endpoint_list_names_the_place_of_the_fault(text: str, needle: str) -> None:
    with pytest.raises(FileFault) as caught:
        listed(text)
    assert needle in str(caught.value)


class Zone(asyncio.DatagramProtocol):
    """A name server for one name. In `records` the value None of a type causes a server failure, and a
    missing type an empty answer."""

    records: Mapping[str, list[str] | None] = {}
    forgets = 0  # number of next answers to A queries that are empty

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        question = query.question[0]
        family = dns.rdatatype.to_text(question.rdtype)
        found = self.records.get(family, [])
        if family == "A" and self.forgets:
            self.forgets, found = self.forgets - 1, []
        if found is None:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif found:
            response.answer.append(dns.rrset.from_text(question.name, 1, "IN", family, *found))
        self._transport.sendto(response.to_wire(), addr)


@pytest.fixture
async def zone() -> AsyncIterator[Zone]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(Zone, local_addr=("127.0.0.1", 0))
    yield server
    transport.close()


def by_dns(zone: Zone, name: str = "models.test.") -> DnsSource:
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = zone.port
    return DnsSource(name, 8000, interval_s=0.02, lookup_s=2, resolver=resolver)


async def test_dns_records_of_both_address_families_are_followed(zone: Zone) -> None:
    zone.records = {"A": ["10.0.0.2", "10.0.0.1"], "AAAA": ["fd00::1"]}
    async with reported(by_dns(zone)) as reports:
        assert await reports.next() == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
        zone.records = {"A": ["10.0.0.1"]}
        lists = [await reports.next()]
        while lists[-1] != ["10.0.0.1:8000"]:  # each address family has its own lookup
            lists.append(await reports.next())
        zone.records = {}
        assert await reports.next() == []


async def test_an_endpoint_without_dns_record_is_removed_after_two_lookups(zone: Zone, log: Lines) -> None:
    zone.records = {"A": ["10.0.0.1"]}
    async with reported(by_dns(zone)) as reports:
        assert await reports.next() == ["10.0.0.1:8000"]
        zone.forgets = 1
        assert "the last good list stays in use" in await log.saying("models.test. A has no address;")
        await until(lambda: not zone.forgets)
        assert reports.empty()
        zone.records = {}
        assert await reports.next() == []
        assert "its list is empty" in await log.saying("models.test. A has no address again")


Records = dict[str, list[str] | None]
NEITHER: Records = {"A": None, "AAAA": None}
ONE: tuple[Records, list[str]] = ({"A": ["10.0.0.1"], "AAAA": []}, ["10.0.0.1:8000"])
OTHER: tuple[Records, list[str]] = ({"A": ["10.0.0.9"]}, ["10.0.0.9:8000"])
# Each step has the name server's records and the list reported next; None: a failure is logged instead.
STEPS: dict[str, tuple[list[tuple[Records, list[str] | None]]]] = {
    "the last good list stays": ([ONE, (NEITHER, None), OTHER],),
    "the other family is followed": (
        [({"A": ["10.0.0.1"], "AAAA": None}, ["10.0.0.1:8000"]), ({"A": [], "AAAA": None}, [])],
    ),
    "no list at the start while one family fails and the other is empty": (
        [({"A": None, "AAAA": []}, None), ONE],
    ),
    "no list at the start while both families fail": ([(NEITHER, None), ONE],),
}  # fmt: skip


@cases("steps", STEPS)
async def test_discovery_keeps_or_updates_its_endpoints_while_a_name_server_fails(
    zone: Zone, log: Lines, steps: list[tuple[Records, list[str] | None]]
) -> None:
    zone.records = steps[0][0]
    async with reported(by_dns(zone)) as reports:
        for records, expected in steps:
            zone.records = records
            if expected is None:
                await log.saying("models.test. A failed")
                assert reports.empty()
            else:
                assert await reports.next() == expected


@pytest.mark.parametrize(("name", "address"), [("127.0.0.1", "127.0.0.1:8000"), ("::1", "[::1]:8000")])
async def test_an_address_given_as_the_dns_name_becomes_the_endpoint(name: str, address: str) -> None:
    async with reported(DnsSource(name, 8000)) as reports:
        assert await reports.next() == [address]


async def test_dns_discovery_lets_the_system_look_up_localhost() -> None:
    async with reported(DnsSource("localhost", 8000)) as reports:
        assert "127.0.0.1:8000" in await reports.next()
