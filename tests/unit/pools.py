"""A pool for tests, with all its parts, not yet running."""

from collections.abc import Mapping
from typing import Any

from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.config import parse
from picker_fleet.ingress.context import OpenRequests
from picker_fleet.pool import Pool


def a_pool(config: Mapping[str, Any], replica: str = "r") -> Pool:
    settings = parse(dict(config))
    bodies = BodyBudget(settings.extproc.max_buffered_bytes)
    return Pool(settings, replica, bodies=bodies, open_requests=OpenRequests())
