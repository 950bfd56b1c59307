"""Parametrises a test by a table of named cases."""

from collections.abc import Mapping

import pytest


def cases(arguments: str, rows: Mapping[str, object]) -> pytest.MarkDecorator:
    """Run the test once for each row: the row's key is the test's id, the row's values are the
    `arguments`."""
    return pytest.mark.parametrize(arguments.split(", "), rows.values(), ids=rows.keys())
