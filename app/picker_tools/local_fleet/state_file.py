"""The state file: where everything in a running local fleet is (docs/protocol.md)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Replace `path` by `state` in one step: a reader sees the old file or the new one, whole."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    draft.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
