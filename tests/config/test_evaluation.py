"""The configuration of an evaluation: sets that load, runs completed from ``model``, messages of what is wrong."""

import pytest
from hydra import compose, initialize_config_dir

from tests.config.test_refusals import cases
from verl.cli.eval_arguments import plain_arguments
from verl.cli.values import FlagError
from verl.config import CONFIG_DIR, ConfigError
from verl.config.evaluation import EvaluationConfig, parse_evaluation_config

SETS = {"FULL_PASS1": (32, 1), "SMALL_SAMPLES_PASS16": (11, 16), "LITTLE_SAMPLES_PASS32": (5, 32)} | {
    "TINY_SAMPLES_PASS256": (5, 256),
    "embedded": (1, 16),
}
"""Name -> number of benchmarks and samples."""


def load(*arguments: str) -> EvaluationConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return parse_evaluation_config(compose("evaluation", overrides=plain_arguments(arguments, EvaluationConfig)))


@pytest.mark.parametrize("name", SETS)
def test_named_sets(name: str):
    config = load(f"evaluation={name}", "model.path=some/model")
    assert (len(config.benchmarks), config.n_sampling) == SETS[name]
    assert config.trainer.experiment_name == name
    released = name != "embedded"
    assert config.temperatures == [0.6 if released else 1.0] and config.top_p == (0.95 if released else 1.0)
    assert config.model.template == ("qwen-boxed" if released else "chat")
    assert {path.stem for path in (CONFIG_DIR / "evaluation").glob("*.yaml")} == set(SETS)


def test_a_run_takes_from_model_what_it_does_not_say():
    runs = "runs.a=outputs/a runs.b.path=outputs/b runs.b.steps=0,120 runs.b.max_response_length=256"
    fields = "data.fields.mine.question=frage data.fields.mine.answer=x"
    config = load("benchmarks=aime24,mine", "model.template=abel", *runs.split(), *fields.split())
    assert config.benchmarks == ["aime24", "mine"]
    found = {name: (run.path, run.steps, run.template, run.max_response_length) for name, run in config.runs.items()}
    assert found == {"a": ("outputs/a", [0, -1], "abel", 1536), "b": ("outputs/b", [0, 120], "abel", 256)}
    # Benchmarks that the config does not know may be mapped.
    assert config.data.fields == {"mine": {"question": "frage", "answer": "x"}}


REFUSALS = """\
model.path=m -> benchmarks=[]: name at least one, or choose a set, such as evaluation=embedded
benchmarks=a -> model.path=None: name a training run or a model
benchmarks=a,a model.path=m -> benchmarks=['a', 'a']: name each once
benchmarks=a model.path=m temperatures=[] -> temperatures=[]: name at least one
benchmarks=[../a] model.path=m -> benchmarks[0]='../a': must name a folder: only letters, digits and . _ + -
benchmarks=a runs.A.steps=0 -> runs.A.path=None: name a training run or a model
benchmarks=a runs.A.path=m runs.A.steps=-2 -> runs.A.steps[0]=-2: must be at least 0, or -1 for the newest
benchmarks=a runs.A.path=m runs.A.stps=1 -> runs.A.stps=1: unknown key; did you mean runs.A.steps?
benchmarks=a runs={A:{pth:m}} -> runs.A.pth='m': unknown key; did you mean runs.A.path?
benchmarks=a runs.A.path=m runs.A.steps=x -> runs.A.steps[0]='x': must be an integer, not str
benchmarks=a runs={_A:{path:m}} -> runs='_A': must name a folder: only letters, digits and . _ + -
benchmarks=a runs=x -> runs='x': must be a mapping, name: value
benchmarks=a model.path=m n_sampling=4 temperatures=0,0.6 -> n_sampling=4: greedy decoding (temperature 0) gives one
benchmarks=a model.path=m compare_to=frist -> compare_to='frist': must be one of auto, first, step0; did you mean 'first
benchmarks=a model.path=m calculator.source=actor -> calculator.source='actor': an evaluation has no actor; set it to
benchmarks=a model.path=m calculator.metric_indices_add=[avg_log_probs]
    -> calculator.metric_indices_add=['avg_log_probs']: an evaluation measures hidden states only; set []
benchmarks=a model.path=m rollout.tensor_parallel_size=2 trainer.n_gpus_per_node=3
    -> rollout.tensor_parallel_size=2: must divide trainer.n_gpus_per_node=3
benchmarks=a model.path=m ++rollout.engine_kwargs.speculative_config.a=1
    -> rollout.engine_kwargs.speculative_config={'a': 1}: it draws in its own way; set rollout.seeded=false
"""


@pytest.mark.parametrize(("arguments", "message"), cases(REFUSALS))
def test_a_wrong_option_is_named_with_its_value_and_fix(arguments: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load(*arguments.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        (["benchmarks=a,b"], ["benchmarks=[a,b]"]),
        (["benchmarks=a"], ["benchmarks=a"]),
        (["benchmarks=[a,b]", "temperatures=0.6,1"], ["benchmarks=[a,b]", "temperatures=[0.6,1]"]),
        (["-m", "benchmarks=a,b"], ["benchmarks=a,b", "-m"]),
        (["seed=1,2"], ["seed=1,2"]),
        (["runs.A.steps=0,80"], ["++runs.A.steps=[0,80]"]),
        (["+runs.A=x", "++runs.B.path=y"], ["+runs.A=x", "++runs.B.path=y"]),
        (["runs.A.path=x"], ["++runs.A.path=x"]),
        (["runs={A:{path:x},B:y}"], ["++runs={A:{path:x},B:y}"]),
        (["runs=x"], ["runs=x"]),
        (["~runs"], ["~runs"]),
        (["--cfg", "job", "n_sampling=1"], ["n_sampling=1", "--cfg", "job"]),
    ],
)
def test_arguments_as_people_type_them(typed: list[str], passed: list[str]):
    assert plain_arguments(typed, EvaluationConfig) == passed


@pytest.mark.parametrize("arguments", [["--benchmarks", "aime24"], ["--model_name", "Qwen/Qwen2.5-1.5B"]])
def test_a_flag_is_refused(arguments: list[str]):
    with pytest.raises(FlagError, match=rf"^{arguments[0]}: "):
        plain_arguments(arguments, EvaluationConfig)
