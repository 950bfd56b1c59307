"""A ticket that the fleet has signed, told again by somebody who has seen it: what has ended stays ended.

And what runs comes back all the same, wherever its record may have been lost.
"""

from collections.abc import Iterator

import pytest
import redis
from script_fleet import ask
from timed_server import LEASE_MS, SECOND_MS, SILENCE_MS, Server

from picker_fleet.admission import ticket

ENDPOINT = "e:1"
TICKET = ticket.write(ask("r"), ENDPOINT)
WINDOW_MS = LEASE_MS + 10_000  # after a loss: what runs has given a sign of life by then
HOUR_MS = 3_600_000


@pytest.fixture
def server(valkey_url: str) -> Iterator[Server]:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as client:
        client.flushdb()
        yield Server(client, "replayed")
        client.flushdb()


def settled(server: Server) -> bool:
    """The server has been the pool's for long, and nobody has been away."""
    server.calm(WINDOW_MS + SECOND_MS)
    return server.report("nobody", TICKET) == "unknown"


def test_a_ticket_of_a_request_that_has_ended_restores_nothing_in_a_calm_fleet(server: Server) -> None:
    assert settled(server)
    # Given a request that has ended, and its ticket
    server.admit("r")
    assert server.report("r", TICKET) == "renewed"
    assert server.end("r") == "settled m"
    # When it is told again, at once and later, then it is not counted
    for _ in range(10):
        assert server.report("r", TICKET) == "unknown"
        server.calm(10 * SECOND_MS)
    # But a replica whose own stream it is brings it back at any time
    assert server.report("r", TICKET, attempt="1") == "restored"


def test_what_was_given_up_unheard_comes_back_with_its_sign_of_life_and_ends_for_good(server: Server) -> None:
    assert settled(server)
    server.admit("r")
    # Given a request that nobody could report for a lease
    server.calm(LEASE_MS + SECOND_MS)
    assert server.sweep()
    assert not server.knows("r")
    server.calm(HOUR_MS // 2)
    # When it is seen alive, then it counts, and when it has ended it does not come back
    assert server.report("r", TICKET) == "restored"
    assert server.end("r") == "settled llama"
    assert server.report("r", TICKET) == "unknown"


def test_what_was_given_up_is_forgotten_with_its_end_and_in_an_hour(server: Server) -> None:
    assert settled(server)
    for name in ("ends", "stays"):
        server.admit(name)
    server.calm(LEASE_MS + SECOND_MS)
    assert server.sweep()
    # When the end of one is heard after all, then a tombstone takes its place
    assert server.end("ends") == "unknown"
    server.call("tombstone", "a", "ends", "0")
    server.calm(WINDOW_MS + SECOND_MS)
    assert server.report("ends", TICKET) == "unknown"
    # And the other is forgotten in an hour
    server.calm(HOUR_MS)
    assert server.sweep()
    assert server.report("stays", TICKET) == "unknown"
    assert not server.exists("unheard")


def test_a_damaged_record_of_a_request_that_runs_is_made_good_by_its_ticket(server: Server) -> None:
    assert settled(server)
    server.admit("r")
    server.damage("r")
    assert server.report("r", TICKET) == "restored"


def test_after_the_state_was_lost_what_runs_comes_back_for_a_lease(server: Server) -> None:
    assert settled(server)
    for name in ("r", "late"):
        server.admit(name)
    server.flush()
    server.publish()
    server.beat()
    # When it is seen alive, then it counts; and past the time by which all that runs has been, no more
    assert server.report("r", TICKET) == "restored"
    server.calm(WINDOW_MS + SECOND_MS)
    assert server.report("late", TICKET) == "unknown"


def test_after_a_failover_that_lost_the_last_writes_what_they_placed_comes_back(server: Server) -> None:
    assert settled(server)
    for name in ("r", "late"):
        server.admit(name)
    # Given another server in its place, which lacks the last writes, for a while nobody's
    server.lose("r", "late")
    server.restart()
    server.passes(20 * SECOND_MS)
    server.beat()
    assert server.report("r", TICKET) == "restored"
    server.calm(WINDOW_MS + SECOND_MS)
    assert server.report("late", TICKET) == "unknown"


def test_when_a_replica_comes_back_what_it_has_seen_alive_is_believed(server: Server) -> None:
    assert settled(server)
    # Given the fleet's only replica, which could not reach the server for longer than it is believed
    server.passes(2 * SILENCE_MS)
    server.beat()
    assert server.report("r", TICKET) == "restored"
    # And one that is new, which can have seen nothing, changes nothing
    assert settled(server)
    server.call("heartbeat", "new", "{}", SILENCE_MS, "")
    assert server.report("other", TICKET) == "unknown"


def test_what_was_let_go_without_the_shared_state_is_believed_for_a_lease_by_anybody(server: Server) -> None:
    assert settled(server)
    # Given requests let go by a replica that alone is without the shared state
    note = ticket.write(ask("r"), ENDPOINT, alone_ms=server.now_ms())
    # When the access log tells another one of the first in time, then it counts
    server.calm(5 * SECOND_MS)
    assert server.report("r", note) == "restored"
    # When it has ended, and been buried, then not again; nor another one later
    assert server.end("r") == "settled llama"
    server.call("tombstone", "a", "r", "0")
    assert server.report("r", note) == "unknown"
    server.calm(WINDOW_MS)
    assert server.report("other", note) == "unknown"
