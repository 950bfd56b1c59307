"""A run as it is kept: what its clients remember, the decision log, and the rules it is judged by.

A folder of three files: `history.jsonl.gz`, a request a line; `log.jsonl.gz`, an entry a line as the stream
has it; `rules.json`, how `check` is to judge them. `python -m bench.witness FOLDER` does so at any time.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.witness.asking import Asked, Wish
from bench.witness.check import Verdict, check

_HISTORY, _LOG, _RULES = "history.jsonl.gz", "log.jsonl.gz", "rules.json"


@dataclass(frozen=True, slots=True)
class Written:
    """A run in `folder`."""

    folder: Path

    def judge(self) -> Verdict:
        """Check what is written here, and nothing else.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError, KeyError, TypeError: it is not what was written.
        """
        rules = json.loads((self.folder / _RULES).read_text(encoding="utf-8"))
        history = [_asked(line) for line in _lines(self.folder / _HISTORY)]
        return check(history, list(_lines(self.folder / _LOG)), **rules)


def write(folder: Path, history: Iterable[Asked], log: Iterable[Mapping[str, str]], **rules: Any) -> Written:
    """Write a run into `folder`, in place of an earlier one. `rules` are `check`'s."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / _HISTORY, map(asdict, history))
    _write_lines(folder / _LOG, map(dict, log))
    (folder / _RULES).write_text(json.dumps(rules) + "\n", encoding="utf-8")
    return Written(folder)


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with gzip.open(file, "wt", compresslevel=3, encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, separators=(",", ":")) + "\n")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _asked(row: dict[str, Any]) -> Asked:
    wish = row.pop("wish")
    headers = tuple((name, value) for name, value in wish.pop("headers"))
    return Asked(Wish(**wish, headers=headers), **row)
