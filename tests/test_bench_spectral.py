"""scripts/bench_spectral.py: every shape asked for is in its results, run or not. No time is asserted."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

BENCH = SimpleNamespace(**runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "bench_spectral.py")))
# On a busy machine it would wait seconds before every shape.
BENCH.main.__globals__["settle"] = lambda device: None

METHODS = ["nested", "eigvalsh", "float32_loop", "svd"]
SHAPES = [(batch, rows, 8) for rows in (16, 24) for batch in (1, 2)]
TINY = [
    "--batch",
    "2",
    "1",
    "--rows",
    "24",
    "16",
    "--width",
    "8",
    "--strides",
    "4",
    "--device",
    "cpu",
    "--repeats",
    "1",
]


def run(out: Path, *args: str) -> tuple[dict[str, Any], list[list[str]]]:
    """The JSON file of a run, and the cells of each row of the page's tables, head rows left out."""
    BENCH.main(["--out", str(out), *TINY, *args])
    rows = [line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return json.loads(out.with_suffix(".json").read_text()), [row for row in cells if row[0].isdigit()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[str]]]:
    return run(tmp_path_factory.mktemp("bench") / "sub" / "spectral", "--limit", "60")


def shape_of(record: dict[str, Any]) -> tuple[int, int, int]:
    return record["batch"], record["rows"], record["width"]


def test_every_shape_is_measured_by_every_method(results):
    content, _ = results
    assert [shape_of(record) for record in content["records"]] == SHAPES
    for record in content["records"]:
        assert (record["stride"], record["prefixes"]) == (4, (record["rows"] - 1) // 4)
        assert list(record["methods"]) == METHODS
        for result in record["methods"].values():
            assert (result["status"], result["runs"]) == ("measured", 1)
            assert result["seconds"] > 0
        assert "values" not in record["methods"]["nested"]


def test_ratios_are_those_of_the_times(results):
    content, _ = results
    for record in content["records"]:
        seconds = {name: result["seconds"] for name, result in record["methods"].items()}
        assert record["loop_over_nested"] == pytest.approx(seconds["float32_loop"] / seconds["nested"])
        assert record["eigvalsh_over_nested"] == pytest.approx(seconds["eigvalsh"] / seconds["nested"])
        operations = record["batch"] * (
            content["metadata"]["nodes"] * record["rows"] ** 3 / 3 + 16 * record["rows"] ** 2
        )
        floor = operations / content["metadata"]["operations_per_s"]
        assert record["nested_over_floor"] == pytest.approx(seconds["nested"] / floor)


def test_errors_are_against_the_svd_of_single_responses(results):
    content, _ = results
    for record in content["records"]:
        errors = {name: result["max_relative_error"] for name, result in record["methods"].items()}
        if record["batch"] > 1:
            assert set(errors.values()) == {None}
        else:
            assert errors["svd"] == 0
            assert 0 < errors["nested"] < 1e-6
            assert errors["eigvalsh"] < 1e-10
            assert 0 < errors["float32_loop"] < 0.1


def test_the_page_has_a_row_for_every_shape(results):
    content, rows = results
    assert [tuple(int(cell) for cell in row[:3]) for row in rows] == SHAPES
    for row, record in zip(rows, content["records"], strict=True):
        assert len(row) == 13
        assert row[10] == record["auto"]
        assert record["auto"] in ("nested", "eigh")
        assert float(row[3].replace(",", "")) == pytest.approx(1e3 * record["methods"]["nested"]["seconds"], rel=0.01)


def test_what_is_over_the_limit_stays_in_the_tables(tmp_path: Path):
    content, rows = run(tmp_path / "spectral", "--limit", "1e-9")
    assert [shape_of(record) for record in content["records"]] == SHAPES
    first, *others = content["records"]
    assert {result["status"] for result in first["methods"].values()} == {"measured"}
    for record in others:
        for result in record["methods"].values():
            assert (result["status"], result["seconds"]) == ("> limit", None)
            assert result["estimate_s"] > 1e-9
            assert result["basis"].startswith(("linear in B", "T^"))
        assert record["loop_over_nested"] is None
    assert [row[3:7] for row in rows[1:]] == [["> limit"] * 4] * 3
    assert "`> limit` was not run" in (tmp_path / "spectral.md").read_text()


def test_what_does_not_fit_stays_in_the_tables(tmp_path: Path):
    _, rows = run(tmp_path / "spectral", "--memory-gib", "0.001")
    assert [row[3:7] for row in rows] == [["> memory"] * 4] * 4


def test_the_first_measurement_is_small_whatever_was_asked_for():
    args = BENCH.parse(["--batch", "64", "--rows", "4096", "--width", "8", "--strides", "40"])
    assert list(BENCH.shapes(args)) == [((1, 128, 8), False), ((64, 4096, 8), True)]
    args = BENCH.parse(["--batch", "1", "2", "--rows", "64", "--width", "8", "--strides", "40"])
    assert list(BENCH.shapes(args)) == [((1, 64, 8), True), ((2, 64, 8), True)]


def test_estimates():
    estimator = BENCH.Estimator()
    assert estimator.predict("svd", BENCH.Shape(1, 128, 64), 40) is None
    for name in ("nested", "svd"):
        estimator.add(name, BENCH.Shape(1, 128, 64), 40, 0.1)
        estimator.add(name, BENCH.Shape(16, 128, 64), 40, 0.8)
        assert estimator.predict(name, BENCH.Shape(64, 128, 64), 40).seconds == pytest.approx(3.2)
    assert estimator.predict("nested", BENCH.Shape(2, 256, 64), 40).seconds == pytest.approx(1.6)
    assert estimator.predict("svd", BENCH.Shape(2, 256, 64), 40).seconds == pytest.approx(3.2)
    assert estimator.predict("svd", BENCH.Shape(1, 128, 64), 8) is None


def test_an_estimate_from_one_prefix():
    bench = BENCH.Bench(BENCH.parse(["--device", "cpu", "--rows", "41"]))
    rough = BENCH.Estimate(60.0, "T^4", True)
    refined = bench.refined("svd", BENCH.Shape(2, 41, 8), 4, rough)
    assert refined.seconds == 20 * bench.probes["svd", 41, 8].seconds
    assert refined.basis == "20 times a prefix of 26 rows"
    bench.limit_s = 2.0
    assert bench.refined("svd", BENCH.Shape(2, 41, 8), 4, rough) is rough


@pytest.mark.parametrize("rows", [12, 40])
def test_the_float32_loop_agrees_with_the_svd_on_well_conditioned_data(rows: int):
    hidden = torch.randn(2, rows, 20, generator=torch.Generator().manual_seed(0))
    lengths, prefixes = torch.full((2,), rows), torch.tensor([[5, 9, rows]] * 2)
    found = BENCH.float32_loop(hidden, lengths, prefixes)
    exact = BENCH.library("svd", hidden, lengths, prefixes)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("args", [["--strides", "16", "--rows", "16"], ["--batch", "0"], ["--repeats", "0"]])
def test_options_that_make_no_sense(args: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        BENCH.parse(args)
    assert args[0] in capsys.readouterr().err
