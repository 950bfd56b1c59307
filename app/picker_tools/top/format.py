"""How figures and names read on a terminal. An unknown value is a dash."""

import math
import unicodedata
from typing import Any, TypeGuard

NONE = "-"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def plain(text: Any) -> str:
    """Text from clients (names of flows, workloads, models) with control characters escaped.

    A terminal obeys escape sequences and changes of direction, so none of them reaches it.
    """
    return "".join(
        f"\\u{ord(sign):04x}" if unicodedata.category(sign) in _HIDDEN else sign for sign in str(text)
    )


def number(value: Any, digits: int = 1) -> str:
    """7, 7.2, 12 400; at most `digits` decimals."""
    if not _known(value):
        return NONE
    text = f"{value:,.{digits}f}".replace(",", " ")
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: Any) -> str:
    """40 ms, 3.2 s, 2 m 05 s, 3 h 10 m, 4 d; of a duration in seconds."""
    if not _known(value):
        return NONE
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60:02} m"
    return f"{whole // 86_400} d"


def percent(value: Any) -> str:
    """A share of 0 to 1 as a percentage."""
    return f"{number(100 * value, 1 if value < 0.0995 else 0)}%" if _known(value) else NONE


def bar(value: Any, most: float, width: int, mark: Any = None) -> str:
    """`width` cells filled up to `value` of `most`, with a line at `mark`."""
    filled = _cells(value, most, width)
    cells = ["█"] * filled + ["░"] * (width - filled)
    if _known(mark):
        cells[min(width - 1, _cells(mark, most, width))] = "│"
    return "".join(cells)


def _cells(value: Any, most: float, width: int) -> int:
    if not _known(value) or most <= 0:
        return 0
    return max(0, min(width, round(width * value / most)))


def _known(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)
