"""The wake-up channel: hints that a grant waits. A lost one costs at most a heartbeat."""

from collections.abc import Callable

from picker_fleet.state import channel
from picker_fleet.state.channel import CHECK_S


async def listen(
    url: str, name: str, on_news: Callable[[str, str], object], *, check_s: float = CHECK_S
) -> None:
    """Pass each line `WHAT ID` of the channel `name` to `on_news` until cancelled, reconnecting as needed."""

    def take(message: bytes) -> None:
        for line in message.decode(errors="replace").split("\n"):
            what, _, request_id = line.partition(" ")
            on_news(what, request_id)

    await channel.follow(url, name, take, what="wake-ups", check_s=check_s)
