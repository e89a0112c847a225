"""Training, evaluation and scores from Python."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from conftest import small_overrides

import verl
from verl import api

CALLED = {
    "fails": "import sys; print('error: a=1: is wrong', file=sys.stderr); print('to resume, ...'); sys.exit(75)",
    "breaks": "print('step 1'); 1 / 0",
    "waits": """
import time
try:
    print("begun")
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted; checkpoints are kept")
    raise SystemExit(130)
""",
}


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in place of entry points."""
    for name, code in CALLED.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "message", "code"),
    [("fails", "a=1: is wrong", 75), ("breaks", "ZeroDivisionError: division by zero", 1)],
)
def test_failure_is_an_exception_with_its_reason(module: str, message: str, code: int, called, capfd):
    with pytest.raises(verl.RunError, match=f"^{message}$") as error:
        api._call(module, [])
    assert error.value.code == code
    printed = capfd.readouterr().out
    assert printed == "error: a=1: is wrong\nto resume, ...\n" if module == "fails" else "step 1\n" in printed


@pytest.mark.slow
def test_interrupt_ends_the_run_as_ctrl_c_does(called, capfd):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it

    def interrupt() -> None:
        while "begun" not in seen():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    printed: list[str] = []

    def seen() -> str:
        printed.append(capfd.readouterr().out)
        return "".join(printed)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            api._call("waits", [])
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert seen() == "begun\ninterrupted; checkpoints are kept\n"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verl.train("rollout.n=8"), "overrides='rollout.n=8': must be a list of strings, such as"),
        (lambda: verl.train(["rollout.n=no"]), "rollout.n='no': must be an integer"),
        (lambda: verl.train(["--cfg", "job"]), "overrides='--cfg': is a flag of the command line"),
        (lambda: verl.train(["--wrong", "1"]), "--wrong: unknown flag"),
        (lambda: verl.evaluate(["n_sampling=0"]), "n_sampling=0: must be greater than 0"),
        (lambda: verl.score("mine", "42", "42"), "data_source='mine': must be one of"),
        (lambda: verl.score("gsm8k", "42", ""), "reward_model.ground_truth: '': no answer"),
    ],
)
def test_mistakes_are_config_errors(call, message: str):
    with pytest.raises(verl.ConfigError) as error:
        call()
    assert str(error.value).startswith(message)


def test_score_is_that_of_the_configuration():
    assert verl.score("math", "so \\boxed{1/2}", "0.5")["score"] == 1
    assert verl.score("math", "so 1/2", "0.5", mode="independent")["score"] == 0.5


@pytest.mark.nightly
@pytest.mark.slow
def test_training_and_an_evaluation(tiny_model, arithmetic_prompts, tmp_path):
    run = verl.train([*small_overrides(tiny_model, arithmetic_prompts, tmp_path / "run"), "trainer.save_hf_model=true"])
    assert list(run.metrics.index)[-2:] == [1, 2] and run.metrics.loc[2, "train/pass@1"] >= 0
    assert run.summary["steps"] == 2 and len(run.samples) > 0
    assert run.model == tmp_path / "run" / "global_step_2" / "actor" / "huggingface"
    options = [f"runs_dir={tmp_path / 'out'}", "evaluation=embedded", f"model.path={run.model}", "n_sampling=1"]
    options += ["data.max_problems=2", "model.max_response_length=16", "trainer.n_gpus_per_node=1", "temperatures=[1]"]
    evaluation = verl.evaluate(options)
    assert evaluation.page.is_file() and list(evaluation.metrics["benchmark"].unique())[0] == "arithmetic"


def test_names_of_other_libraries_are_answered():
    with pytest.raises(ImportError, match=r"^verl has no GRPOTrainer: verl\.train\(\.\.\.\) and "):
        exec("from verl import GRPOTrainer")
    with pytest.raises(AttributeError, match=r"has no attribute 'evalute'; did you mean 'evaluate'\?$"):
        _ = verl.evalute
    assert not hasattr(verl, "nothing_of_the_kind")
