"""The images of the compose file: fetches the third-party images, and checks the images built here."""

import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from long.compose.engine import BASE, Engine, EngineFault, command

REDIS = "docker.io/library/redis:7.2-alpine"
PROMETHEUS = "docker.io/prom/prometheus:v2.53.5"
USER = "10001:10001"
MOST_ABOVE_BASE_BYTES = 120_000_000  # limit for the image picker
_OWN = "/opt/picker"
_SBOM = f"{_OWN}/sbom.cdx.json"
_NO_TOOLS = {"pip", "pip3", "gcc", "cc", "g++", "c++", "ld", "as", "make"}
_NO_PACKAGES = {"pip", "setuptools", "ensurepip"}

# Substitutes for official images: Debian's program with an entry point like the official image's.
_STAND_INS = {
    REDIS: f"""
        FROM {BASE}
        RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server >/dev/null
        RUN printf '#!/bin/sh\\nexec "$@" --protected-mode no\\n' > /entry && chmod 755 /entry
        RUN mkdir -p /data
        WORKDIR /data
        ENTRYPOINT ["/entry"]
    """,
    PROMETHEUS: f"""
        FROM {BASE}
        RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus wget >/dev/null
        RUN mkdir -p /prometheus
        ENTRYPOINT ["/usr/bin/prometheus"]
    """,
}


@dataclass(frozen=True, slots=True)
class Quality:
    """The result of examining one image; `faults` describes each fault."""

    above_base_bytes: int
    packages: int
    faults: tuple[str, ...]


def fetch_or_make(engine: Engine, name: str) -> str:
    """Provide the image `name`: already present, pulled, or made from Debian. Returns which of these."""
    if _has(engine, name):
        return "was here"
    try:
        engine.run("pull", "--quiet", name, within_s=300)
        return "pulled"
    except (EngineFault, subprocess.TimeoutExpired):
        if not engine.is_podman:
            raise
    if name == BASE:
        command(str(Path(__file__).with_name("base-image.sh")), BASE)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "Containerfile"
            file.write_text("\n".join(line.strip() for line in _STAND_INS[name].strip().splitlines()))
            engine.run("build", "--isolation", "chroot", "-t", name, "-f", str(file), folder)
    return "made from Debian, since no registry answers"


def members(engine: Engine, image: str) -> Iterator[tuple[PurePosixPath, tarfile.TarInfo]]:
    """All files and folders in `image`, with their paths."""
    container = engine.run("create", image, "true").split()[-1]
    try:
        with (
            subprocess.Popen((engine.program, "export", container), stdout=subprocess.PIPE) as export,
            tarfile.open(fileobj=export.stdout, mode="r|") as tar,
        ):
            for member in tar:
                yield PurePosixPath("/", member.name.removeprefix("./")), member
    finally:
        engine.run("rm", "--force", container)


def examine(engine: Engine, image: str, *, is_small: bool) -> Quality:
    """Check the promises of docs/deployment.md for `image`; with `is_small` also its size (image picker)."""
    faults = []
    config = json.loads(engine.run("inspect", "--format", "{{json .Config}}", image))
    if config.get("User") != USER:
        faults.append(f"its user is {config.get('User')!r}")
    above = _size_bytes(engine, image) - _size_bytes(engine, BASE)
    if is_small and above > MOST_ABOVE_BASE_BYTES:
        faults.append(f"{above / 1e6:.0f} MB above the base")
    packages = set()
    for path, each in members(engine, image):
        if path.name in _NO_TOOLS and path.parent.name in ("bin", "sbin"):
            faults.append(f"a tool to build or install: {path}")
        if path.parent.name in ("site-packages", "dist-packages", "python3.11") and path.name in _NO_PACKAGES:
            faults.append(f"a package to install others: {path}")
        if not path.is_relative_to(_OWN):
            continue
        if path.name in ("test", "tests") and each.isdir():
            faults.append(f"tests: {path}")
        if (each.uid, each.gid) != (0, 0) or (each.mode & 0o022 and not each.issym()):
            faults.append(f"others than root may change {path}")
        if path.suffix == ".dist-info":
            packages.add(path.stem.rpartition("-")[0].lower().replace("-", "_").replace(".", "_"))
    listed = _listed(engine, image)
    if listed != packages:
        faults.append(f"the SBOM and the packages differ: {', '.join(sorted(listed ^ packages))}")
    return Quality(above, len(packages), tuple(faults))


def _listed(engine: Engine, image: str) -> set[str]:
    """Names of the packages in the image's SBOM, in the spelling of `.dist-info` folders."""
    read = f"print(open({_SBOM!r}).read())"
    text = engine.run("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", read)
    bom = json.loads(text)
    components = [*bom["components"], bom["metadata"]["component"]]
    has_hashes = all(each.get("hashes") or each.get("externalReferences") for each in components)
    if bom["bomFormat"] != "CycloneDX" or not has_hashes:
        raise EngineFault(f"{image}: {_SBOM} is no CycloneDX with hashes")
    return {each["name"].lower().replace("-", "_").replace(".", "_") for each in components}


def _has(engine: Engine, name: str) -> bool:
    try:
        engine.run("image", "inspect", name)
    except EngineFault:
        return False
    return True


def _size_bytes(engine: Engine, image: str) -> int:
    return int(engine.run("image", "inspect", "--format", "{{.Size}}", image))
