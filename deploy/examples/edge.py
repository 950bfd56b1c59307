"""Helpers for the examples in this folder: read, change and write the bootstrap of `picker envoy-config`.

The bootstrap removes clients' own fairness ids, in both spellings, before the first filter runs. So the
picker gets only the fairness id that a filter sets, and uses it if `extproc.trusted_headers` has the header.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]

FAIRNESS_ID = "x-gateway-inference-fairness-id"


def text(file: Path) -> str:
    """The text of a file; ends the program if the file cannot be read."""
    try:
        return file.read_text()
    except OSError as fault:
        sys.exit(f"{file}: cannot be read: {fault.strerror}")


def read() -> Tree:
    """The bootstrap that stdin contains."""
    tree = yaml.safe_load(sys.stdin)
    if not isinstance(tree, dict) or "staticResources" not in tree:
        sys.exit("no bootstrap on stdin: picker envoy-config … | python " + sys.argv[0])
    return tree


def filter_chain(tree: Tree) -> Tree:
    """The filter chain of the listener to which clients connect."""
    chain: Tree = tree["staticResources"]["listeners"][0]["filterChains"][0]
    return chain


def first_filter(tree: Tree, name: str, config: Tree) -> None:
    """Put an HTTP filter before all other filters, including the picker's ext_proc filter."""
    manager = filter_chain(tree)["filters"][0]["typedConfig"]
    removed = [each["remove"] for each in _early(manager) if "remove" in each]
    if FAIRNESS_ID not in removed:
        sys.exit(f"the bootstrap lets clients set {FAIRNESS_ID}: make it without --trust-headers")
    manager["httpFilters"].insert(0, {"name": name, "typedConfig": config})


def _early(manager: Tree) -> list[Tree]:
    return [
        mutation
        for extension in manager.get("earlyHeaderMutationExtensions", ())
        for mutation in extension["typedConfig"]["mutations"]
    ]


def write(tree: Tree) -> None:
    """Write the bootstrap to stdout."""
    yaml.safe_dump(tree, sys.stdout, sort_keys=False, width=110)
