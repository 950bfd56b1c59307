"""The scenarios of `picker load` for Locust: a User class for each scenario, with the scenario's name.

    locust -f deploy/locust/locustfile.py --host http://127.0.0.1:8080 NoisyNeighbourUser -u 40

Each simulated user sends a request of one of the scenario's sources, waits for its answer, pauses, and sends
the next request: a closed loop, so a slow fleet gets less load. `picker load` is an open loop and checks the
promises; this file gives Locust's page and statistics. `replica-crash`, `redis-outage` and `demo` only send
the load and kill no process. Refusals count as failures, named by their reason.
"""

import itertools
from random import Random

from locust import FastHttpUser, task

from picker_tools.load.generator import PATH
from picker_tools.load.scenarios import SCENARIOS, Scenario, source_request

_PAUSE_S = 1.0  # mean pause between an answer and the user's next request
_MODEL = "llama"  # the model that `picker up` serves

_numbers = itertools.count()
_chance = Random()


class ScenarioUser(FastHttpUser):
    """A user that draws each request's source with probability in proportion to the source's load."""

    abstract = True
    host = "http://127.0.0.1:8080"
    scenario: Scenario

    def wait_time(self) -> float:
        return _chance.expovariate(1 / _PAUSE_S)

    @task
    def play(self) -> None:
        sources = self.scenario.sources
        source = _chance.choices(sources, [each.load for each in sources])[0]
        request = source_request(source, _MODEL, next(_numbers), _chance.randrange(2**32))
        with self.client.post(
            PATH,
            name=source.name,
            data=request.body(),
            headers={**dict(request.headers), "content-type": "application/json"},
            catch_response=True,
        ) as response:
            if response.status_code in (429, 503):
                reason = (response.headers or {}).get("x-llm-d-request-dropped-reason", "without a reason")
                response.failure(f"refused: {reason}")
            elif response.status_code != 200:
                response.failure(f"status {response.status_code}: {(response.text or '')[:100]}")
            elif request.streamed and "data: [DONE]" not in response.text[-100:]:
                response.failure("the stream ended without [DONE]")
            else:
                response.success()


# Locust uses the User classes among the module's global names.
for _scenario in SCENARIOS.values():
    _name = "".join(word.capitalize() for word in _scenario.name.split("-")) + "User"
    globals()[_name] = type(_name, (ScenarioUser,), {"scenario": _scenario, "__doc__": _scenario.summary})
