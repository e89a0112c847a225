"""The model in data/tiny_model: small, without traces of the machine that made it, and made again by its command."""

import json
from pathlib import Path

import make_tiny_model
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from tiny_tokenizer import make_tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = ROOT / "data" / "tiny_model"


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / make_tiny_model.METRICS).read_text().splitlines()]


def score(folder: Path) -> float:
    """Sequence probability on held-out problems after the last step."""
    return metrics(folder)[-1]["val/sequence_probability"]


def test_the_shipped_model():
    files = {path.name: path for path in MODEL.iterdir()}
    assert sum(path.stat().st_size for path in files.values()) < 4e6
    texts = "".join(path.read_text() for name, path in files.items() if name != "model.safetensors")
    assert not any(trace in texts for trace in ("_name_or_path", "/home/", "/root/", "/tmp/"))
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert sum(parameter.numel() for parameter in model.parameters()) == 888_192
    assert AutoTokenizer.from_pretrained(MODEL).get_vocab() == make_tiny_tokenizer().get_vocab()
    assert score(MODEL) > 0.36
    command = "python scripts/make_tiny_model.py --out data/tiny_model --data data/arithmetic"
    card = make_tiny_model.CARD.format(command=command, step=metrics(MODEL)[-1]["step"], score=score(MODEL))
    assert files["README.md"].read_text() == card


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_its_command_makes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    make_tiny_model.main(["--out", str(tmp_path / "model"), "--data", "data/arithmetic"])
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in MODEL.iterdir()}
    made, shipped = metrics(tmp_path / "model"), metrics(MODEL)
    losses, expected = ([record["train/loss"] for record in records] for records in (made, shipped))
    assert losses[:10] == pytest.approx(expected[:10], rel=1e-4)
    # Accuracy rises by some 5 points between two validations.
    assert score(tmp_path / "model") == pytest.approx(score(MODEL), abs=0.07)
    if losses == expected:  # a machine that computes like the one that made it
        new, old = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", MODEL))
        assert new.keys() == old.keys() and all(torch.equal(new[name], old[name]) for name in new)
