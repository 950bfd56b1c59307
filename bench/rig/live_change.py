"""Change a running fleet's live configuration, and wait until all replicas have the change."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

_FOLLOWED_S = 30.0
_POLL_S = 0.1


async def change_live(client: httpx.AsyncClient, admins: Sequence[str], tree: dict[str, Any]) -> None:
    """`admins`: the admin API's URL of each replica.

    Raises:
        httpx.HTTPError: the change was refused, or a replica did not answer.
        TimeoutError: a replica did not follow.
    """
    answer = await client.patch(f"{admins[0]}/api/v1/config", json=tree)
    wanted = answer.raise_for_status().json()["tuned_version"]
    async with asyncio.timeout(_FOLLOWED_S):
        for admin in admins:
            while await _version(client, admin) != wanted:  # noqa: ASYNC110 - the fleet notifies nobody of it
                await asyncio.sleep(_POLL_S)


async def _version(client: httpx.AsyncClient, admin: str) -> str:
    return str((await client.get(f"{admin}/api/v1/config")).json()["tuned_version"])
