"""Parametrises a test by a table of named cases."""

from collections.abc import Mapping

import pytest


def cases(arguments: str, rows: Mapping[str, object]) -> pytest.MarkDecorator:
    """Run the test once for each of `rows`, whose key is its id; the values are its `arguments`."""
    return pytest.mark.parametrize(arguments.split(", "), rows.values(), ids=rows.keys())
