"""`python -m bench.overhead.reduced_replica PART serve …`: a replica that does only a part of its work, to
tell what the rest costs. Each PART includes those before it:

    reads   the request and its access log are read, and it is answered with a constant
    pings   and Valkey is asked for one PING
    calls   and `admit` and `settle` are called, with no queue, failover or accounting around them
"""

import sys
from typing import Any

from picker_fleet import cli
from picker_fleet.failover.gate import FailoverGate
from picker_fleet.request import Completion, InferenceRequest, Placement
from picker_fleet.state import accounting_token

PARTS = ("reads", "pings", "calls")


def reduce_to(part: str) -> None:
    """From now on a gate of this process does no more than `part`."""

    async def admit(self: Any, request: InferenceRequest, **_: object) -> Placement:
        chosen = tuple(each.address for each in self._endpoints.current.endpoints[:2])
        if part == "pings":
            await self._store._client.command("PING")
        elif part == "calls":
            decision = await self._store.admit(request, 1, "*")
            chosen = tuple(decision.detail.split(","))
        fields = accounting_token.write(request, chosen[0])  # else the access log would not count
        return Placement(chosen, accounting_token.signed(fields, request.id, self._shared._keys))

    def settle(self: Any, completion: Completion) -> None:
        if part == "calls":
            self._store.settle(completion.id, completion.outcome)

    FailoverGate.admit = admit  # type: ignore[method-assign, assignment]
    FailoverGate.settle = settle  # type: ignore[method-assign]


if __name__ == "__main__":
    reduce_to(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
