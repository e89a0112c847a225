"""TRL's names on the command line are answered with ours."""

import pytest

from verl.cli.dialects import SCHEMA, trl_groups, trl_option
from verl.cli.eval_arguments import plain_arguments
from verl.cli.translate import translate
from verl.cli.values import FlagError
from verl.config.evaluation import EvaluationConfig


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["num_generations=8"], "TRL's num_generations is rollout.n here: rollout.n=8"),
        (["--num_generations", "8"], "TRL's num_generations is rollout.n here: rollout.n=8"),
        (["--num-generations=8"], "TRL's num_generations is rollout.n here: rollout.n=8"),
        (
            ["trainer.max_steps=2"],
            "TRL's max_steps is trainer.total_training_steps here: trainer.total_training_steps=2",
        ),
        (["model=tiny", "max_steps=2"], "TRL's max_steps is trainer.total_training_steps here: trainer.total_train..."),
        (["--output_dir", "x"], "TRL's output_dir is trainer.default_local_dir here: trainer.default_local_dir=x"),
        (["learning_rate=1e-6"], "TRL's learning_rate is actor.optim.lr here: actor.optim.lr=1e-6"),
        (["--model_name_or_path", "a/b"], "TRL's model_name_or_path is model.path here: model.path=a/b"),
        (["+top_k=0"], "TRL's top_k is rollout.top_k here: rollout.top_k=0 (-1 for all)"),
        (["--shuffle_dataset"], "TRL's shuffle_dataset is data.shuffle here: data.shuffle=VALUE"),
        (["--use_peft", "--lora_r=8"], "use_peft: is a name of TRL's; here: model.lora.rank=32; 0 turns adapters off"),
        (["beta=0.04"], "beta: is a name of TRL's; here: actor.use_kl_loss=true actor.kl_loss_coef=0.001; 0 is ..."),
        (["resume=true"], "resume: is a name of TRL's; here: the same command resumes; trainer.resume_mode and ..."),
        (["actor_rollout_ref.rollout.n=5", "num_generations=8"], "TRL's num_generations is rollout.n here: ..."),
    ],
)
def test_names_of_trl_are_answered_with_ours(words: list[str], line: str, refused):
    with refused(line, error=FlagError):
        translate(words)


def test_names_that_are_ours_or_the_releases_stay(capsys: pytest.CaptureFixture[str]):
    assert translate(["seed=3"]) == ["seed=3"]
    assert "rollout.temperature=0.7" in translate(["--temperature", "0.7"])
    assert plain_arguments(["temperatures=0.7", "num_generations=8"], EvaluationConfig)[-1] == "num_generations=8"


def test_rows_name_options_that_exist():
    rows = [text for group in trl_groups() for text in group["rows"].values()]
    alone = [text for text in rows if "`" not in text and " " not in text]
    assert len(alone) > 40 and {*alone} <= SCHEMA
    assert trl_option("rollout.top_k; -1 for all") == ("rollout.top_k", "-1 for all")
