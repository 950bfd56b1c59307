"""A view: a table of one kind of thing in the fleet, with what there is no room for below it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from picker_tools.top.feed import News

Thing = Mapping[str, Any]
ViewName = Literal["flows", "workloads", "endpoints", "replicas", "queue", "log", "stock"]
ROOMY = 124  # cells: room for every column


@dataclass(frozen=True, slots=True)
class Column:
    """Widths are in cells: the narrowest it may become (never less than its title), and the widest on a
    terminal that has no room to spare. One with `wide` is left out where there is no room for all."""

    title: str
    right: bool = False
    least: int | None = None
    most: int | None = None
    wide: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """`things` picks the rows out of the news, `cells` makes one: a cell a column; the column `named` has
    what it is called by. `total`: how many there are, told or not. `none` says why there are none.
    """

    name: ViewName
    columns: tuple[Column, ...]
    things: Callable[[News], Sequence[Thing]]
    cells: Callable[[Thing, float], Sequence[str | Text]]
    total: Callable[[News], int]
    named: int = 0
    none: Callable[[News], str] = lambda _: ""

    def shown(self, width: int) -> list[int]:
        """The columns that a terminal of so many cells has room for."""
        return [at for at, column in enumerate(self.columns) if width >= ROOMY or not column.wide]


def table(
    view: View, things: Sequence[Thing], *, first: int, rows: int, selected: int | None, width: int
) -> Table:
    """Rows `first` to `first + rows` of a view; `selected` is the row to stand out."""
    shown = view.shown(width)
    made = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="dim")
    for at in shown:
        column = view.columns[at]
        justify: Literal["left", "right"] = "right" if column.right else "left"
        most = column.most and column.most + max(0, width - ROOMY) // 2
        made.add_column(
            column.title,
            justify=justify,
            min_width=max(column.least or 0, len(column.title)),
            max_width=most,
            no_wrap=True,
            overflow="ellipsis",
        )
    scale = _scale(things)
    for row, thing in enumerate(things[first : first + rows], first):
        cells = view.cells(thing, scale)
        told = [cells[at] for at in shown]
        if row == selected:  # the rest keeps its own colours: a bar turned inside out says the opposite
            told[0] = Text(str(told[0]), "reverse")
        made.add_row(*told, style="bold" if row == selected else "")
    return made


def detail(view: View, thing: Thing, *, width: int, lines: int) -> list[Text]:
    """Exactly `lines` lines: the whole name of a row, and what its columns left out for want of room."""
    cells, shown = view.cells(thing, 1.0), view.shown(width)
    parts = [str(cells[view.named])]
    parts += [
        f"{each.title} {cells[at]}" for at, each in enumerate(view.columns) if at not in (*shown, view.named)
    ]
    said = " · ".join(parts)
    room = width * lines
    said = said if len(said) <= room else f"{said[: room - 1]}…"
    return [Text(said[at : at + width], "dim", no_wrap=True, overflow="crop") for at in range(0, room, width)]


def _scale(things: Sequence[Thing]) -> float:
    return max((max(_of(each, "share"), _of(each, "fair_share")) for each in things), default=0.0)


def _of(thing: Thing, key: str) -> float:
    value = thing.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0
