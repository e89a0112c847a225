"""The page of runs in a browser."""

import json
from pathlib import Path

import pytest

from tests.chromium import choose, press, shows, until, value
from tests.evaluation.example_results import HOSTILE
from tests.verl_pages.example_runs import (
    ER,
    hostile_run,
    metrics_of,
    of_tokens,
    response,
    write_metrics,
    write_run,
    write_samples,
)
from verl_pages.run import make_page

pytestmark = pytest.mark.slow

COUNT = "document.getElementById('count').textContent"
HEADING = "document.querySelector('#detail h3').textContent"
TEXTS = "[...document.querySelectorAll('.response')].map((e) => e.textContent)"
TIP = "document.getElementById('tip').innerText.split('\\n')"
DRAWN = until("document.querySelectorAll('section:not(#others) .panel.waiting:not([hidden])').length === 0")


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
    for shown in (busy, "step 0, before training", 1, ["0", "8", "6", "7"]):
        assert shown in values
    assert ["After 0 steps it is \\boxed{8}.", "After 6 steps it is \\boxed{7}."] in values
    assert values[-1] == ["ER, layer 1", "20", "26", "+6"]


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


def test_histograms_belong_to_the_runs_shown(browser, tmp_path: Path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=1.0, num_tokens=20)]
    shown = "[...document.querySelectorAll('#distributions .histogram')].filter((e) => !e.hidden"
    lengths = f"{shown} && /^Tokens/.test(e.innerText))"
    steps = [
        # All responses of a run are in one bin of each of the steps 2, 4 and 6.
        value(f"{lengths}.map((e) => e.querySelectorAll('.bin').length)"),
        press("End", "document.querySelectorAll('#distributions svg[role]')[1]"),
        value(TIP),
        value("document.querySelectorAll('#runs button')[0].click()"),
        until(f"{lengths}.length === 1"),
    ]
    bins, tip = (found for found in browser(make_page(runs)[0], [DRAWN, *steps]) if isinstance(found, list))
    assert bins == [3, 3] and tip == ["step 6", "19.58 to 20", "100.0%"]


def test_options_printing_and_the_keyboard(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run")
    (folder / "start.json").write_text(json.dumps({"overrides": ["actor.optim.lr=0.0001"], "host": "node7"}))
    names = "[...document.querySelectorAll('#option-table tbody th')].map((e) => e.textContent)"
    # Options of the command line are shown alone, and before the others.
    options = [
        until(f"{names}.length === 1"),
        value(names),
        value("document.getElementById('differing').click()"),
        until(f"{names}.length > 1"),
        value(names),
        value("document.querySelector('#commands code').textContent"),
        value("document.getElementById('overview-table').textContent.includes('node7')"),
    ]
    # A reader who prints at once gets every chart.
    panels = "[...document.querySelectorAll('section:not(#others) .panel[data-panel]:not([hidden])')]"
    printing = [
        DRAWN,
        value(f"({panels}.forEach((e) => {{ e.classList.add('waiting'); e.replaceChildren(); }}), {panels}.length)"),
        value("(window.dispatchEvent(new Event('beforeprint')), 0)"),
        value(f"{panels}.filter((e) => e.querySelector('svg path.line')).length"),
    ]
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
    steps.append(until(f"document.activeElement === {second}"))
    values = browser(make_page([folder])[0], [*options, *printing, *steps])
    alone, _, every, command, host, *printed = values[:8]
    assert alone == ["actor.optim.lr"] and every[0] == "actor.optim.lr" and len(every) > 1
    assert (command, host, printed) == ("actor.optim.lr=0.0001", True, [10, 0, 10])


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
