"""A process that is tied to its parent gets a signal when its parent is killed."""

import os
import subprocess
import sys

import pytest

from picker_tools.local_fleet import die_with_parent

CHILD = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("stopped", flush=True)))
print("ready", flush=True)
signal.pause()
"""
PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, sys.argv[1], str(os.getpid()), "SIGTERM", sys.executable, "-c", sys.argv[2]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_a_process_is_terminated_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, die_with_parent.__file__, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == "stopped\n"


def test_a_process_whose_parent_has_died_already_does_not_run() -> None:
    command = [sys.executable, die_with_parent.__file__, str(os.getppid()), "SIGTERM", "/bin/echo", "ran"]
    ended = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")
