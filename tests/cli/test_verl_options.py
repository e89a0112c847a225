"""veRL's command lines: every option of its trainer.

``verl_defaults.tsv`` holds them with their defaults, at veRL's commit b178a3cd56f58b2d502255daba591e92833930a7.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.cli.verl_command import ACTOR, CORRECTION, ROLLOUT, composed, leaves
from tests.tables import cases, refusals
from verl.cli.dialects import SCHEMA, find_verl
from verl.cli.rules import FLAGS, RELEASE, VERL
from verl.cli.translate import translate
from verl.cli.values import FlagError
from verl.config import PPOConfig, load_config
from verl.config.errors import ConfigError

HERE = Path(__file__).parent
DEFAULTS = dict(line.split("\t") for line in (HERE / "verl_defaults.tsv").read_text().splitlines())
HOME = os.environ["HOME"]
MODEL = "actor_rollout_ref.model.path=some/model"


def config_of(*arguments: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", translate(arguments))


def test_every_verl_option_has_a_fate():
    assert len(DEFAULTS) == 556
    unknown = [key for key in DEFAULTS if find_verl(key) is None]
    assert unknown == []


def test_every_row_names_options_of_ours_and_says_what_it_does():
    for key, option in [*VERL.items(), *RELEASE.items(), *FLAGS.items()]:
        ours = [name.removeprefix("++") for name in (*option.to, *(o.partition("=")[0] for o in option.also))]
        known = SCHEMA | VERL.keys() | {f"--{flag}" for flag in FLAGS} | {"algorithm"}
        assert all(name in known or name.rpartition(".")[0] in SCHEMA for name in ours), key
        assert {*option.unless, option.read_with} <= VERL.keys() | RELEASE.keys() | {""}, key
        assert option.describe() and not re.search(r"[\n|]|\$(ours|theirs|above)", option.describe()), key


def test_verl_defaults_equal_the_preset():
    given = [f"{key}={value}" for key, value in DEFAULTS.items() if value != "???"]
    assert len(given) == 554
    ours, preset = (leaves(composed(*arguments)) for arguments in (given, ["preset=verl"]))
    # auto is cuda wherever there is a GPU
    assert {key: (ours[key], preset[key]) for key in preset if ours[key] != preset[key]} == {"device": ("cuda", "auto")}


def test_the_preset_holds_what_verl_does_without_an_option():
    found = leaves(composed("preset=verl"))
    assert (found["data.template"], found["reward_model.rule_weight"]) == ("chat", 0.0)
    assert (found["reward_manager.add_adv"], found["reward_manager.add_reward"]) == (False, False)
    # The release measures Traditional Rank too; veRL knows neither, and nothing reads it.
    assert found["calculator.metric_indices"] == [1]
    assert leaves(composed("preset=paper"))["calculator.metric_indices"] == [1, 2]
    assert config_of("preset=verl").model.path == f"{HOME}/models/deepseek-llm-7b-chat"


def expected(text: str) -> Any:
    """A value of a table, as JSON."""
    return json.loads(text.replace('"~/', f'"{HOME}/'))


@pytest.mark.parametrize(("argument", "option", "value"), cases("cli/verl_meant.txt"))
def test_a_value_means_here_what_it_means_in_verl(argument: str, option: str, value: str):
    parsed = OverridesParser.create().parse_overrides(translate([MODEL, argument]))
    assert {override.key_or_group: override.value() for override in parsed}[option] == expected(value)
    assert {override.key_or_group for override in parsed} - {"preset"} <= SCHEMA | {option}


SHORT = {"actor.": f"{ACTOR}.", "rollout.": f"{ROLLOUT}.", "rs": f"{CORRECTION}.rollout_rs"}


@pytest.mark.parametrize(("command", "option", "value"), cases("cli/verl_together.txt"))
def test_options_mean_the_same_together_in_any_order(command: str, option: str, value: str):
    arguments = [re.sub(r"^(actor\.|rollout\.|rs)", lambda found: SHORT[found[0]], word) for word in command.split()]
    assert OmegaConf.select(composed(MODEL, *arguments), option) == expected(value)
    forward, backward = ({o.partition("=")[0]: o for o in translate([MODEL, *a])} for a in (arguments, arguments[::-1]))
    assert backward == forward


def test_only_gmpos_lower_clip_may_be_above_1():
    gmpo = [f"{ACTOR}.policy_loss.loss_mode=geo_mean", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"]
    assert config_of(*gmpo, f"{ACTOR}.clip_ratio_low=1.5").actor.clip_range == (1.5, 0.2)
    with pytest.raises(ConfigError, match="actor.clip_ratio_low=1.5: must be in .0, 1.; with gmpo it may be greater"):
        config_of(*gmpo[1:], "actor.clip_ratio_low=1.5")


@pytest.mark.parametrize(("argument", "message"), cases("cli/verl_refused.txt"))
def test_what_is_not_here_is_refused_by_name(argument: str, message: str):
    with pytest.raises(FlagError) as error:
        translate([MODEL, argument])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(argument.partition("=")[0].lstrip("+~") if "~" not in argument else "~")


BYPASS = [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=sequence"]


@pytest.mark.parametrize(
    ("options", "loss", "dual_clip", "level"),
    [
        ([*BYPASS], "ppo_clip", 3.0, None),
        ([*BYPASS, f"{CORRECTION}.loss_type=ppo_clip", f"{ACTOR}.policy_loss.loss_mode=gspo"], "ppo_clip", 3.0, None),
        ([*BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.clip_ratio_c=10.0"], "gpg", None, "sequence"),
        ([*BYPASS[1:], f"{CORRECTION}.loss_type=reinforce"], "ppo_clip", 3.0, "sequence"),
    ],
)
def test_bypass_mode_decides_the_loss(options: list[str], loss: str, dual_clip: float | None, level: str | None):
    for arguments in (options, options[::-1]):
        config = config_of(MODEL, "data.train_files=a", f"{ROLLOUT}.n=2", *arguments)
        actor, correction = config.actor, config.algorithm.rollout_correction
        assert (actor.policy_loss, actor.clip_ratio_c, correction.rollout_is) == (loss, dual_clip, level)
        assert actor.bypass_mode is (BYPASS[0] in options)
    with pytest.raises(FlagError, match="loss_type=dpo: must be ppo_clip or reinforce"):
        translate([*BYPASS, f"{CORRECTION}.loss_type=dpo"])


def test_verl_config_file_equal_to_preset_is_dropped():
    words = translate([MODEL, "--config-path", "./config", "--config-name=ppo_trainer.yaml", "--cfg", "job"])
    assert words[-2:] == ["--cfg", "job"]
    assert "-cp" not in translate([MODEL, "-cp", "verl/trainer/config", "-cn", "ppo_trainer"])
    for flag in ("--config-path=/my/settings", "--config-dir=/my/settings"):
        with pytest.raises(FlagError, match="^--config-name=mine: no file /my/settings/mine.yaml; name its folder in"):
            translate([MODEL, flag, "--config-name=mine"])
    with pytest.raises(FlagError, match="ppo_megatron_trainer: Megatron is not supported"):
        translate([MODEL, "--config-name=ppo_megatron_trainer"])


def test_a_configuration_file_of_verls_examples_is_read(tmp_path: Path):
    file, flags = tmp_path / "talks.yaml", [f"--config-path={tmp_path}", "--config-name", "talks"]
    text = "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 100, shuffle: False}\n"
    file.write_text(text + "actor_rollout_ref: {rollout: {name: vllm, n: 3, val_kwargs: {top_p: 0.7}}}\n")
    tree = composed(MODEL, *flags, f"{ROLLOUT}.n=5", "data.train_files=a")
    assert (tree.data.max_prompt_length, tree.data.shuffle, tree.rollout.n) == (100, False, 5)
    assert tree.rollout.val_kwargs.top_p == 0.7
    for wrong, message in {
        "defaults: [other]": "is based on 'other'; only files based on ppo_trainer are read",
        "- 1": "cannot be read",
    }.items():
        file.write_text(wrong)
        with pytest.raises(FlagError, match=f"^--config-name=talks: {file} {message}"):
            translate([MODEL, *flags])


def test_our_own_options_stand_beside_verls():
    tree = composed(MODEL, "reward_manager=verl", "calculator.layers=[-2]", "actor.optim.eps=1e-6", "data.template=raw")
    assert tree.reward_manager.add_adv and list(tree.calculator.layers) == [-2]
    assert (tree.actor.optim.eps, tree.data.template, tree.model.path) == (1e-6, "raw", "some/model")
    assert composed(f"{ROLLOUT}.n=8", "model=qwen2.5_1.5b", "trainer=gpus4").model.path == "Qwen/Qwen2.5-1.5B"
    assert composed(f"{ROLLOUT}.n=8", "experiment=dapo").algorithm.filter_groups.enable
    flags = composed(f"{ROLLOUT}.n=8", "--learning_rate", "3e-6")
    assert (flags.actor.optim.lr, flags.rollout.n, flags.trainer.total_epochs) == (3e-6, 8, 30)


def test_user_preset_and_native_commands_are_kept(capsys: pytest.CaptureFixture[str]):
    assert translate([f"{ROLLOUT}.n=8", "preset=paper"]) == ["rollout.n=8", "preset=paper"]
    ours = ["trainer.test_freq=5", "algorithm.gamma=1.0", "critic.model.path=x", "critic.model.override_config.a=1"]
    assert translate(ours) == ours
    assert translate(["trainer.save_freq=0"]) == ["trainer.save_freq=0"]  # ours: after the last step
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("argument", "message"), refusals("cli/refusals.txt", "verl"))
def test_verl_name_in_native_command_is_explained(argument: str, message: str, refused):
    with refused(message, error=FlagError):
        translate([argument, "trainer.test_freq=5"])


def test_options_without_effect_are_listed_in_one_line(capsys: pytest.CaptureFixture[str]):
    options = [f"{ROLLOUT}.layered_summon=True", "data.use_shm=True", f"{ROLLOUT}.mode=async", "critic.enable=False"]
    translate([MODEL, *options, f"{ACTOR}.ppo_epochs=1", "--svd_niter", "4"])
    names = f"data.use_shm, {ROLLOUT}.mode, {ROLLOUT}.layered_summon, critic.enable, --svd_niter"
    assert capsys.readouterr().err.splitlines() == [
        "note: a command of veRL's: options that it leaves out have veRL's defaults, preset=verl",
        f"note: no effect here: {names} (docs/from_verl_options.md has the reasons)",
    ]
