"""The proxies of `examples/` before a running fleet: the examples' own files, with this fleet's addresses."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from picker_tools.local_fleet.network import LOOPBACK, free_port

_EXAMPLES = Path(__file__).parents[2] / "examples"
_READY_S = 30.0
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
    example = _EXAMPLES / "nginx"
    text = (example / "nginx.conf").read_text()
    pickers = "".join(
        f"server {each['http']} max_fails=1 fail_timeout=1s;\n" for each in fleet.state["replicas"]
    )
    text = _replaced(text, r"(?:        server 127\.0\.0\.1:900\d .*;\n)+", pickers)
    text = _replaced(text, r"listen 127\.0\.0\.1:8080;", f"listen {LOOPBACK}:{port};")
    text = _replaced(text, r"http \{\n", "http {" + _OWN_TEMP.format(folder=folder))
    file = folder / "nginx.conf"
    file.write_text(_OWN_FOLDER.format(folder=folder) + text)
    for part in ("model_server.conf", "settle.conf"):
        shutil.copy(example / part, folder)
    command = [binary, "-p", str(folder), "-c", str(file), "-e", str(folder / "error.log")]
    with _serving(command, [*command, "-t"], port) as url:
        yield url


@contextmanager
def haproxy(fleet: Any, folder: Path) -> Iterator[str]:
    """The URL of a running HAProxy; ended with the block."""
    binary = _debian("haproxy", "haproxy")
    folder.mkdir(exist_ok=True)
    port = free_port()
    text = (_EXAMPLES / "haproxy" / "haproxy.cfg").read_text()
    pickers = "".join(
        f"    server {number} {each['http']}\n" for number, each in enumerate(fleet.state["replicas"])
    )
    text = _replaced(text, r"(?:    server \w 127\.0\.0\.1:900\d\n)+", pickers)
    text = _replaced(text, r"bind 127\.0\.0\.1:8080", f"bind {LOOPBACK}:{port}")
    text = _replaced(text, r"/etc/haproxy", str(folder))
    script = (_EXAMPLES / "haproxy" / "picker.lua").read_text()
    file = folder / "haproxy.cfg"
    file.write_text(_replaced(text, r"/run/haproxy-", f"{folder}/"))
    (folder / "picker.lua").write_text(_replaced(script, r"/run/haproxy-", f"{folder}/"))
    command = [binary, "-db", "-q", "-f", str(file)]
    with _serving(command, [*command, "-c"], port) as url:
        yield url


@contextmanager
def caddy(fleet: Any, folder: Path, binary: str) -> Iterator[str]:
    """The URL of a running Caddy, whose program is `binary`; ended with the block."""
    port = free_port()
    text = (_EXAMPLES / "caddy" / "Caddyfile").read_text()
    pickers = " ".join(each["http"] for each in fleet.state["replicas"])
    text = _replaced(text, r"127\.0\.0\.1:9003 127\.0\.0\.1:9004", pickers)
    text = _replaced(text, r"http://:8080 \{", f"http://:{port} {{")
    file = folder / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n\tstorage file_system {folder}\n}}\n{text}")
    arguments = ["--config", str(file), "--adapter", "caddyfile"]
    with _serving([binary, "run", *arguments], [binary, "validate", *arguments], port) as url:
        yield url


@contextmanager
def _serving(command: Sequence[str], check: Sequence[str], port: int) -> Iterator[str]:
    checked = subprocess.run(check, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command)
    try:
        _wait_for(port, process)
        yield f"http://{LOOPBACK}:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    end, tick = time.monotonic() + _READY_S, threading.Event()
    while time.monotonic() < end:
        assert process.poll() is None, "the proxy ended"
        try:
            socket.create_connection((LOOPBACK, port), timeout=1).close()
        except OSError:
            tick.wait(0.02)
        else:
            return
    raise AssertionError("the proxy does not accept connections")


def _debian(program: str, package: str) -> str:
    binary = shutil.which(program) or f"/usr/sbin/{program}"
    assert Path(binary).exists(), f"{program} is missing: install Debian's {package}"
    return binary


def _replaced(text: str, pattern: str, by: str) -> str:
    changed, count = re.subn(pattern, lambda _: by, text, count=1)
    assert count == 1, f"the example has no {pattern}"
    return changed
