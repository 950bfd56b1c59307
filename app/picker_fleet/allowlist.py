"""Which paths reach a model server, and which request headers a client may set (docs/security.md).

Used by the picker for each request, by the configuration, and for Envoy's routes and header removal.

Paths are compared byte for byte with what the client sent, up to the `?`. Model servers get the path
unchanged, so a path that needs normalising (`//`, `..`, `%2e`, `;x=1`, a trailing slash) matches no rule. A
model's name, the one variable part, has only letters that no server reads as anything else.

Headers that steer a request decide its flow, its band or its model. They count only where their sender is
trusted: `extproc.trusted_headers` names them for the picker, `picker envoy-config --trust-headers` for
clients of an Envoy of ours, which removes the others. Both spellings of a header go together.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

# Characters of a model's name; a slash within it may be percent-encoded, as may a colon, an at and a plus.
_SEGMENT = "[A-Za-z0-9](?:[A-Za-z0-9._:@+=~-]|%3[Aa]|%40|%2[Bb])*"
_MODEL_NAME = f"{_SEGMENT}(?:(?:/|%2[Ff]){_SEGMENT})*"
_NAME = "{id}"
NOT_LISTED = "no model server is asked this: not a method and path of the list"  # to who asks for another
_ENTRY = re.compile(r"(GET|POST) ((?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+(?:/\{id\})?)")


class PathRule(NamedTuple):
    """A method and a path as it is written; one that ends in `{id}` stands for any model's name there."""

    method: Literal["GET", "POST"]
    path: str

    @property
    def is_exact(self) -> bool:
        """Whether it stands for itself alone."""
        return not self.path.endswith(_NAME)

    @property
    def regex(self) -> str:
        """What a whole path (without its query) has to match; RE2 and Python read it alike."""
        if self.is_exact:
            return re.escape(self.path)
        return re.escape(self.path.removesuffix(_NAME)) + _MODEL_NAME


DEFAULT_RULES = (
    PathRule("POST", "/v1/chat/completions"),
    PathRule("POST", "/v1/completions"),
    PathRule("POST", "/v1/responses"),
    PathRule("POST", "/v1/messages"),
    PathRule("POST", "/v1/messages/count_tokens"),
    PathRule("POST", "/v1/embeddings"),
    PathRule("POST", "/v1/rerank"),
    PathRule("POST", "/v2/rerank"),
    PathRule("POST", "/rerank"),
    PathRule("POST", "/v1/score"),
    PathRule("POST", "/score"),
    PathRule("POST", "/v1/tokenize"),
    PathRule("POST", "/v1/detokenize"),
    PathRule("POST", "/tokenize"),
    PathRule("POST", "/detokenize"),
    PathRule("POST", "/v1/audio/speech"),
    PathRule("POST", "/v1/audio/transcriptions"),
    PathRule("POST", "/v1/audio/translations"),
    PathRule("POST", "/v1/images/generations"),
    PathRule("POST", "/v1/images/edits"),
    PathRule("POST", "/v1/images/variations"),
    PathRule("GET", "/v1/models"),
    PathRule("GET", "/v1/models/{id}"),
)


def path_rule(text: object) -> PathRule:
    """The rule that a configuration spells as `POST /v1/classify` or `GET /v1/adapters/{id}`.

    Raises:
        ValueError: it is neither, or its path is one that would have to be normalised.
    """
    if isinstance(text, PathRule):
        return text
    match = _ENTRY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{str(text)[:60]!r} is no method and path; write POST /v1/classify or GET /version")
    return PathRule("GET" if match[1] == "GET" else "POST", match[2])


def rules(configured: Iterable[PathRule]) -> tuple[PathRule, ...]:
    """The paths of every engine and those that `extproc.paths` adds, each once."""
    return tuple(dict.fromkeys((*DEFAULT_RULES, *configured)))


FAIRNESS_ID = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
OBJECTIVE = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
REWRITE = ("x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite")
STEERING = (FAIRNESS_ID, OBJECTIVE, REWRITE)

# Only the picker and Envoy set these; no sender is trusted with them.
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
