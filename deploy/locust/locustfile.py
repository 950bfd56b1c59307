"""The scenarios of `picker load` for Locust: one User class each, named after its scenario.

    locust -f deploy/locust/locustfile.py --host http://127.0.0.1:8080 NoisyNeighbourUser -u 40

Each simulated user sends a request of one of the scenario's sources, waits for its answer, pauses, and sends
the next: a closed loop, so a slow fleet is asked for less. `picker load` is an open loop and checks the
promises; this is for Locust's own page, its distribution over machines and its statistics. The classes of
`replica-crash` and `redis-outage` send the load only and kill nothing.

A `TTFT` line of the statistics is the time to the first byte. Refusals are failures, named by their reason.
"""

import itertools
import time
from random import Random
from typing import Any

import gevent
from locust import FastHttpUser, task

from picker_tools.load.client import HttpRequest
from picker_tools.load.generator import completion_request, conversation_turn
from picker_tools.load.scenarios import SCENARIOS, Scenario, Source

_PAUSE_S = 1.0  # mean, between the answer and the next request
_FIRST_BYTE = 1
_CHUNK_BYTES = 65_536
_MODEL = "llama"  # what `picker up` serves

_numbers = itertools.count()
_chance = Random()


class ScenarioUser(FastHttpUser):
    """A user that plays one source after the other, each as often as its part of the scenario's load."""

    abstract = True
    host = "http://127.0.0.1:8080"
    scenario: Scenario

    def wait_time(self) -> float:
        return _chance.expovariate(1 / _PAUSE_S)

    @task
    def play(self) -> None:
        sources = self.scenario.sources
        source = _chance.choices(sources, [each.load for each in sources])[0]
        if source.conversation is None:
            self.send(source, completion_request(source, _MODEL, next(_numbers), _chance.randrange(2**32)))
            return
        said: list[str] = []
        for number in range(source.conversation.turns):
            ask, words = conversation_turn(source, _MODEL, said, _chance)
            if not self.send(source, ask):
                return
            said += [words, f"answer {number}"]
            gevent.sleep(_chance.expovariate(1 / source.conversation.think_s))

    def send(self, source: Source, ask: HttpRequest) -> bool:
        """One request, read to its end; whether it was served whole."""
        began = time.perf_counter()
        headers = {**dict(ask.headers), "content-type": "application/json"}
        with self.client.post(
            ask.path, name=source.name, data=ask.body, headers=headers, stream=True, catch_response=True
        ) as response:
            body = "".join(_read(response, _FIRST_BYTE, most=1))
            first_ms = 1000 * (time.perf_counter() - began)
            body += "".join(_read(response, _CHUNK_BYTES))
            response.request_meta["response_time"] = 1000 * (time.perf_counter() - began)
            response.request_meta["response_length"] = len(body)
            if response.status_code in (429, 503):
                reason = (response.headers or {}).get("x-llm-d-request-dropped-reason", "without a reason")
                response.failure(f"refused: {reason}")
                return False
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {body[:100]}")
                return False
            if ask.streamed and "data: [DONE]" not in body[-100:]:
                response.failure("a stream that ended without [DONE]")
                return False
            response.success()
        self.environment.events.request.fire(
            request_type="TTFT", name=source.name, response_time=first_ms, response_length=0, exception=None
        )
        return True


def _read(response: Any, size: int, most: int | None = None) -> Any:
    if not response.status_code:  # there was no answer
        return ()
    chunks = (chunk if isinstance(chunk, str) else chunk.decode(errors="replace") for chunk in
              response.iter_content(size))  # fmt: skip
    return itertools.islice(chunks, most)


# Locust finds its users among the module's names.
for _scenario in SCENARIOS.values():
    _name = "".join(word.capitalize() for word in _scenario.name.split("-")) + "User"
    globals()[_name] = type(_name, (ScenarioUser,), {"scenario": _scenario, "__doc__": _scenario.summary})
