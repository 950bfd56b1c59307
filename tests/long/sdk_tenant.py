"""Makes calls of one SDK with one API key; long/tenants.py runs it in an environment with the SDKs.

    python sdk_tenant.py openai|anthropic URL KEY WORKERS SECONDS

Each worker makes its next call when its last call has ended. The first worker's client never retries. Prints
the calls as JSON: [{"took_s", "raised", "attempts": [{"at_s", "status", "headers", "body"}]}].
"""

import asyncio
import contextvars
import json
import sys
import time
from typing import Any

import anthropic
import openai

_LIBRARIES: dict[str, Any] = {"openai": openai, "anthropic": anthropic}
_ASK: Any = {"model": "llama", "max_tokens": 3, "messages": [{"role": "user", "content": "Grüße"}]}
_KEPT = ("retry-after", "x-ratelimit-", "anthropic-ratelimit-")
_MOST_RETRIES, _PAUSE_S = 100, 0.2
_attempts: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("_attempts")


async def _note_answer(answer: Any) -> None:
    """Note an HTTP answer that the SDK got for the current task's call."""
    headers = {name: value for name, value in answer.headers.items() if name.startswith(_KEPT)}
    body = (await answer.aread()).decode() if answer.status_code != 200 else ""
    _attempts.get().append(
        {"at_s": time.monotonic(), "status": answer.status_code, "headers": headers, "body": body}
    )


async def _work(library: Any, client: Any, until_s: float) -> list[dict[str, Any]]:
    create = client.messages.create if library is anthropic else client.chat.completions.create
    calls = []
    while (began_s := time.monotonic()) < until_s:
        attempts: list[Any] = []
        _attempts.set(attempts)
        raised = ""
        try:
            await create(**_ASK)
        except library.APIError as fault:
            raised = type(fault).__name__
            await asyncio.sleep(_PAUSE_S)
        took_s = time.monotonic() - began_s
        calls.append({"took_s": took_s, "raised": raised, "attempts": attempts})
    return calls


async def _main(sdk: str, url: str, key: str, workers: str, seconds: str) -> None:
    library = _LIBRARIES[sdk]
    http = library.DefaultAsyncHttpxClient(event_hooks={"response": [_note_answer]}, trust_env=False)
    if library is anthropic:
        client = anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=http)
    else:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http)
    until_s = time.monotonic() + float(seconds)
    clients = [client.with_options(max_retries=_MOST_RETRIES if n else 0) for n in range(int(workers))]
    work = [_work(library, each, until_s) for each in clients]
    print(json.dumps([call for calls in await asyncio.gather(*work) for call in calls]))


asyncio.run(_main(*sys.argv[1:]))
