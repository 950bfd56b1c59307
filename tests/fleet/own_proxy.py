"""The proxies of `examples/` before a running fleet: the examples' own files, with this fleet's addresses."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis_servers import wait

from picker_tools.local_fleet.network import LOOPBACK, free_port

_EXAMPLES = Path(__file__).parents[2] / "examples"
# Paths that nginx otherwise takes from how it was built.
_OWN_FOLDER = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
"""
_OWN_TEMP = """
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
"""


@contextmanager
def nginx(fleet: Any, folder: Path) -> Iterator[str]:
    """The URL of a running nginx; ended with the block."""
    binary = _debian("nginx", "nginx-light")
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    port = free_port()
    servers = (f"server {address} max_fails=1 fail_timeout=1s;\n" for address in _pickers(fleet))
    text = _changed(
        "nginx/nginx.conf",
        (r"(?:        server 127\.0\.0\.1:900\d .*;\n)+", "".join(servers)),
        (r"listen 127\.0\.0\.1:8080;", f"listen {LOOPBACK}:{port};"),
        (r"http \{\n", "http {" + _OWN_TEMP.format(folder=folder)),
    )
    file = folder / "nginx.conf"
    file.write_text(_OWN_FOLDER.format(folder=folder) + text)
    for part in ("model_server.conf", "settle.conf"):
        shutil.copy(_EXAMPLES / "nginx" / part, folder)
    command = [binary, "-p", str(folder), "-c", str(file), "-e", str(folder / "error.log")]
    with _serving(command, [*command, "-t"], port) as url:
        yield url


@contextmanager
def haproxy(fleet: Any, folder: Path) -> Iterator[str]:
    """The URL of a running HAProxy; ended with the block."""
    binary = _debian("haproxy", "haproxy")
    folder.mkdir(exist_ok=True)
    port = free_port()
    servers = (f"    server {number} {address}\n" for number, address in enumerate(_pickers(fleet)))
    here = (r"/run/haproxy-", f"{folder}/")
    text = _changed(
        "haproxy/haproxy.cfg",
        (r"(?:    server \w 127\.0\.0\.1:900\d\n)+", "".join(servers)),
        (r"bind 127\.0\.0\.1:8080", f"bind {LOOPBACK}:{port}"),
        (r"/etc/haproxy", str(folder)),
        here,
    )
    (folder / "haproxy.cfg").write_text(text)
    (folder / "picker.lua").write_text(_changed("haproxy/picker.lua", here))
    command = [binary, "-db", "-q", "-f", str(folder / "haproxy.cfg")]
    with _serving(command, [*command, "-c"], port) as url:
        yield url


@contextmanager
def caddy(fleet: Any, folder: Path, binary: str) -> Iterator[str]:
    """The URL of a running Caddy, whose program is `binary`; ended with the block."""
    port = free_port()
    text = _changed(
        "caddy/Caddyfile",
        (r"127\.0\.0\.1:9003 127\.0\.0\.1:9004", " ".join(_pickers(fleet))),
        (r"http://:8080 \{", f"http://:{port} {{"),
    )
    file = folder / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n\tstorage file_system {folder}\n}}\n{text}")
    arguments = ["--config", str(file), "--adapter", "caddyfile"]
    with _serving([binary, "run", *arguments], [binary, "validate", *arguments], port) as url:
        yield url


def _pickers(fleet: Any) -> list[str]:
    return [replica["http"] for replica in fleet.state["replicas"]]


@contextmanager
def _serving(command: Sequence[str], check: Sequence[str], port: int) -> Iterator[str]:
    checked = subprocess.run(check, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command)

    def accepts() -> bool:
        assert process.poll() is None, "the proxy ended"
        socket.create_connection((LOOPBACK, port), timeout=1).close()
        return True

    try:
        wait(accepts, "a proxy that accepts connections")
        yield f"http://{LOOPBACK}:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _debian(program: str, package: str) -> str:
    binary = shutil.which(program) or f"/usr/sbin/{program}"
    assert Path(binary).exists(), f"{program} is missing: install Debian's {package}"
    return binary


def _changed(example: str, *changes: tuple[str, str]) -> str:
    """The text of an example's file, with each pattern that it has replaced."""
    text = (_EXAMPLES / example).read_text()
    for pattern, by in changes:
        text, count = re.subn(pattern, lambda _, by=by: by, text, count=1)
        assert count == 1, f"the example has no {pattern}"
    return text
