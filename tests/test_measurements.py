"""The scripts that measure and draw the rank metrics."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def accuracy() -> dict:
    return runpy.run_path(str(SCRIPTS / "measure_spectral_accuracy.py"))


def test_accuracy_table_names_what_is_worse(accuracy):
    for name in ("power law 2, at least 1e-5", "hidden-like, bfloat16"):
        condition, rank, log_rank, entropy, erv, era, coarse, _ = accuracy["errors"](accuracy["SPECTRA"][name])
        assert condition < 1e6
        assert max(rank, log_rank, entropy, erv, era) < 1e-6 < 1e-4 < coarse, name


def test_float32_shows_in_the_largest_shift(accuracy):
    errors = accuracy["float32_shift_errors"](1.5)
    assert len(errors) == 8
    assert max(errors) == errors[0] > 1e-6


@pytest.mark.slow
def test_figure_of_a_response(tiny_model, tmp_path):
    out = tmp_path / "rank.svg"
    command = [sys.executable, SCRIPTS / "plot_rank_along_response.py", "--model", tiny_model, "--out", out]
    prompt = ["--prompt", "What is 1 + 2?", "--max-tokens", "12", "--seed", "1"]
    printed = subprocess.run([*command, *prompt], capture_output=True, text=True, check=True).stdout
    assert "a response of" in printed
    drawing = out.read_text()
    for label in ("effective rank", "velocity (ERV)", "acceleration (ERA)", "tokens of the response"):
        assert label in drawing
