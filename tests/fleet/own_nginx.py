"""The nginx of `examples/nginx` before a running fleet: its own file, with this fleet's addresses."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from picker_tools.local_fleet.network import LOOPBACK, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "nginx"
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
    """The URL of a running nginx; killed at the end."""
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    assert Path(binary).exists(), "nginx is missing: install Debian's nginx-light"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    port = free_port()
    text = (EXAMPLE / "nginx.conf").read_text()
    pickers = "".join(
        f"server {each['http']} max_fails=1 fail_timeout=1s;\n" for each in fleet.state["replicas"]
    )
    text = _replaced(text, r"(?:        server 127\.0\.0\.1:900\d .*;\n)+", pickers)
    text = _replaced(text, r"listen 127\.0\.0\.1:8080;", f"listen {LOOPBACK}:{port};")
    text = _replaced(text, r"http \{\n", "http {" + _OWN_TEMP.format(folder=folder))
    file = folder / "nginx.conf"
    file.write_text(_OWN_FOLDER.format(folder=folder) + text)
    for part in ("model_server.conf", "settle.conf"):
        shutil.copy(EXAMPLE / part, folder)
    command = [binary, "-p", str(folder), "-c", str(file), "-e", str(folder / "error.log")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=30, check=False)
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
        assert process.poll() is None, "nginx ended"
        try:
            socket.create_connection((LOOPBACK, port), timeout=1).close()
        except OSError:
            tick.wait(0.02)
        else:
            return
    raise AssertionError("nginx does not accept connections")


def _replaced(text: str, pattern: str, by: str) -> str:
    changed, count = re.subn(pattern, lambda _: by, text, count=1)
    assert count == 1, f"the example has no {pattern}"
    return changed
