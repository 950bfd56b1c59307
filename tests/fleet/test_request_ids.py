"""A client that knows the id of another client's request cannot use it at a real replica."""

import asyncio
import json
from typing import Any

import grpc
from check_client import Connection, check
from crowd import http_client
from extproc_client import body, headers
from own_replica import exchange_on, served_here
from page_server import serving
from redis_servers import Server
from script_fleet import until, until_is

BODY = json.dumps({"model": "llama", "prompt": "the first"}).encode()
OTHER_BODY = json.dumps({"model": "llama", "prompt": "a stranger's"}).encode()


async def ask(channel: grpc.aio.Channel, request_id: str, content: bytes) -> Any:
    """Open a stream in mode `lean` and send a whole request."""
    stream = exchange_on(channel)
    await stream.write(headers("lean", {"x-request-id": request_id}))
    await stream.write(body(content))
    return stream


async def placed(stream: Any) -> tuple[str, str]:
    """Return the request id and the accounting token in the replica's answer to Envoy."""
    answer = await stream.read()
    fields = answer.dynamic_metadata.fields["picker"].struct_value.fields
    return fields["id"].string_value, fields["token"].string_value


async def test_a_client_that_sends_anothers_request_id_gets_its_own_id_and_token(valkey: Server) -> None:
    async with serving() as page:
        endpoints = {"static": [{"address": page.address}]}
        bounds = {"watermark_per_backend": 10}
        tree = {
            "redis": {"url": valkey.url}, "discovery": endpoints, "request_queue_controller": bounds,
            "http": {"listen": "127.0.0.1:0"},
        }  # fmt: skip
        async with (
            served_here(tree) as bound,
            grpc.aio.insecure_channel(bound.grpc) as channel,
            http_client(bound.admin) as admin,
        ):

            async def is_changed(what: str) -> bool:
                return (await admin.post(f"/api/v1/{what}")).is_success

            async def waiting() -> int:
                return int((await admin.get("/api/v1/state")).json()["queued"])

            await until(lambda: is_changed("pause"))
            first = await ask(channel, "known", BODY)
            await until_is(waiting, 1)
            stranger = await ask(channel, "known", OTHER_BODY)
            await until_is(waiting, 2)
            await is_changed("resume")
            known, token = await placed(first)
            assert known == "known"
            # The first request is now in flight.
            for each in (stranger, await ask(channel, "known", OTHER_BODY)):
                other, others = await placed(each)
                assert other != "known"
                assert others != token
            # In mode `http`, too, the stranger gets its own id and token.
            assert bound.http is not None
            http = Connection(*await asyncio.open_connection(*bound.http.split(":")))
            http.send(check(body=OTHER_BODY, x_request_id="known"))
            answer = await http.reply()
            assert answer.status == 200
            assert answer.headers["x-picker-request-id"] not in ("", "known")
            assert answer.headers["x-picker-accounting-token"] != f"={token}"
            await http.close()
            # When Envoy retries the first request, the retry keeps the id and the token.
            assert await placed(await ask(channel, "known", BODY)) == ("known", token)
