"""Prints the software bill of materials of an image: CycloneDX 1.5, in JSON.

    sbom.py LOCK WHEEL > sbom.cdx.json

It lists the packages that LOCK pins for this platform, with their hashes; pip has accepted a file with one of
a package's hashes. Equal inputs give equal text.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

from packaging.markers import Marker
from packaging.utils import canonicalize_name, parse_wheel_filename

_ENTRY = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)(?: ; (?P<marker>.*?))? \\$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def _component(name: str, version: str, hashes: list[str]) -> dict[str, object]:
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    component: dict[str, object] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    if len(hashes) == 1:
        component["hashes"] = [{"alg": "SHA-256", "content": hashes[0]}]
    else:  # the installed file is one of several; list each file as a distribution
        listed = [{"alg": "SHA-256", "content": each} for each in hashes]
        component["externalReferences"] = [
            {"type": "distribution", "url": purl, "hashes": [each]} for each in listed
        ]
    return component


def locked(text: str) -> list[dict[str, object]]:
    """The components that the lock file `text` pins for this platform."""
    components = []
    for block in re.split(r"\n(?=\S)", text.strip()):
        first, *rest = block.splitlines()
        found = _ENTRY.match(first)
        hashes = _HASH.findall("\n".join(rest))
        if found is None or not hashes:
            raise SystemExit(f"the lock file has no pinned package with hashes here: {first}")
        if found["marker"] is None or Marker(found["marker"]).evaluate():
            components.append(_component(found["name"], found["version"], hashes))
    return components


def main() -> None:
    lock, wheel = (Path(word) for word in sys.argv[1:])
    name, version, *_ = parse_wheel_filename(wheel.name)
    components = locked(lock.read_text())
    own = _component(name, str(version), [hashlib.sha256(wheel.read_bytes()).hexdigest()])
    own["type"] = "application"
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [
            {"ref": own["bom-ref"], "dependsOn": sorted(str(each["bom-ref"]) for each in components)}
        ],
    }
    print(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main()
