"""What a process may use of its machine, and how it treats memory."""

import gc
import platform
import subprocess
import sys

import pytest

from verl.utils import process
from verl.utils.process import loading


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_cores_of_a_container(files, expected, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(process, "CGROUPS", tmp_path)
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert process.available_cores() == expected


def test_loading_collects_nothing_and_freezes_what_stays():
    frozen = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled() and len(kept) == 1000
    assert gc.get_freeze_count() >= frozen + 1000


RETURNED = """
import psutil, torch
from verl.utils.process import keep_freed_memory, return_freed_memory
assert keep_freed_memory()
held = psutil.Process().memory_info
tensors = [torch.zeros(2 << 20) for _ in range(40)]
between = torch.zeros(1 << 20)  # what lies above them keeps the heap from shrinking by itself
tensors.clear()
before = held().rss
return_freed_memory()
print(before - held().rss)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_kept_memory_can_be_returned():
    run = subprocess.run([sys.executable, "-c", RETURNED], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 200 << 20  # of 320 MiB
