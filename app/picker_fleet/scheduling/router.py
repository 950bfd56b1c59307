"""Chooses endpoints for requests that need no admission."""

import random

from picker_fleet.domain.errors import NoEndpoints
from picker_fleet.domain.request import Placement
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.chooser import EndpointChooser


class Router:
    """Routes requests without a body (GET) to `endpoints` that decode, each with `fallbacks` alternatives."""

    def __init__(self, endpoints: SnapshotCell, chooser: EndpointChooser, fallbacks: int) -> None:
        self._endpoints, self._chooser, self._fallbacks = endpoints, chooser, fallbacks

    def route(self, subset: tuple[str, ...] | None, *, origin: str = "", session: str = "") -> Placement:
        """Choose random ready endpoints. The first is the endpoint `origin`, even if it takes no new
        requests; without `origin`, the endpoint of the `session`.

        Raises:
            NoEndpoints: no endpoint, or no endpoint of the subset, is ready.
        """
        allowed = [e for e in self._endpoints.current.decoders if subset is None or e.address in subset]
        ready = [e.address for e in allowed if e.ready]
        first = [e.address for e in allowed if e.address == origin and not e.down]
        if session and not first:
            preferred = self._chooser.session_endpoint(session, subset)
            first = [address for address in ready if address == preferred]
        if not ready and not first:
            raise NoEndpoints("no endpoint is ready that may serve this request", retry_after_s=1)
        others = random.sample(ready, min(len(ready), 1 + self._fallbacks))
        return Placement(tuple(dict.fromkeys((*first, *others)))[: 1 + self._fallbacks], "")
