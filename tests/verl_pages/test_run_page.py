"""The page of runs: what is on it, that text of models is inert, and that it works in a browser."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.chromium import PageText, choose, press, shows, until, value
from tests.evaluation.example_results import HOSTILE
from tests.verl_pages.example_runs import ER, metrics_of, of_tokens, response, write_metrics, write_run, write_samples
from verl.config.errors import ConfigError
from verl.utils.portable import valid_unicode
from verl_pages.names import metric_name
from verl_pages.options import differences, run_names
from verl_pages.run import make_page, read_runs
from verl_pages.run_folder import RunFolder, read_run
from verl_pages.sample_files import gather_samples
from verl_pages.samples import listed

COUNT = "document.getElementById('count').textContent"
HEADING = "document.querySelector('#detail h3').textContent"
TEXTS = "[...document.querySelectorAll('.response')].map((e) => e.textContent)"
TIP = "document.getElementById('tip').innerText.split('\\n')"
DRAWN = until("document.querySelectorAll('section:not(#others) .panel.waiting:not([hidden])').length === 0")


class Page(PageText):
    """The page of runs."""

    def __init__(self, *folders: Path, **options: Any) -> None:
        text, self.troubles = make_page(folders, **options)
        super().__init__(text)

    def panel(self, title: str) -> Any:
        (panel,) = (panel for panel in self.index["panels"] if panel["title"] == title)
        return panel

    def curves(self, title: str) -> Any:
        """By series and run: steps and values."""
        return self.chunk(self.panel(title)["chunk"])[self.panel(title)["place"]]

    def options(self) -> Any:
        return self.chunk(self.index["options"])


@pytest.mark.parametrize(
    ("seconds", "engines", "trainer"),
    [
        # Taking turns: sampling, learning, validation.
        ({"step": 10, "gen": 6, "update_actor": 3, "testing": 1}, [(0, 6), (9, 10)], [(6, 9)]),
        # Engines of their own sample the next step meanwhile; the trainer waits for them, or they for it.
        ({"step": 10, "gen": 10, "update_actor": 7, "trainer_wait": 3, "engine_wait": 0}, [(0, 10)], [(0, 7)]),
        ({"step": 10, "gen": 4, "update_actor": 10, "trainer_wait": 0, "engine_wait": 6}, [(0, 4)], [(0, 10)]),
        # The last one's responses are there when it begins.
        ({"step": 10, "update_actor": 6, "testing": 4, "gen": 0}, [(6, 10)], [(0, 6)]),
        # In the first step also that step itself, before the trainer begins.
        ({"step": 10, "gen": 9, "update_actor": 6, "trainer_wait": 0, "engine_wait": 0}, [(0, 9)], [(4, 10)]),
    ],
)
def test_who_was_busy_in_a_step(tmp_path: Path, seconds, engines, trainer):
    write_metrics(tmp_path, [{"step": 3} | {f"timing_s/{name}": value for name, value in seconds.items()}])
    (shown,) = Page(tmp_path).index["timelines"]
    assert shown["steps"] == [[3, 10, *([list(span) for span in spans] for spans in (engines, trainer))]]
    assert shown["busy"] == [sum(stop - start for start, stop in spans) / 10 for spans in (engines, trainer)]


def test_the_page_has_curves_options_times_and_samples(tmp_path: Path):
    page = Page(write_run(tmp_path / "grpo"))
    assert page.troubles == [] and page.scripts["data"].isascii()
    training, validation = page.curves("Correct responses, pass@1")
    assert training[0][0] == [1, 2, 3, 4, 5, 6] and validation[0] == [[0, 2, 4, 6], [0.5, 0.524979, 0.549834, 0.574443]]
    sections = {panel["section"] for panel in page.index["panels"]}
    assert sections == {"learning", "sources", "rank", "shaping", "updates", "speed", "others"}
    ranks = [p for p in page.index["panels"] if p["title"] == "ER, effective rank, training"]
    assert [(p["layer"], p["series"]) for p in ranks] == [("layer_1", ["correct", "incorrect"]), ("layer_2", ["all"])]
    assert page.panel("gsm8k: pass@1")["percent"] and page.panel("Seconds by phase")["series"] == [
        "gen",
        "update_actor",
    ]
    assert page.index["phases"] == [{"gen": 12.0, "update_actor": 6.0}]
    assert ["actor.optim.lr", 0, ["0.0001"]] in page.options()
    # advantages of uid 0, 1, 2, 3 change by 0, 10, 20 and 0 %: steps 2, 4 and 6
    shares = page.curves("Responses by the change of their advantage")
    assert [curve[0] for curve in shares] == [[[2, 4, 6], [share] * 3] for share in (0.5, 0.0, 0.5, 0.0, 0.0)]
    assert page.index["samples"]["prompts"] == 8
    (place,) = (place for place, entry in enumerate(page.entries) if entry[:2] == ["val", 1])
    assert page.entries[place][4] == [[0, 0, "w", 0], [0, 2, "c", 0], [0, 4, "c", 0], [0, 6, "c", 0]]
    first, second = (responses[0] for responses in page.record(place)["cells"][:2])
    assert first["text"] == ["After 0 steps it is \\boxed{8}.", ""]
    assert page.index["samples"]["figures"][0] == "score" and second["figures"][0] == 1.0


def test_seeds_are_together_and_options_that_differ_are_marked(tmp_path: Path):
    runs = [write_run(tmp_path / f"grpo_s{seed}", seed=seed) for seed in (0, 1)]
    page = Page(*runs, write_run(tmp_path / "other", lr=1.0))
    assert [run["group"] for run in page.index["runs"]] == [0, 0, 1]
    assert [group["name"] for group in page.index["groups"]] == ["grpo_s0 (2 runs)", "other"]
    assert ["actor.optim.lr", 1, ["0.0001", "0.0001", "1.0"]] in page.options()
    assert ["trainer.total_training_steps", 0, ["6"]] in page.options()


def test_metrics_have_one_name():
    names = {
        "Effective Rank diff 2": "ERA",
        "layer_2/Effective Rank": "ER, layer 2",
        "Curvature diff": "velocity of Curvature",
        "avg_log_probs": "log-probability, mean",
        "avg_log_probs_avg": "log-probability, mean, of prompts",
        "correctness_avg": "share correct",
        "my/own": "my/own",
    }
    assert {name: metric_name(name) for name in names} == names


def test_runs_are_called_by_their_experiment_and_by_what_differs():
    def run(folder: str, experiment: str, lr: str) -> RunFolder:
        options = {"trainer.experiment_name": json.dumps(experiment), "actor.optim.lr": lr, "seed": "0"}
        return RunFolder(Path(folder), folder, options=options)

    runs = [run("2026-01-01", "grpo", "0.1"), run("2026-01-02", "grpo", "0.2"), run("2026-01-03", "ppo", "0.1")]
    assert run_names(runs) == ["grpo, optim.lr=0.1", "grpo, optim.lr=0.2", "ppo"]
    assert differences(runs) == [["optim.lr=0.1"], ["optim.lr=0.2"], ["optim.lr=0.1"]]
    # Nothing but the folder differs, or nothing is known.
    assert run_names([runs[0], replace(runs[0], name="2026-01-02")]) == ["grpo 2026-01-01", "grpo 2026-01-02"]
    assert run_names([RunFolder(Path("a"), "a"), runs[2]]) == ["a", "ppo"]


def test_curves_of_many_steps_are_thinned_without_losing_peaks(tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    write_metrics(folder, [{"step": step, "my/own": 1e3 if step == 4321 else 0.0} for step in range(10_001)])
    page = Page(folder)
    steps, means, lows, highs = page.curves("my/own")[0][0]
    # 26 steps a point
    assert len(steps) == 385 and steps[:2] == [12.5, 38.5]
    assert max(highs) == 1e3 and max(means) == pytest.approx(1e3 / 26, rel=1e-5) and max(lows) == 0
    assert page.index["samples"]["limits"] == ""


def test_what_is_damaged_costs_itself_and_a_line(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[2:2] = ['{"step": 1', '{"step": true, "x": 1}', "[" * 100_000, '{"step": 2e9}', '"text"']
    numbers = '"actor/entropy": null, "my/own": 1e999, "train/pass@1": "high", "score/mean": ' + "9" * 400
    lines += [f'{{"step": 7, {numbers}}}']
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 8, "my/o']))
    (folder / "config.yaml").write_text("a: &a [x\nb: {")
    (folder / "summary.json").write_text("[" * 100_000)
    (folder / "samples" / "train_000004.parquet").write_bytes(b"PAR1 nothing")
    cut = folder / "samples" / "val_000004.parquet"
    cut.write_bytes(cut.read_bytes()[:900])
    os.mkfifo(folder / "samples" / "val_000008.parquet")
    write_samples(folder, "val", 6, [{"uid": "one", "prompt": 3, "response": None, "correct": "yes"}])
    page = Page(folder)
    assert [line.removeprefix(f"{folder}/").partition(" (")[0].partition(": while")[0] for line in page.troubles] == [
        "config.yaml: is damaged",
        "summary.json: is damaged, not used",
        "metrics.jsonl: 6 damaged lines left out",
        "samples/train_000004.parquet: cannot be read",
        "samples/val_000004.parquet: cannot be read",
        "samples/val_000006.parquet: cannot be read",
        "samples: 1 more files cannot be read",
    ]
    assert page.curves("my/own")[0][0][0] == [1, 2, 3, 4, 5, 6] and page.panel("my/own")["nonfinite"] == 1
    assert [cell[1] for cell in page.entries[0][4]] in ([0, 2], [2, 6])


def test_options_are_cut_or_refused_and_samples_need_no_metrics(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "config.yaml").write_text("\n".join(f"x{i}: 1" for i in range(6000)))
    page = Page(folder)
    assert any("more than 5000 options" in line for line in page.troubles) and len(page.options()) == 5000
    assert page.index["last"] == 6
    (folder / "config.yaml").write_text("a: &a {x: 1}\nb: {c: *a}\n")
    page = Page(folder)
    assert any("config.yaml: is damaged: holds an alias; the options of this run" in line for line in page.troubles)
    assert page.options() == []
    with pytest.raises(ConfigError, match="nothing: not a run folder"):
        make_page([tmp_path / "nothing"])


def hostile_run(folder: Path) -> Path:
    """A run with hostile texts, as samples are written, in every place that has a text."""
    write_run(folder, samples=False)
    texts = [valid_unicode(text) for text in HOSTILE.values()]
    everywhere = ("prompt", "response", "ground_truth", "answer", "reason", "data_source", "reward_extra_info")
    for step in (0, 1):
        rows = [response(i, step, True, **dict.fromkeys(everywhere, text)) for i, text in enumerate(texts)]
        for row, text in zip(rows, texts, strict=True):
            row.update(of_tokens([text, text], [1], [2.0]))
        write_samples(folder, "val", step, rows)
    text = "</script><script>window.broken = 1</script><img src=x onerror=alert(1)>"
    (folder / "config.yaml").write_text(json.dumps({"seed": 0, text: {text: text}}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, f"my/{text}": 1.0, f"train/{text}/pass@1": 0.5}) + "\n")
    (folder / "summary.json").write_text(json.dumps({text: text}))
    return folder


def test_hostile_text_ends_no_element(tmp_path: Path):
    page, plain = Page(hostile_run(tmp_path / "run")), Page(write_run(tmp_path / "plain"))
    assert [tag for tag in page.tags if tag != "script"] == [tag for tag in plain.tags if tag != "script"]
    page.check_inert()


def test_a_folder_stands_for_the_runs_in_it(tmp_path: Path):
    for name in ("sweep/0", "sweep/1", "later"):
        write_run(tmp_path / name, samples=False)
    evaluation = write_run(tmp_path / "evaluation", samples=False)
    (evaluation / "results.csv").touch()
    assert [run.path.name for run in read_runs([tmp_path])] == ["later", "0", "1"]
    assert [run.path.name for run in read_runs([tmp_path / "sweep"])] == ["0", "1"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: not a run folder"):
        read_runs([tmp_path / "empty"])


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6 * 7?",
        "<|start_header_id|>user<|end_header_id|><|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhat is 6 * 7?",
        "<start_of_turn>user\nWhat is 6 * 7?",
        "<|user|>What is 6 * 7?",
        "<s>[INST] What is 6 * 7?",
        "What is 6 * 7?",
    ],
)
def test_list_shows_the_last_user_message(prompt: str):
    assert listed(prompt) == "What is 6 * 7?"
    assert listed(f"{prompt}{'7' * 600}") == f"What is 6 * 7?{'7' * 486}"


def test_overview_names_the_place_of_shaping(tmp_path: Path):
    def shaping(**places: bool) -> str:
        run = write_run(tmp_path / "run", samples=False)
        (run / "config.yaml").write_text(json.dumps({"reward_manager": places}))
        return Page(run).index["runs"][0]["shaping"]

    assert shaping(add_reward=False, add_adv=True) == "of advantages"
    assert shaping(add_reward=True, add_adv=True) == "of rewards and of advantages"
    assert shaping(add_reward=False, add_adv=False) == "off"
    assert shaping() == ""


def test_page_drops_the_same_prompts_at_every_step(tmp_path: Path):
    folder = write_run(tmp_path / "run", num_prompts=200)
    run = read_run(folder, "run")
    size = sum(pq.read_metadata(folder / "samples" / file.name).row_group(0).total_byte_size for file in run.samples)
    found = gather_samples([run], size // 4)
    assert 0.24 < found.fraction < 0.26 and 60 < len(found.prompts) < 140
    assert {len(prompt.cells) for prompt in found.prompts if prompt.split == "val"} == {4}
    assert {len(prompt.cells) for prompt in found.prompts if prompt.split == "train"} == {3}
    # What rank shaping did is counted over all responses.
    assert found.shaping[0][0] == [2, 0.335, 0.0, 0.665, 0.0, 0.0]
    page = Page(folder, max_bytes=1)
    assert page.index["samples"]["prompts"] == 0 and page.curves("my/own")
    assert "it has 0 prompts, about 0%" in page.index["samples"]["limits"]


def test_tokens_and_prefixes_are_kept_for_those_that_are_shown(tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    columns = of_tokens(["<b>", " \U0001f600", *["word "] * 3000, "end"], [2, 4], [1.5, 2.5])
    short = response(1, 0, True, **of_tokens(["a"], [3], [1, 2]))
    write_samples(folder, "val", 0, [response(0, 0, True, **columns), short])
    page = Page(folder)
    first, second = sorted((page.record(place)["cells"][0][0] for place in (0, 1)), key=lambda r: r["text"][0])
    assert page.index["samples"]["prefixes"] == [["ER, layer 1", "ERV, layer 1", "ERA, layer 1"]]
    shown = first["tokens"]
    # 6,000 characters at each end: 3 + 2 + 1199 words, and 1199 words + 3
    places = shown["lengths"][:3], shown["head"], shown["skipped"], len(shown["lengths"])
    assert places == ([3, 3, 5], 1201, 602, 2401)
    assert shown["logprobs"][-1] == -0.5 * 3002 and first["left"] == 602 * 5
    assert (shown["rows"], shown["prefixes"]) == ([2, 4], [[1.5, 2.5]])
    # Two values for one prefix: neither is shown.
    assert second["tokens"]["prefixes"] == [[]]


def test_ground_truths_are_shown_as_text_not_as_json(tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    truths = {r'"\\frac{1}{2}"': r"\frac{1}{2}", '["7", "8"]': '["7", "8"]', "no {json": "no {json"}
    rows = [response(uid, 0, True, ground_truth=truth) for uid, truth in enumerate(truths)]
    write_samples(folder, "val", 0, rows)
    page = Page(folder)
    assert {page.record(i)["truth"] for i in range(3)} == set(truths.values())


@pytest.mark.parametrize("damaged", [False, True])
def test_a_conversation_shows_who_speaks_without_colour(tmp_path: Path, damaged: bool):
    folder = write_run(tmp_path / "run", samples=False)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    parts = [("policy", call), ("environment", "42"), ("policy", "It is 42.")]
    said = json.dumps([{"by": by, "text": text} for by, text in parts])[damaged:]
    write_samples(folder, "val", 0, [response(0, 0, True, response="as read", conversation=said)])
    (cell,) = Page(folder).record(0)["cells"][0]
    assert cell["text"] == ["as read" if damaged else f"{call}\n┌ environment\n42\n└\nIt is 42.", ""]


@pytest.mark.slow
def test_the_page_works_in_a_browser(browser, tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=1.0)]
    values = browser(
        make_page(runs)[0],
        [
            value(COUNT),
            until("document.querySelectorAll('#learning path.line').length === 6"),
            # what nobody has scrolled to is drawn too
            DRAWN,
            value("[...document.querySelectorAll('#option-table tbody th')].map((e) => e.textContent)"),
            value("[...document.querySelectorAll('#phases tbody th')].map((e) => e.textContent)"),
            value("document.querySelector('#speed .timeline svg').getAttribute('aria-label')"),
            press("Home", "document.querySelector('#learning svg[role]')"),
            value(f"{TIP}[0]"),
            # a run is left out
            value("document.querySelectorAll('#runs button')[1].click()"),
            until("document.querySelectorAll('#learning path.line').length === 3"),
            choose("layer", "layer_2"),
            value("document.querySelectorAll('#rank [data-panel]:not([hidden])').length"),
            *(choose("filter-split", "val"), shows(COUNT, "4 of 8 prompts")),
            *(choose("filter-verdict", "never"), shows(COUNT, "0 of 8 prompts")),
            *(choose("filter-verdict", "gained"), shows(COUNT, "4 of 8 prompts")),
            *(choose("filter-text", "problem 3"), shows(HEADING, "gsm8k · validation prompt 3")),
            until("document.querySelectorAll('.response').length === 2"),
            value(TEXTS),
            value("[...document.querySelectorAll('.response mark')].map((e) => e.textContent)"),
            value("[...document.querySelectorAll('.figures tbody tr:last-child > *')].map((e) => e.textContent)"),
        ],
    )
    assert values[0] == "8 of 8 prompts"
    assert values[1] == ["actor.optim.lr", "trainer.default_local_dir", "trainer.experiment_name"]
    assert values[2] == ["gen", "update_actor"]
    busy = "engines busy 66.7% of the time, trainer busy 33.3% of the time"
    for shown in (busy, "step 0", 1, ["0", "8", "6", "7"]):
        assert shown in values
    assert ["After 0 steps it is \\boxed{8}.", "After 6 steps it is \\boxed{7}."] in values
    assert values[-1] == ["ER, layer 1", "20", "26", "+6"]


@pytest.mark.slow
def test_a_chart_is_enlarged(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    records = [{"step": s, "actor/pg_loss": 10.0 ** (s - 5), "response_length/mean": 10.0} for s in range(1, 11)]
    write_metrics(folder, records)
    panel = "[...document.querySelectorAll('#updates .panel')].find((e) => e.innerText.includes('{}'))"
    chart, texts = "document.querySelector('dialog svg')", "[...document.querySelectorAll('dialog svg text')]"
    labels = value(f"{texts}.map((e) => e.textContent)")
    box = f"{chart}.getBoundingClientRect()"
    place = f"{{{{clientX: {box}.left + {{}} * {box}.width, clientY: {box}.top + 50}}}}"
    pointer = f"{chart}.dispatchEvent(new PointerEvent('pointer{{}}', {place}))"
    button = "[...document.querySelectorAll('dialog button')].find((e) => e.textContent === '{}').click()"
    steps = [
        DRAWN,
        # A constant has room around it, and labels that differ.
        value("[...document.querySelectorAll('#lengths svg[role] text')].map((e) => e.textContent)"),
        value("(window.made = [], URL.createObjectURL = (blob) => (made.push(blob), '#made'), 0)"),
        value(f"{panel.format('Policy loss')}.querySelector('.enlarge').click()"),
        labels,
        value("document.getElementById('large-log').click()"),
        labels,
        *(value(pointer.format(kind, at)) for kind, at in (("down", 0.5), ("move", 0.8), ("up", 0.8))),
        labels,
        value(f"({button.format('CSV')}, {button.format('PNG')}, 0)"),
        until("made.length === 2"),
        value("made.map((blob) => blob.type)"),
        value("(made[0].text().then((text) => { window.csv = text; }), 0)"),
        until("window.csv !== undefined"),
        value("window.csv.split('\\r\\n').slice(0, 3)"),
        value(f"({button.format('Close')}, document.querySelectorAll('dialog').length)"),
    ]
    constant, whole, log, zoomed, kinds, csv = (
        shown for shown in browser(make_page([folder])[0], steps) if isinstance(shown, list)
    )
    assert constant == ["9", "9.5", "10", "10.5", "11", "0", "2", "4", "6", "8", "10"]
    # Both axes are named, and the part that is left has ticks of its own.
    assert whole[:3] == ["0", "20,000", "40,000"] and whole[-2:] == ["training step", "Policy loss"]
    assert log[:3] == ["1e−4", "0.01", "1"] and zoomed[0] == "1" and zoomed[-5:-2] == ["5", "6", "7"]
    assert kinds == ["text/csv", "image/png"] and csv == ['"training step","loss"', "1,0.0001", "2,0.001"]


@pytest.mark.slow
def test_correct_and_wrong_have_colours_of_their_own(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    verdicts = {"verifier/exact": 1.0, "verifier/different": 2.0, "verifier/timeout": 0.0}
    lengths = {f"response_length/{group}/mean": 3.0 for group in ("correct", "incorrect")}
    write_metrics(folder, [metrics_of(step) | verdicts | lengths for step in range(1, 5)])
    keys = "[...document.querySelectorAll('.keysOf span')]"
    look = "[e.textContent, ...['stroke', 'stroke-dasharray'].map((a) => e.querySelector('path').getAttribute(a))]"
    looks = browser(make_page([folder])[0], [DRAWN, value(f"{keys}.map((e) => {look})")])[0]
    meant = {tuple(look) for look in looks if "var(--" in look[1]}
    good, bad = ("var(--good)", None), ("var(--bad)", "6 3")
    assert meant == {("correct", *good), ("exact", *good), ("incorrect", *bad), ("different", *bad)}
    assert {"timeout", "training", "gen"} <= {look[0] for look in looks}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_overview_is_seen_whole(browser, tmp_path: Path, count: int):
    runs = [write_run(tmp_path / f"2026-01-0{i}_12-00-00", lr=i / 8, samples=False) for i in range(count)]
    more = {"critic/rewards/mean": -0.875, "response_length/mean": 123.4, "perf/throughput": 1234.5, "score/mean": 0.5}
    for order, name in enumerate(("", " diff", " diff 2")):
        more[f"cal/overall/layer_1/{ER}{name}/mean"] = 12.34 / (1 + order)
    for run in runs:
        write_metrics(run, [metrics_of(step) | more for step in range(200)])
    table = "document.getElementById('overview-table')"
    steps = [value(f"{table}.scrollWidth <= {table}.clientWidth"), value(f"{table}.innerText.includes('−0.875')")]
    assert browser(make_page(runs)[0], steps) == [True, True]


@pytest.mark.slow
def test_who_prints_at_once_gets_every_chart(browser, tmp_path: Path):
    panels = "[...document.querySelectorAll('section:not(#others) .panel[data-panel]:not([hidden])')]"
    steps = [
        DRAWN,
        value(f"({panels}.forEach((e) => {{ e.classList.add('waiting'); e.replaceChildren(); }}), {panels}.length)"),
        value("(window.dispatchEvent(new Event('beforeprint')), 0)"),
        value(f"{panels}.filter((e) => e.querySelector('svg path.line')).length"),
    ]
    assert browser(make_page([write_run(tmp_path / "run")])[0], steps) == [10, 0, 10]


@pytest.mark.slow
def test_the_figures_of_an_axis_are_seen_whole(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    phases = {f"timing_s/phase{i}": 1.0 for i in range(9)}
    own = {"actor/lr": 1.25e-7, "actor/pg_loss": -0.003125, "response_length/clip_ratio": 0.0}
    write_metrics(folder, [{"step": s, **phases, **{k: v * s for k, v in own.items()}} for s in range(5)])
    texts = "[...document.querySelectorAll('.panel svg[role] text')]"
    # With more lines than colours, what each is drawn with.
    panel = "[...document.querySelectorAll('#speed .panel')].find((e) => e.innerText.includes('phase8'))"
    strokes = "map((e) => e.getAttribute('stroke') + e.getAttribute('stroke-dasharray'))"
    steps = [
        value(f"{texts}.filter((e) => ((b) => b.x < 0 || b.x + b.width > 380)(e.getBBox())).map((e) => e.textContent)"),
        value(f"{texts}.map((e) => e.textContent).filter((t) => t.includes('e−') || t.startsWith('−'))"),
        value(f"new Set([...{panel}.querySelectorAll('path.line')].{strokes}).size"),
    ]
    # None is outside of its panel. Rates are never below zero.
    assert browser(make_page([folder])[0], [DRAWN, *steps]) == [[], ["−0.01", "−0.005", "2e−7", "4e−7"], 9]


@pytest.mark.slow
def test_seeds_are_one_line_with_a_band(browser, tmp_path: Path):
    runs = [write_run(tmp_path / f"grpo_s{seed}", seed=seed) for seed in (0, 1, 2)]
    lines, bands = (f"document.querySelectorAll('#learning {shape}').length" for shape in ("path.line", "path.band"))
    steps = [
        until(f"{lines} === 3 && {bands} === 3"),
        press("End", "document.querySelector('#learning svg[role]')"),
        value(TIP),
        value("document.getElementById('together').click()"),
        until(f"{lines} === 9 && {bands} === 0"),
    ]
    (tip,) = (shown for shown in browser(make_page(runs)[0], steps) if isinstance(shown, list))
    # 0.5 + tanh(6 / 40) / 2 and 1 and 2 hundredths more
    assert tip[0] == "step 6" and {"58.4%", "57.4% to 59.4%"} <= set(tip)


@pytest.mark.slow
def test_samples_are_read_by_keyboard(browser, tmp_path: Path):
    side = "document.getElementById('side-{}').selectedOptions[0].textContent"
    steps = [choose("filter-split", "val")]
    for key, expression, text in (
        ("j", HEADING, "gsm8k · validation prompt"),
        ("ArrowLeft", side.format(1), "step 4"),
        ("]", side.format(0), "step 2"),
        ("[", side.format(0), "step 0"),
        ("/", "document.activeElement.id", "filter-text"),
    ):
        steps += [press(key), shows(expression, text)]
    # A step that is chosen with the keyboard draws the prompt again; the keyboard stays there.
    second = "document.querySelectorAll('.step')[1]"
    steps += [value(f"{second}.focus()"), value("document.activeElement.click()"), shows(side.format(1), "step 2")]
    browser(make_page([write_run(tmp_path / "run")])[0], [*steps, until(f"document.activeElement === {second}")])


@pytest.mark.slow
def test_tokens_are_coloured_by_what_is_known_of_them(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    tokens = ["one", " two", " three", " four", " five", " six"]
    for step in (0, 1):
        write_samples(folder, "val", step, [response(0, step, True, **of_tokens(tokens, [2, 4, 5], [1.0, 4.0, 6.0]))])
    fifth = "document.querySelector('.response [data-token=\"4\"]')"
    spans = "[...document.querySelector('.pane').querySelectorAll('[data-token]')]"
    hover = "new PointerEvent('pointermove', {bubbles: true, clientX: 300, clientY: 300})"
    measure = "document.getElementById('measure')"
    steps = [value(f"[...{measure}.options].map((o) => o.textContent)")]
    for key in ("logprob", "ER, layer 1/0", "ER, layer 1/1", "ER, layer 1/2"):
        steps += [
            value(f"({measure}.value = {json.dumps(key)}, {measure}.dispatchEvent(new Event('change')), 0)"),
            until(f"{measure}.value === {json.dumps(key)} && {fifth} !== null"),
            value(f"{spans}.map((e) => e.style.getPropertyValue('--s'))"),
        ]
    steps += [value(f"({fifth}.dispatchEvent({hover}), 0)"), value(TIP)]
    names, *strengths, tip = (shown for shown in browser(make_page([folder])[0], steps) if shown != 0)
    assert names == ["nothing", "log-probability", "entropy", "ER, layer 1", "ERV, layer 1", "ERA, layer 1"]
    assert strengths == [
        ["0%", "14%", "29%", "43%", "58%", "72%"],
        # ER of the first prefix with the token: 1, 1, 4, 4, 6, and none for the sixth token
        ["7%", "7%", "46%", "46%", "72%", ""],
        # ERV: 4 - 1 = 3, 6 - (1 + 4) / 2 = 3.5; ERA: 3.5 - 3 = 0.5
        ["", "", "62%", "62%", "72%", ""],
        ["", "", "", "", "72%", ""],
    ]
    assert " ".join(tip).split()[:2] == ["token", "5"] and {"−2", "6", "3.5", "0.5"} <= set(" ".join(tip).split())


@pytest.mark.slow
def test_hostile_text_is_text_in_a_browser(browser, tmp_path: Path):
    steps = [value(TEXTS)]
    for _ in range(len(HOSTILE) - 1):
        steps += [value(f"(window.last = {HEADING}, 0)"), press("j"), until(f"{HEADING} !== window.last"), value(TEXTS)]
    steps += [
        value("(document.querySelector('#others details').open = true, 0)"),
        value("String(window.broken)"),
        value("document.querySelectorAll('img, iframe, #detail b > *, #detail pre > :not(span, mark)').length"),
    ]
    values = browser(make_page([hostile_run(tmp_path / "run")])[0], steps)
    assert len([texts for texts in values if isinstance(texts, list) and len(texts) == 2]) == len(HOSTILE)
    assert values[-2:] == ["undefined", 0]


FORMULAS = {
    "inline": ("so $x^2 - 5x + 6 = 0$ holds", 1),
    "display": ("\\[\\sum_{i=1}^n i = \\frac{n(n+1)}{2}\\]", 1),
    "parentheses": ("\\(\\mathbb{R}\\) and $$\\sqrt{2}$$", 2),
    "words": ("$12 \\mbox{ inches}^2$", 1),
    "environment": ("\\begin{align*}a &= b\\\\ c &= d\\end{align*}", 1),
    "money": ("It costs $5 and $6, or 7$ in all.", 0),
    "address": ("$\\href{javascript:alert(1)}{x}$ $\\url{https://example.org}$ $\\htmlClass{badge}{x}$", 0),
    "image": ("$\\includegraphics{https://example.org/x.png}$", 0),
    "macro bomb": ("$\\def\\a{\\a\\a}\\a$ $\\newcommand{\\b}{x}\\b$", 0),
    "out of its place": ("$\\kern-90em x$ $\\hspace{-3cm}x$ $\\llap{x}$ $\\raisebox{9em}{x}$", 0),
    "unseen": ("$\\color{white}{x}$ $\\phantom{x+y}$ $x % y$", 0),
    "damaged": ("$\\frac{1}$ $\\left( x$", 0),
    "too long": ("$" + "x+" * 600 + "y$", 0),
}

ANSWERS = {"\\frac{1}{2}": 1, "x^2": 1, "$x$ or $y^2$": 2, "\\text{Evelyn}": 1, "max_flow": 0, "the square 5^2": 0}
"""Answers, which seldom have the signs of a formula around them -> formulas shown."""


@pytest.mark.slow
def test_formulas_are_typeset_or_shown_as_source(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run", samples=False)
    prompt = "<|im_start|>user\nWhat is $\\frac{1}{2}$?<|im_end|>\n<|im_start|>assistant\n"
    answers = [*ANSWERS, *[""] * (len(FORMULAS) - len(ANSWERS))]
    rows = [
        response(i, 0, True, response=text, prompt=prompt, answer=answer)
        for i, ((text, _), answer) in enumerate(zip(FORMULAS.values(), answers, strict=True))
    ]
    write_samples(folder, "val", 0, rows)
    page = make_page([folder])[0]
    shown = "document.querySelector('.response')"
    answer = "document.querySelector('.pane .facts')"
    steps: list[dict] = [choose("filter-order", "place")]
    for place in range(len(FORMULAS)):
        steps += [
            shows(HEADING, f"gsm8k · validation prompt {place}"),
            value(f"[{shown}.querySelectorAll('.formula').length, {shown}.textContent]"),
            value(f"{answer}.querySelectorAll('.formula').length + ' in the answer'"),
            press("j"),
        ]
    steps += [
        value("[...document.querySelectorAll('.prompt summary')].map((e) => e.dataset.role)"),
        value("document.querySelectorAll('.prompt .formula .katex-html').length"),
        value("[...document.fonts].map((font) => font.status)"),
        value("document.querySelectorAll('#detail :is(a, img, iframe, script, style)').length"),
        press("f"),
        until("document.querySelectorAll('.formula').length === 0"),
    ]
    values = [shown for shown in browser(page, steps) if not isinstance(shown, bool)]
    found = [shown for shown in values if isinstance(shown, list)]
    for (name, (text, number)), (typeset, content) in zip(FORMULAS.items(), found, strict=False):
        assert typeset == number, name
        assert number or content == text, name
    in_answers = [int(shown.split()[0]) for shown in values if str(shown).endswith("in the answer")]
    assert dict(zip(ANSWERS, in_answers, strict=False)) == ANSWERS
    assert values[-4:] == [["user", "assistant"], 1, ["loaded"] * 9, 0]


def test_katex_is_on_pages_with_formulas_alone(tmp_path: Path):
    plain = write_run(tmp_path / "plain")
    assert "KaTeX" not in make_page([plain])[0]
    write_samples(plain, "val", 0, [response(0, 0, True, response="so $x^2$")])
    page = Page(plain)
    page.check_inert()
    assert "MIT License" in page.text and len([name for name, _ in page.attributes if name == "data-font"]) == 9
    (policy,) = (text for name, text in page.attributes if name == "content" and "default-src" in text)
    # Formulas loosen nothing.
    assert [part.split(" ")[0] for part in policy.split("; ")] == [
        "default-src",
        "style-src",
        "base-uri",
        "form-action",
        "script-src",
        "connect-src",
    ]
    assert policy.count("'sha256-") == 2 and "unsafe" not in policy
