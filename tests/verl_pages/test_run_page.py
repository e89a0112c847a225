"""The page of runs: its contents, and that text of models is inert."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.chromium import PageText
from tests.verl_pages.example_runs import (
    hostile_run,
    of_tokens,
    response,
    write_metrics,
    write_run,
    write_samples,
)
from verl.config.errors import ConfigError
from verl_pages.names import metric_name
from verl_pages.options import differences, run_names
from verl_pages.run import make_page, read_runs
from verl_pages.run_folder import RunFolder, read_run
from verl_pages.sample_files import gather_samples
from verl_pages.samples import listed


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
    assert ["actor.optim.lr", 0, ["0.0001"], 0] in page.options()
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
    assert ["actor.optim.lr", 1, ["0.0001", "0.0001", "1.0"], 0] in page.options()
    assert ["trainer.total_training_steps", 0, ["6"], 0] in page.options()


def test_command_line_is_shown_and_what_it_set_comes_first(tmp_path: Path):
    folder = write_run(tmp_path / "grpo")
    start = {"overrides": ["+trainer.total_training_steps=6", "preset=small"], "host": "node7", "git_revision": "ab12"}
    start |= {"started": "2026-05-01T12:00:00+00:00", "versions": {"verl": "0.2.0"}}
    (folder / "start.json").write_text(json.dumps(start))
    page = Page(folder)
    names = [(name, is_set) for name, _, _, is_set in page.options()]
    assert names[:2] == [("trainer.total_training_steps", 1), ("actor.optim.lr", 0)]
    (run,) = page.index["runs"]
    shown = (run["command"], run["host"], run["started"], run["version"], run["revision"])
    assert shown == (" ".join(start["overrides"]), "node7", "2026-05-01 12:00:00 UTC", "0.2.0", "ab12")


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
    def run(folder: str, experiment: str = "", **options: str) -> RunFolder:
        known = {"trainer.experiment_name": json.dumps(experiment)} if experiment else {}
        return RunFolder(Path(folder), folder, options=known | {"seed": "0"} | options)

    rates = [{"actor.optim.lr": lr} for lr in ("0.1", "0.2")]
    runs = [run("2026-01-01", "grpo", **rates[0]), run("2026-01-02", "grpo", **rates[1])]
    runs.append(run("2026-01-03", "ppo", **rates[0]))
    assert run_names(runs) == ["grpo, optim.lr=0.1", "grpo, optim.lr=0.2", "ppo"]
    assert differences(runs) == [["optim.lr=0.1"], ["optim.lr=0.2"], ["optim.lr=0.1"]]
    # Nothing but the folder differs, or nothing is known.
    assert run_names([runs[0], replace(runs[0], name="2026-01-02")]) == ["grpo 2026-01-01", "grpo 2026-01-02"]
    assert run_names([RunFolder(Path("a"), "a"), runs[2]]) == ["a", "ppo"]
    # Of runs that differ in many options, each is known by what few others have.
    both = [("a", "8"), ("a", "1"), ("b", "8"), ("b", "8")]
    assert differences([run("x", **{"data.files": files, "rollout.n": n}) for files, n in both]) == [
        ["data.files=a", "rollout.n=8"],
        ["rollout.n=1", "data.files=a"],
        ["data.files=b", "rollout.n=8"],
        ["data.files=b", "rollout.n=8"],
    ]


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
