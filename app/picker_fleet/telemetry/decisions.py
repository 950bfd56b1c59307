"""A log line for each decision: placements at debug level, refusals at info, a few a second of each kind."""

import logging
from collections.abc import Callable, Sequence

from picker_fleet.errors import NoEndpoints
from picker_fleet.request import InferenceRequest
from picker_fleet.scheduling.explain import Explanation
from picker_fleet.telemetry.logs import about

_log = logging.getLogger(__name__)
_REFUSALS_A_SECOND = 5  # of one code; a flood of refusals must not become a flood of lines


class DecisionLines:
    """Writes them. `debug` says whether placements are written: ask before telling of one. One event loop.

    `clock` is in seconds, and only its differences count. `explain` tells how a request's endpoint was
    chosen; it is asked at debug level only.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        explain: Callable[[str], Explanation | None] = lambda request_id: None,
    ) -> None:
        self.debug = _log.isEnabledFor(logging.DEBUG)
        self._explain = explain
        self._clock = clock
        self._second = -1
        self._written: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def placed(
        self, request: InferenceRequest | None, endpoints: Sequence[str], mode: str, seconds: float
    ) -> None:
        """A request goes to the first of `endpoints`; without `request` it was not admitted (GET)."""
        fields = {**_of(request, "ok", mode, seconds), "endpoints": ",".join(endpoints)}
        _log.debug("placed", extra={**fields, **self._why(request)})

    def refused(
        self, request: InferenceRequest | None, code: str, status: int, mode: str, seconds: float
    ) -> None:
        """A request got `code` and the HTTP `status` for an answer, or its client left before there was one
        (`client_gone`, 499); without `request` it could not be read."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._written.clear()
        written = self._written.get(code, 0)
        if written >= _REFUSALS_A_SECOND and not self.debug:
            self._left_out[code] = self._left_out.get(code, 0) + 1
            return
        self._written[code] = written + 1
        fields = {**_of(request, code, mode, seconds), "status": status}
        if self.debug and code == NoEndpoints.code:
            fields |= self._why(request)
        left_out = self._left_out.pop(code, 0)
        _log.info("refused", extra={**fields, "left_out": left_out} if left_out else fields)

    def _why(self, request: InferenceRequest | None) -> dict[str, str]:
        explained = None if request is None else self._explain(request.id)
        return {} if explained is None else explained.summary()


def _of(request: InferenceRequest | None, code: str, mode: str, seconds: float) -> dict[str, object]:
    fields: dict[str, object] = {"mode": mode, "took_s": round(seconds, 6)}
    if request is None:
        return {"decision": code, **fields}
    band = request.band.label
    return {**about(request.id, request.flow, code), "model": request.model, "band": band, **fields}
