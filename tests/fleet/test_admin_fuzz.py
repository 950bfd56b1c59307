"""Sends the admin API random calls, generated from its OpenAPI document, while requests wait and run."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from admin_calls import ask
from hypothesis import HealthCheck, given, settings
from whole_fleet import says_unavailable

CONFIG = {
    "admin": {"rate": 1e6},
    "fair_request_queue": {"ordering": "workload-aware"},
    "request_queue_controller": {"watermark_per_backend": 2},
}
EXAMPLES = 15  # number of random calls of each operation
MAX_ATTEMPTS = 5  # tries of one call, while the API answers that Redis timed out


@pytest.fixture
async def busy(fleet: Any) -> AsyncIterator[Any]:
    """A fleet with 2 requests running and 30 waiting, from 3 flows and 2 workloads."""
    here = fleet("--replicas", "1", "--endpoints", "1", "--sim-ttft", "60000", config=CONFIG)
    async with here.client() as client:
        requests = [
            ask(client, f"flow/{n % 3}", workload=f"w {n % 2}", criticality=1 + n % 5) for n in range(32)
        ]
        asked = [asyncio.create_task(each) for each in requests]
        await here.until_state(queued=30)
        yield here
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_no_call_fails_and_every_answer_conforms_to_the_openapi_document(busy: Any) -> None:
    described = (await busy.admin("/openapi.json")).json()

    async def listed() -> Any:  # the returned list may be up to a second older than the queue
        return (await busy.get("queue"))["requests"]

    waiting = (await busy.eventually(listed, what="a queued request in the list"))[0]["id"]
    del described["paths"]["/api/v1/events"]
    tried = await asyncio.to_thread(_fuzz, described, busy.admin_url())
    assert tried.keys() == {
        f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods
    }
    assert all(count > 0 for count in tried.values())
    assert (await busy.admin("/healthz")).status_code == 200
    assert (await busy.admin(f"/api/v1/requests/{waiting}")).status_code in (200, 404)


def _fuzz(described: dict[str, Any], base: str) -> dict[str, int]:
    """Call every operation with random arguments; return how often each was called. Raises AssertionError
    or schemathesis's error for a wrong answer, or if Redis times out MAX_ATTEMPTS times in a row.
    """
    # Import schemathesis here, because the import takes more than a second and other tests do not need it.
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conforms = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_dict(described)
    tried: dict[str, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=EXAMPLES, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            tried[case.operation.label] = tried.get(case.operation.label, 0) + 1
            for _ in range(MAX_ATTEMPTS):
                answer = case.call(base_url=base, timeout=20)
                case.validate_response(answer, checks=conforms)
                if not says_unavailable(answer):
                    break
            case.validate_response(answer, checks=[not_a_server_error])

        call()
    return tried
