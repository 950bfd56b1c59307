#!/bin/sh
# Runs in a build stage: installs the project's wheel in /opt/picker, and writes the SBOM of lock file $1. Equal inputs
# give an equal /opt/picker.
set -eu
lock=$1

/opt/build/bin/pip --python /opt/picker/bin/python install --no-compile --no-deps --no-index /wheel/*.whl
/opt/build/bin/python sbom.py "$lock" /wheel/*.whl >/opt/picker/sbom.cdx.json

# No one runs the packages' own tests in an image.
find /opt/picker/lib -depth -type d \( -name tests -o -name test \) -exec rm -r {} +
# CPython uses the other one of zstandard's backends: this one takes 12 MB.
rm -f /opt/picker/lib/python*/site-packages/zstandard/_cffi.* /opt/picker/lib/python*/site-packages/zstandard/backend_cffi.py
# Compile now, because a container's root is read-only; use hashes instead of times, so that two builds are equal.
# `|| :` ignores errors in packages' templates that are not valid Python.
PYTHONHASHSEED=0 /opt/picker/bin/python -m compileall -f -qq --invalidation-mode unchecked-hash /opt/picker/lib || :
