"""The route of the event stream, and the response that lasts until either side ends it."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from picker_fleet.admin.calls import Calls
from picker_fleet.admin.events import Events, Listener
from picker_fleet.admin.models import Problem
from picker_fleet.admin.problems import Refused

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_DESCRIBED = {
    "description": "Server-sent events: `snapshot` (the state, 50 flows and workloads, endpoints and"
    " replicas), `decisions` (while the decision log is on) and `unavailable`, each second.",
    "content": {
        "text/event-stream": {
            "schema": {"type": "string"},
            "example": 'event: snapshot\ndata: {"at": 1767225600.5, "flows": [], "flows_total": 0}\n\n',
        }
    },
}


class EventStream(Response):
    """Sends a listener's events until the client goes, the listener is dropped, or the replica ends it."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, listener: Listener) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.create_task(work, name=f"events-{name}")
            for name, work in (
                ("send", self._send(send)),
                ("gone", _gone(receive)),
                ("dropped", self._listener.dropped.wait()),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._events.leave(self._listener)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for said in self._listener.events():
            await send({"type": "http.response.body", "body": said, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def add(calls: Calls, events: Events) -> None:
    """Add the route to `calls`."""
    routes = calls.group("state")

    @routes.get(
        "/events",
        summary="What happens, each second",
        response_class=Response,
        responses={
            200: _DESCRIBED,
            503: {"model": Problem, "description": "`too_many_listeners`: 64 listen to this replica already"},
        },
    )
    async def stream() -> EventStream:
        """What happens, as it happens, for as long as the client listens."""
        listener = events.join()
        if listener is None:
            raise Refused(503, "too_many_listeners", "no more can listen to this replica; ask another")
        return EventStream(events, listener)

    calls.add(routes)
