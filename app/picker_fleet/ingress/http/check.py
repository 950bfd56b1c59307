"""Decides the requests of mode `http`, about each of which Envoy's `ext_authz` filter asks by a check.

Envoy's check has the client's method, path and body, and the headers that the picker reads. The answer is 200
with the endpoint and the fields that the access log later returns (docs/protocol.md), or the refusal for the
client. The picker parses the body and drops it before the request waits, since Envoy keeps a copy: a waiting
request holds no body bytes in this replica.
"""

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from picker_fleet.domain.allowlist import DESTINATION, SUBSET
from picker_fleet.domain.budgets import BodyBuffer
from picker_fleet.domain.errors import RequestError, Unsupported
from picker_fleet.ingress import quota_headers
from picker_fleet.ingress.context import DROPPED_REASON, PRESSURE, SHOULD_RETRY, Decision, ExchangeContext
from picker_fleet.ingress.ext_proc.accesslog import (
    ID_HEADER,
    TARGET_HEADER,
    TOKEN_HEADER,
    TOKEN_MARK,
    WAITED_HEADER,
)
from picker_fleet.ingress.headers import FORWARDED_FOR, ROUTE_TIMEOUT, read_subset
from picker_fleet.scheduling.sessions import SESSION_HEADER

MODE: Final = "http"
REMOVED_HEADERS: Final = "x-envoy-auth-headers-to-remove"  # Envoy removes these headers from the request
# Headers of a placement and of a refusal that Envoy passes on to the client.
CLIENT_HEADERS: Final = (SESSION_HEADER, PRESSURE)
REFUSAL_HEADERS: Final = ("content-type", "retry-after", PRESSURE, DROPPED_REASON)
# Further headers of placements and refusals if tenants are configured.
TENANT_HEADERS: Final = (*quota_headers.NAMES, SHOULD_RETRY)
# Envoy treats a 5xx from its authorisation server as a failure of that server, and hides the answer from the
# client. So the picker sends a 5xx refusal with an unused 4xx status, which Envoy's configuration maps back.
CARRIED: Final = {status: status - 40 for status in (500, 503, 504)}

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """The answer to a check; `lines` has the answer's header lines."""

    status: int
    lines: str
    body: bytes = b""


class Check:
    """The check of one request; call `decide` once, with the whole request. `url` is the check's own URL.

    Call `decision.placed` when the answer is written, or `decision.client_left` if Envoy cannot get it.
    """

    def __init__(self, context: ExchangeContext, url: bytes = b"") -> None:
        self._context = context
        self.decision = Decision(context, MODE, url)

    async def decide(self, method: bytes, path: bytes, headers: dict[str, bytes], body: BodyBuffer) -> Answer:
        """Admit and place the request, or refuse it. `body` is released before the request waits.

        Raises:
            CancelledError: the client left while the request waited.
        """
        context, decision = self._context, self.decision
        try:
            way = context.way(method, path, has_body=body.size_bytes > 0)
            subset = _subset(headers)
            if way.kind == "read":
                await decision.route(way, headers, subset)
            else:
                whole = body.join() if body.size_bytes else None
                ask, decoded = await context.ask(whole, headers, way)
                try:
                    headers.pop(ROUTE_TIMEOUT, None)  # Envoy's timeout for this check, not for the request
                    if decision.read(ask, headers, subset, headers.pop(FORWARDED_FOR, b"")):
                        asked = ask.model or context.intake.default_model or "(none)"
                        raise Unsupported(
                            f"http mode cannot send model {asked} as {decision.target_model}; "
                            "use mode lean or standard"
                        )
                finally:
                    if decoded is not None:
                        decoded.release()
                del ask, whole
                body.release()  # a waiting request holds no body bytes
                await decision.admit()
            return self._placed()
        except RequestError as error:
            return self.refuse(error)
        except Exception:
            _log.exception("a check failed", extra={"mode": MODE, "model": decision.model})
            return self.refuse(RequestError("the picker failed on this request; its log has the reason"))
        except BaseException:
            decision.client_left()
            raise

    def refuse(self, error: RequestError) -> Answer:
        """Record a refusal. Returns the answer that the client gets."""
        refusal = self.decision.refuse(error)
        lines = "".join([f"{name}: {value}\r\n" for name, value in refusal.headers.items()])
        return Answer(CARRIED.get(refusal.status, refusal.status), lines, refusal.body)

    def _placed(self) -> Answer:
        decision, request, placement = self.decision, self.decision.request, self.decision.placement
        assert placement is not None, "the request is placed"
        lines = f"{DESTINATION}: {decision.destinations(placement)}\r\n{PRESSURE}: {decision.pressure}\r\n"
        stages = decision.stage_headers(placement)
        lines += "".join([f"{name}: {value}\r\n" for name, value in stages if value])
        if removed := ",".join([name for name, value in stages if not value]):
            lines += f"{REMOVED_HEADERS}: {removed}\r\n"
        if decision.request_id:
            token = TOKEN_MARK + placement.accounting_token
            lines += f"{ID_HEADER}: {decision.request_id}\r\n{TOKEN_HEADER}: {token}\r\n"
        lines += "".join([f"{name}: {value}\r\n" for name, value in decision.quota_headers().items()])
        if placement.session and request is not None:
            lines += f"{SESSION_HEADER}: {placement.session}\r\n"
        if placement.waited_s is not None and request is not None:
            target = TOKEN_MARK + request.target_model
            lines += f"{WAITED_HEADER}: {placement.waited_s:.6f}\r\n{TARGET_HEADER}: {target}\r\n"
        return Answer(200, lines)


def _subset(headers: Mapping[str, bytes]) -> tuple[str, ...] | None:
    """The endpoints of the subset hint, which Envoy's configuration puts into a header; None without one."""
    hint = headers.get(SUBSET)
    if hint is None:
        return None
    return read_subset(hint.decode("latin-1").strip("[] ").replace('"', ""))
