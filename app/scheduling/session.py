"""The session a request says it belongs to, for session affinity."""

from collections.abc import Mapping

MAX_SESSION_BYTES = 256


def session_of(headers: Mapping[str, bytes], *, header: str) -> str:
    """The value of `header` (lower case); '' if there is none.

    Longer than 256 bytes, or not UTF-8, is no session: affinity is a wish, so nothing is refused for it.
    """
    raw = headers.get(header, b"").strip()
    if len(raw) > MAX_SESSION_BYTES:
        return ""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""
