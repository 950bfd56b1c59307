#!/bin/sh
# Run in a build stage: /opt/picker from the lock file LOCK and the project's wheel, the same for the same inputs.
set -eu
lock=$1

/opt/build/bin/pip --python /opt/picker/bin/python install --no-compile --no-deps --no-index /wheel/*.whl
/opt/build/bin/python sbom.py "$lock" /wheel/*.whl >/opt/picker/sbom.cdx.json

# Tests that packages bring are for their authors.
find /opt/picker/lib -depth -type d \( -name tests -o -name test \) -exec rm -r {} +
# Compiled here, since a container's root is read-only. By hash and not by time, so that two builds are equal.
# A template that is no Python (of another package) is left as it is.
PYTHONHASHSEED=0 /opt/picker/bin/python -m compileall -f -qq --invalidation-mode unchecked-hash /opt/picker/lib || :
