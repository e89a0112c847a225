"""The estimate of memory against the real sharding on fake GPUs, which a tracker watches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.pretend_cuda]

SIZES = {"7b, four layers": (3584, 4, 18944, 28, 4), "7b": (3584, 28, 18944, 28, 4), "32b": (5120, 64, 27648, 40, 8)}
"""Width, layers, width of the MLP, heads of queries and of keys: those of Qwen2.5."""


@pytest.mark.parametrize(
    ("size", "workers"),
    [
        ("7b, four layers", 8),
        pytest.param("7b", 8, marks=pytest.mark.nightly),
        pytest.param("32b", 64, marks=pytest.mark.nightly),
    ],
)
def test_memory_estimate_covers_the_tracked_peak(compiled: dict[str, str], size: str, workers: int, tmp_path: Path):
    width, layers, inner, heads, keys = SIZES[size]
    config = Qwen2Config(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=152064, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "tests.pretend_cuda.memory", str(tmp_path), str(workers), "16384", "8"]
    done = subprocess.run(command, cwd=ROOT, env=compiled, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    for phase, held in json.loads(done.stdout.splitlines()[-1]).items():
        # The estimate adds up what is largest of each kind, which not all is there at once.
        assert 0.75 < held["tracked"] / held["estimated"] < 1.05, (phase, held)
