"""A recording of a run's lines as one SVG file that plays them, as they came, in a browser or on a page.

`picker load --record FILE` writes it.
"""

import re
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Final

_WIDTH: Final = 118  # characters; a longer line is cut
_ROW_PX, _CHARACTER_PX, _MARGIN_PX = 17, 7.3, 14
_HOLD_S: Final = 8.0  # of the last picture, before it plays again
_STYLE: Final = (
    "rect{fill:#12161c}text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#e4e8ee;white-space:pre}"
    ".fault{fill:#ff7b72}.held{fill:#4cc38a}.ready{fill:#98a3b3}"
)
# The first that a line matches. Verdicts begin a line: what an audit found has the word `broken`, too.
_KINDS: Final = (
    (r"held\b", "held"),
    (r"(?i:broken)\b|DOWN\b|.*(kill -9|Redis is)", "fault"),
    (r"ready\b", "ready"),
)


class Recording:
    """Lines and when they came. `speed` times as fast is how they are played."""

    def __init__(self, speed: float = 4.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._speed = speed
        self._clock = clock
        self._began_s = clock()
        self._lines: list[tuple[float, str]] = []

    def line(self, text: str) -> None:
        """Add a text of one or more lines, as it comes now."""
        at_s = (self._clock() - self._began_s) / self._speed
        self._lines += [(at_s, line) for line in text.splitlines()]

    def write(self, file: Path) -> None:
        """Write the SVG. Raises OSError."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._svg(), encoding="utf-8")

    def _svg(self) -> str:
        total_s = max((at_s for at_s, _ in self._lines), default=0.0) + _HOLD_S
        width = round(_WIDTH * _CHARACTER_PX + 2 * _MARGIN_PX)
        height = len(self._lines) * _ROW_PX + 2 * _MARGIN_PX
        rows = "\n".join(
            _row(number, at_s / total_s, total_s, text) for number, (at_s, text) in enumerate(self._lines)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
            f'<style>{_STYLE}</style>\n<rect width="100%" height="100%" rx="6"/>\n{rows}\n</svg>\n'
        )


def _row(number: int, part: float, total_s: float, text: str) -> str:
    """A line that is seen from `part` of each turn of `total_s` on."""
    kind = next((kind for pattern, kind in _KINDS if re.match(pattern, text)), "")
    y = _MARGIN_PX + (number + 0.75) * _ROW_PX
    shown = (
        f'<animate attributeName="opacity" dur="{total_s:.2f}s" repeatCount="indefinite" calcMode="discrete" '
        f'values="0;1" keyTimes="0;{part:.4f}"/>'
        if part > 0.0001
        else ""
    )
    seen = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
    return f'<text class="{kind}" x="{_MARGIN_PX}" y="{y:g}">{escape(seen)}{shown}</text>'
