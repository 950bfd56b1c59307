"""The endpoint picker: the code that one replica of the fleet runs."""

import functools


@functools.cache
def version() -> str:
    """The version of the installed distribution; `unknown` if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("picker-fleet")
    except PackageNotFoundError:
        return "unknown"
