"""Fetches the third-party images of the compose file, and checks the images that are built here."""

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
MOST_ABOVE_BASE_BYTES = 145_000_000  # limit for the image `picker`
_OWN = "/opt/picker"
_SBOM = f"{_OWN}/sbom.cdx.json"
_NO_TOOLS = {"pip", "pip3", "gcc", "cc", "g++", "c++", "ld", "as", "make"}
_NO_PACKAGES = {"pip", "setuptools", "ensurepip"}

# Images with Debian's program and the official image's kind of entry point, instead of official images.
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
    """Results of `examine`; `faults`: a text for each broken promise of docs/deployment.md."""

    above_base_bytes: int
    packages: int
    faults: tuple[str, ...]


def fetch_or_make(engine: Engine, name: str) -> str:
    """Make sure that image `name` exists: pull it, or build it from Debian. Returns words on its origin."""
    if _has(engine, name):
        return "already present"
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
    return "built from Debian, because no registry answers"


def members(engine: Engine, image: str) -> Iterator[tuple[PurePosixPath, tarfile.TarInfo]]:
    """Path and tar entry of every file and folder in `image`."""
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
    """Check the promises of docs/deployment.md for `image`; if `is_small`, also the promised size."""
    faults = []
    config = json.loads(engine.run("inspect", "--format", "{{json .Config}}", image))
    if config.get("User") != USER:
        faults.append(f"the image's user is {config.get('User')!r}")
    above = _size_bytes(engine, image) - _size_bytes(engine, BASE)
    if is_small and above > MOST_ABOVE_BASE_BYTES:
        faults.append(f"{above / 1e6:.0f} MB above the base")
    packages = set()
    for path, each in members(engine, image):
        if path.name in _NO_TOOLS and path.parent.name in ("bin", "sbin"):
            faults.append(f"contains a build or install tool: {path}")
        if path.parent.name in ("site-packages", "dist-packages", "python3.11") and path.name in _NO_PACKAGES:
            faults.append(f"contains an installer package: {path}")
        if not path.is_relative_to(_OWN):
            continue
        if path.name in ("test", "tests") and each.isdir():
            faults.append(f"contains tests: {path}")
        if (each.uid, each.gid) != (0, 0) or (each.mode & 0o022 and not each.issym()):
            faults.append(f"users other than root may write {path}")
        if path.suffix == ".dist-info":
            packages.add(path.stem.rpartition("-")[0].lower().replace("-", "_").replace(".", "_"))
    listed = _listed(engine, image)
    if listed != packages:
        faults.append(f"the SBOM and the packages differ: {', '.join(sorted(listed ^ packages))}")
    return Quality(above, len(packages), tuple(faults))


def _listed(engine: Engine, image: str) -> set[str]:
    """Names of the packages in the image's SBOM, spelled as `.dist-info` folders are."""
    read = f"print(open({_SBOM!r}).read())"
    text = engine.run("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", read)
    bom = json.loads(text)
    components = [*bom["components"], bom["metadata"]["component"]]
    has_hashes = all(each.get("hashes") or each.get("externalReferences") for each in components)
    if bom["bomFormat"] != "CycloneDX" or not has_hashes:
        raise EngineFault(f"{image}: {_SBOM} is not a CycloneDX document with hashes")
    return {each["name"].lower().replace("-", "_").replace(".", "_") for each in components}


def _has(engine: Engine, name: str) -> bool:
    try:
        engine.run("image", "inspect", name)
    except EngineFault:
        return False
    return True


def _size_bytes(engine: Engine, image: str) -> int:
    return int(engine.run("image", "inspect", "--format", "{{.Size}}", image))
