"""The configuration of an evaluation: sets that load, runs completed from ``model``, messages of what is wrong."""

import pytest

from tests.tables import cases
from verl.cli.eval_arguments import plain_arguments
from verl.cli.values import FlagError
from verl.config import CONFIG_DIR
from verl.config.evaluation import EvaluationConfig, parse_evaluation_config
from verl.config.load import compose_config

SETS = {"FULL_PASS1": (32, 1), "SMALL_SAMPLES_PASS16": (11, 16), "LITTLE_SAMPLES_PASS32": (5, 32)} | {
    "TINY_SAMPLES_PASS256": (5, 256),
    "embedded": (1, 16),
    "arithmetic_tools": (1, 4),
    "word_problems": (1, 1),
}
"""Name -> number of benchmarks and samples."""


def load(*arguments: str) -> EvaluationConfig:
    overrides = plain_arguments(arguments, EvaluationConfig)
    return parse_evaluation_config(compose_config(EvaluationConfig, "evaluation", overrides))


@pytest.mark.parametrize("name", SETS)
def test_named_sets(name: str):
    config = load(f"evaluation={name}", "model.path=some/model")
    assert (len(config.benchmarks), config.n_sampling) == SETS[name]
    assert config.trainer.experiment_name == name
    own = {"embedded": 1.0, "arithmetic_tools": 1.0, "word_problems": 0.0}
    released = name not in own
    assert config.temperatures == [own.get(name, 0.6)] and config.top_p == (0.95 if released else 1.0)
    assert config.model.template == (None if released else "chat")
    assert {path.stem for path in (CONFIG_DIR / "evaluation").glob("*.yaml")} == set(SETS)


def test_a_run_takes_from_model_what_it_does_not_say():
    runs = "runs.a=outputs/a runs.b.path=outputs/b runs.b.steps=0,120 runs.b.max_response_length=256"
    fields = "data.fields.mine.question=frage data.fields.mine.answer=x"
    config = load("benchmarks=aime24,mine", "model.template=abel", *runs.split(), *fields.split())
    assert config.benchmarks == ["aime24", "mine"]
    found = {name: (run.path, run.steps, run.template, run.max_response_length) for name, run in config.runs.items()}
    assert found == {"a": ("outputs/a", [0, -1], "abel", None), "b": ("outputs/b", [0, 120], "abel", 256)}
    # Benchmarks that the config does not know may be mapped.
    assert config.data.fields == {"mine": {"question": "frage", "answer": "x"}}


@pytest.mark.parametrize(("arguments", "message"), cases("config/refusals_evaluation.txt"))
def test_a_wrong_option_is_named_with_its_value_and_fix(arguments: str, message: str, refused):
    with refused(f"{message}..."):
        load(*arguments.split())


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


def test_other_flags_are_refused(refused):
    for words, line in {
        "--model_name Qwen/Qwen2.5-1.5B": "--model_name: is no flag of eval.sh...",
        "--benchmark=a": "--benchmark: unknown flag; set options as in model.path=VALUE",
    }.items():
        with refused(line, FlagError):
            plain_arguments(words.split(), EvaluationConfig)
