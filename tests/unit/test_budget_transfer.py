"""Budget transfer between replicas, over real gRPC."""

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from background import running, until
from extproc_client import serving_on
from local_requests import rules, start, waiting

from picker_fleet.admission.budget_transfer import SERVICE, GrpcPeers, handlers
from picker_fleet.admission.local_gate import LocalGate
from picker_fleet.admission.peers import BudgetTransfer, EndedCharge, OutageCount, RedisUse
from picker_fleet.domain.sections import Tls
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.telemetry.metrics import Metrics

pytestmark = pytest.mark.usefixtures("transport")

Transfer = Callable[[float, float], Awaitable[float]]
METHOD = f"/{SERVICE}/Ask"
KEYS = Keyring()  # the keys that sign the fleet's calls
PATIENT_S = 30.0  # seconds, longer than a busy machine pauses


@asynccontextmanager
async def replica(transfer: Transfer, tls: Certificates | None = None, **answers: Any) -> AsyncIterator[str]:
    """Serve a replica of pool `p` that transfers budget by the function `transfer`; yields the replica's
    address."""
    address = ""
    async with serving_on(handlers("p", transfer, KEYS, lambda: address, **answers), tls) as bound:
        address = bound
        yield address


def peers(
    pool: str = "p", keys: Keyring = KEYS, tls: Certificates | None = None, margin_s: float = PATIENT_S
) -> GrpcPeers:
    return GrpcPeers(pool, keys, tls, margin_s)


async def gives(least: float, most: float) -> float:
    return min(most, 2.0)


async def test_another_pool_or_a_malformed_request_gets_no_budget() -> None:
    strangers = peers("other")
    async with replica(gives) as address:
        assert await strangers.ask(address, 1.0, 5.0) == 0.0
        amounts = (b'-1, "most": 2', b'3, "most": 2', b'"x", "most": 2', b'NaN, "most": NaN')
        wrong = [b'{"pool": "p", "least": %s}' % each for each in amounts]
        for question in (b"", b"\xff", b"[]", b"[" * 100_000, b'{"pool": "p"}', *wrong):
            assert await raw(address, question) == b'{"given":0.0}', question


async def test_a_call_gets_budget_only_if_the_fleet_signed_it_for_this_replica_and_only_once() -> None:
    counts = AsyncMock(return_value=2.0)
    strangers = peers(keys=Keyring())
    async with replica(counts) as address, replica(gives) as other:
        # A call without a signature by the fleet's key gets no budget.
        assert await strangers.ask(address, 1.0, 5.0) == 0.0
        unsigned = b'{"pool":"p","least":1.0,"most":5.0,"nonce":"n","signature":""}'
        assert await raw(address, unsigned) == b'{"given":0.0}'
        covered = hashlib.blake2b(
            b'{"least":1.0,"most":5.0,"nonce":"n","pool":"p"}', digest_size=16
        ).hexdigest()
        signature = KEYS.sign("share", f"p\n{address}\n{METHOD}\n{covered}")
        question = unsigned.replace(b're":""', f're":"{signature}"'.encode())
        # A changed call gets no budget, nor does a call that is sent to another replica.
        assert await raw(address, question.replace(b"5.0", b"9.0")) == b'{"given":0.0}'
        assert await raw(other, question) == b'{"given":0.0}'
        # The intended replica transfers budget once, and repeats the same answer if the call is repeated.
        assert await raw(address, question) == b'{"given":2.0}'
        assert await raw(address, question) == b'{"given":2.0}'
        counts.assert_awaited_once()


async def raw(address: str, question: bytes) -> bytes:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await channel.unary_unary(METHOD)(question, timeout=10)
        assert isinstance(answer, bytes)
        return answer


async def test_budget_in_a_late_answer_is_not_lost() -> None:
    open_ = asyncio.Event()

    async def gives_late(least: float, most: float) -> float:
        await open_.wait()
        return 2.0

    slow = AsyncMock(side_effect=gives_late)
    counted = AsyncMock(side_effect=handlers("p", slow, KEYS, lambda: address)[METHOD])
    them = peers(margin_s=0.0)
    async with serving_on({METHOD: counted}) as address:
        answer = asyncio.create_task(them.ask(address, 1.0, 5.0))
        await until(lambda: counted.call_count == 2)  # the first call has timed out
        open_.set()
        assert await answer == 2.0
    slow.assert_awaited_once()


@pytest.mark.parametrize("said", [-1.0, 7.0, float("nan")])
async def test_an_impossible_amount_of_budget_is_ignored(said: float) -> None:
    them = peers()
    async with replica(AsyncMock(return_value=said)) as address:
        assert not await them.ask(address, 1.0, 5.0)


async def test_only_the_fleet_can_read_a_replicas_outage_count_and_ended_requests() -> None:
    own = OutageCount(3, 8.8, 1.0, {"r": 1.0, "s": 2.5})

    def ended_before(ids: Collection[str]) -> list[str]:
        return [name for name in ids if name != "s"]

    them, strangers = peers(), peers(keys=Keyring())
    charges = {"r": EndedCharge(True, None), "s": EndedCharge(False, [7.0, 0.0, 2.0])}
    answers = {"count": lambda: own, "ended_before": ended_before, "ended": lambda ids: charges}
    async with replica(gives, **answers) as address:
        assert await them.count(address) == own
        assert await them.ended_before(address, ["r", "s"]) == ["r"]
        assert await strangers.count(address) is None
        assert await strangers.ended_before(address, ["r"]) is None
        assert await them.ended(address, ["r", "s", "t"]) == charges
        assert await strangers.ended(address, ["r"]) is None
        many = [f"{n:036}" for n in range(30_000)]
        assert await them.ended_before(address, many) == many
    async with replica(gives) as address:  # this replica reports no outage
        assert await them.count(address) is None
        assert await them.ended_before(address, ["r"]) is None
        assert await them.ended(address, ["r"]) is None


async def test_only_the_fleet_can_ask_whether_a_replica_uses_redis() -> None:
    async with replica(gives, redis_use=lambda: RedisUse(True, 1.5)) as address:
        assert await peers().redis_use(address) == RedisUse(True, 1.5)
        assert await peers(keys=Keyring()).redis_use(address) is None


async def test_the_ended_ids_of_any_number_of_requests_arrive_over_tls() -> None:
    # The answer exceeds a new connection's flow-control window, and the question exceeds an HTTP/2 frame.
    many = {f"{n:036}": 1.0 for n in range(20_000)}
    own = OutageCount(2, 1e6, 1.0, many)
    tls = Certificates(Tls(), "extproc.tls", "h2")
    them = peers(tls=tls)
    async with replica(gives, tls, count=lambda: own, ended_before=list) as address:
        assert await them.count(address) == own
        assert await them.ended_before(address, many) == list(many)


def borrowing(gate: LocalGate, *addresses: str) -> AbstractAsyncContextManager[None]:
    """Let the local gate `gate` ask the replicas at `addresses` for budget until the block ends."""
    them = GrpcPeers("p", KEYS, margin_s=PATIENT_S)
    return running(BudgetTransfer(gate, them, lambda: addresses).run())


async def test_a_waiting_request_is_admitted_with_the_budget_of_another_replica() -> None:
    rich, poor = (LocalGate(Metrics(), free, 10.0, rules()) for free in (2.0, 0.0))

    give = functools.partial(rich.transfer_budget, wait_s=0.5)
    async with replica(give) as address, borrowing(poor, address):
        tasks = [start(poor, str(n)) for n in range(3)]
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks[:2])
        # Two requests are admitted with the other replica's budget.
        assert (rich.free, poor.free, poor.waiting) == (0.0, 0.0, 1)
        # The third request is admitted as soon as the other replica receives the end of a request.
        rich.release(1.0)
        async with asyncio.timeout(30):
            assert await tasks[2]
    assert rich.free + poor.free == 0.0


async def test_without_peers_requests_wait_for_local_budget() -> None:
    gate = LocalGate(Metrics(), 0.0, 10.0, rules())
    async with borrowing(gate):
        (task,) = await waiting(gate, "r")
        gate.release(1.0)
        assert await task
