"""Which request headers a client may set for itself (docs/security.md).

Headers that steer a request decide its share, its band or its model. They count only where whoever sets
them is trusted: `extproc.trusted_headers` names them for the picker, `picker envoy-config --trust-headers`
for clients of an Envoy of ours, which removes the others. Both spellings of a header go together.
"""

from collections.abc import Iterable

FAIRNESS_ID = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
OBJECTIVE = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
REWRITE = ("x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite")
STEERING = (FAIRNESS_ID, OBJECTIVE, REWRITE)

# Only the picker and Envoy say these, whoever is trusted.
NEVER_TRUSTED = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
)
# Any client may set these: they change nothing but its own request. Naming one as trusted changes nothing.
ALWAYS_KEPT = (
    "x-workload-context",
    "x-llm-d-inference-ttl",
    "x-request-timeout",
    "grpc-timeout",
    "x-envoy-expected-rq-timeout-ms",
    "x-session-token",
    "traceparent",
)

_TRUSTABLE = frozenset((*ALWAYS_KEPT, *(name for pair in STEERING for name in pair)))


def trusted_name(value: object) -> str:
    """`value` as the lower-case name of a header that can be trusted.

    Raises:
        ValueError: it is no such header; the message lists them.
    """
    name = value.strip().lower() if isinstance(value, str) else ""
    if name not in _TRUSTABLE:
        valid = ", ".join(spelling for pair in STEERING for spelling in pair)
        why = "is never taken from a client" if name in NEVER_TRUSTED else "is no header that steers"
        raise ValueError(f"{str(value)[:60]!r} {why}; valid: {valid}")
    return name


def trusted(named: Iterable[str]) -> frozenset[str]:
    """The steering headers that count if `named` are trusted: both spellings of each."""
    names = frozenset(named)
    return frozenset(name for pair in STEERING if names & frozenset(pair) for name in pair)


def untrusted(named: Iterable[str]) -> tuple[str, ...]:
    """What is to be removed from a client's request if only `named` are trusted."""
    kept = trusted(named)
    return (*(name for pair in STEERING for name in pair if name not in kept), *NEVER_TRUSTED)
