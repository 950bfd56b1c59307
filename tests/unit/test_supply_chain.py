"""Supply chain: locked packages have hashes, and deploy/images/licences.md lists every licence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
LOCKS = [ROOT / "requirements.lock", ROOT / "requirements-local.lock", *sorted(IMAGES.glob("*.lock"))]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_locked_package_has_hashes_of_its_files(lock: Path) -> None:
    packages = re.split(r"\n(?=\S)", lock.read_text().strip())
    assert [each for each in packages if not re.match(r"[\w.-]+==\S+.*\\\n +--hash=sha256:", each)] == []


@pytest.mark.parametrize("name", ["Makefile", "Dockerfile"])
def test_every_installation_from_the_index_requires_hashes(name: str) -> None:
    installs = re.findall(r"(?:pip|\$\(INSTALL\))[^\n]* (?:install|--).*", (ROOT / name).read_text())
    from_index = [each for each in installs if "--requirement" in each]
    assert len(from_index) >= 3
    assert [each for each in from_index if "--require-hashes" not in each] == []


def test_the_page_lists_the_licence_of_each_package_of_an_image() -> None:
    locks = ("picker.lock", "edge.lock", "load.lock")
    written = subprocess.run(
        [sys.executable, "licences.py", *locks], cwd=IMAGES, capture_output=True, text=True, check=True
    ).stdout
    assert written == (IMAGES / "licences.md").read_text()
    assert "unknown" not in written
