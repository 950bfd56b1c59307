"""The project uses the standard terms of its field: former private words do not come back.

Each word is listed with the standard term that replaced it. Pages that name the terms of earlier versions
are exempt.
"""

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXEMPT = (
    "CHANGELOG.md", "LICENSE", "docs/upgrading.md", "tests/data/", "tests/unit/test_vocabulary.py",
    "bench/results/",
)  # fmt: skip
SUFFIXES = (".py", ".lua", ".md", ".js", ".html", ".css", ".yml", ".yaml", ".toml", ".json")

# The words in WORDS are forbidden in code and prose, also as a part of an identifier.
WORDS = {
    "sturdy": "failover", "crossing": "failover state", "purse": "local budget",
    "borrower": "budget transfer", "homecoming": "resync", "fleetmate": "peer", "fleetmates": "peers",
    "outbox": "outage journal", "glance": "heartbeat_now(full=False)", "poke": "heartbeat_now",
    "bury": "tombstone", "victim": "preemption candidate", "lane": "flow queue", "underway": "in flight",
    "astray": "not primary", "heed": "raise_if_cancelled", "lookout": "fleet state cache",
    "foretold": "predicted order", "whereabouts": "request status", "upheaval": "chaos",
    "witness": "client history",
}  # fmt: skip

# The words in NAMES are forbidden as names in code; in prose they keep their ordinary English meaning.
NAMES = {
    "buried": "tombstone", "lanes": "flow queues", "victims": "preemption candidates",
    "ahead": "read_ahead", "writes": "write_behind", "later": "defer_write", "born": "epoch",
    "lives": "epoch", "desk": "exchange context", "door": "drain gate", "earn": "release",
    "spend": "acquire", "expose": "add", "harm": "faults injected", "hear": "notified",
    "held": "stream_owned or orphaned", "introduction": "replica info", "judge": "check",
    "judges": "checks", "lasting": "durable", "lend": "transfer_budget", "news": "notifications",
    "park": "throttle", "recall": "explanation cache", "shield": "remove", "show_out": "cancel_waiters",
    "standing": "fleet state", "tell": "notify", "ticket": "accounting_token", "waking": "pause detector",
}  # fmt: skip

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_FROM_ELSEWHERE = re.compile(r"asyncio\.shield|output\.tell")
_STRINGS_AND_COMMENTS = {
    ".py": re.compile(r'"""[\s\S]*?"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#[^\n]*'),
    ".lua": re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|--[^\n]*'),
    ".js": re.compile(r'`[^`]*`|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|//[^\n]*|/\*[\s\S]*?\*/'),
}


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of each file of the project that is not exempt from the rules."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if name.endswith(SUFFIXES) and not name.startswith(EXEMPT) and (ROOT / name).is_file():
            yield name, (ROOT / name).read_text(encoding="utf-8")


def uses(words: Mapping[str, str], text: str, parts: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Each name in `text` with a part that is one of `words`, and the term that replaces the part."""
    for name in {*_IDENTIFIER.findall(text)}:
        yield from (f"{name} (for {part} say {words[part]})" for part in {*parts(name)} & words.keys())


def code_of(name: str, text: str) -> str:
    """The source `text` without strings and comments."""
    return _FROM_ELSEWHERE.sub("", _STRINGS_AND_COMMENTS[Path(name).suffix].sub(" ", text))


def test_no_text_has_former_private_words() -> None:
    def parts(name: str) -> list[str]:
        return [part.lower() for part in _PARTS.findall(name)]

    assert [f"{name}:{use}" for name, text in texts() for use in uses(WORDS, text, parts)] == []


def test_the_code_has_no_former_private_names() -> None:
    code = {name: code_of(name, text) for name, text in texts() if name.endswith((".py", ".lua", ".js"))}
    bare = [
        f"{n}:{use}" for n, text in code.items() for use in uses(NAMES, text, lambda name: [name.strip("_")])
    ]
    assert bare == []
