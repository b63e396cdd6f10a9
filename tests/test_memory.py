"""Memory that is freed stays with the process where that is asked for."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from pfedbayes.engine.plan import Plan

Plan(chunk=int(sys.argv[1]) or None).activate()
def write():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**24).fill_(1.0)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(write() for _ in range(5)))
"""


def fresh_pages(chunk: int, **settings: str) -> int:
    """Pages that the system gives to a process for a large tensor after some like it were freed."""
    command = [sys.executable, "-c", PROGRAM, str(chunk)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | settings).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries are left as they are")
def test_freed_memory_is_kept_for_many_clients_unless_somebody_else_decides():
    given_back = fresh_pages(chunk=0)
    assert fresh_pages(chunk=10) < given_back / 4
    assert fresh_pages(chunk=10, MALLOC_MMAP_MAX_="65536") > given_back / 2
