"""A whole analysis with real engines: the tiny model and a run's last checkpoint."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from tests.e2e.runs import Analysis

pytestmark = pytest.mark.nightly

MODEL = ROOT / "data" / "tiny_model"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint whose weights differ a little from the embedded model's."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    model = folder / "global_step_5" / "actor" / "huggingface"
    shutil.copytree(MODEL, model)
    torch.manual_seed(0)
    weights = load_file(model / "model.safetensors")
    changed = {name: w * (1 + 0.02 * torch.randn_like(w)) for name, w in weights.items()}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    (folder / "config.yaml").write_text(f"model: {{path: {MODEL}}}\ntrainer: {{experiment_name: mine}}\n")
    return folder


def test_first_and_the_last_checkpoint(run: Path, tmp_path: Path):
    folder = tmp_path / "out"
    arguments = [
        *("evaluation=embedded", f"model.path={run}", "n_sampling=4", "data.max_problems=10", "device=cpu"),
        *(f"trainer.default_local_dir={folder}", "calculator.layers=[0,-1]", "calculator.diff_stride=8"),
        *("analysis.draws=100", "rollout.kv_cache_memory_mb=64", "trainer.n_gpus_per_node=2"),
    ]
    Analysis.complete(arguments, tmp_path / "log", timeout_s=400)
    sheets = pd.read_excel(folder / "analysis.xlsx", sheet_name=None)
    assert list(sheets) == ["exploit_data (per-rollout)", "explore_data (per-prompt)", "correlations"]
    responses, prompts, correlations = sheets.values()
    assert (len(responses), len(prompts)) == (80, 20)
    for table in (responses, prompts):
        assert table["step"].unique().tolist() == [0, 5] and not table.isna().any().any()
    by_prompt = responses.groupby(["step", "prompt_id"])
    assert prompts["Effective Rank Avg"].tolist() == pytest.approx(by_prompt["Effective Rank"].mean().tolist())
    assert prompts["response_length_stack"].tolist() == by_prompt["response_length"].sum().tolist()
    # A stack has more directions than its responses have on average, or the same if they are all equal.
    growth = prompts["Effective Rank Stack"] / prompts["Effective Rank Avg"]
    assert growth.min() > 0.999 and growth.max() > 1.1
    pair = correlations[(correlations["x"] == "avg_logits_entropy") & (correlations["responses"] == "all")]
    pair = pair[pair["y"] == "avg_log_probs"]
    assert len(pair) == 2 and (pair["pearson"] < 0).all()
    assert ((pair["pearson_low"] <= pair["pearson"]) & (pair["pearson"] <= pair["pearson_high"])).all()
    assert pd.read_parquet(folder / "responses.parquet")["response"].str.len().min() > 0
    figures = {path.name for path in (folder / "figures").iterdir()}
    for name in ("scatter_responses_mine@5_arithmetic_T1", "along_mine@0_arithmetic_T1", "checkpoints"):
        assert {f"{name}.svg", f"{name}.png"} <= figures
    assert (folder / "index.html").read_text().count("<img ") == len(figures) // 2
    # The same command again generates and measures nothing.
    (samples,) = folder.glob("*/step_5/arithmetic/T1/samples.jsonl")
    assert len(json.loads(samples.read_text().splitlines()[0])["token_ids"]) > 1
    again = Analysis.complete(arguments, tmp_path / "log2")
    assert "to generate" not in again.log.read_text() and "reading the responses" not in again.log.read_text()
