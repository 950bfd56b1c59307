"""Sends passes: series of similar requests in a closed loop over warm connections; all must be served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from picker_tools.load.generator import Answer, Client, Load, MakeRequest, Request, flow_header

SMALL_BYTES, LARGE_BYTES = 300, 400_000  # sizes of a request's body in bytes
_WARM_UP_PER_CONNECTION = 2
_FLOWS = 4
_LIMIT_S = 180.0  # timeout of a pass in seconds

Send = Callable[[int], Awaitable[list[Answer]]]


class WrongAnswer(Exception):
    """A request was not served, or a pass exceeded its timeout."""


def alike(prompt_bytes: int, tokens: int) -> MakeRequest:
    """Returns a maker of streamed requests for `tokens`, with bodies of `prompt_bytes`, from four flows."""
    room = prompt_bytes - len(Request("", tokens, streamed=True).body())
    prompt = ("the quick brown fox jumps over the lazy dog " * (room // 44 + 1))[: max(0, room)]
    requests = [
        Request(
            prompt,
            tokens,
            streamed=True,
            headers=(
                *flow_header(f"acme/search/flow-{number}"),
                ("x-workload-context", f'{{"workload_id": "workload-{number}", "criticality": 3}}'),
            ),
        )
        for number in range(_FLOWS)
    ]
    return lambda _, number: requests[number % _FLOWS]


@contextlib.asynccontextmanager
async def warmed(url: str, connections: int, make_request: MakeRequest) -> AsyncIterator[Send]:
    """Warm up `connections` connections. Yields a function that sends a pass of N requests.

    Raises:
        WrongAnswer: raised if a request of a pass was not served.
    """
    with Client(url) as client:

        async def send(requests: int) -> list[Answer]:
            load = Load(client)
            try:
                async with asyncio.timeout(_LIMIT_S):
                    await load.send_closed(connections, make_request, requests=requests)
            except TimeoutError:
                raise WrongAnswer(f"{load.open} requests got no answer within {_LIMIT_S:g} s") from None
            for answer in load.unserved:
                raise WrongAnswer(f"{answer.outcome} {answer.text}")
            return load.history

        await send(_WARM_UP_PER_CONNECTION * connections)
        yield send


def per_s(answers: list[Answer]) -> float:
    """Requests a second of a pass, from the first request to the last answer."""
    return len(answers) / (max(each.done_s for each in answers) - min(each.sent_s for each in answers))
