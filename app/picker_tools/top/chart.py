"""The stock against its bounds, and the queue, over the last five minutes, in cells of a terminal. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from rich.text import Text

from picker_tools.top.words import number, seconds

WINDOW_S = 300.0
_GAP_S = 3.0  # nothing was heard in between: no line is drawn over it
_BLOCKS = " ▁▂▃▄▅▆▇█"
_SCALE_CELLS = 8  # left of a chart: what its lines stand for
_STEPS = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_STYLES = {"upper": "red", "watermark": "dim", "lower": "yellow"}


@dataclass(frozen=True, slots=True)
class Moment:
    """What is kept of a snapshot: `at` in seconds since the epoch, the stock and its bounds in its unit."""

    at: float
    stock: float
    queued: float
    lower: float
    watermark: float
    upper: float

    @classmethod
    def of(cls, shot: Mapping[str, Any]) -> "Moment":
        state = shot["state"]
        bounds = (float(state["bounds"].get(key) or 0) for key in ("lower", "watermark", "upper"))
        return cls(float(shot["at"]), float(state["stock"]), float(state["queued"]), *bounds)


def charts(moments: Sequence[Moment], unit: str, *, width: int, height: int) -> list[Text]:
    """Exactly `height` lines of at most `width` cells: the stock above, what waits below, each with its
    figures in words. Of what does not fit, the queue is left out first.
    """
    if not moments:
        return [Text("nothing was heard yet")] + [Text() for _ in range(height - 1)]
    low = height // 3 if height >= 9 else 0
    lines = _stock(moments, unit, width, height - low)
    if low:
        lines += [_words("waiting", moments, lambda each: each.queued, "requests", width)]
        lines += _drawn(moments, lambda each: each.queued, (), width, low - 1)
    return lines


def _stock(moments: Sequence[Moment], unit: str, width: int, height: int) -> list[Text]:
    last = moments[-1]
    said = _words("in flight", moments, lambda each: each.stock, unit, width)
    said.append(f"; bounds {number(last.lower)} to {number(last.upper)}")
    said.truncate(width, overflow="ellipsis")
    drawn = _drawn(moments, lambda each: each.stock, ("upper", "lower", "watermark"), width, height - 1)
    return [said, *drawn]


def _words(
    name: str, moments: Sequence[Moment], of: Callable[[Moment], float], unit: str, width: int
) -> Text:
    values = [of(each) for each in moments]
    least, most = number(min(values)), number(max(values))
    spread = f"always {least}" if least == most else f"{least} to {most}"
    line = Text(f"{name} ", no_wrap=True)
    line.append(number(values[-1]), "bold")
    line.append(f" {unit} now; {spread} over {seconds(moments[-1].at - moments[0].at)}")
    line.truncate(width, overflow="ellipsis")
    return line


def _drawn(
    moments: Sequence[Moment],
    of: Callable[[Moment], float],
    bounds: Sequence[str],
    width: int,
    height: int,
) -> list[Text]:
    """`height` lines, the time to the right, now at the end; a bound is a line across."""
    most = _nice(max([of(each) for each in moments] + [getattr(each, b) for each in moments for b in bounds]))
    columns = _columns(moments, of, max(1, width - _SCALE_CELLS - 1))
    labels = {0: "0"} | {_row(getattr(moments[-1], b), most, height): b for b in reversed(bounds)}
    lines = []
    for row in range(height - 1, -1, -1):
        name = labels.get(row, "")
        said = number(getattr(moments[-1], name)) if name in bounds else name
        if row == height - 1 and not said:
            said = number(most)
        line = Text(no_wrap=True).append(f"{said:>{_SCALE_CELLS}} ", "dim")
        cells = [_cell(moment, of, bounds, most, row, height) for moment in columns]
        for style, stretch in groupby(cells, key=lambda cell: cell[1]):  # few escapes: it may go over SSH
            line.append("".join(sign for sign, _ in stretch), style)
        lines.append(line)
    return lines


def _columns(moments: Sequence[Moment], of: Callable[[Moment], float], count: int) -> list[Moment | None]:
    """For each column the moment of the most in its stretch of time; None where nothing was heard."""
    columns: list[Moment | None] = [None] * count
    end = moments[-1].at
    for moment, after in pairwise([*moments, moments[-1]]):
        until = after.at if after.at - moment.at <= _GAP_S else moment.at  # a figure holds until the next
        first, last = (int((1 - (end - at) / WINDOW_S) * (count - 1) + 0.5) for at in (moment.at, until))
        for at in range(max(0, first), min(count - 1, last) + 1):
            there = columns[at]
            if there is None or of(moment) >= of(there):
                columns[at] = moment
    return columns


def _cell(
    moment: Moment | None,
    of: Callable[[Moment], float],
    bounds: Sequence[str],
    most: float,
    row: int,
    height: int,
) -> tuple[str, str]:
    if moment is None:
        return " ", ""
    bound = next((each for each in bounds if _row(getattr(moment, each), most, height) == row), None)
    eighths = max(0, min(8, round(8 * (of(moment) / most * height - row))))
    if bound is None or 0 < eighths < 8:
        return _BLOCKS[eighths], "cyan"
    return "─", f"{_STYLES[bound]} on cyan" if eighths == 8 else _STYLES[bound]


def _row(value: float, most: float, height: int) -> int:
    return max(0, min(height - 1, int(value / most * height)))


def _nice(value: float) -> float:
    """The least of 1, 1.2, 1.5, 2, 3, … 10, 12, … that is not below `value`."""
    power = 1.0
    while 10 * power < value:
        power *= 10
    return next(step * power for step in _STEPS if step * power >= min(value, 10 * power))
