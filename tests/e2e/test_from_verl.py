"""Published commands of veRL's train, with a tiny random model and a few rows in the place of theirs."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_tokenizer import make_tiny_tokenizer
from transformers import AutoModelForCausalLM

from tests.cli.verl_command import ACTOR, EXAMPLES, ROLLOUT
from tests.e2e.runs import Run, records
from tests.rollout.environments.test_verl_tools import write_checkout
from tests.vllm_patches import zoo
from verl.data.templates import render_chat

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "extra_info": {
        "index": 0,
        "split": "train",
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}},
    },
}
SMALL = {
    "data.train_batch_size": "4",
    "data.max_prompt_length": "100",
    "data.max_response_length": "16",
    f"{ACTOR}.ppo_mini_batch_size": "2",
    f"{ROLLOUT}.tensor_model_parallel_size": "1",
    "trainer.n_gpus_per_node": "1",
    "trainer.nnodes": "1",
    "trainer.total_training_steps": "2",
    "trainer.save_freq": "-1",
    "trainer.logger": "['console']",
}
# A command -> what must be smaller in it too, and a metric of its method.
COMMANDS = {
    "grpo_trainer/run_qwen2-7b": (
        {
            "algorithm.rollout_correction.rollout_is": "sequence",
            "algorithm.rollout_correction.rollout_is_batch_normalize": "true",
        },
        "rollout_corr/rollout_is_batch_norm_factor",
    ),
    "ppo_trainer/run_qwen2-7b_seq_balance": ({}, "critic/vf_loss"),
    "rollout_correction/run_with_rollout_corr": ({}, "actor/tis_weight"),
    "otb_trainer/run_qwen2_5-7b": ({}, "actor/pg_loss"),
    "dapo/test_dapo_7b_math": (
        {
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len": "4",
            "+reward_model.reward_kwargs.max_resp_len": "16",
            f"{ACTOR}.ulysses_sequence_parallel_size": "1",
            f"{ACTOR}.fsdp_config.fsdp_size": "-1",
            "+actor_rollout_ref.model.override_config.max_position_embeddings": "256",
            # Of the DAPO recipe's first script.
            **{
                f"+actor_rollout_ref.model.override_config.{name}": "0."
                for name in ("attention_dropout", "resid_pdrop")
            },
        },
        "train/overlong_penalty/mean",
    ),
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn": (
        {
            "--config-path": "CHECKOUT/examples",
            "--config-name": "gsm8k_multiturn_grpo",
            f"{ROLLOUT}.multi_turn.tool_config_path": "CHECKOUT/examples/tools.yaml",
            "data.max_response_length": "200",
        },
        "environment/calls",
    ),
}
# What the command of conversations names, of the same values as veRL's file.
CONVERSATIONS = """
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 256, return_raw_chat: True}
actor_rollout_ref: {hybrid_engine: True, rollout: {name: sglang, multi_turn: {enable: True, max_assistant_turns: 5}}}
"""


SAID = [
    '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "4"}}</tool_call><|im_end|>',
    "<|tool|>calc_gsm8k_reward: 1.0<|im_end|><|assistant|>",
    "#### 4<|im_end|>",
]
"""A conversation that a model is taught by heart, so that a tool is called."""


def teach(model: Path, tokens: list[int]) -> None:
    """Let the model in a folder say ``tokens`` and little else."""
    policy, ids = AutoModelForCausalLM.from_pretrained(model), torch.tensor([tokens])
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(100):
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.save_pretrained(model)


@pytest.mark.parametrize("name", COMMANDS)
def test_published_command_trains_two_steps(name: str, tmp_path: Path):
    tokenizer = make_tiny_tokenizer(tools=True)
    model = zoo.build("qwen2", tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    teach(model, render_chat(ROW["prompt"], tokenizer) + tokenizer("".join(SAID)).input_ids)
    (write_checkout(tmp_path).parent / "gsm8k_multiturn_grpo.yaml").write_text(CONVERSATIONS)
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([ROW] * 8), rows)
    further, metric = COMMANDS[name]
    ours = {
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": str(rows),
        "data.val_files": f"['{rows}']",
        "trainer.default_local_dir": str(tmp_path / "run"),
        **({"critic.model.path": str(model)} if "critic.model.path" in EXAMPLES[name] else {}),
    }
    options = EXAMPLES[name] | SMALL | further | ours
    command = [f"{key}={value}".replace("CHECKOUT", str(tmp_path)) for key, value in options.items()]
    Run.complete(command, tmp_path / "log")
    steps = [record for record in records(tmp_path / "run") if record["step"] > 0]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(metric in record for record in steps), sorted(steps[0])
    assert all(record["environment/calls"] > 32 for record in steps if metric == "environment/calls")
    assert all("reward_manager/shaped_token_share" not in record for record in steps)
