"""The flags of the paper's release: what each becomes, and the message of each that becomes nothing."""

import shlex
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from tests.tables import cases
from verl.cli.rules import FLAGS
from verl.cli.translate import translate
from verl.cli.values import FlagError
from verl.config import PPOConfig, load_config

COMMANDS = {
    name: shlex.split(words)
    for name, words in yaml.safe_load(Path(__file__).with_name("release_commands.yaml").read_text()).items()
}


@pytest.fixture(autouse=True)
def no_release_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HDFS_DATA_PATH", raising=False)
    monkeypatch.delenv("HDFS_MODEL_PATH", raising=False)


def config_of(*arguments: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", translate(arguments))


def test_the_later_command_sets_the_later_signal():
    flags, shipped = (config_of(*arguments) for arguments in (COMMANDS["later"], ["experiment=released_code_later"]))
    for name in ("diff_stride", "metric_indices", "metric_indices_add", "diff_calculator_method"):
        assert getattr(flags.calculator, name) == getattr(shipped.calculator, name), name
    for name in ("indicator_names", "w_explore", "w_exploit", "hypothesis_type", "add_adv", "guide"):
        assert getattr(flags.reward_manager, name) == getattr(shipped.reward_manager, name), name


def test_every_flag_of_the_release_is_known():
    assert set(FLAGS) == set(COMMANDS["flags"])


def test_the_shipped_command_becomes_the_config_it_means(capsys: pytest.CaptureFixture[str]):
    shipped, meant = COMMANDS["shipped"], COMMANDS["meant"]
    folder = "trainer.default_local_dir=run"  # its default holds the time
    assert config_of(*shipped, folder) == load_config(PPOConfig, "ppo_trainer", [*meant, folder])
    model, data, ignored = capsys.readouterr().err.splitlines()
    assert model.startswith("note: --model_name: ") and data.startswith("note: --dataset_name: ")
    names = "--micro_rollout_batch_size, --return_hidden_states, --return_decode, --return_prefill"
    assert ignored == f"note: no effect here: {names} (TRAINING_CONFIG.md has the reasons)"
    # The other spelling of flags means the same.
    spelled = [f"{name}={value}" for name, value in zip(shipped[::2], shipped[1::2], strict=True)]
    assert translate(spelled) == translate(shipped)


@pytest.mark.parametrize(
    ("arguments", "indices"),
    [
        ("--compute_log_effective_rank False", [1]),
        ("--compute_log_effective_rank True preset=paper", [1, 2, 4]),
        ("--compute_log_effective_rank True calculator.metric_indices=1", [1, 4]),
        ("--compute_log_effective_rank True --metric_indices [2,1]", [2, 1, 4]),
    ],
)
def test_the_log_effective_rank_is_one_more_metric(arguments: str, indices: list[int]):
    assert config_of(*arguments.split()).calculator.metric_indices == indices


@pytest.mark.parametrize(("arguments", "translated"), cases("cli/release_flags.txt"))
def test_arguments_become_overrides(arguments: str, translated: str, capsys: pytest.CaptureFixture[str]):
    assert translate(shlex.split(arguments)) == shlex.split(translated)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["a b", "it's", 'say "x"', "a,b", "[a]", "x=1", "4", "back\\slash\\", "\\'", "ä{}"])
def test_any_text_reaches_the_config_as_it_is(name: str):
    assert config_of("--model_name", name).model.path == name


@pytest.mark.parametrize(
    ("chosen", "name"), [("", "verl_grpo_x"), ("experiment=dapo", "dapo_x"), ("--exp_name a", "a_x")]
)
def test_the_suffix_follows_the_name_of_the_experiment(chosen: str, name: str):
    assert config_of("--suffix", "x", *chosen.split()).trainer.experiment_name == name


def test_lists_may_be_written_as_in_python_or_hydra():
    for value in ("['Effective Rank']", "('Effective Rank',)", "[Effective Rank]", "Effective Rank"):
        (word,) = translate(["--reward_indicator_names", value])
        assert word.replace("'", "") == "reward_manager.indicator_names=[Effective Rank]"


@pytest.mark.parametrize(("arguments", "message"), cases("cli/release_flags_refused.txt"))
def test_what_cannot_be_translated_is_named(arguments: str, message: str, refused):
    with refused(f"{message}...", error=FlagError):
        translate(arguments.split())


@pytest.mark.parametrize("chosen", [["--adv_estimator", "gae"], ["algorithm=gae"], ["experiment=verl_ppo"]])
def test_the_critics_model_goes_with_gae(chosen: list[str], capsys: pytest.CaptureFixture[str]):
    config = config_of(*chosen, "--critic_model_path", "some/critic")
    assert (config.algorithm.adv_estimator, config.critic.model.path) == ("gae", "some/critic")
    assert capsys.readouterr().err == ""


def test_data_and_models_are_found_below_the_releases_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my models" / "Qwen2.5-1.5B").mkdir(parents=True)
    monkeypatch.setenv("HDFS_DATA_PATH", "/sets")
    monkeypatch.setenv("HDFS_MODEL_PATH", str(tmp_path / "my models"))
    config = config_of("--dataset_name", "level 3", "--model_name", "Qwen2.5-1.5B")
    assert config.data.train_files == ["/sets/level 3/train.parquet"]
    assert config.data.val_files == ["/sets/level 3/test.parquet"]
    assert config.model.path == str(tmp_path / "my models" / "Qwen2.5-1.5B")
    assert config_of("--model_name", "Qwen/Qwen2.5-1.5B").model.path == "Qwen/Qwen2.5-1.5B"


@pytest.mark.parametrize(
    ("arguments", "preset"),
    [
        ("", None),
        ("experiment=dapo trainer.test_freq=5", None),
        ("model.path=data/tiny_model", None),
        ("model.path='data/tiny_model/'", None),
        ("model=tiny", None),
        ("model.path=Qwen/Qwen2.5-0.5B", "foreign"),
        ("model=qwen2.5_1.5b --rollout_n 4", "foreign"),
        ("model.path=my/folder preset=small", "small"),
        ("model.path=my/folder preset=embedded", "embedded"),
        # A translated command comes before it, and an explicit preset before that.
        ("--model_name my/folder", "paper"),
        ("actor_rollout_ref.model.path=my/folder actor_rollout_ref.rollout.n=4", "verl"),
        ("actor_rollout_ref.model.path=my/folder preset=small", "small"),
        ("--model_name my/folder preset=small", "small"),
    ],
)
def test_a_model_that_is_not_ours_has_settings_of_its_own(arguments, preset, capsys: pytest.CaptureFixture[str]):
    words = translate(shlex.split(arguments, posix=False))
    assert [word for word in words if word.startswith("preset=")] == ([f"preset={preset}"] if preset else [])
    told = [line for line in capsys.readouterr().err.splitlines() if "preset=foreign" in line]
    assert len(told) == (preset == "foreign")


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        # What the user's own files say counts as if it were typed.
        ("experiment=with_preset", False),
        ("experiment=with_preset model.path=my/other", False),
        ("experiment=without", True),
        ("--config-name=whole model.path=my/other", False),
        ("experiment=dapo", False),
        ("experiment=arithmetic_tools", False),
        ("model.path=embedded", False),
        ("model.path=my/a,my/b --multirun", True),
        ("experiment=with_preset,dapo --multirun", False),
    ],
)
def test_the_users_files_may_choose_preset_and_model(arguments: str, chosen: bool, tmp_path, monkeypatch, capsys):
    (tmp_path / "embedded").symlink_to(ROOT / "data" / "tiny_model")
    monkeypatch.chdir(tmp_path)
    words = translate([*arguments.split(), "--config-dir", str(own_configs(tmp_path))])
    assert (words[0] == "preset=foreign") == chosen == ("preset=foreign" in capsys.readouterr().err)


@pytest.mark.parametrize(
    "varied", ["model=tiny,qwen2.5_1.5b", "model.path=my/a,data/tiny_model", "experiment=without,dapo"]
)
def test_sweep_over_models_names_its_preset(varied: str, tmp_path, refused):
    arguments = [varied, "--multirun", "--config-dir", str(own_configs(tmp_path))]
    with refused("...another job of this sweep trains the embedded model, ...name the preset of all...", FlagError):
        translate(arguments)
    assert translate([*arguments, "preset=small"])[:2] == [varied, "preset=small"]


def own_configs(folder: Path) -> Path:
    """A folder with two experiments and a whole configuration."""
    preset, model = "override {}preset: paper", "model: {path: my/folder}"
    files = {
        "experiment/with_preset": f"# @package _global_\ndefaults:\n  - {preset.format('/')}\n{model}\n",
        "experiment/without": f"# @package _global_\n{model}\n",
        "whole": f"defaults:\n  - ppo_trainer\n  - {preset.format('')}\n  - _self_\n{model}\n",
    }
    for name, text in files.items():
        path = folder / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "configs"
