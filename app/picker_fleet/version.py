"""Which release this is."""

import functools
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


@functools.cache
def version() -> str:
    """The distribution's version; `unknown` where it is not installed."""
    try:
        return installed("picker-fleet")
    except PackageNotFoundError:
        return "unknown"
