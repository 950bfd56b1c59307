"""The session a request says it belongs to, for session affinity."""

from collections.abc import Mapping

MAX_SESSION_BYTES = 256
COOKIE = "cookie"


def session_of(headers: Mapping[str, bytes], *, header: str, cookie: str = "") -> str:
    """The value of `header` (lower case), else of the cookie named `cookie`; '' if there is none.

    Longer than 256 bytes, or not UTF-8, is no session: affinity is a wish, so nothing is refused for it.
    """
    raw = headers.get(header, b"").strip()
    if not raw and cookie:
        wanted = cookie.encode()
        for pair in headers.get(COOKIE, b"").split(b";"):
            name, _, value = pair.partition(b"=")
            if name.strip() == wanted:
                raw = value.strip().strip(b'"')
                break
    if len(raw) > MAX_SESSION_BYTES:
        return ""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""
