"""The frames of HTTP/2 (RFC 9113, sections 4 to 7): types, flags, error codes, settings, and encoding."""

import struct
from typing import Final

DEFAULT_WINDOW: Final = 65_535  # initial bytes of each flow-control window (RFC 9113, 6.9.2)
FRAME_BYTES: Final = 16_384  # maximum bytes of a frame's payload unless a setting allows more
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER = struct.Struct(">BHBBL")  # a frame's header: length in two parts, type, flags, stream id
SETTING = struct.Struct(">HL")  # id and value of a setting
HEADER_BYTES: Final = 9
MAX_WINDOW: Final = 2**31 - 1
LAST_STREAM: Final = 2**31 - 1  # the largest stream id

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x5, 0x6, 0x7, 0x8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x9, 0xB
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_LIST = range(2, 7)
NO_ERROR_CODE = b"\0\0\0\0"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    size = len(payload)
    return HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def start_of_frame(kind: int, flags: int, size: int) -> bytes:
    """Encode the five bytes of a frame that precede its stream id."""
    return HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, 0)[:5]


class ConnectionFault(Exception):
    """The peer broke the protocol: end the connection by a GOAWAY frame with the error code `code`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
