"""All attacks of docs/security.md at once, for 5 seconds, while honest clients send requests.

`make hostile` does the same for ten minutes, in mode `lean`, and also checks latencies.
"""

import pytest
from hostile_attacks import ENDED
from hostile_fleet import attack_fleet

from picker_tools.local_fleet.parts import Mode

# UNAVAILABLE: all streams of a replica are in use by other attackers.
REFUSED_BY_GRPC = ("INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
# Allowed outcomes of the attackers' attempts. The only 5xx is 503: a TTL set by the attacker expired, the
# hostile model servers are out of service, the attackers' flow is full, or reading the queue exceeded its
# limit of 2 s. ENDED: Envoy or a replica closed the connection, or a client that left has read only part of
# its answer.
ALLOWED_OUTCOMES = {
    "hostile bodies of 8 MiB": {"200", "400", "413", "503"},
    "large bodies that stop half-way": {"400", "408", "503", ENDED},
    "claims of 4000 to 10¹⁸ tokens, then leaving": {"200", "400", "503", "left"},
    "half-sent requests at Envoy": {ENDED, "held"},
    "half-sent requests at the admin ports": {ENDED, "held"},
    "requests that are begun and reset": {"reset", ENDED},
    "clients that leave at once": {"left", ENDED},
    "half-sent streams at Envoy": {ENDED, "held"},
    "answers that nobody reads": {ENDED, "held"},
    "requests that Envoy cannot read": {"400", "431"},
    "silent streams at the gRPC ports": {ENDED, "held"},
    "frames that carry nothing": {ENDED},
    "blocked answers that changes of windows wake": {ENDED, "held"},
    "connections that end with a thousand requests": {"left", ENDED},
    "requests that are reset after 1.1 s": {"left", ENDED},
    "idle connections to the gRPC ports": {ENDED, "held"},
    "forged access logs, accounting tokens and shares": {"taken", "given 0", *REFUSED_BY_GRPC},
    "takeover of requests by their ids": {"asked", "429", "503", ENDED, *REFUSED_BY_GRPC},
    "false reports of failures and ends": {"taken", "no place", "429", "503", ENDED, *REFUSED_BY_GRPC},
    "EDS requests that change": {ENDED, "held"},
    "headers and messages of tiny parts": {ENDED, "held"},
    "endless streams of one address": {ENDED, "held"},
    "TLS handshakes without an end": {ENDED, "held"},
    "TLS handshakes that are begun and left": {"left", ENDED},
    "names with separators": {"200", "400", "404", "503"},
    "spoofed steering headers": {"200", "400", "503"},
    "paths that are not inference, guessed keys": {"401", "404"},
    "long paths": {"200", "400", "404", "503"},
    "readers of the admin ports": {"200", "400", "404", "421", "429", "503", ENDED},  # 400: malformed Host
    "requests of any size at http.listen": {ENDED},
    "half-sent requests at http.listen": {ENDED, "held"},
    "a Redis user of another pool": {"refused"},
}
NOT_IN = {
    "standard": {"requests of any size at http.listen", "half-sent requests at http.listen"},
    "http": {"TLS handshakes without an end", "TLS handshakes that are begun and left"},
}


@pytest.mark.parametrize("mode", ["standard", "http"])
async def test_honest_clients_are_served_during_every_attack_and_no_process_exceeds_its_memory_limit(
    mode: Mode,
) -> None:
    report = await attack_fleet(replicas=2, servers=2, per_s=10, calm_s=0, hostile_s=5, mode=mode)
    assert report.faults() == []
    assert len(report.hostile.last_s) >= 40
    assert report.outcomes.keys() == ALLOWED_OUTCOMES.keys() - NOT_IN[mode]
    for name, outcomes in report.outcomes.items():
        assert outcomes.keys() <= ALLOWED_OUTCOMES[name] | {"under way"}, name
