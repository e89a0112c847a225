import math
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import scoring
from tiny_tokenizer import make_tiny_tokenizer

from tests.kit import data_options, jsonl
from tests.tables import refusals
from verl.config.errors import ConfigError
from verl.config.rewards import RewardScoreConfig
from verl.data.prompts import PromptDataset
from verl.evaluation.benchmarks import load_benchmark
from verl.rewards import check_ground_truth, compute_score, use_custom_functions
from verl.rewards.custom import CustomFunctionError, custom_verdict, load_function, partial_scores_note
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import CUSTOM_FUNCTIONS, VERIFIERS, find_scorer
from verl.verifiers.verdict import Verdict

MODULE = """
import os
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 3


def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 10


def echo(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": -0.25, "acc": solution_str == ground_truth, "seen": [data_source, extra_info]}


def misbehave(solution_str, ground_truth, data_source, extra_info=None):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "eat memory":
        bytearray(2**40)
    if solution_str == "die":
        os.kill(os.getpid(), 9)
    if solution_str == "recurse":
        return misbehave(solution_str, ground_truth, data_source, extra_info)
    if solution_str == "timeout":
        raise TimeoutError("no network")
    if solution_str == "exit":
        sys.exit(3)
    return extra_info["returns"] if extra_info else 0.75


class Rude:
    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error()


def rude(data_source, solution_str, ground_truth, extra_info=None):
    kinds = {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit, "GeneratorExit": GeneratorExit}
    name, _, later = solution_str.partition(" ")
    if later:
        return {"score": Rude(kinds[name])}
    raise kinds[name]


def leave_children(data_source, solution_str, ground_truth, extra_info=None):
    pids = Path(ground_truth)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]

    def note(name, pid):
        with (pids / name).open("w") as file:
            file.write(str(pid))

    note("child", subprocess.Popen(sleep).pid)
    note("own session", subprocess.Popen(sleep, start_new_session=True).pid)
    note("no environment", subprocess.Popen(sleep, env={}).pid)
    if os.fork() == 0:  # a daemon that runs no other program
        os.setsid()
        if os.fork():
            os._exit(0)
        note("daemon", os.getpid())
        time.sleep(600)
    while not (pids / "daemon").exists():
        time.sleep(0.01)
    if solution_str == "die":
        os.kill(os.getpid(), 9)
    time.sleep(600)


def show(data_source, solution_str, ground_truth, extra_info=None):
    extras = {"solution": solution_str, "truth": ground_truth, "kind": type(ground_truth).__name__}
    return {"score": 1.0} | extras


def with_options(data_source, solution_str, ground_truth, extra_info, weight, floor=0.0):
    return max(floor, weight * len(solution_str))


def old_style(solution_str, ground_truth):
    return 1.0
"""


@pytest.fixture(autouse=True)
def no_functions_remain() -> Iterator[None]:
    yield
    use_custom_functions({})


@pytest.fixture(scope="module", autouse=True)
def my_rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("custom")
    (folder / "my_rewards.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    use_custom_functions({})


def config(*custom_functions: str, mode: str = "independent") -> RewardScoreConfig:
    return scoring(
        mode=mode, num_workers=1, timeout_s=1.5, memory_limit_mb=512, custom_functions=list(custom_functions)
    )


def verdict_of(returned: object) -> Verdict:
    return custom_verdict("my_rewards:misbehave", "mine", r"so \boxed{5}", "5", {"returns": returned})


@pytest.mark.parametrize(
    ("returned", "score", "correct"),
    [
        (0.5, 0.5, True),
        (-2, -2.0, False),
        (0, 0.0, False),
        (True, 1.0, True),
        ({"score": 0.5}, 0.5, True),
        ({"score": -1, "correctness": True}, -1.0, True),
        ({"score": 1.0, "acc": 0.0}, 1.0, False),
        ({"score": 1.0, "correctness": False, "acc": True}, 1.0, False),
        ({"score": 1.0, "correctness": None, "pred": "5", "parts": [1, {"a": 2}]}, 1.0, True),
    ],
)
def test_return_values_become_scores(returned: object, score: float, correct: bool):
    extras = {key: returned[key] for key in ("pred", "parts") if isinstance(returned, dict) and key in returned}
    assert verdict_of(returned) == Verdict(correct, True, "custom", score=score, extras=extras)


def test_partial_scores_that_count_as_right_are_noted():
    def verdicts(*scores: float, right: bool | None = None, reason: str = "custom") -> list[Verdict]:
        return [Verdict(s > 0 if right is None else right, False, reason, score=s) for s in scores]

    assert partial_scores_note(verdicts(0.01, 0.01, 1.0)).startswith("note: 2 of 3 scores of custom reward functions")
    games = verdicts(0.01, 0.01, 1.0, reason="environment")
    assert partial_scores_note(games).startswith("note: 2 of 3 scores of environments lie between 0 and 1")
    for others in (verdicts(0.01, 1.0), verdicts(0.01, 0.5, right=False), verdicts(0.1, 0.2, reason="exact"), []):
        assert partial_scores_note(others) == ""


@pytest.mark.parametrize("truth", ["7", 7, 7.5, True, None, [7, "seven"], {"target": 7, "numbers": [3, 4]}])
def test_function_gets_response_and_ground_truth_unchanged(truth: object):
    use_custom_functions({"mine": "my_rewards:show"})
    check_ground_truth("mine", truth)
    extra = compute_score("mine", "<think>7</think> 8", truth)["reward_extra_info"]
    assert extra == {"solution": "<think>7</think> 8", "truth": truth, "kind": type(truth).__name__}


def test_function_in_a_file(my_rewards: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(my_rewards)
    paths = {"a": "my_rewards.py:length", "b": f"{my_rewards}/my_rewards.py:length"}
    assert config(*(f"{source}={path}" for source, path in paths.items())).paths_of_custom_functions() == paths
    use_custom_functions(paths)
    assert [compute_score(source, "12345", "")["score"] for source in paths] == [0.5, 0.5]


@pytest.mark.parametrize(("returned", "line"), refusals("rewards/refusals.txt", "returned"))
def test_invalid_return_values_are_refused(refused, my_rewards: Path, returned: str, line: str):
    first = MODULE[: MODULE.index("def misbehave")].count("\n") + 1
    line = line.replace("WHOLE", "must be a finite number, a bool, or a dict with 'score' LINE")
    line = line.replace("LINE", f"({my_rewards}/my_rewards.py, line {first})")
    with refused(
        f"reward_score.custom_functions: my_rewards:misbehave on data_source='mine' {line}", CustomFunctionError
    ):
        verdict_of(eval(returned, {"math": math, "np": np}))


@pytest.mark.parametrize(("path", "line"), refusals("rewards/refusals.txt", "functions"))
def test_function_that_cannot_be_used_is_refused(refused, path: str, line: str):
    entry = {"mine": path}
    for use in (
        lambda: load_function(path),
        lambda: VerifierPool(config(f"mine={path}")),
        lambda: use_custom_functions(entry),
    ):
        with refused(f"reward_score.custom_functions='{path}': {line}"):
            use()


@pytest.mark.parametrize(("options", "line"), refusals("rewards/refusals.txt", "config"))
def test_entries_and_arguments_are_checked(refused, options: str, line: str):
    paths = {"a/b": "c.d:e", "a=b=": "c.d:g", "*": "c.d:f"}
    assert config("a/b=c.d:e", "a==b===c.d:g", "*=c.d:f").paths_of_custom_functions() == paths
    for values in eval(f"[{options}]"):
        with refused(line):
            scoring(**values)


def test_custom_function_of_a_source():
    custom = {"math": "m:exact", "*": "m:star"}
    assert find_scorer("math", custom) == ("m:exact", True)
    assert find_scorer("unheard of", custom) == ("m:star", True)
    assert find_scorer("gsm8k", {"math": "m:exact"}).is_custom is False
    with pytest.raises(
        ConfigError, match="data_source='my_set': must be one of .*; reward_score.custom_functions has my"
    ):
        find_scorer("my_set", {"myset": "m:exact"})


def test_use_custom_functions():
    use_custom_functions({"mine": "my_rewards:length", "math": "my_rewards:echo"})
    assert compute_score("mine", "12345", "", mode="mix")["score"] == 0.5
    assert compute_score("math", "5", "5") == {
        "score": -0.25,
        "acc": True,
        "boxed": False,
        "reason": "custom",
        "answer": "",
        "reward_extra_info": {"seen": ["math", None]},
    }
    # A later run's functions take the place of the earlier run's.
    use_custom_functions({})
    assert CUSTOM_FUNCTIONS == {}
    assert find_scorer("math") == (VERIFIERS["math"], False)


def test_signature_of_trl_is_explained(tmp_path: Path, refused):
    (tmp_path / "theirs.py").write_text("def score(completions, **kwargs):\n    return [1.0]\n")
    line = "...theirs.py:score on data_source='mine' takes completions (as in TRL; here a function scores one response,"
    with refused(f"{line} solution_str), but besides ... the record has level (TMP/theirs.py, line 1)"):
        custom_verdict(f"{tmp_path}/theirs.py:score", "mine", "1", "1", {"level": 3})


def test_further_arguments():
    use_custom_functions({"mine": "my_rewards:with_options"}, {"weight": 0.5})
    assert compute_score("mine", "123", "")["score"] == 1.5
    use_custom_functions({"mine": "my_rewards:with_options"}, {"weight": 0.5, "floor": 9})
    assert compute_score("mine", "123", "")["score"] == 9.0
    with pytest.raises(
        ConfigError, match="'ceiling'; it is called with .* reward_score.custom_kwargs, weight, ceiling"
    ):
        use_custom_functions({"mine": "my_rewards:with_options"}, {"weight": 0.5, "ceiling": 9})
    use_custom_functions({"mine": "my_rewards:with_options"})  # a column may have this name
    with pytest.raises(ConfigError, match=r"takes weight, but besides .* no column \(.*my_rewards.py, line"):
        compute_score("mine", "123", "")


def test_columns_reach_parameters_of_their_names(tmp_path: Path):
    use_custom_functions({"mine": "my_rewards:with_options"})
    rows = [{"data_source": "mine", "prompt": "1?", "answer": "1", "weight": 2, "level": 3}]
    rows.append(rows[0] | {"extra_info": {"weight": 5}})
    config = data_options(answer_key="answer", max_prompt_length=99)
    records = PromptDataset([jsonl(tmp_path / "a.jsonl", *rows)], make_tiny_tokenizer(), config).records
    # Columns without a parameter stay out, and an entry of extra_info has precedence.
    assert [record.extra_info for record in records] == [{"weight": 2}, {"weight": 5}]
    assert compute_score("mine", "123", "1", records[0].extra_info)["score"] == 6
    problems = load_benchmark("a", tmp_path, data_source="mine")
    assert [problem.extra_info for problem in problems] == [{"weight": 2}, {"weight": 5}]
    use_custom_functions({"mine": "my_rewards:with_options"}, {"weight": 0.5})
    assert compute_score("mine", "123", "1", records[0].extra_info)["score"] == 1.5


@pytest.mark.slow
def test_further_arguments_reach_the_pool():
    own = scoring(num_workers=1, custom_functions=["*=my_rewards:with_options"], custom_kwargs={"weight": 0.5})
    with VerifierPool(own) as pool:
        assert [score.score for score in pool.score_batch(["a", "b"], ["1", "12345"], ["", ""])] == [0.5, 2.5]


@pytest.mark.slow
def test_in_the_pool():
    solutions = ["hang", "7", "eat memory", "die", "recurse", "7", r"\boxed{7}"]
    sources = ["mine"] * 5 + ["elsewhere", "math"]
    with VerifierPool(config("mine=my_rewards:misbehave", "elsewhere=my_rewards:echo", mode="mix")) as pool:
        # A function gets the response alone, even where the prompt opened a thought.
        scores = pool.score_batch(sources, solutions, ["7"] * 7, None, [True] * 6 + [False])
        reasons = ["timeout", "custom", "memory", "crash", "crash", "custom", "exact"]
        assert [score.reason for score in scores] == reasons
        assert [score.score for score in scores] == [0.0, 0.75, 0.0, 0.0, 0.0, -0.25, 1.0]
        assert [score.correct for score in scores] == [False, True, False, False, False, True, True]


@pytest.mark.slow
def test_error_in_a_function_ends_the_run():
    where = r"reward_score.custom_functions: my_rewards:misbehave on data_source='any source' "
    with VerifierPool(config("*=my_rewards:misbehave")) as pool:
        for solution, info, message in (
            ("timeout", None, r"raised TimeoutError: no network \(.*/my_rewards.py, line 29\)$"),
            ("exit", None, "raised SystemExit: 3"),
            ("nan", {"returns": math.nan}, "returned nan; must"),
        ):
            # An error of the config: the run ends with this line alone.
            with pytest.raises(ConfigError, match=where + message):
                pool.score_batch(["any source"] * 2, [solution] * 2, ["7"] * 2, [info] * 2)
            assert pool.score_batch(["any source"], ["7"], ["7"])[0].score == 0.75


@pytest.mark.slow
def test_error_in_a_function_scores_0_if_asked(caplog: pytest.LogCaptureFixture):
    scores = config("*=my_rewards:misbehave")
    with VerifierPool(replace(scores, on_function_error="zero")) as pool:
        infos = [None, {"returns": math.nan}, None, None]
        found = pool.score_batch(["mine"] * 4, ["exit", "nan", "7", "timeout"], ["7"] * 4, infos)
    assert [(score.score, score.correct, score.reason) for score in found] == [
        (0.0, False, "error"),
        (0.0, False, "error"),
        (0.75, True, "custom"),
        (0.0, False, "error"),
    ]
    (warning,) = [record.message for record in caplog.records if record.name == "verl.rewards.pool"]
    assert "my_rewards:misbehave on data_source='mine' raised SystemExit: 3 (" in warning
    assert "; this and later such responses score 0" in warning


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "GeneratorExit"])
@pytest.mark.parametrize("moment", ["", " later"])
def test_interrupts_raised_by_a_function_are_its_errors(error: str, moment: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.rewards.custom.CUSTOM_KWARGS", {})
    with pytest.raises(CustomFunctionError, match=f"my_rewards:rude on data_source='mine' .*{error}"):
        custom_verdict("my_rewards:rude", "mine", error + moment, "5", None)


@pytest.mark.slow
def test_child_processes_of_a_function_are_killed(tmp_path: Path):
    folders = [tmp_path / name for name in ("hang", "die")]
    for folder in folders:
        folder.mkdir()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        with VerifierPool(config("mine=my_rewards:leave_children")) as pool:
            solutions = [folder.name for folder in folders]
            scores = pool.score_batch(["mine"] * 2, solutions, [str(folder) for folder in folders])
            # The numbers of those that ended may be given to sessions of the user's own.
            assert pool._started <= {process.pid for process in multiprocessing.active_children()}
        assert [score.reason for score in scores] == ["timeout", "crash"]
        pids = {file: int(file.read_text()) for folder in folders for file in folder.iterdir()}
        assert len(pids) == 8
        assert [file for file, pid in pids.items() if psutil.pid_exists(pid) and not is_zombie(pid)] == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def is_zombie(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
