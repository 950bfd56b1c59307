"""Generates damaged messages from a seed: ext_proc and access-log messages that Envoy never sends, and
requests to the port of mode `http` that no proxy sends.
"""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from extproc_client import body, response_body, response_trailers, trailers

from picker_fleet.ingress.ext_proc.accesslog import EXT_AUTHZ, ID_HEADER, TOKEN_HEADER

_NAMES = ("x-workload-context", "x-gateway-inference-fairness-id", "x-gateway-inference-objective",
          "x-llm-d-inference-ttl", "x-gateway-model-name-rewrite", "x-request-id", "content-length",
          "content-type", ":path", "\x00", "x-" + "y" * 300)  # fmt: skip
_VALUES = (b"", b"0", b"-1", b"1e309", b"NaN", b"5ms", b"llama", b"\xff\xfe\x00", b"{" * 500, b"x" * 5000,
           b'{"workload_id": "w", "criticality": 5}', b'{"workload_id": null}', "ü\u202e".encode(),
           b"99999999999999999999999", b"a\tb\nc")  # fmt: skip
_LINES = (b"POST /check/v1/completions", b"GET /check/v1/models", b"GET /healthz", b"POST /check/../healthz",
          b"POST /check/" + b"%2e" * 3000, b"POST /check", b"CONNECT /check/")  # fmt: skip
_FIELDS = (None, [], {}, -1, 2**70, 1e308, "x", True, ["a", 3], [[1, 2]], [{"role": 1, "content": [{}]}])
_MODES = ((4, 4), (4, 0), (0, 0), (2, 1), (99, 4))
_NUMBERS = (0, 1, -1, 2**31, 2**53 + 1, float("nan"), float("inf"), 1e308, -1e308)


def exchange(dice: random.Random, name: str) -> list[bytes]:
    """The messages of one ext_proc stream, sometimes damaged or out of order, for request `name`."""
    messages = [_headers(dice, name), *_bodies(dice)]
    if dice.random() < 0.1:
        messages.append(_part(dice))
    if dice.random() < 0.1:
        dice.shuffle(messages)
    return _damaged(dice, [message.SerializeToString() for message in messages])


def entries(dice: random.Random, names: Sequence[str]) -> bytes:
    """One access-log message with entries about requests in `names` and about unknown requests."""
    message = StreamAccessLogsMessage()
    for _ in range(dice.randrange(4)):
        message.http_logs.log_entry.append(_entry(dice, dice.choice([*names, "nobody", ""])))
    return _damaged(dice, [message.SerializeToString()])[0]


def end(name: str) -> HTTPAccessLogEntry:
    """Envoy's final access-log entry for request `name`, which completed with status 200."""
    return _end("picker", {"id": name})


def end_of_check(name: str, token: str) -> HTTPAccessLogEntry:
    """Envoy's final access-log entry in mode `http`, for request `name` with accounting token `token`."""
    return _end(EXT_AUTHZ, {ID_HEADER: name, TOKEN_HEADER: token})


def _end(namespace: str, fields: dict[str, str]) -> HTTPAccessLogEntry:
    entry = HTTPAccessLogEntry()
    entry.common_properties.access_log_type = 6
    entry.common_properties.metadata.filter_metadata[namespace].update(fields)
    entry.response.response_code.value = 200
    return entry


def requests(dice: random.Random, name: str) -> list[tuple[bytes, bool]]:
    """Pairs for one connection to the port of mode `http`: data, and whether the data are a whole request."""
    found = []
    for number in range(dice.randrange(1, 4)):
        text = b"".join(message.request_body.body for message in _bodies(dice))
        common = {"x-request-id": f"{name}-{number}".encode()}
        common |= {dice.choice(_NAMES): dice.choice(_VALUES) for _ in range(dice.randrange(3))}
        line = dice.choice(_LINES) if dice.random() < 0.2 else _LINES[0]
        found.append(_request(line, common, text))
    return [(data, data in found) for data in _damaged(dice, [*found])]


def _request(line: bytes, headers: Mapping[str, bytes], body: bytes = b"") -> bytes:
    fields = {"host": b"a", **headers, "content-length": b"%d" % len(body)}
    head = b"".join(b"%b: %b\r\n" % (name.encode(), value) for name, value in fields.items())
    return b"%b HTTP/1.1\r\n%b\r\n%b" % (line, head, body)


def _headers(dice: random.Random, name: str) -> ProcessingRequest:
    message = ProcessingRequest()
    pairs = [(":method", b"POST"), (":path", b"/v1/completions"), ("x-request-id", name.encode())]
    pairs += [(dice.choice(_NAMES), dice.choice(_VALUES)) for _ in range(dice.randrange(4))]
    for key, value in pairs:
        message.request_headers.headers.headers.add(key=key, raw_value=value)
    message.request_headers.end_of_stream = dice.random() < 0.05
    if dice.random() < 0.9:
        request, response = dice.choice(_MODES) if dice.random() < 0.5 else (4, 0)
        message.protocol_config.request_body_mode = request
        message.protocol_config.response_body_mode = response
    if dice.random() < 0.3:
        hint = {"x-gateway-destination-endpoint-subset": dice.choice(([], [1, None], "x", ["a:b"], {}))}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    return message


def _bodies(dice: random.Random) -> list[ProcessingRequest]:
    ask: dict[str, Any] = {"model": "llama", "prompt": "x" * dice.randrange(200), "max_tokens": 4}
    if dice.random() < 0.4:
        ask[dice.choice(("model", "prompt", "max_tokens", "stream", "messages", "n"))] = dice.choice(_FIELDS)
    text = json.dumps(ask).encode()
    text = _scarred(dice, text) if dice.random() < 0.3 else text
    cuts = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(3)))
    *chunks, last = (text[a:b] for a, b in pairwise((0, *cuts, len(text))))
    return [*(body(chunk, ended=False) for chunk in chunks), body(last, ended=dice.random() < 0.9)]


def _part(dice: random.Random) -> ProcessingRequest:
    """An ext_proc message that belongs to no phase of a request, or an empty message."""
    status = ProcessingRequest()
    status.response_headers.headers.headers.add(key=":status", raw_value=dice.choice(_VALUES))
    data = response_body(b"data: " + dice.choice(_VALUES))
    return dice.choice((trailers(), status, data, response_trailers(), ProcessingRequest()))


def _entry(dice: random.Random, name: str) -> HTTPAccessLogEntry:
    entry = end(name)
    common = entry.common_properties
    common.access_log_type = dice.choice((0, 6, 5, 3))
    common.intermediate_log_entry = dice.random() < 0.3
    entry.response.response_code.value = dice.choice((0, 200, 503, 2**32 - 1))
    if dice.random() < 0.5:
        fields = ["flow", "1", "1.0", "1", "w", "3", "llama", "10.0.0.1:1", "0", "extra"]
        fields[dice.randrange(9)] = dice.choice(("", "nan", "inf", "-5", "1e308", "x" * 300, "\t", "0x10"))
        token = "\t".join(fields[: dice.randrange(7, 11)])
        common.metadata.filter_metadata["picker"].update({"token": token})
    if dice.random() < 0.5:
        usage = {"prompt_tokens": dice.choice(_NUMBERS), "completion_tokens": dice.choice(_NUMBERS)}
        common.metadata.filter_metadata["picker.usage"].update(usage)
    if dice.random() < 0.3:
        served = dice.choice(("", "nowhere", 7, "[::1]:0", "a\tb"))
        common.metadata.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
    if dice.random() < 0.3:
        common.time_to_last_downstream_tx_byte.seconds = dice.choice((-5, 0, 10**11))
    return entry


def _damaged(dice: random.Random, messages: list[bytes]) -> list[bytes]:
    """The `messages`; with probability 0.3 one message is damaged, doubled, emptied, or replaced by noise."""
    if dice.random() < 0.3:
        at = dice.randrange(len(messages))
        message = messages[at]
        noise, scarred = dice.randbytes(dice.randrange(60)), _scarred(dice, message)
        messages[at : at + 1] = dice.choice(([scarred], [message, message], [noise], [b""]))
    return messages


def _scarred(dice: random.Random, data: bytes) -> bytes:
    """The bytes `data` with one to three random changes: a flipped bit, a truncation, or inserted bytes."""
    found = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(found) + 1)
        match dice.randrange(3):
            case 0 if at < len(found):
                found[at] ^= 1 << dice.randrange(8)
            case 1:
                del found[at:]
            case _:
                found[at:at] = dice.randbytes(dice.randrange(1, 9))
    return bytes(found)
