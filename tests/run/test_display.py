import re
from io import StringIO

import pytest

from verl.run.display import RunDisplay, sampling_display, share_rows


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a log file or a CI job; these variables would make Rich treat it as a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_terminal_each_step_is_one_line(capsys: pytest.CaptureFixture[str]):
    columns = {"reward": ("score/mean", "+.2f"), "pass@1": ("train/pass@1", ".0%"), "val": ("val/pass@1", ".1%")}
    columns |= {f"column{i}": (f"metric{i}", ".4f") for i in range(10)}
    with RunDisplay("run", 3, columns) as display:
        display.phase("generate")
        display.step(1, {"score/mean": 0.125, "train/pass@1": 0.5, "other": 3.0})
        # A line has what its step measured; the bar keeps the last validation.
        display.step(2, {"score/mean": -1.0, "val/pass@1": 0.25})
        display.step(3, {f"metric{i}": 1.0 for i in range(10)})
    first, second, long = capsys.readouterr().out.splitlines()
    assert first == "step 1/3  reward +0.12  pass@1 50%"
    assert second == "step 2/3  reward -1.00  val 25.0%"
    assert long.startswith("step 3/3  column0 1.0000  ") and long.endswith("  column9 1.0000")
    # An attempt after a restart shows its own figures alone.
    display.begin(1)
    display.step(2, {"score/mean": 0.5}, "no update")
    assert capsys.readouterr().out == "step 2/3  reward +0.50  no update\n"


def test_first_step_and_slow_steps_show_phases(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("verl.run.display.time.monotonic", lambda: now)
    display = RunDisplay("run", 9, {})
    display.begin(4)
    for step, seconds in ((5, 1.0), (6, 50.0), (7, 70.0)):
        for name in ("gen", "reward", "gen"):
            display.phase(name)
        now += seconds
        display.phase("update_actor")
        display.step(step, {})
    assert capsys.readouterr().out.splitlines() == [
        *("step 5: sampling", "step 5: updating the policy", "step 5/9  "),
        "step 6/9  ",
        *("step 7: updating the policy", "step 7/9  "),
    ]


def test_lines_of_an_evaluation_have_a_distance(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("verl.run.display.time.monotonic", lambda: now)
    with sampling_display("evaluation", "samples") as display:
        display.begin(0, description="run@0", total=4)
        for step in range(1, 5):
            now += 8
            display.step(step, {"problems": step, "tokens_per_s": 10.4, "seconds_left": 0.0})
    lines = [f"sample {step}/4  problems {step}  tok/s 10  seconds left 0" for step in (2, 4)]
    assert capsys.readouterr().out.splitlines() == lines  # the last one is always printed


def test_forced_colours_make_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    # As in notebooks and continuous integration, where every redrawn line would stay.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunDisplay("run", 3, {}) as display:
        for stage in ("starting Ray", "loading the model on 2 workers"):
            display.stage(stage)
        display.step(1, {})
    assert capsys.readouterr().out == "starting Ray\nloading the model on 2 workers\nstep 1/3  \n"


def test_terminal_shows_a_spinner_until_the_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    display = RunDisplay("run", 3, {"val": ("val/pass@1", ".1%")})
    display.console.file = shown = StringIO()
    display.stage("joining [/b] the cluster")  # no markup
    display.stage("starting vllm on 2 workers")
    display.say("a warning")
    with display:
        display.stage("step 0: validating")
        display.step(1, {"val/pass@1": 0.25})
        display.step(2, {})
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert "starting vllm on 2 workers" in lines and "a warning\n" in lines
    assert lines.rindex("starting vllm") < lines.index("step 0: validating")
    assert lines.index("2/3") < lines.rindex("val 25.0%")


def test_a_response_cannot_look_like_a_line_of_the_run(capsys: pytest.CaptureFixture[str]):
    display = RunDisplay("run", 1, {})
    display.sample({"answer": "1\nstep 9/9  reward +1.00", "reason": "x" * 1000}, "What?", "a:b:c\nstep 9/9\x1b[2J")
    facts, *texts = capsys.readouterr().out.splitlines()
    assert facts.startswith("answer 1\\nstep 9/9  reward +1.00 | reason xxx") and len(facts) < 300
    display.say("data.a: was \x1b]0;x\x07")
    assert capsys.readouterr().out == "data.a: was \\x1b]0;x\\x07\n"
    # A name between colons stays what it is.
    assert texts == ["    What?", "    > a:b:c", "    step 9/9\\x1b[2J"]


def test_shares_of_time_are_sorted():
    rows = [["generate", "3.0 s", "74%"], ["update", "1.0 s", "25%"], ["save", "0.0 s", "1%"]]
    assert share_rows({"update": 1.0, "generate": 2.96, "save": 0.04}) == rows
    assert share_rows({"save": 0.0}) == [["save", "0.0 s", "0%"]]
