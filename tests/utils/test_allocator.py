import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from verl.utils.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def use():
    return [torch.zeros(2 << 20) for _ in range(20)]

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_tensors_get_the_memory_of_those_before_them():
    def faults(mode: str) -> int:
        run = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert faults("keep") < faults("return") / 2
