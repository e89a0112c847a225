"""The flags of the paper's release: what each becomes, and the message of each that becomes nothing."""

import shlex
from pathlib import Path

import pytest

from verl.cli.release_flags import FLAGS, translate
from verl.cli.values import FlagError
from verl.config import PPOConfig, load_config

RELEASE_FLAGS = """
    train_batch_size val_batch_size max_prompt_length max_response_length learning_rate ppo_mini_batch_size
    ppo_micro_batch_size kl_loss_coef entropy_coefficient clip_ratio kl_loss_type temperature log_prob_micro_batch_size
    rollout_n rollout_gpu_memory_util rollout_tp micro_rollout_batch_size kl_coef total_epochs dataset_name model_name
    save_freq test_freq remove_clip remove_previous_ckpt suffix logger_config exp_name reward_ema_alpha
    reward_indicator_names reward_weights reward_weights_exploit val_before_train val_sample_size diff_stride
    enable_calculator add_reward add_adv compute_log_effective_rank metric_indices metric_indices_add modulation_gain
    adv_estimator critic_model_path aux_reward_global_weight hypothesis_type return_hidden_states return_prefill
    return_decode aux_fix adv_shaping_kappa svd_rank svd_niter zeroth_order_svd_method diff_svd_method
    compute_global_metrics compute_cumulative_global_metrics global_diff_stride_train global_diff_stride_val except_save
    diff_calculator_method total_steps val_only motivation_mode plot_x_metrics plot_y_metrics plot_layer confidence_k
""".split()

SHIPPED = shlex.split("""
    --model_name mistralai/Mathstral-7B-v0.1 --max_prompt_length 512 --max_response_length 1536 --critic_model_path ''
    --adv_estimator grpo --exp_name GRPO_VERL --add_reward False --add_adv True --train_batch_size 48
    --ppo_mini_batch_size 24 --val_batch_size 48 --rollout_n 4 --ppo_micro_batch_size 1 --log_prob_micro_batch_size 12
    --micro_rollout_batch_size 12 --compute_global_metrics True --compute_cumulative_global_metrics True
    --global_diff_stride_train 20 --global_diff_stride_val 20 --kl_loss_coef 0.001 --entropy_coefficient 0.001
    --rollout_gpu_memory_util 0.65 --logger_config "['console','wandb']" --rollout_tp 1 --save_freq 40 --except_save ''
    --test_freq 10 --total_epochs 2 --total_steps 161 --dataset_name simplelr_abel_level3to5 --val_before_train True
    --val_sample_size -1 --enable_calculator True --metric_indices [1,2] --reward_weights '[0.0, 0.0, 1.0]'
    --reward_weights_exploit '[0.0, 1.0, 0.0]' --diff_stride 40 --modulation_gain 2.0 --aux_reward_global_weight 1.0
    --reward_indicator_names "['Effective Rank diff 2', 'Effective Rank diff', 'Effective Rank']"
    --aux_fix True --reward_ema_alpha 0.3 --adv_shaping_kappa 2.0
    --return_hidden_states True --return_prefill False --return_decode True
""")
"""The command that the release's train.sh runs."""

MEANT = """
    preset=paper model.path=mistralai/Mathstral-7B-v0.1 algorithm=grpo trainer.experiment_name=GRPO_VERL data=simplerl
    data.train_files=[data/simplelr_abel_level3to5/train.parquet]
    data.val_files=[data/simplelr_abel_level3to5/test.parquet]
    data.max_prompt_length=512 data.max_response_length=1536 data.train_batch_size=48 data.val_batch_size=48
    data.val_sample_size=-1 actor.ppo_mini_batch_size=24 actor.micro_batch_size_per_gpu=1 actor.optim.lr=5e-7
    actor.log_prob_micro_batch_size_per_gpu=12 actor.kl_loss_coef=0.001 actor.entropy_coeff=0.001 rollout.n=4
    rollout.gpu_memory_utilization=0.65 rollout.tensor_parallel_size=1 reward_score.mode=independent
    calculator.enable=true calculator.metric_indices=[1,2] calculator.diff_stride=40
    calculator.compute_global_metrics=true calculator.compute_cumulative_global_metrics=true
    calculator.global_diff_stride_train=20 calculator.global_diff_stride_val=20
    reward_manager.add_reward=false reward_manager.add_adv=true reward_manager.aux_fix=true reward_manager.gain=2
    reward_manager.kappa=2 reward_manager.ema_alpha=0.3 reward_manager.aux_reward_global_weight=1
    reward_manager.w_explore=[0,0,1] reward_manager.w_exploit=[0,1,0] trainer.logger=[console,wandb]
    trainer.total_epochs=2 trainer.total_training_steps=160 trainer.save_freq=40 trainer.test_freq=10
    trainer.val_before_train=true trainer.except_save=[]
""".split()
"""That command in overrides, except for the names of the indicators, which contain spaces."""


@pytest.fixture(autouse=True)
def no_release_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HDFS_DATA_PATH", raising=False)
    monkeypatch.delenv("HDFS_MODEL_PATH", raising=False)


def config_of(*arguments: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", translate(arguments))


LATER = shlex.split("""
    --max_response_length 4096 --diff_stride 128 --metric_indices [1,2]
    --metric_indices_add "['avg_log_probs','avg_response_entropy','avg_logits_entropy']" --hypothesis_type PlanB
    --reward_weights '[0.0, 0.0, 1.0, 0.0, 0.0]' --reward_weights_exploit '[0.0, 1.0, 0.0, 0.0, 0.0]'
    --reward_indicator_names
    "['Effective Rank diff 2','Effective Rank diff','Effective Rank','avg_log_probs','avg_response_entropy']"
    --diff_calculator_method optimized --aux_fix True --add_adv True
""")
"""What the later release's command sets differently, with rank shaping on."""


def test_the_later_command_sets_the_later_signal():
    flags, shipped = (config_of(*arguments) for arguments in (LATER, ["experiment=released_code_later"]))
    for name in ("diff_stride", "metric_indices", "metric_indices_add", "diff_calculator_method"):
        assert getattr(flags.calculator, name) == getattr(shipped.calculator, name), name
    for name in ("indicator_names", "w_explore", "w_exploit", "hypothesis_type", "add_adv", "guide"):
        assert getattr(flags.reward_manager, name) == getattr(shipped.reward_manager, name), name


def test_the_batched_method_is_a_rule_for_prefixes():
    calculator = config_of("--diff_calculator_method", "batched").calculator
    assert (calculator.diff_calculator_method, calculator.prefix_rule) == ("optimized", "at_stride_and_whole")
    assert calculator.max_seq_len_from == "start"


def test_every_flag_of_the_release_is_known():
    assert set(FLAGS) == set(RELEASE_FLAGS)


def test_the_shipped_command_becomes_the_config_it_means(capsys: pytest.CaptureFixture[str]):
    indicators = "reward_manager.indicator_names=[Effective Rank diff 2,Effective Rank diff,Effective Rank]"
    folder = "trainer.default_local_dir=run"  # its default holds the time
    assert config_of(*SHIPPED, folder) == load_config(PPOConfig, "ppo_trainer", [*MEANT, indicators, folder])
    notes = [line.split()[:2] for line in capsys.readouterr().err.splitlines()]
    expected = "--model_name: --micro_rollout_batch_size --dataset_name: --return_hidden_states --return_decode"
    assert notes == [["note:", flag] for flag in expected.split()]
    # The other spelling of flags means the same.
    spelled = [f"{name}={value}" for name, value in zip(SHIPPED[::2], SHIPPED[1::2], strict=True)]
    assert translate(spelled) == translate(SHIPPED)


OTHERS = {
    "learning_rate": ("1e-6", "actor.optim.lr=1e-6"),
    "remove_clip": ("TRUE", "trainer.remove_clip=true"),
    "remove_previous_ckpt": ("true", "trainer.max_ckpt_to_keep=1"),
    "val_only": ("True", "trainer.val_only=true"),
    "compute_log_effective_rank": ("True", "calculator.metric_indices=[1,4]"),
    "diff_calculator_method": ("original", "calculator.diff_calculator_method=original"),
    "metric_indices_add": ("['avg_log_probs']", "calculator.metric_indices_add=['avg_log_probs']"),
    "except_save": ("40,80", "trainer.except_save=[40,80]"),
    "test_freq": ("-1", "trainer.test_freq=-1"),
    "logger_config": ("console", "trainer.logger=['console']"),
}


@pytest.mark.parametrize(("flag", "value", "override"), [(flag, *pair) for flag, pair in OTHERS.items()])
def test_a_flag_becomes_an_override_that_the_config_takes(flag: str, value: str, override: str):
    assert translate([f"--{flag}", value]) == [override]
    config_of(f"--{flag}", value)


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


@pytest.mark.parametrize(
    ("arguments", "translated"),
    [
        ("--remove_previous_ckpt True trainer.max_ckpt_to_keep=3", "trainer.max_ckpt_to_keep=3"),
        ("--clip_ratio 0.3", "actor.clip_ratio_low=0.3 actor.clip_ratio_high=0.3"),
        # Epochs are not cut short by the steps of another task.
        ("--total_epochs 20", "trainer.total_epochs=20 trainer.total_training_steps=0"),
        # The release's counter starts at 1 and training ends when it reaches the flag's value.
        ("--total_epochs 20 --total_steps 7", "trainer.total_epochs=20 trainer.total_training_steps=6"),
        ("-m --total_steps 41,1", "trainer.total_training_steps=40,1 -m"),
        # An empty value is a flag that is not given.
        ("--except_save '' --motivation_mode '' --rollout_tp=", ""),
        ("""--except_save '""' --motivation_mode "''" --rollout_tp=' '""", ""),
        # Overrides win over flags wherever they stand; a repeated flag counts as given last.
        ("trainer.test_freq=5 --test_freq 10 --rollout_n=4", "rollout.n=4 trainer.test_freq=5"),
        ("algorithm=rloo --adv_estimator grpo", "algorithm=rloo"),
        ("--rollout_n 4 --rollout_n 8", "rollout.n=8"),
        # Overrides and Hydra's flags pass unchanged, in one piece each.
        ("""seed=1 --cfg job "+a='x y'" --rollout_n 4 ~b""", """rollout.n=4 seed=1 "+a='x y'" ~b --cfg job"""),
        ("seed=1 --package=trainer --resolve ~b", "seed=1 ~b --package=trainer --resolve"),
        ("-m seed=1,2 --hypothesis_type PlanB,FixTwo", "reward_manager.hypothesis_type=PlanB,FixTwo seed=1,2 -m"),
        ("--info defaults seed=1", "seed=1 --info defaults"),
        ("--info seed=1", "seed=1 --info"),
        # A preset of one's own replaces the paper's.
        ("--model_name a/b preset=embedded", """"model.path='a/b'" preset=embedded"""),
    ],
)
def test_arguments_become_overrides(arguments: str, translated: str, capsys: pytest.CaptureFixture[str]):
    assert translate(shlex.split(arguments)) == shlex.split(translated)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["a b", "it's", 'say "x"', "a,b", "[a]", "x=1", "4", "back\\slash\\", "\\'", "ä{}"])
def test_any_text_reaches_the_config_as_it_is(name: str):
    assert config_of("--exp_name", name).trainer.experiment_name == name


@pytest.mark.parametrize(
    ("chosen", "name"), [("", "verl_grpo_x"), ("experiment=dapo", "dapo_x"), ("--exp_name a", "a_x")]
)
def test_the_suffix_follows_the_name_of_the_experiment(chosen: str, name: str):
    assert config_of("--suffix", "x", *chosen.split()).trainer.experiment_name == name


@pytest.mark.parametrize(
    "value", ["['Effective Rank']", "('Effective Rank',)", '["Effective Rank"]', "[Effective Rank]", "Effective Rank"]
)
def test_lists_may_be_written_as_in_python_or_hydra(value: str):
    weighed = ["--reward_weights", "1", "--reward_weights_exploit", "1"]
    assert config_of("--reward_indicator_names", value, *weighed).reward_manager.indicator_names == ["Effective Rank"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rolout_n 4", "--rolout_n: unknown flag; did you mean --rollout_n?"),
        ("--rollout-n 4", "--rollout-n: unknown flag; did you mean --rollout_n?"),
        ("--multi-run", "--multi-run: unknown flag; did you mean --multirun?"),
        ("--rollout.n=4", "--rollout.n: unknown flag; options are set without dashes: rollout.n=VALUE"),
        ("--zzz 4", "--zzz: unknown flag; TRAINING_CONFIG.md lists them"),
        ("--rollout_n", "--rollout_n: needs a value after it"),
        ("--rollout_n --add_adv True", "--rollout_n: needs a value after it"),
        ("--rollout_n -m", "--rollout_n: needs a value after it"),
        ("--cfg", "--cfg: needs a value after it"),
        ("--adv_estimator grop", "--adv_estimator grop: must be one of gae, gpg, grpo, grpo_passk, "),
        (
            "--metric_indices_add response_entropy",
            "--metric_indices_add response_entropy: response_entropy is the same",
        ),
        (
            "--diff_calculator_method optimized,batched -m",
            "--diff_calculator_method optimized,batched: batched sets other options and cannot be swept",
        ),
        ("--total_steps ten", "--total_steps ten: must be a whole number"),
        ("--remove_previous_ckpt 3", "--remove_previous_ckpt 3: must be true or false"),
        (
            "--compute_log_effective_rank True -m experiment=grpo,verl_grpo",
            "--compute_log_effective_rank: cannot be added to a sweep over one of preset, experiment, calculator",
        ),
        ("-m --cfg job", "--multirun: --cfg and --info show one configuration"),
    ],
)
def test_what_cannot_be_translated_is_named(arguments: str, message: str):
    with pytest.raises(FlagError) as caught:
        translate(arguments.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ("--micro_rollout_batch_size 12", "--micro_rollout_batch_size 12 has no effect: vLLM schedules by itself"),
        ("--return_prefill True", "--return_prefill True has no effect: the hidden states of prompts are not measured"),
        ("--svd_niter 4", "--svd_niter 4 has no effect: lowrank keeps the exact largest singular values"),
        ("--plot_x_metrics ER", "--plot_x_metrics ER has no effect: the analysis measures every metric"),
        ("--critic_model_path x/y", "--critic_model_path is ignored: grpo has no critic"),
        ("--adv_estimator rloo --critic_model_path x/y", "--critic_model_path is ignored: rloo has no critic"),
    ],
)
def test_what_has_no_effect_is_said(arguments: str, note: str, capsys: pytest.CaptureFixture[str]):
    assert [override for override in translate(arguments.split()) if "algorithm" not in override] == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {note}")


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
    ("arguments", "said"),
    [
        (
            "--motivation_mode allin",
            "note: --motivation_mode allin: trains, with validations as usual; once it has che",
        ),
        ("--val_only True", "note: --val_only: validates; for the release's spreadsheets add --motivation_mode allin"),
        ("--val_only True --motivation_mode disable", ""),
        ("--val_only False", ""),
    ],
)
def test_the_releases_modes_of_validation_are_explained(arguments: str, said: str, capsys: pytest.CaptureFixture[str]):
    translate(arguments.split())
    assert capsys.readouterr().err[: len(said) or None] == said
