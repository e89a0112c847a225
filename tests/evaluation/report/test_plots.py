import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.image
import pytest

from tests.evaluation.example_results import TWO_RUNS, hostile_result, result, with_metrics
from verl.evaluation.report.figures import write_figures
from verl.evaluation.report.plots import draw_plots, label_styles, pass_figure
from verl.evaluation.results import TaskResult
from verl.evaluation.statistics.summary import summarise
from verl_pages.colours import lighter


def write_plots(folder: Path, results: list[TaskResult]) -> list[str]:
    return [name for name, _ in write_figures(folder, draw_plots(summarise(results)), ("pass_at_k_", "metric_"))]


def test_every_plot_is_written_as_svg_and_png(tmp_path: Path):
    (tmp_path / "pass_at_k_gone.svg").write_text("of an earlier evaluation")
    (tmp_path / "mine.png").write_text("not ours")
    names = write_plots(tmp_path, TWO_RUNS)
    ours = ["pass_at_k_aime24", "pass_at_k_amc23", "pass_at_k_average", "pass_at_k_all", "metric_Effective_Rank"]
    assert names == ours
    files = {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert {path.name for path in tmp_path.iterdir()} == files | {"mine.png"}
    for name in names:
        texts = "".join(ET.parse(tmp_path / f"{name}.svg").getroot().itertext())
        assert "grpo@300" in texts or "metric" in name
        height, width = matplotlib.image.imread(tmp_path / f"{name}.png").shape[:2]
        assert width > 900 and height > 300
    # Little to plot.
    few = [[], [result(["", ""])], [result(["c"])]]
    assert [len(write_plots(tmp_path, results)) for results in few] == [0, 0, 1]


def test_k_is_on_a_scale_of_doublings():
    axes = pass_figure(summarise(TWO_RUNS), "aime24").axes[0]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]
    assert len(axes.collections) == 2  # a band for each run
    assert [line.get_label() for line in axes.lines] == ["grpo@0", "grpo@300"]
    assert axes.lines[0].get_ydata()[0] == pytest.approx(5 / 12)


def test_steps_of_a_run_share_a_colour_that_deepens():
    styles = label_styles(["a@0", "a@10", "a@20", "b@20", "c@d@5 T=0.6", "no step"])
    assert styles["a@20"]["color"] == "#0072b2"
    assert styles["a@10"]["color"] == lighter("#0072b2", 0.275)
    assert styles["a@0"]["linestyle"] != "-" and styles["a@20"]["linestyle"] == "-"
    assert styles["a@20"]["marker"] != styles["b@20"]["marker"]
    assert len({style["color"] for style in styles.values()}) == 6


def test_hostile_names_are_drawn_as_text(tmp_path: Path):
    results = [with_metrics(hostile_result("$x_{$ <b>\x00"), {"a/../b $": [1.0] * 14})]
    assert write_plots(tmp_path, results) == ["pass_at_k_%3C%2Fscript%3Ebench%7Cmark", "metric_a%2F..%2Fb_%24"]
