"""TRAINING_CONFIG.md and docs/from_verl_options.md say what the code says."""

import runpy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from verl.cli.rules import FLAGS
from verl.config import PPOConfig, SFTConfig
from verl.config.evaluation import EvaluationConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "TRAINING_CONFIG.md"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))


def options(schema: Any, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    names = []
    for field in fields(schema):
        name = f"{prefix}{field.name}"
        names += options(hints[field.name], f"{name}.") if is_dataclass(hints[field.name]) else [name]
    return names


@pytest.mark.parametrize("name", ["make_training_config", "make_from_verl"])
def test_pages_are_current_and_a_stale_one_is_told(name: str, tmp_path: Path, monkeypatch, capsys):
    main, page = script(name)["main"], script(name)["PAGE"].read_text()
    assert main(["--check"]) == 0, capsys.readouterr().err
    stale = tmp_path / "page.md"
    old = page.replace("`data.val_sample_size`", "`data.other`")
    stale.write_text(old)
    monkeypatch.setitem(main.__globals__, "PAGE", stale)
    assert main(["--check"]) == 1
    assert f"run: python scripts/{name}.py" in capsys.readouterr().err
    assert stale.read_text() == old
    assert main([]) == 0
    assert stale.read_text() == page


def test_every_option_flag_and_experiment_has_a_row():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    known = {row[0].removeprefix("| ").strip("`") for row in rows}
    expected = {*options(PPOConfig), *options(SFTConfig), *options(EvaluationConfig), *(f"--{name}" for name in FLAGS)}
    expected |= {f"experiment={path.stem}" for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    expected |= {f"evaluation={path.stem}" for path in (ROOT / "configs" / "evaluation").glob("*.yaml")}
    assert expected <= known, sorted(expected - known)
    assert all(row[-1].removesuffix("|").strip() for row in rows), "a row without a meaning"


def test_docstrings_survive_a_table_cell():
    markdown = script("make_training_config")["markdown"]
    assert markdown("``a``: |A| / kappa\n    or ``b|c``.") == "`a`: \\|A\\| / kappa or `b\\|c`."
    assert markdown('("<name> diff") of ``<code>``') == '("\\<name> diff") of `<code>`'
