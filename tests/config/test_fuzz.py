"""Hostile options: an override is taken or refused in one line, and so is any tree of values."""

from typing import Any

from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.fuzzing import VALUES, fuzz
from verl.config import ConfigError, PPOConfig, load_config
from verl.config.evaluation import EvaluationConfig, parse_evaluation_config
from verl.config.load import compose_config, option_names, parse_config

JOBS = {"ppo_trainer": PPOConfig, "evaluation": EvaluationConfig}
NAMES = sorted({name for schema in JOBS.values() for name in option_names(schema, "")})
FORMS = (
    *("{n}={v}", "+{n}={v}", "++{n}={v}", "~{n}", "~{n}={v}", "{n}.x={v}", "+{n}.x={v}", "={v}", "{n}", "{v}"),
    *("{n}@x={v}", "+{n}[0]={v}", "{n}:{v}"),
)
TEXTS = """null|5|-5|1e400|nan|inf|true|[1,2]|[]|{}|{a:1}|x|'x|"x"|${a}|==|${oc.env:HOME}|${oc.env:NOPE}|${trainer}|???|
\\|[[[[|}{|-|a,b|range(1,5)|choice(a)|glob(*)|sort(3,1)|int(x)|${eval:1}|*a|@""".replace("\n", "").split("|")
TEXTS += ["", "\ud800", "\0", "x" * 999, "7" * 5000, "1" + "0" * 400]
OVERRIDES = st.builds(
    lambda form, name, value: form.replace("{n}", name).replace("{v}", value),
    st.sampled_from(FORMS),
    st.sampled_from([*NAMES, "a", "", "data.x", "runs", "runs.a", "hydra.run.dir", "_target_", "algorithm"]),
    st.sampled_from(TEXTS) | st.text(max_size=6),
)


@fuzz(25, job=st.sampled_from(sorted(JOBS)), overrides=st.lists(OVERRIDES, min_size=1, max_size=2))
def overrides(job: str, overrides: list[str]):
    parse: Any = parse_evaluation_config if job == "evaluation" else lambda tree: parse_config(PPOConfig, tree)
    try:
        parse(compose_config(JOBS[job], job, overrides))
    except ConfigError as error:
        assert_lines_of_options(error)


def assert_lines_of_options(error: ConfigError) -> None:
    """Check that the error is one line, or one for each option with a mistake; and that a terminal can write it."""
    lines = str(error).splitlines()
    assert len(lines) == 1 or all(line.startswith(tuple(NAMES)) for line in lines), error
    str(error).encode()


@fuzz(50, name=st.sampled_from(sorted(option_names(PPOConfig, ""))), value=VALUES)
def values(name: str, value: object):
    tree = TREE.copy()
    try:
        OmegaConf.update(tree, name, value, merge=False, force_add=True)
    except Exception:  # not a value that Hydra could have
        return
    try:
        parse_config(PPOConfig, tree)
    except ConfigError as error:
        # Some options take over another one's value.
        assert all(line.startswith(tuple(NAMES)) for line in str(error).splitlines()), error
        str(error).encode()


TREE = compose_config(PPOConfig, "ppo_trainer")
test_overrides, test_many_overrides = overrides
test_values, test_many_values = values


def test_what_is_right_is_taken():
    assert load_config(PPOConfig, "ppo_trainer", ["seed=7"]).seed == 7
    assert parse_config(PPOConfig, TREE.copy()).actor == load_config(PPOConfig, "ppo_trainer").actor
