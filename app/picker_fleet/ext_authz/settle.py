"""The end of a request whose proxy writes no access log: the settle address, and the leases until then.

A check by headers (check.py) gives the proxy a settle token. The proxy keeps it from its client, and sends it
to `POST /settle` of any replica when the request has ended. The token has the fleet's signature for its
request, so nobody else can end it. Until then the replica that placed the request renews its lease, in place
of an access log. It stops when the request is settled, here or elsewhere, and after `http.longest_request`,
when the proxy must have lost the request: then its place is free when its endpoint's metrics pages no longer
count it, or when the lease runs out. A request whose record Redis has lost is not restored, since another
replica may have settled it.
"""

import asyncio
import base64
import binascii
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from picker_fleet.admission.gate import Gate
from picker_fleet.errors import BadRequest
from picker_fleet.extproc.accesslog import Account, owner
from picker_fleet.request import Alive, Completion, Outcome
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import NO_TOKEN

TOKEN: Final = "x-picker-settle-token"
OUTCOME: Final = "x-picker-outcome"  # completed, client_gone or upstream_failed; without it the status says
ANSWER_STATUS: Final = "x-picker-answer-status"  # what the client got
SERVED: Final = "x-picker-served"  # `ip:port`; of several tries the last
SECONDS: Final = "x-picker-seconds"  # from the request's arrival at the proxy to its end
HEADERS: Final = (TOKEN, OUTCOME, ANSWER_STATUS, SERVED, SECONDS)

_LONGEST_TOKEN = 16 * 1024
_LONGEST_ID = 512
_SEPARATOR = "\n"  # no field can contain it
_UNKNOWN_RENEWALS = 3  # in a row, after which a request must have been settled elsewhere
_OUTCOMES = {outcome.value.encode(): outcome for outcome in Outcome}

_log = logging.getLogger(__name__)


class Placed(NamedTuple):
    """A request that was placed and has to be settled. The names are those of `request.Placement`."""

    id: str
    accounting_token: str
    waited_s: float | None
    target_model: str

    def token(self) -> str:
        """What its proxy keeps and sends back: ASCII, without blanks."""
        waited = "" if self.waited_s is None else repr(self.waited_s)
        fields = _SEPARATOR.join((self.id, self.accounting_token, waited, self.target_model))
        return base64.urlsafe_b64encode(fields.encode()).decode()

    @classmethod
    def read(cls, token: bytes) -> Self:
        """What `token` wrote; its signature is not checked.

        Raises:
            BadRequest: it is no such token.
        """
        try:
            if len(token) > _LONGEST_TOKEN:
                raise ValueError
            decoded = base64.b64decode(token, altchars=b"-_", validate=True).decode()
            request_id, signed, waited, target_model = decoded.split(_SEPARATOR)
            waited_s = float(waited) if waited else None
            if not 0 < len(request_id) <= _LONGEST_ID or (
                waited_s is not None and not 0 <= waited_s < math.inf
            ):
                raise ValueError
        except (ValueError, binascii.Error):
            raise BadRequest(f"{TOKEN} is missing, or is not what a check gave") from None
        return cls(request_id, signed, waited_s, target_model)


@dataclass(slots=True)
class _Open:
    placed: Placed
    gate: Gate  # of its pool
    since_s: float
    unknown: int = 0  # renewals in a row that found no such request


class Placements:
    """Those that this replica made by headers and that have not ended, as far as it knows, in any pool.

    `clock` is in seconds; only its differences count.
    """

    def __init__(self, accounts: Sequence[Account], longest_s: float, clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self._longest_s, self._clock = longest_s, clock
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def began(self, placed: Placed, gate: Gate) -> None:
        """The proxy has been told of the placement, which `gate` made."""
        self._open[placed.id] = _Open(placed, gate, self._clock())

    def settle(self, headers: Mapping[str, bytes]) -> bool:
        """Account for the end that a proxy reports; false if the fleet has not signed its token.

        Raises:
            BadRequest: the report is malformed.
        """
        placed = Placed.read(headers.get(TOKEN, b""))
        outcome, status = _outcome(headers)
        served = _last(headers.get(SERVED, b"").decode("latin-1"))
        token = placed.accounting_token
        account, fault = owner(token, placed.id, self._accounts)
        if fault or not token:
            account.metrics.access_log_rejected(fault or NO_TOKEN)
            return False
        self._open.pop(placed.id, None)
        account.gate.settle(
            Completion(
                id=placed.id,
                outcome=outcome,
                status=status,
                served=served or accounting_token.endpoint_of(token),
                prompt_tokens=None,
                completion_tokens=None,
                duration_s=_seconds(headers.get(SECONDS, b"")),
                first_byte_s=None,
                accounting_token=token,
                waited_s=placed.waited_s,
                target_model=placed.target_model,
            )
        )
        account.metrics.access_log("ended")
        return True

    def renew(self) -> None:
        """Renew every lease, but not of requests that have been settled elsewhere or lost."""
        lost_before_s = self._clock() - self._longest_s
        lost = [request_id for request_id, entry in self._open.items() if entry.since_s < lost_before_s]
        for request_id in lost:
            self._open.pop(request_id).gate.suspect(request_id)
        if lost:
            _log.warning(
                "nobody has settled a request within http.longest_request",
                extra={"request": lost[0], "requests": len(lost)},
            )
        for entry in list(self._open.values()):
            # Without its token: what was settled elsewhere must not be restored.
            answer = entry.gate.renew(Alive(entry.placed.id, None, ""))
            if answer is not None:
                answer.add_done_callback(lambda done, entry=entry: self._renewed(entry, done))  # type: ignore[misc]

    def _renewed(self, entry: _Open, answer: "asyncio.Future[str]") -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        # What was placed without Redis is unknown there until this replica has told it.
        entry.unknown = entry.unknown + 1 if answer.result() == "unknown" else 0
        if entry.unknown >= _UNKNOWN_RENEWALS and self._open.get(entry.placed.id) is entry:
            del self._open[entry.placed.id]


def _outcome(headers: Mapping[str, bytes]) -> tuple[Outcome, int]:
    """How the request ended, and the status that its client got, 0 for none."""
    text = headers.get(ANSWER_STATUS, b"")
    status = int(text) if len(text) == 3 and text.isdigit() else 0
    given = headers.get(OUTCOME)
    if given is None:
        gone = Outcome.CLIENT_GONE if status == 499 else Outcome.COMPLETED
        return (Outcome.UPSTREAM_FAILED if status >= 500 else gone), status
    outcome = _OUTCOMES.get(given)
    if outcome is None:
        raise BadRequest(f"{OUTCOME} is one of {', '.join(each.value for each in Outcome)}")
    return outcome, status


def _last(served: str) -> str:
    """The last of the addresses in `served`; nginx joins them by `, ` and ` : `."""
    parts = served.replace(",", " ").split()
    return parts[-1] if parts else ""


def _seconds(text: bytes) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
