"""Certificates for tests, made by openssl: authorities, and certificates that authorities sign."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    cert: Path
    key: Path


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def authority(folder: Path, name: str) -> Pair:
    """A new certificate authority, whose own certificate is also valid for a server at 127.0.0.1."""
    made = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    files = ("-keyout", made.key, "-out", made.cert)
    own = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    _openssl("req", "-x509", *_NEW_KEY, "-days", "2", *own, *files)
    return made


def signed(folder: Path, name: str, by: Pair, alternative: str = "", days: int = 2) -> Pair:
    """A new certificate for servers and clients, signed by the authority `by`. The certificate's subject
    alternative name is by default `name` and this host.
    """
    made, request = Pair(folder / f"{name}.crt", folder / f"{name}.key"), folder / f"{name}.csr"
    _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={alternative or f'DNS:{name},IP:127.0.0.1'}\n")
    signer = ("-CA", by.cert, "-CAkey", by.key, "-CAcreateserial", "-days", f"{days}")
    _openssl("x509", "-req", "-in", request, *signer, "-extfile", extensions, "-out", made.cert)
    return made
