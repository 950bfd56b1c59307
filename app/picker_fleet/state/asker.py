"""Plain commands beside the scripts: a few at a time, on a connection that nobody else waits for."""

import asyncio
from collections.abc import Sequence
from typing import Any

import hiredis
from redis import exceptions as redis_errors

from picker_fleet.errors import StateUnavailable
from picker_fleet.state import cancelling
from picker_fleet.state.error_replies import Meaning, meaning_of
from picker_fleet.state.primary import connections
from picker_fleet.state.wire import DOWN, Wire

Command = tuple[Any, ...]


class Asker:
    """Asks the server that holds `key`. Its connection is made when first needed, and anew after a fault.
    One event loop; who asks while another's commands are under way waits for their replies."""

    def __init__(self, url: str, key: str, *, deadline_s: float) -> None:
        self._pool = connections(url, key)
        self._deadline_s = deadline_s
        self._wire: Wire | None = None
        self._lost = False
        self._turn = asyncio.Lock()
        self._replies: list[Any] = []
        self._answer: asyncio.Future[None] | None = None
        self._left = 0

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to `commands`, texts as bytes; all are sent at once, and an error to one fails all.

        Raises:
            StateUnavailable: no answer within the deadline, no server, or what it refused and why.
        """
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                replies = await self._ask(commands)
            cancelling.heed()
        except DOWN as fault:
            cancelling.heed()
            raise StateUnavailable(str(fault) or "no answer in time") from None
        return replies

    async def close(self) -> None:
        """End the connection, if there is one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        if self._lost:
            await self.close()
        if self._wire is None:
            self._wire = await Wire.connect(self._pool, self._take, self._lose, text=False)
            self._lost = False
        self._replies, self._left = [], len(commands)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._wire.write(b"".join([hiredis.pack_command(command) for command in commands]))
            await self._answer
        except BaseException:
            # What is still to come on this connection belongs to nobody.
            await self.close()
            raise
        finally:
            self._answer = None
        for reply in self._replies:
            if isinstance(reply, hiredis.ReplyError):
                if meaning_of(str(reply)) is Meaning.ELSEWHERE:
                    await self.close()
                raise redis_errors.ResponseError(str(reply))
        return self._replies

    def _take(self, reply: Any) -> None:
        self._replies.append(reply)
        self._left -= 1
        if self._left == 0 and self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _lose(self, why: str) -> None:
        self._lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))
