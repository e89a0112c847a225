import pytest

from verl.run.display import RunDisplay, share_rows


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a log file or a CI job sees; these variables would make Rich treat it as a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_each_step_is_one_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    columns = {"reward": ("score/mean", "+.2f"), "pass@1": ("train/pass@1", ".0%"), "val": ("val/pass@1", ".1%")}
    with RunDisplay("run", 2, columns) as display:
        display.phase("generate")
        display.step(1, {"score/mean": 0.125, "train/pass@1": 0.5, "other": 3.0})
        # What a step does not measure keeps its last value.
        display.step(2, {"score/mean": -1.0, "val/pass@1": 0.25})
    assert capsys.readouterr().out.splitlines() == [
        "step 1/2  reward +0.12  pass@1 50%",
        "step 2/2  reward -1.00  pass@1 50%  val 25.0%",
    ]


def test_a_long_line_is_not_broken(capsys: pytest.CaptureFixture[str]):
    columns = {f"column{i}": (f"metric{i}", ".4f") for i in range(10)}
    with RunDisplay("run", 1, columns) as display:
        display.step(1, {f"metric{i}": 1.0 for i in range(10)})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 1/1  column0 1.0000  ") and line.endswith("  column9 1.0000")


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    RunDisplay("run", 1, {}).say("into outputs/[red]/run")
    assert capsys.readouterr().out == "into outputs/[red]/run\n"


def test_tables_show_every_cell(capsys: pytest.CaptureFixture[str]):
    RunDisplay("run", 1, {}).table("Validation", ["", "step 0"], [["pass@1", "12.5%"]])
    output = capsys.readouterr().out
    assert all(text in output for text in ("Validation", "step 0", "pass@1", "12.5%"))


def test_shares_of_time_are_sorted():
    assert share_rows({"update": 1.0, "generate": 2.96, "save": 0.04}) == [
        ["generate", "3.0 s", "74%"],
        ["update", "1.0 s", "25%"],
        ["save", "0.0 s", "1%"],
    ]


def test_no_time_at_all_has_no_shares():
    assert share_rows({}) == []
    assert share_rows({"save": 0.0}) == [["save", "0.0 s", "0%"]]
