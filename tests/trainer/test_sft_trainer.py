"""The loop of supervised fine-tuning, over workers that only count."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from verl.batch import Batch
from verl.config import ConfigError, SFTConfig, load_config
from verl.data.conversations import conversation_batch
from verl.run.session import TrainingRun
from verl.run.tracking import Tracker
from verl.trainer.sft_trainer import COLUMNS, SFTTrainer, run_sft


class CountingWorkers:
    """Stand for a ``WorkerGroup`` of four; a conversation's log-probability is the negative of its first token."""

    world_size = 4
    device_type = "cpu"
    device_name = ""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def run_split(self, method: str, batch: Batch, *arguments: Any, ranks_per_share: int = 1) -> list[Any]:
        shares = list(batch.split(len(batch) // (self.world_size // ranks_per_share)))
        self.calls.append((method, [len(share) for share in shares]))
        return [self.answer(method, share) for share in shares]

    def answer(self, method: str, share: Batch) -> dict[str, float] | Batch:
        if method == "train_step":
            return {"train/loss": 1.0, "train/skipped_updates": 0.0}
        first = share.rows()[0][:, 0]
        return share.columns().fill(total_logprob=-first.double(), num_learned=share.response_lengths.double())

    def take_peak_memory(self) -> None:
        return None


def conversations(size: int) -> Batch:
    """``size`` conversations of three tokens, of which the last two are learned."""
    return conversation_batch([([row] * 3, [0, 1, 1]) for row in range(size)])


def fitted(tiny_model: Path, folder: Path, workers: CountingWorkers, *overrides: str) -> tuple[SFTTrainer, list[int]]:
    """A trainer after its run, and the steps after which it saved."""
    options = [f"model.path={tiny_model}", "trainer.n_gpus_per_node=4", f"trainer.default_local_dir={folder}"]
    config = load_config(SFTConfig, "sft", [*options, *overrides])
    tracker = Tracker(folder, [], "verl", "sft", config)
    # Three held-out conversations are fewer than there are workers.
    sft = SFTTrainer(
        config, [conversations(8)], conversations(3), workers, tracker, TrainingRun(config, 1, COLUMNS, "cpu")
    )
    saved: list[int] = []
    sft._save = lambda: saved.append(sft.step)
    sft.fit()
    tracker.close()
    return sft, saved


@pytest.mark.parametrize(("sequence", "shares"), [(1, [2, 2, 2, 2]), (2, [4, 4])])
def test_workers_that_share_sequences_get_the_same_rows(tiny_model: Path, tmp_path: Path, sequence: int, shares):
    workers = CountingWorkers()
    parallel = ["model.use_remove_padding=true", f"model.ulysses_sequence_parallel_size={sequence}"]
    sft, _ = fitted(tiny_model, tmp_path, workers, *parallel, "trainer.total_training_steps=1")
    assert workers.calls[0] == ("train_step", shares)
    assert workers.calls[1] == ("evaluate", [1] * 4 if sequence == 1 else [2, 2])
    # Log-probabilities 0, -1 and -2 of two tokens each; the rows that fill up the shares do not count.
    assert sft.validations[1]["val/loss"] == pytest.approx(3 / 6)


@pytest.mark.parametrize(
    ("overrides", "validated", "saved"),
    [
        (["trainer.test_freq=2", "trainer.save_freq=0"], [2, 4, 5], [5]),
        (["trainer.test_freq=0", "trainer.save_freq=2"], [5], [2, 4, 5]),
        (["trainer.test_freq=-1", "trainer.save_freq=-1"], [], []),
        # The sequence probability is 0.50.
        (["trainer.stop_at_sequence_probability=0.4", "trainer.test_freq=2", "trainer.save_freq=0"], [2], [2]),
        (["trainer.stop_at_sequence_probability=0.4", "trainer.test_freq=2", "trainer.save_freq=-1"], [2], []),
    ],
)
def test_fine_tuning_validates_saves_and_stops_on_time(tiny_model, tmp_path, overrides, validated, saved):
    length = ["trainer.total_training_steps=5", "trainer.total_epochs=5"]
    sft, steps = fitted(tiny_model, tmp_path, CountingWorkers(), *overrides, *length)
    assert (list(sft.validations), steps) == (validated, saved)


def test_sft_refuses_a_tokenizer_larger_than_the_model(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path / "model")
    message = r"^model\.path='.*': the tokenizer has tokens up to number 262, the model embeddings for 262"
    with pytest.raises(ConfigError, match=message):
        options = [f"model.path={tmp_path}/model", "device=cpu", f"trainer.default_local_dir={tmp_path}/run"]
        run_sft(load_config(SFTConfig, "sft", options))
