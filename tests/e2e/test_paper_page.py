"""docs/paper.md: its commands are what its table says, and each kind of them trains."""

import subprocess
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from tests.e2e.runs import Run, records
from tests.vllm_patches import zoo
from verl.cli.release_flags import translate
from verl.config import PPOConfig, load_config

pytestmark = pytest.mark.slow

SHELL = """
bash() { shift; printf '%s\\0' "$@"; printf '\\n\\0'; }
hf() { :; }
"""
"""Commands of the page, which then print their arguments instead of running."""


@cache
def commands() -> list[list[str]]:
    """The arguments of every `bash train.sh` of the page, as a shell reads them."""
    page = (ROOT / "docs" / "paper.md").read_text()
    code = "".join(block.partition("```")[0] for block in page.split("```bash\n")[1:])
    printed = subprocess.run(["bash", "-euc", SHELL + code], capture_output=True, text=True, check=True).stdout
    lines = printed.split("\n\0")[:-1]
    return [line.split("\0")[:-1] for line in lines]


def config_of(arguments: list[str]) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", translate(arguments))


MATHSTRAL, MISTRAL = "mistralai/Mathstral-7B-v0.1", "mistralai/Mistral-7B-v0.3"
LLAMA, SMALL_LLAMA = "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
QWEN, SMALL_QWEN = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-1.5B"

# Model, data, longest response, updates, responses per prompt and estimator of each pair: with shaping, and without.
PAIRS = [
    (MATHSTRAL, "abel_level3to5", 1536, 160, 4, "grpo"),
    (MISTRAL, "abel_gsm8k_level1", 1536, 160, 1, "gae"),
    (MISTRAL, "abel_gsm8k_level1", 1536, 160, 4, "grpo"),
    (LLAMA, "abel_level1to4", 1280, 160, 4, "grpo"),
    (LLAMA, "abel_level1to4", 4096, 160, 4, "grpo"),
    (SMALL_LLAMA, "abel_gsm8k_level1", 1024, 320, 4, "grpo"),
    (SMALL_LLAMA, "abel_gsm8k_level1", 1536, 320, 1, "gae"),
    (SMALL_QWEN, "abel_level3to5", 1024, 320, 4, "grpo"),
    (SMALL_QWEN, "abel_level3to5", 1536, 320, 1, "gae"),
    (QWEN, "qwen_level3to5", 1536, 160, 4, "grpo"),
]


def test_the_commands_are_the_papers_runs():
    found = []
    for arguments in commands()[:-1]:
        config = config_of(arguments)
        data, manager = config.data, config.reward_manager
        folder = data.train_files[0].removeprefix("data/simplerl/simplelr_").removesuffix("/train.parquet")
        steps = config.trainer.total_training_steps
        run = (config.model.path, folder, data.max_response_length, steps, config.rollout.n)
        found.append((*run, config.algorithm.adv_estimator, manager.add_adv))
        assert (data.template, data.filters, config.rollout.stop) == ("raw", True, ["Question:"])
        assert config.calculator.diff_stride == (128 if data.max_response_length == 4096 else 40)
        assert manager.aux_reward_global_weight == (
            0.5 if found[-1][0] == SMALL_QWEN and found[-1][5:] == ("gae", True) else 1
        )
    assert found == [(*pair, shaped) for pair in PAIRS for shaped in (True, False)]


def test_the_releases_command_is_the_first_run():
    *_, released = commands()
    ours, theirs = config_of(commands()[0]), config_of(released)
    assert theirs.trainer.total_training_steps == ours.trainer.total_training_steps == 160
    assert (theirs.data.template, theirs.data.filters) == ("raw", True)
    assert theirs.actor == ours.actor and theirs.algorithm == ours.algorithm and theirs.calculator == ours.calculator
    assert theirs.model.path == MATHSTRAL and theirs.rollout.n == 4


ROW = {
    "data_source": "simplelr_math_35",
    "prompt": [{"role": "user", "content": "Question:\nWhat is 2 + 2?\nAnswer:\nLet's think step by step.\n"}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}
ARCHITECTURES = {MATHSTRAL: "mistral", MISTRAL: "mistral", LLAMA: "llama", SMALL_QWEN: "qwen2"}
TWO_STEPS = [pair for pair in PAIRS if pair[0] in ARCHITECTURES]


@pytest.mark.nightly
@pytest.mark.parametrize("pair", TWO_STEPS, ids=lambda pair: f"{pair[0]}-{pair[5]}-{pair[2]}")
def test_a_shaped_run_trains_two_steps_with_a_tiny_model_of_its_architecture(pair, tiny_tokenizer, tmp_path: Path):
    arguments = commands()[2 * PAIRS.index(pair)]
    model = zoo.build(ARCHITECTURES[pair[0]], tmp_path / "model", vocab_size=len(tiny_tokenizer))
    tiny_tokenizer.save_pretrained(model)
    rows = tmp_path / "rows.parquet"
    too_long = ROW | {"prompt": [{"role": "user", "content": "Question:\n" + "2 + " * 150 + "?"}]}
    pq.write_table(pa.Table.from_pylist([ROW] * 8 + [too_long]), rows)
    small = [
        *(f"model.path={model}", f"data.train_files=[{rows}]", f"data.val_files=[{rows}]"),
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "data.max_prompt_length=100"),
        *("data.max_response_length=16", "calculator.diff_stride=4", "trainer.n_gpus_per_node=1"),
        *("trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.save_freq=-1"),
    ]
    run = Run([*arguments, *small], tmp_path / "log")
    assert run.finish() == 0, run.log.read_text()
    output = run.log.read_text()
    assert 'training prompts: "Question:\\nWhat is 2 + 2?\\nAnswer:\\nLet\'s think step by step.\\n"' in output
    assert "left out 1 of 9 prompts that are longer than data.max_prompt_length=100" in output
    steps = [record for record in records(tmp_path / "run") if record["step"] > 0]
    assert [record["step"] for record in steps] == [1, 2]
    assert all("reward_manager/shaped_token_share" in record for record in steps)
