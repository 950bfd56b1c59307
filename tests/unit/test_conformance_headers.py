"""The conformance suite's headers choose an endpoint and name the endpoint that served, if switched on."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import extproc_client as envoy
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from extproc_client import Talk, body, headers, set_headers

from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.ingress.headers import selected_endpoints

ASK = b'{"model": "m", "prompt": "p"}'
CHOICE = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
POOL = SnapshotCell()
POOL.publish(
    Snapshot("1", tuple(map(Endpoint, ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000"))))
)


def conforming() -> Talk:
    """An exchange with a replica that has `extproc.conformance`."""
    talk = Talk(settings={"extproc": {"conformance": True}})
    talk.here = replace(talk.here, selected=partial(selected_endpoints, POOL))
    return talk.another()


def asked(fields: Mapping[str, str], **more: object) -> list[ProcessingRequest]:
    return [headers("standard", fields, **more), body(ASK)]  # type: ignore[arg-type]


CHOICES = [
    ("10.0.0.2", ("10.0.0.2:8000",)),
    ("10.0.0.1", ("10.0.0.1:8000", "10.0.0.1:8001")),
    ("10.0.0.1:8001, 10.0.0.2", ("10.0.0.2:8000", "10.0.0.1:8001")),
    ("fd00::1", ("[fd00::1]:8000",)),
    ("[fd00::1]:8000", ("[fd00::1]:8000",)),
    ("10.9.9.9", ()),
    ("", ()),
]


@pytest.mark.parametrize(("choice", "subset"), CHOICES)
async def test_the_conformance_header_chooses_endpoints(choice: str, subset: tuple[str, ...]) -> None:
    talk = conforming()
    await talk.say(*asked({CHOICE: choice}))
    assert talk.gate.admitted[0][0].subset == subset


async def test_without_the_conformance_header_a_subset_hint_still_limits_the_choice() -> None:
    talk = conforming()
    await talk.say(*asked({}))
    assert talk.gate.admitted[0][0].subset is None
    talk = conforming()
    hint = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.2:8000"]}}
    await talk.say(*asked({CHOICE: "10.0.0.1,10.0.0.2"}, metadata=hint))
    assert talk.gate.admitted[0][0].subset == ("10.0.0.2:8000",)


ANSWERS = [
    (envoy.response_headers(200, served="10.0.0.1:8000"), "10.0.0.1:8000"),
    (envoy.response_headers(200), "fail: missing envoy lb metadata"),
]


@pytest.mark.parametrize(("answer", "told"), ANSWERS)
async def test_an_answer_header_names_the_endpoint_that_served(answer: ProcessingRequest, told: str) -> None:
    talk = conforming()
    said = await talk.say(*asked({}), answer)
    assert set_headers(said[-1].response_headers.response.header_mutation)[SERVED] == told
    talk.close()


async def test_the_conformance_suite_may_ask_for_any_path() -> None:
    talk = conforming()
    await talk.say(*asked({}, ask=("POST", "/primary-gateway-test")))
    assert len(talk.gate.admitted) == 1


async def test_by_default_the_conformance_headers_have_no_effect() -> None:
    talk = Talk()
    said = await talk.say(*asked({CHOICE: "10.0.0.1"}), envoy.response_headers(200, served="10.0.0.1:8000"))
    assert talk.gate.admitted[0][0].subset is None
    assert SERVED not in set_headers(said[-1].response_headers.response.header_mutation)
    talk.close()
