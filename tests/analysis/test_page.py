"""Figures, the page of an analysis, in a browser too, and everything that is published."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from tests.analysis.example_tables import analysis_config, tables
from tests.chromium import value
from tests.evaluation.example_results import HOSTILE
from verl.analysis.drawing import write_figures
from verl.analysis.figures import scatter_figure
from verl.analysis.publish import publish
from verl.run.display import RunDisplay
from verl.utils.portable import valid_unicode
from verl_pages.analysis import build_page

PAIRS = (
    "analysis.response_pairs=[[Effective Rank,avg_log_probs]]",
    "analysis.prompt_pairs=[[exploration_token_jsd,correctness_avg]]",
)


@pytest.mark.slow
def test_the_page_in_a_browser(chromium, tmp_path: Path):
    # Names of prompt files and of data are anyone's; here they are in every place that has a text.
    *_, correlations = tables(analysis_config())
    texts = [valid_unicode(text) for text in HOSTILE.values()]
    rows = [correlations.iloc[[0]].assign(run=text, benchmark=text, x=text, y=text) for text in texts]
    figures = write_figures(tmp_path, iter([("a\"'<b>&", Figure(), texts[0])]))
    page = build_page(texts[0], texts, tmp_path, figures, pd.concat(rows))
    said = chromium(
        page,
        [
            value("[...document.querySelectorAll('tbody td:first-child')].map((e) => e.textContent)"),
            value("[...document.querySelectorAll('main > p')].map((e) => e.textContent)"),
            value("document.querySelectorAll('script, iframe, img:not(figure img), b, i, svg').length"),
            value("[...document.images].map((e) => e.complete && e.naturalWidth > 0)"),
            value("document.documentElement.scrollWidth <= window.innerWidth"),
            value("document.title"),
        ],
    )
    cells, lines, elements, images, fits, title = said["values"]
    as_read = [text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "") for text in texts]
    assert said["loaded"] and said["console"] == [] and said["requests"] == []
    assert cells == as_read and lines == as_read and title == " ".join(as_read[0].split())
    assert elements == 0 and images == [True] and fits


@pytest.mark.slow
def test_what_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = analysis_config(
        *PAIRS, "calculator.diff_stride=8", "analysis.draws=20", "trainer.logger=[console,tensorboard]"
    )
    responses, prompts, courses, _ = tables(config)
    responses = responses.assign(**{"Effective Rank diff 2": [0.0] * 12 + [1.0] * 36})
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "old.svg").write_text("")
    with RunDisplay("", 0, {}) as display:
        display.errors.append("a@9: gone")
        publish(tmp_path, config, display, responses, prompts, courses)
    files = {path.name for path in tmp_path.iterdir()}
    expected = {
        *"index.html analysis.xlsx config.yaml start.json metrics.jsonl summary.json tensorboard figures".split()
    }
    tables_written = ("responses", "prompts", "courses", "correlations", "early")
    assert files == expected | {f"{name}.parquet" for name in tables_written}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["figures"]) == ["a<b@0", "a<b@5"] and summary["failed"] == ["a@9: gone"]
    first = summary["figures"]["a<b@0"]["sums"]
    # Ranks 20 to 31 and 20, 22, ... 42; the prompts' divergence is set to 0, 0.1, ... 1.1.
    assert first["Effective Rank"] == pytest.approx((25.5 + 31) / 2) and first["correctness"] == 0.5
    assert first["exploration_token_jsd"] == pytest.approx(0.55) and "correctness_avg" not in first
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [0, 5]
    assert logged[0]["a<b/sums/Effective Rank"] == first["Effective Rank"]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["analysis"]["draws"] == 20
    kinds = ("scatter_responses", "scatter_prompts", "correctness", "along", "early", "layers")
    one = [f"{kind}_a%3Cb@{{}}_sums_T1" for kind in kinds]
    names = [*(name.format(step) for step in (0, 5) for name in one), "checkpoints"]
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {f"{name}.{end}" for name in names for end in ("svg", "png")}
    row = pd.read_parquet(tmp_path / "correlations.parquet").iloc[0]
    interval = f"[{row['pearson_low']:.2f}, {row['pearson_high']:.2f}]"
    scatter = (tmp_path / "figures" / f"{names[0]}.svg").read_text()
    assert f"r = {row['pearson']:.2f} {interval}" in scatter
    assert "ER  (exploration)" in scatter and "correct responses" in scatter
    # Responses are equal up to 8 tokens; after 16 the wrong ones have the higher rank.
    early = pd.read_parquet(tmp_path / "early.parquet").query("step == 5 and metric == 'Effective Rank'")
    assert early[early["by"] == "position"].set_index("at")["within"].to_dict() == {8: 0.5, 16: 0.0}
    assert "pairs within a prompt, by position" in (tmp_path / "figures" / f"{one[4].format(5)}.svg").read_text()
    page = (tmp_path / "index.html").read_text()
    assert page.count("<img ") == 13 and "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "a&lt;b@0 on sums" in page and "a<b" not in page and f"{row['pearson']:.2f}<br>{interval}" in page
    assert "25% of the responses have fewer than three prefixes" in page
    assert "warning: 25% of the responses have fewer than three prefixes" in " ".join(capsys.readouterr().out.split())


def test_histograms_share_bins():
    responses, _, _, correlations = tables(analysis_config())
    figure = scatter_figure(responses, [("Effective Rank", "avg_log_probs")], correlations, "correctness", "t")
    top = figure.subfigs[0].axes[1]
    first, second = ([bar.get_x() for bar in container] for container in top.containers)
    assert first == second and len(first) == 24
