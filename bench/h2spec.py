"""h2spec against the native transport: `python -m bench.h2spec PATH_OF_H2SPEC`.

It builds by `go install github.com/summerwind/h2spec/cmd/h2spec@v2.6.0`. Its requests are GETs without a
content type, which a gRPC server answers at once, so many cases end before their fault. So they run twice:
against the transport as it is, and with each request taken for gRPC, which shows the frame layer. Writes
bench/results/h2spec.md; exits with 1 if a case of the frame layer fails.
"""

import argparse
import asyncio
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.rig.machine import describe_machine
from picker_fleet.extproc.certificates import Certificates, server_options
from picker_fleet.extproc.context import BodyBudget
from picker_fleet.extproc.http2 import Connection, Limits, OpenStreams
from picker_fleet.extproc.native import GrpcStream
from picker_fleet.extproc.transport import Stream
from picker_fleet.sections import Tls

RESULT = Path(__file__).parent / "results" / "h2spec.md"
_LARGEST = 1024 * 1024
_TIMEOUT_S = 300
_FAILED = re.compile(r"× \d+: (.*)")


class AnyRequest(Connection):
    """Takes every request for one of gRPC."""

    def _request(self, headers: Any) -> Any:
        pairs = [(bytes(name), bytes(value)) for name, value in headers]
        pairs = [(name, b"POST" if name == b":method" else value) for name, value in pairs]
        if not any(name == b"content-type" for name, _ in pairs):
            pairs.append((b"content-type", b"application/grpc"))
        return super()._request(pairs)


async def _whole(stream: Stream) -> bytes | None:
    """Answers nothing before the request has ended."""
    while await stream.read() is not None:
        pass
    return b""


async def _run(h2spec: str, kind: type[Connection], *, secure: bool) -> tuple[str, list[str]]:
    """The last line of h2spec, and the cases that failed."""
    loop = asyncio.get_running_loop()
    streams, connections = OpenStreams(loop.time, Limits()), set[Connection]()
    new_stream = partial(GrpcStream, message_bytes=_LARGEST)
    whole = _whole, BodyBudget(64 * _LARGEST)
    server = await loop.create_server(
        lambda: kind(
            lambda path, authority: whole if path == b"/" else None, new_stream, connections, streams
        ),
        "127.0.0.1",
        0,
        **server_options(Certificates(Tls(), "extproc.tls", "h2") if secure else None),
    )
    port = server.sockets[0].getsockname()[1]
    command = [h2spec, "-h", "127.0.0.1", "-p", str(port), "-o", "2", *(["-t", "-k"] if secure else [])]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    server.close()
    for connection in list(connections):
        connection.abort()
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    failed = dict.fromkeys(match[1] for line in lines if (match := _FAILED.search(line)))
    return lines[-1], list(failed)


async def measure(h2spec: str) -> int:
    runs = {
        "as it is": await _run(h2spec, Connection, secure=False),
        "each request taken for gRPC": await _run(h2spec, AnyRequest, secure=False),
        "each request taken for gRPC, by TLS": await _run(h2spec, AnyRequest, secure=True),
    }
    here = describe_machine("bench.h2spec", ["h2spec"])
    lines = [
        "# h2spec against the native transport",
        "",
        f"`{here.command}`, {here.date}.",
        "",
        "| transport | result |",
        "|---|---|",
        *(f"| {name} | {last} |" for name, (last, _) in runs.items()),
    ]
    for name, (_, failed) in runs.items():
        if failed:
            lines += ["", f"What fails, {name}:", "", *(f"- {case}" for case in failed)]
    lines += [
        "",
        "As it is, the transport answers each request of h2spec with status 415 at its headers, since none",
        "is gRPC. What h2spec then does to the stream reaches an ended one, whose frames are ignored, so",
        "it waits for an error in vain. The other rows show that the same cases hold where the stream is",
        "open. `tests/unit/test_http2.py` has them as tests.",
        "",
    ]
    RESULT.write_text("\n".join(lines))
    print("\n".join(lines))
    return 1 if any(failed for name, (_, failed) in runs.items() if name != "as it is") else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("h2spec", help="path of the program")
    return asyncio.run(measure(parser.parse_args().h2spec))


if __name__ == "__main__":
    sys.exit(main())
