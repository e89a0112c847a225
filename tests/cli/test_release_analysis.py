"""The release's motivation experiment becomes a command line of the analysis, which its config accepts."""

import pytest
from hydra import compose, initialize_config_dir

from tests.tables import refusals
from verl.cli.release_analysis import analysis_arguments
from verl.cli.translate import read_line
from verl.cli.values import FlagError
from verl.config.analysis import AnalysisConfig, parse_analysis_config
from verl.config.load import CONFIG_DIR
from verl.trainer import main_ppo

ASKED = "--motivation_mode allin --val_only True"
MODEL = "--model_name data/tiny_model --dataset_name arithmetic preset=embedded"


def config_of(arguments: str) -> AnalysisConfig:
    overrides = analysis_arguments(read_line(arguments.split()))
    assert overrides is not None
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return parse_analysis_config(compose("analysis", overrides=overrides))


def test_both_sheets(capsys: pytest.CaptureFixture[str]):
    flags = "--rollout_n 6 --temperature 0.8 --max_response_length 77 --confidence_k 3 --diff_stride 16 --exp_name mine"
    config = config_of(f"{ASKED} {MODEL} {flags} calculator.layers=[1,-1] --plot_layer 2")
    assert (config.analysis.mode, config.n_sampling, config.temperatures) == ("allin", 6, [0.8])
    assert config.analysis.prompt_files == ["data/arithmetic/test.parquet"] and config.benchmarks == []
    target = config.model
    assert (target.path, target.template, target.max_response_length) == ("data/tiny_model", "chat", 77)
    assert (config.calculator.layers, config.analysis.layer, config.layer_place) == ([1, -1], -1, 1)
    assert (config.calculator.diff_stride, config.analysis.confidence_k) == (16, 3)
    assert config.trainer.experiment_name == "mine" and config.calculator.enable
    assert "note: --motivation_mode: runs `python -m verl.trainer.main_analysis`" in capsys.readouterr().err


def test_exploit_is_greedy_and_has_one_response():
    config = config_of(f"--motivation_mode=exploit trainer.val_only=true {MODEL} --rollout_n 6")
    assert (config.analysis.mode, config.n_sampling, config.temperatures) == ("exploit", 1, [0.0])


def test_what_decides_the_responses_and_their_scores_is_carried(capsys: pytest.CaptureFixture[str]):
    overrides = """+data.apply_chat_template_kwargs.enable_thinking=false rollout.repetition_penalty=1.2
    reward_score.custom_functions=["*=rewards.py:score"] +reward_score.custom_kwargs.k=3 reward_score.timeout_s=3
    reward_score.overlong_buffer.enable=true +rollout.engine_kwargs.swap_space=2 model.attn_implementation=eager
    trainer.logger=[console,tensorboard] trainer.default_local_dir=there --val_sample_size 7"""
    config = config_of(f"{ASKED} {MODEL} {overrides}")
    assert config.model.apply_chat_template_kwargs == {"enable_thinking": False}
    score = config.reward_score
    assert (score.custom_functions, score.custom_kwargs, score.timeout_s) == (["*=rewards.py:score"], {"k": 3}, 3)
    assert score.overlong_buffer.enable and config.policy.attn_implementation == "eager"
    assert (config.repetition_penalty, config.rollout.engine_kwargs) == (1.2, {"swap_space": 2})
    assert (config.trainer.logger, config.trainer.default_local_dir) == (["console", "tensorboard"], "there")
    assert config.data.max_problems == 7 and "takes the first prompts of each file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *("", MODEL, "--motivation_mode disable --val_only True", "--motivation_mode ''", "--motivation_mode allin"),
        "--motivation_mode allin --val_only False",
        # As elsewhere, an override wins over the flag.
        "--motivation_mode allin --val_only True trainer.val_only=false",
    ],
)
def test_other_commands_train(arguments: str):
    assert analysis_arguments(read_line([word.strip("'") for word in arguments.split()])) is None


@pytest.mark.parametrize(("arguments", "message"), refusals("cli/refusals.txt", "analysis"))
def test_what_cannot_be_analysed_is_named(arguments: str, message: str, refused):
    with refused(message, error=FlagError):
        analysis_arguments(read_line(arguments.replace("ASKED", f"{ASKED} {MODEL}").split()))


def test_each_mistake_is_an_error_line(monkeypatch: pytest.MonkeyPatch):
    mistakes = "rollout.n=0 data.train_batch_size=x"
    monkeypatch.setattr("sys.argv", ["main_ppo", *f"{ASKED} {mistakes}".split()])
    with pytest.raises(SystemExit) as raised:
        main_ppo.main()
    assert str(raised.value).splitlines() == [
        "error: data.train_batch_size='x': must be an integer, not str",
        "error: rollout.n=0: must be greater than 0",
    ]
