"""Calls of the admin API that the tests of whole fleets share."""

from typing import Any

import httpx
from fleet_load import shared


async def post(fleet: Any, path: str, replica: int = 0) -> Any:
    """The answer to a change through one replica, which must accept it."""
    answer = await fleet.admin(f"/api/v1/{path}", replica, method="POST")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def patch(fleet: Any, changes: dict[str, Any], replica: int = 0) -> Any:
    """The configuration after a live change through one replica, which must accept it."""
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0) as client:
        url = f"{fleet.state['replicas'][replica]['admin']}/api/v1/config"
        answer = await client.patch(url, json=changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def queue_length(fleet: Any, count: int) -> None:
    """Wait until `count` requests are queued."""

    async def reached() -> bool:
        return bool((await shared(fleet))["queued"] == count)

    await fleet.eventually(reached, what=f"{count} queued")
