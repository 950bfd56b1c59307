"""The response phases of `standard` mode: passed on one for one, read on the way, accounted at the end."""

from collections.abc import Callable, Mapping
from typing import Any

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from picker_fleet.extproc import codec
from picker_fleet.extproc.rename import ModelRename
from picker_fleet.extproc.usage import UsageTail
from picker_fleet.request import Completion, Outcome

_STATUS = ":status"
_ENCODING = "content-encoding"
_WANTED = frozenset((_STATUS, _ENCODING))


class Response:
    """A model server's answer on its way back; settles its request exactly once (G6).

    `request_id` is '' if nothing was admitted for it, and then nothing is settled. `rename` puts the client's
    model name back, None if it was never changed. `told` are headers for the client. Times are counted
    from `started_s`. Who served is in the metadata `namespace`. `waited_s` and `target_model` are the
    completion's.
    """

    __slots__ = (
        "_clock",
        "_first_byte_s",
        "_namespace",
        "_placed_s",
        "_rename",
        "_request_id",
        "_served",
        "_settle",
        "_started_s",
        "_status",
        "_target_model",
        "_told",
        "_usage",
        "_waited_s",
        "ended",
    )

    def __init__(
        self,
        request_id: str,
        rename: ModelRename | None,
        *,
        settle: Callable[[Completion], object],
        clock: Callable[[], float],
        started_s: float,
        placed_s: float,
        namespace: str,
        told: Mapping[str, str],
        waited_s: float | None = None,
        target_model: str = "",
    ) -> None:
        self.ended = False
        self._namespace = namespace
        self._told = told
        self._waited_s = waited_s
        self._target_model = target_model
        self._request_id = request_id
        self._rename = rename
        self._settle = settle
        self._clock = clock
        self._started_s = started_s
        self._placed_s = placed_s
        self._status = 0
        self._served: str | None = None
        self._first_byte_s: float | None = None
        self._usage = UsageTail()

    def pass_on(self, part: str, message: Any) -> list[ProcessingResponse]:
        """What goes back for one message of the response; `part` says which it is."""
        if part == "response_body":
            return self._chunk(message.response_body)
        if part == "response_headers":
            return self._headers(message)
        held = self._rename.feed(b"", ended=True) if self._rename is not None else b""
        self._end(Outcome.COMPLETED)
        trailers = [codec.RESPONSE_TRAILERS]
        return [codec.response_body(held, ended=False), *trailers] if held else trailers

    def cut(self) -> None:
        """The stream ended before the answer did: its client is gone, or Envoy gave it up."""
        self._end(Outcome.CLIENT_GONE)

    def _headers(self, message: Any) -> list[ProcessingResponse]:
        headers = message.response_headers
        self._first_byte_s = self._clock() - self._started_s
        found = codec.read_headers(headers, _WANTED)
        status = found.get(_STATUS, b"")
        self._status = int(status) if status.isdigit() and len(status) == 3 else 0
        served = (codec.read_metadata(message, self._namespace) or {}).get(codec.SERVED)
        self._served = served if isinstance(served, str) and served else None
        if _ENCODING in found:
            self._rename = None  # names can't be found in compressed text
        if headers.end_of_stream:
            self._end(Outcome.COMPLETED)
        return [codec.response_headers(self._told, sized=self._rename is None)]

    def _chunk(self, part: Any) -> list[ProcessingResponse]:
        body, ended = part.body, part.end_of_stream
        self._usage.feed(body)
        if self._rename is not None:
            body = self._rename.feed(body, ended=ended)
        if ended:
            self._end(Outcome.COMPLETED)
        return [codec.response_body(body, ended=ended)]

    def _end(self, outcome: Outcome) -> None:
        if self.ended:
            return
        self.ended = True
        if not self._request_id:
            return
        prompt_tokens, completion_tokens = self._usage.tokens()
        now_s = self._clock()
        self._settle(
            Completion(
                id=self._request_id,
                outcome=Outcome.UPSTREAM_FAILED if self._status >= 500 else outcome,
                status=self._status,
                served=self._served,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                duration_s=now_s - self._started_s,
                first_byte_s=self._first_byte_s,
                service_s=now_s - self._placed_s,
                waited_s=self._waited_s,
                target_model=self._target_model,
            )
        )
