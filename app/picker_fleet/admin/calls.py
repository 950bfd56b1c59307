"""The calls of the API proper, `/api/v1`: what they have in common, and how they come into the app."""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.params import Depends as Dependency

from picker_fleet.admin.models import Problem
from picker_fleet.admin.rate import Rate

Responses = dict[int | str, dict[str, Any]]

ANY_FAULT: Responses = {"default": {"model": Problem, "description": "a fault (application/problem+json)"}}


class Calls:
    """Adds calls to `app`, group by group. `rate` is asked before each."""

    def __init__(self, app: FastAPI, rate: Rate) -> None:
        self._app = app
        self._rate = rate

    def group(
        self, tag: str, responses: Responses | None = None, dependencies: Iterable[Dependency] = ()
    ) -> APIRouter:
        """A router for calls that share this much, to be given back to `add` with its routes."""
        return APIRouter(
            prefix="/api/v1",
            tags=[tag],
            responses={**ANY_FAULT, 429: {"model": Problem}, **(responses or {})},
            dependencies=[Depends(self._rate), *dependencies],
        )

    def add(self, group: APIRouter) -> None:
        """Add the routes of `group` as they are. To include it would make each anew, with its models: once at
        the start, and once more, in the event loop, at the first call.
        """
        self._app.router.routes.extend(group.routes)
