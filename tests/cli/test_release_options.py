"""The Hydra options of the paper's release: its script's own command line runs as its flags do."""

import shlex
from pathlib import Path

import pytest

from tests.cli.test_release_flags import COMMANDS
from tests.cli.verl_command import leaves
from verl.cli.dialects import MARKS, SCHEMA, find_verl, is_release
from verl.cli.release_analysis import analysis_arguments
from verl.cli.translate import read_line, translate
from verl.config import PPOConfig
from verl.config.load import compose_config

DEFAULTS = Path(__file__).with_name("release_defaults.tsv").read_text().splitlines()
"""The release's options with their defaults, resolved."""

ACTOR = "actor_rollout_ref.actor"
RELEASE = "algorithm.add_adv=True"
"""Makes a command the release's."""


def options_of(*arguments: str) -> dict[str, object]:
    return leaves(compose_config(PPOConfig, "ppo_trainer", translate(arguments)))


def test_release_defaults_are_accepted():
    assert len(DEFAULTS) == 189
    given = [line.replace("\t", "=") for line in DEFAULTS]
    translate(given)
    # Three lengths are products, which the release leaves as text.
    options = options_of(*(word for word in given if "* 512" not in word))
    assert options["reward_manager.w_explore"] == [1.0, 0.25, 0.0625]
    assert MARKS < {line.partition("\t")[0] for line in DEFAULTS}
    assert [mark for mark in MARKS if mark in SCHEMA or find_verl(mark)] == []


def test_the_line_of_the_releases_script_runs_as_its_flags_do(capsys: pytest.CaptureFixture[str]):
    script, flags = options_of(*COMMANDS["script"]), options_of(*COMMANDS["shipped"])
    name = "mistralai_Mathstral-7B-v0.1_GRPO_VERL_verl_max_prompt512_max_response1536_grpo_batch48_ppomini24_valbatch48"
    assert str(script.pop("trainer.experiment_name")).startswith(name)
    assert str(script.pop("trainer.default_local_dir")).startswith("/checkpoints/mistralai/Mathstral-7B-v0.1_GRPO_VERL")
    assert len(COMMANDS["script"]) == 83
    # The rest is what the script itself sets, where flags leave the choice to the config.
    parts = ("model", "critic.model", "reward_model.model", "teacher.model")
    offloads = [f"{part}.fsdp.{kind}_offload" for part in parts for kind in ("param", "optimizer")]
    assert {option: value for option, value in script.items() if value != flags[option]} == {
        "data.train_files": ["/data/simplelr_abel_level3to5/train.parquet"],
        "data.val_files": ["/data/simplelr_abel_level3to5/test.parquet"],
        "model.path": "/models/mistralai/Mathstral-7B-v0.1",
        "critic.model.path": "/models/mistralai/Mathstral-7B-v0.1",
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.2,
        "rollout.dtype": "bfloat16",
        "rollout.max_num_batched_tokens": 2148,
        "calculator.svd_rank": 50,
        "trainer.project_name": "VELR_train",
        "trainer.n_gpus_per_node": 4,
        "ref.param_offload": True,
        **dict.fromkeys(offloads, True),
    }
    notes = capsys.readouterr().err
    assert "a command of the paper's release: options that it leaves out come from preset=paper" in notes
    assert "rollout.return_hidden_states, actor_rollout_ref.rollout.return_decode, " in notes


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        ("actor_rollout_ref.rollout.name=hidden_vllm", "rollout.name", "vllm"),
        ("actor_rollout_ref.rollout.name=hidden_vllm", "data.max_response_length", 1536),  # of preset=paper
        ("actor_rollout_ref.rollout.name=hidden_vllm preset=verl", "data.max_response_length", 512),
        (f"{RELEASE} algorithm.adv_estimator=gae critic.model.path=c", "critic.model.path", "c"),
        (f"{RELEASE} trainer.except_save=\\'10,20\\'", "trainer.except_save", [10, 20]),
        (f"{RELEASE} trainer.remove_previous_ckpt=True", "trainer.max_ckpt_to_keep", 1),
        (f"{RELEASE} trainer.total_training_steps=161", "trainer.total_training_steps", 160),
        (f"{RELEASE} trainer.total_epochs=3 trainer.total_training_steps=null", "trainer.total_training_steps", 0),
        (f"{RELEASE} trainer.experiment_name='/x/a@b'", "trainer.experiment_name", "x_a_b"),
        (f"{RELEASE} data.train_files=/d/simplelr_x/train.parquet", "data.template", "raw"),
        (f"{RELEASE} data.train_files=/d/gsm8k/train.parquet", "data.template", "chat"),
        (f"{ACTOR}.use_lora=False {ACTOR}.lora_r=4", "model.lora.rank", 0),
        (f"{ACTOR}.use_lora=True", "model.lora.rank", 8),
        (f"{ACTOR}.use_lora=True", "model.lora.dropout", 0.05),
        (f"{ACTOR}.use_lora=True", "model.lora.target_modules", ["q_proj", "v_proj"]),
        (f"{ACTOR}.lora_alpha=64 {ACTOR}.use_lora=True", "model.lora.alpha", 64),
    ],
)
def test_an_option_means_what_it_means_in_the_release(arguments: str, option: str, value: object):
    assert options_of(*arguments.split())[option] == value


def test_the_releases_validation_with_a_mode_is_an_analysis():
    command = ["trainer.plot_config.mode=explore", "trainer.val_only=True", "trainer.confidence_metric_config.k=3"]
    model = shlex.split("actor_rollout_ref.model.path=data/tiny_model data.val_files=data/arithmetic/test.parquet")
    overrides = analysis_arguments(read_line([*command, *model]))
    assert overrides is not None
    assert {"++analysis.mode='explore'", "++analysis.confidence_k=3", "++n_sampling=4"} <= set(overrides)
    assert analysis_arguments(read_line([command[0], *model])) is None


def test_other_commands_are_left_alone():
    for words in (["trainer.total_training_steps=161"], ["actor_rollout_ref.rollout.n=4", "trainer.val_only=True"]):
        assert not is_release(read_line(words))
