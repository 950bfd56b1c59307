"""The gate as Envoy's side sees it: may this request go now, and where?"""

from typing import Protocol

from picker_fleet.request import Alive, Completion, InferenceRequest, Placement


class Gate(Protocol):
    """Admission and placement of requests; every implementation is safe to call from one event loop."""

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        """Wait for the request's turn and its endpoints; its place in the queue is that of one which came
        `age_s` ago.

        `held` says that this replica holds the request's stream until it ends (`standard`): the gate then
        renews its lease by itself until `settle` or `withdraw`. Otherwise access-log entries do.
        Cancelling the call withdraws the request, wherever it is.

        Raises:
            RequestError: it is refused, expired, preempted, evicted, or the shared state cannot be reached.
        """
        ...

    async def route(self, subset: tuple[str, ...] | None) -> Placement:
        """An endpoint without admission, for a request that ends with its headers (GET).

        Raises:
            NoEndpoints: none is ready, or none of the subset.
        """
        ...

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        """Whether a placement made `age_s` ago is still the request's own: it then has a whole lease again.

        For a request that is not `held` and that Envoy has not been told of, whose lease nobody renews.

        Raises:
            StateUnavailable: nobody can tell.
        """
        ...

    def withdraw(self, request_id: str, placement: Placement) -> None:
        """Take back a placement that never reached Envoy. Returns at once."""
        ...

    def settle(self, completion: Completion) -> object:
        """Account for a request's end. Returns at once; the next batch carries it. Idempotent."""
        ...

    def suspect(self, request_id: str) -> None:
        """The request's client may have gone: an entry without a token says so. Returns at once."""
        ...

    def renew(self, alive: Alive) -> None:
        """Keep a request's lease. Returns at once; the next batch carries it."""
        ...
