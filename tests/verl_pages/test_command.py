"""``verl-report``: what it writes, and what it says of mistakes."""

import json
import re
import resource
import sys
from pathlib import Path

import psutil
import pytest

from tests.verl_pages.example_runs import write_run
from verl_pages import command
from verl_pages.command import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["verl-report", *map(str, arguments)])
    main()


def test_one_run_gets_its_page_and_several_get_one_here(tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    (runs[0] / "samples" / "val_000002.parquet").write_text("damaged")
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, runs[0])
    said = capsys.readouterr()
    assert said.out == f"page: {runs[0]}/report.html\n" and (runs[0] / "report.html").stat().st_size > 30_000
    assert said.err.startswith(f"warning: {runs[0]}/samples/val_000002.parquet: cannot be read (")
    run(monkeypatch, *runs)
    assert (
        capsys.readouterr().out == "page: report.html\n" and "<title>2 runs</title>" in Path("report.html").read_text()
    )
    run(monkeypatch, runs[1], "--out", tmp_path / "own.html")
    assert "<title>Run: b</title>" in (tmp_path / "own.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "error: nothing: not a run folder; it has no metrics.jsonl, no config.yaml and no samples"),
        (["a", "--serve"], "error: --serve is gone: open RUN/report.html, which follows a run that trains"),
        (
            ["a", "--out", "no/such/page.html"],
            "error: no/such/page.html: cannot be written (No such file",
        ),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, arguments, message):
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert str(stopped.value).startswith(message)


def test_runs_are_listed_with_the_newest_first(tmp_path, monkeypatch, capsys):
    started = {"old": None, "a": "2026-01-02T03:04:05+00:00", "b": "2026-01-03T00:00:00+00:00"}
    for name, time in started.items():
        folder = write_run(tmp_path / name)
        if time:
            (folder / "start.json").write_text(json.dumps({"started": time}))
    (folder / "summary.json").write_text('{"step": 6}')
    run(monkeypatch, tmp_path, "--list")
    header, *rows = (re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    assert header == ["started", "experiment", "steps", "score", "validation pass@1", "folder"]
    first = ["b", "6", "0.544", "50.0% to 57.4%", str(tmp_path / "b")]
    assert rows[0] == ["2026-01-03 00:00", *first] and rows[1][:3] == ["2026-01-02 03:04", "a", "6 of 6"]
    assert rows[2][:2] == ["-", "old"]
    # One validation is no change.
    write_run(tmp_path / "short", steps=1)
    run(monkeypatch, tmp_path / "short", "--list")
    assert "  50.0%  " in capsys.readouterr().out


def test_folders_that_unpack_to_any_size_are_read_within_a_limit(tmp_path, monkeypatch, capsys):
    before = resource.getrlimit(resource.RLIMIT_DATA)

    def write(folders: list[Path], out: Path) -> list[str]:
        # Beside what this process holds already, which is much after other tests.
        held = psutil.Process().memory_info().data
        assert abs(resource.getrlimit(resource.RLIMIT_DATA)[0] - held - (4 << 30)) < 64 << 20
        raise MemoryError

    monkeypatch.setattr(command, "write_page", write)
    with pytest.raises(SystemExit, match="error: the page needs more than 4 GiB; name fewer runs"):
        run(monkeypatch, tmp_path)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
