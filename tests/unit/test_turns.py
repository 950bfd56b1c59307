"""Turns of connections on the event loop."""

from background import until

from picker_fleet.grpc.turns import Line, Turns


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
