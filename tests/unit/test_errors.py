"""The tree of errors in the docstring of picker_fleet.domain.errors is the tree of its classes."""

import inspect
import re
from collections.abc import Iterator

from picker_fleet.domain import errors
from picker_fleet.domain.errors import Dropped, PickerError, RequestError

LINE = re.compile(r"^(?P<lead>[ │├└─]*)(?P<names>[A-Z]\w+(?:, [A-Z]\w+)*) *(?P<status>\d{3})?", re.MULTILINE)
INDENT = 4


def drawn() -> Iterator[tuple[str, str, int | None]]:
    """Name, parent and HTTP status of each error in the docstring; the status is None if the line has
    none."""
    tree = (errors.__doc__ or "").split("\n\n")[1]
    parents: list[str] = []
    for match in LINE.finditer(tree):
        depth = len(match["lead"]) // INDENT - 1
        names = match["names"].split(", ")
        for name in names:
            yield name, parents[depth - 1] if depth else "Exception", int(match["status"] or 0) or None
        parents[depth:] = names[:1]


def test_the_docstring_shows_each_error_with_its_base_and_its_status() -> None:
    tree = list(drawn())
    classes = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, PickerError) and cls.__module__ == errors.__name__
    }
    assert sorted(name for name, _, _ in tree) == sorted(classes)
    for name, parent, status in tree:
        assert classes[name].__bases__[0].__name__ == parent
        if status is not None:
            assert classes[name].status == status  # type: ignore[attr-defined]


def test_each_error_that_ends_a_request_for_overload_takes_the_configured_status() -> None:
    overloads = {name for name, parent, _ in drawn() if parent == "Dropped"}
    classes = [getattr(errors, name) for name, _, _ in drawn()]
    found = {cls.__name__ for cls in classes if issubclass(cls, RequestError) and cls.is_overload}
    assert found == {*overloads, Dropped.__name__}
