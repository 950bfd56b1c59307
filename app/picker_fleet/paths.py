"""Which requests may reach a model server, by method and path. Used by the picker and for Envoy's routes.

Paths are compared byte for byte with what the client sent, up to the `?`: model servers get the path as it
came, so a path that has to be normalised first (`//`, `..`, `%2e`, `;x=1`, a trailing slash) is none of them.
The one part that varies, a model's name, has letters that no server reads as anything else.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["inference", "read"]  # needs a body and is admitted; has none and is not

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


class AllowedPaths:
    """Says what a request's method and path are. A lookup in a dictionary for all but models' names."""

    def __init__(self, configured: Iterable[PathRule] = ()) -> None:
        self._exact: dict[tuple[bytes, bytes], Kind] = {}
        self._patterns: list[tuple[bytes, re.Pattern[bytes], Kind]] = []
        for rule in rules(configured):
            kind: Kind = "inference" if rule.method == "POST" else "read"
            if rule.is_exact:
                self._exact[rule.method.encode(), rule.path.encode()] = kind
            else:
                self._patterns.append((rule.method.encode(), re.compile(rule.regex.encode()), kind))

    def kind(self, method: bytes, path: bytes) -> Kind | None:
        """What a request with these `:method` and `:path` is; None if no model server may see it."""
        bare = path.partition(b"?")[0]
        kind = self._exact.get((method, bare))
        if kind is not None:
            return kind
        for wanted, pattern, kind in self._patterns:
            if method == wanted and pattern.fullmatch(bare):
                return kind
        return None
