#!/usr/bin/env bash
# Builds a substitute for the image python:3.11-slim if no registry answers: Debian's Python 3.11 with this
# machine's certificates and pip configuration. Needs root. Usage: base-image.sh NAME
set -euo pipefail
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$root" >/dev/null
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"

# Install a pip that can be uninstalled, like the official image's pip.
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
chroot "$root" env PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_ROOT_USER_ACTION=ignore \
  pip install --quiet --upgrade --ignore-installed pip setuptools wheel
chroot "$root" dpkg --remove --force-all python3-pip python3-wheel python3-setuptools >/dev/null 2>&1
ln -s /usr/bin/python3 "$root/usr/local/bin/python"
ln -s /usr/bin/python3 "$root/usr/local/bin/python3"

rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/*.log "$root"/debootstrap
tar --directory "$root" --create . | podman import --quiet - "$1"
