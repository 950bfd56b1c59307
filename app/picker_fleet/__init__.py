"""What one replica of the fleet runs."""

import functools


@functools.cache
def version() -> str:
    """The installed distribution's version; `unknown` where it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("picker-fleet")
    except PackageNotFoundError:
        return "unknown"
