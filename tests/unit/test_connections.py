"""Turns of connections on the event loop."""

import asyncio

from background import until

from picker_fleet.grpc.connections import Line, Turns


class Backlog:
    """A connection with `left` units of work; if it `trusts`, the first unit done makes it trusted."""

    def __init__(self, left: int, trusts: bool) -> None:
        self.left, self.trusts = left, trusts
        self.line: Line | None = None
        self.tag, self.queued, self.done = 0.0, False, 0

    @property
    def trusted(self) -> bool:
        return self.trusts and self.done > 0

    def work(self, most: int) -> tuple[int, bool]:
        self.done += most
        return most, self.done < self.left


async def test_a_connection_becomes_trusted_once_it_is_answered_while_its_work_waits() -> None:
    turns = Turns(step_work=64, strangers_work=1)
    stranger, gateway = Backlog(10_000, trusts=False), Backlog(10_000, trusts=True)
    turns.ask(gateway)
    turns.ask(stranger)
    await until(lambda: gateway.done >= gateway.left)
    assert stranger.done <= 64


async def test_strangers_may_use_a_seconds_work_at_once_and_then_wait() -> None:
    turns = Turns(step_work=64, strangers_work=10_000)
    upload, flood = Backlog(9_000, trusts=False), Backlog(10**9, trusts=False)
    for each in (upload, flood):
        turns.ask(each)
        for _ in range(160):
            await asyncio.sleep(0)
    assert upload.done >= upload.left
    assert 0 < flood.done <= 10_000
