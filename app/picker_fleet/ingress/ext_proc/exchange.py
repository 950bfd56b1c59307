"""One ext_proc exchange as a state machine that takes Envoy's messages and returns answers, and the service
that runs an exchange for each stream.

    OPEN ── headers ──► BODY ── whole answer, standard ──► RESPONSE ──► DONE
      └─ whole answer to a header-only request ──────────────▲            ▲
                        BODY ── whole answer, lean ───────────────────────┘

A body is complete when Envoy sets the flag end_of_stream, or `END_S` seconds after all bytes of the
content-length have arrived without that flag. The content-length is only a hint: an earlier filter may have
changed the body.

The `protocol_config` of Envoy's first message sets the mode (`codec.mode_of`).

An exchange sends no answer before the whole body has arrived and the request is placed: until then Envoy can
retry the request at another replica (G7). If Envoy cannot have received the whole answer, the exchange
withdraws the placement. In mode `standard` the exchange settles the request exactly once at the end of the
response (G6); in other modes the access log does. `server.Server` runs the service on a transport.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from picker_fleet.domain.allowlist import SUBSET, Way
from picker_fleet.domain.budgets import BodyBuffer
from picker_fleet.domain.errors import BadRequest, BodyStalled, BufferFull, RequestError, Unsupported
from picker_fleet.grpc.transport import RpcError, Status, Stream
from picker_fleet.ingress.context import Decision, ExchangeContext, UploadDeadlines, UploadOverdue
from picker_fleet.ingress.ext_proc import codec
from picker_fleet.ingress.ext_proc.response import ModelRename, Response
from picker_fleet.ingress.headers import (
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    FORWARDED_FOR,
    METHOD,
    PATH,
    TEST_SELECTION,
    read_subset,
)

END_S = 0.1  # seconds to wait for end_of_stream once all bytes of the content-length have arrived
# Maximum bytes of a message besides a body, and maximum headers and attributes of a message: to parse 256 KiB
# of empty headers takes 4 ms, to read them 25 ms.
_MOST_BYTES_BESIDE_BODY, _MOST_PARTS = 256 * 1024, 2048
_FEW_BYTES = 16 * 1024  # a message with fewer bytes besides a body is not charged, nor are its parts counted
_BYTES_A_UNIT = 256  # further bytes besides a body that take a unit of work (grpc/connections.py) to read
CONFIRM_AFTER_S = 1.0  # confirm an older placement before Envoy gets it; shorter than any lease

_log = logging.getLogger(__name__)


class Step(enum.Enum):
    """The states of an exchange, as in the diagram of this module."""

    OPEN = enum.auto()
    BODY = enum.auto()
    RESPONSE = enum.auto()
    DONE = enum.auto()


_OPEN, _BODY, _RESPONSE, _DONE = Step  # reading an enum member through its class takes twice as long


class _Forwarded(NamedTuple):
    """The body that Envoy forwards for a placed request (None: no body). `length` is the new content-length,
    None to keep the header; if `is_decoded`, the header content-encoding is removed."""

    body: bytes | None = None
    length: int | None = None
    is_decoded: bool = False
    rename: ModelRename | None = None


class Exchange:
    """One ext_proc stream: call `receive` for each message, write the answers, and call `close` at the end.
    `charge` is called with units of work (grpc/connections.py) that are beyond a message's usual work.

    Once `done` is True, the next answer from `receive` is the last. Once `answered` is True, messages may go
    to the method `pass_on`.
    """

    def __init__(self, context: ExchangeContext, charge: Callable[[int], object] = lambda work: None) -> None:
        self._context, self._charge = context, charge
        self._decision = Decision(context)
        self._step = _OPEN
        self._headers: dict[str, bytes] = {}
        self._forwarded_for = b""
        self._subset: tuple[str, ...] | None = None
        self._way = _READ
        self._body = context.new_body()
        self._decoded: BodyBuffer | None = None  # the buffer that charges the decoded body
        self._tried = False  # whether the exchange has tried to place the request before end_of_stream
        self._forwarded: _Forwarded | None = None  # the body to forward, set once the request is placed
        self._response: Response | None = None

    @property
    def done(self) -> bool:
        """Whether the exchange reads no further message, and writes no answer after the current one."""
        return self._step is _DONE

    @property
    def uploading(self) -> bool:
        """Whether the exchange is waiting for the rest of the request from Envoy."""
        return self._step is _BODY or self._step is _OPEN

    @property
    def upload_began_s(self) -> float:
        """When the request began to arrive; after an early placement, when that placement was made."""
        return self._decision.began_s if self._forwarded is None else self._decision.placed_s

    @property
    def awaits_end(self) -> bool:
        """Whether all bytes of the content-length have arrived, but not the message that ends the body."""
        return self._step is _BODY and self._body.size_bytes == self._body.content_length

    @property
    def answered(self) -> bool:
        """Whether the request is answered, and the response is being passed on."""
        return self._step is _RESPONSE

    async def end(self) -> Iterable[bytes]:
        """Treat the body as complete although no message has ended it. Returns answers as `receive` does."""
        return await self.receive(_END)

    def pass_on(self, data: bytes) -> tuple[Sequence[bytes], bool]:
        """Answer Envoy's next message about a response. Returns answers, and whether the exchange is done.

        Raises:
            RpcError: the message `data` is not a ProcessingRequest.
        """
        message = _read(data, self._charge)
        return self._pass_on(message.WhichOneof("request"), message), self.done

    async def receive(self, message: ProcessingRequest) -> Iterable[bytes]:
        """Handle Envoy's next message. Returns the answers to write now, in order, built lazily.

        Raises:
            CancelledError: the client left while the request waited.
        """
        try:
            part = message.WhichOneof("request")
            if self._step is _BODY and part == "request_body":
                ended = self._keep(message.request_body)
                del message  # free this copy of the body's last chunk before the request waits
                if ended:
                    return await self._answer_body()
                # Envoy signals the end of a body in a separate message. Once all bytes of the content-length
                # have arrived, place the request without waiting for the signal. Send an answer of one
                # message at once; an answer in chunks waits for the signal, which arrives during placement.
                if self.awaits_end and not self._tried and await self._place_early():
                    return await self._answer_body()
                return ()
            if self._step is _OPEN and part == "request_headers":
                if self._begin(message):
                    return ()
                return self._answers(await self._place(None), in_one=False)
            if self._step is _RESPONSE:
                return self._pass_on(part, message)
            if self._step is _BODY and part == "request_trailers":
                return await self._answer_body(trailers=True)
            return self._unexpected(part, message)
        except RequestError as error:
            return (self.refuse(error),)
        except Exception:
            if self._step is _RESPONSE:
                raise  # the response has begun, so Envoy would not accept a refusal
            decision = self._decision
            _log.exception("an exchange failed", extra={"mode": decision.mode, "model": decision.model})
            return (self.refuse(RequestError("the picker failed on this request; its log has the reason")),)

    def refuse(self, error: RequestError) -> bytes:
        """End the exchange with a refusal, and release everything. Returns the answer to Envoy."""
        if self._response is not None:
            self._response.cut()
        self._end(_DONE)
        return codec.refused(self._decision.refuse(error), error.code)

    def close(self) -> None:
        """Release everything that the exchange still holds, after its stream has ended for any reason."""
        if self._step is _DONE:
            return
        if self._response is not None:
            self._response.cut()
        else:
            self._decision.client_left()
        self._end(_DONE)

    def _end(self, step: Step) -> None:
        """Change the state to `step`, and drop the request's body."""
        self._step = step
        self._forwarded = None
        self._body.release()
        if self._decoded is not None:
            self._decoded.release()

    # Read Envoy's messages.

    def _begin(self, message: ProcessingRequest) -> bool:
        """Read the stream's first message. Returns whether to wait for a body.

        Raises:
            UnknownPath, TooManyReads: the path is not allowed, or the read limit is reached.
            BadRequest: the request lacks the body that its path needs.
        """
        mode = codec.mode_of(message)
        self._decision.mode = "lean" if mode == codec.HEADERS_ALONE else mode
        self._decision.trusts_id = mode != "standard" or codec.has_id_attribute(message)
        hint = codec.read_metadata(message, codec.SUBSET_HINT, SUBSET)
        if hint is not None:
            self._subset = read_subset(hint)
        headers = message.request_headers
        self._headers = codec.read_headers(headers, self._context.intake.headers)
        if self._context.selected is not None and TEST_SELECTION in self._headers:
            selected = self._context.selected(self._headers.pop(TEST_SELECTION))
            hinted = self._subset
            self._subset = selected if hinted is None else tuple(each for each in selected if each in hinted)
        method, path = self._headers.pop(METHOD, None), self._headers.pop(PATH, None)
        if path is None and method == b"CONNECT":  # a request without a path cannot be allowed
            path = b""
        if method is None or path is None:
            raise Unsupported("Envoy sends no :method and :path; see forward_rules of the ext_proc filter")
        self._decision.path = path
        has_body = not headers.end_of_stream
        self._way = self._context.way(method, path, has_body=has_body)
        self._forwarded_for = self._headers.pop(FORWARDED_FOR, b"")
        length = self._headers.pop(CONTENT_LENGTH, b"")
        if self._way.kind == "session" or not has_body:
            return False
        if mode == codec.HEADERS_ALONE:
            raise Unsupported("request_body_mode NONE is not supported for requests with a body")
        self._body.announce(length)
        self._step = _BODY
        return True

    def _keep(self, part: HttpBody) -> bool:
        """Keep a chunk of the body. Returns whether Envoy marks the chunk as the last."""
        chunk = part.body
        if chunk and self._forwarded is None:
            self._body.add(chunk)
        elif chunk.strip(_SPACES):  # the JSON object was complete, since the request is already placed
            raise BadRequest("the body has more text after its JSON object")
        return bool(part.end_of_stream)

    def _unexpected(self, part: str | None, message: ProcessingRequest) -> Sequence[bytes]:
        if self._step is _OPEN:
            self._decision.mode = codec.mode_of(message)
        if part == "response_headers" and self._decision.mode == "standard" and self.uploading:
            # Envoy answers an incomplete request by a reply of its own: pass that reply on.
            self._decision.withdraw()
            self._respond(None)
            return self._pass_on(part, message)
        received = (part or "an empty message").replace("_", " ")
        wanted = "the request's headers" if self._step is _OPEN else "the rest of the request"
        raise Unsupported(
            f"received {received} instead of {wanted}; see processing_mode of the ext_proc filter"
        )

    # Place the request.

    async def _place_early(self) -> bool:
        """Place the request before Envoy signals the end of its body. Returns whether to answer Envoy now.

        Only JSON objects are placed early: their closing brace shows that the body is complete.
        """
        self._tried = True
        if self._way.source == "form" or self._way.kind == "read" or CONTENT_ENCODING in self._headers:
            return False
        body = self._body.join()
        if body[-1:] == b"}" or body.rstrip(_SPACES)[-1:] == b"}":
            try:
                self._forwarded = await self._place(body)
                return self._in_one_message(len(body))
            except BadRequest:
                pass  # the JSON may be incomplete: an earlier filter may have lengthened the body
        self._body.keep(body)
        return False

    async def _place(self, body: bytes | None) -> _Forwarded:
        """Place the request whose whole body is `body` (None: no body)."""
        decision = self._decision
        if self._way.kind == "read":
            await decision.route(self._way, self._headers, self._subset)
            return _Forwarded(body)
        ask, self._decoded = await self._context.ask(body, self._headers, self._way)
        length = rename = None
        is_decoded = False
        if decision.read(ask, self._headers, self._subset, self._forwarded_for):
            body = ask.renamed(decision.target_model)
            length, is_decoded = len(body), self._decoded is not None
            if ask.model:
                rename = ModelRename(decision.target_model, ask.model, self._charge)
        elif self._decoded is not None:
            self._decoded.release()
        del ask  # free the parsed body before the request waits
        if length is None and body is not None and self._body.content_length not in (-1, len(body)):
            length = len(body)
        await decision.admit()
        return _Forwarded(body, length, is_decoded, rename)

    async def _answer_body(self, *, trailers: bool = False) -> Iterable[bytes]:
        """Answer a complete body; `trailers` says that trailers follow the body.

        With trailers, headers and body go back in one message in every mode, and Envoy forwards the trailers.
        A body sent back in chunks would reach the model server twice on routes with retries: Envoy's router
        also sends its own copy of the chunks once the trailers are answered (docs/decisions.md, 15).
        """
        decision, forwarded = self._decision, self._forwarded
        if forwarded is None:
            forwarded = await self._place(self._body.join())
        if decision.mode != "standard":
            age_s = self._context.clock() - decision.placed_s
            if age_s > CONFIRM_AFTER_S:
                await decision.confirm(age_s)
        in_one = trailers or self._in_one_message(len(forwarded.body or b""))
        return self._answers(forwarded, in_one=in_one)

    # Answer Envoy.

    def _in_one_message(self, size_bytes: int) -> bool:
        """Whether one message returns headers and body to Envoy, so that Envoy gets both or neither
        (docs/decisions.md, 15). True only in mode `lean`, in which Envoy has the project's configuration."""
        return self._decision.mode == "lean" and size_bytes <= codec.WHOLE_BYTES

    def _answers(self, forwarded: _Forwarded, *, in_one: bool) -> Iterator[bytes]:
        """The answer for the placed request, in one or several messages. Counts the placement just before
        the last message, since Envoy may end the stream before the write of that message returns."""
        decision, (body, length, is_decoded, _) = self._decision, forwarded
        placement, request = decision.placement, decision.request
        assert placement is not None, "the request is placed"
        answer = codec.placed(
            placement,
            decision.destinations(placement),
            decision.request_id,
            length,
            "" if request is None else request.target_model,
            namespace=self._context.settings.extproc.metadata_namespace,
            pressure=decision.pressure,
            quota=decision.quota_headers() if decision.mode != "standard" else {},
            removes=CONTENT_ENCODING if is_decoded else "",
            is_our_envoy=decision.mode == "lean",
            stages=decision.stage_headers(placement),
        )
        if body is not None and in_one:
            last = answer.with_body(body)
        else:
            last = answer.message()
            for chunk in () if body is None else codec.request_body(body):
                yield last
                last = chunk
        if decision.mode == "standard":
            self._respond(forwarded.rename)
        else:
            self._end(_DONE)
        decision.placed()
        yield last

    def _respond(self, rename: ModelRename | None) -> None:
        """Begin to handle the response, in which `rename` restores the client's model name."""
        context = self._context
        note_ids = context.origins.note if self._way.has_state else None
        self._response = Response(context, self._decision, rename, note_ids)
        self._end(_RESPONSE)

    def _pass_on(self, part: str | None, message: ProcessingRequest) -> Sequence[bytes]:
        if self._response is not None and part is not None and part.startswith("response_"):
            answers = self._response.pass_on(part, message)
            if self._response.ended:
                self._step = _DONE
            return answers
        if part == "request_body" and self._way.kind == "session":
            chunk = message.request_body
            return [codec.streamed_request(chunk.body, ended=chunk.end_of_stream)]
        if part == "request_trailers":
            return [codec.REQUEST_TRAILERS]  # the request was answered before its trailers arrived
        return ()  # the request is already answered, so ignore Envoy's further messages


_READ = Way("read")
_SPACES = b" \t\r\n\0"
_END = ProcessingRequest(request_body={"end_of_stream": True})


def _read(data: bytes, charge: Callable[[int], object]) -> ProcessingRequest:
    beside_bytes = codec.bytes_beside_body(data) if len(data) > _FEW_BYTES else 0
    charge(max(beside_bytes - _FEW_BYTES, 0) // _BYTES_A_UNIT)
    if beside_bytes > _MOST_BYTES_BESIDE_BODY:
        why = f"a message has more than {_MOST_BYTES_BESIDE_BODY} bytes that are not a body's"
        raise RpcError(Status.RESOURCE_EXHAUSTED, why)
    try:
        message = ProcessingRequest.FromString(data)
    except DecodeError:
        raise RpcError(Status.INVALID_ARGUMENT, "no ProcessingRequest") from None
    if beside_bytes > _FEW_BYTES and codec.parts_of(message) > _MOST_PARTS:
        raise RpcError(Status.RESOURCE_EXHAUSTED, f"a message has more than {_MOST_PARTS} headers")
    return message


class ExchangeService:
    """Serves one pool's `ext_proc` streams, each with its own `Exchange`."""

    def __init__(self, context: ExchangeContext, uploads: UploadDeadlines) -> None:
        self.context = context
        self._uploads = uploads

    async def process(self, stream: Stream) -> bytes | None:
        """Serve one ext_proc stream of Envoy. Returns the last answer, which the transport sends, or None."""
        exchange = Exchange(self.context, stream.charge)
        self.context.open_requests.began()
        reading: asyncio.Task[bytes | None] | None = None  # the task that reads until the body's end
        try:
            # Only the wait for an upload has a deadline here. During any other wait, Envoy ends the stream
            # with the request, which cancels this task; keepalive ends the streams of an Envoy that vanished.
            while True:
                waits = exchange.uploading and not stream.has_message
                if waits:
                    self._uploads.wait(stream, exchange.upload_began_s)
                is_late = False
                try:
                    if reading is not None:
                        data, reading = await reading, None
                    elif exchange.answered:
                        return await stream.relay(exchange.pass_on)
                    elif waits and exchange.awaits_end:
                        reading = asyncio.create_task(stream.read())
                        is_late = not (await asyncio.wait((reading,), timeout=END_S))[0]
                        if not is_late:
                            data, reading = reading.result(), None
                    else:
                        data = await stream.read()
                except BufferFull as fault:
                    return exchange.refuse(fault)
                except UploadOverdue:
                    return exchange.refuse(BodyStalled("the rest of the body did not arrive"))
                if waits:
                    self._uploads.received(stream)
                if is_late:
                    work = exchange.end()
                elif data is None:
                    return None
                else:
                    message = _read(data, stream.charge)
                    work = exchange.receive(message)
                    del message, data  # free this copy of the body's last chunk before the request waits
                for answer in await work:
                    if exchange.done:
                        return answer
                    await stream.write(answer)
        finally:
            if reading is not None:
                reading.cancel()
            self.context.open_requests.ended()
            self._uploads.received(stream)
            exchange.close()
