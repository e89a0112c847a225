"""The page of an evaluation: what is on it, and what it looks like in a browser."""

import math
import random
import string
from typing import Any

import pytest

from tests.chromium import READY, PageText, choose, press, shows, until, value
from tests.evaluation.example_results import HOSTILE, TWO_RUNS, hostile_result, problem, result, sample
from verl.evaluation.report.page import make_page as page_of
from verl.evaluation.results import ProblemResult, TaskResult
from verl.evaluation.statistics import summarise
from verl.utils.portable import valid_unicode
from verl_pages.evaluation import LIMITS

COUNT = "document.getElementById('count').textContent"
ITEM = "document.querySelector('.item[aria-selected=true] .where').textContent"
LIST = "document.getElementById('list')"
RIGHT = "document.querySelector('.pane:last-child')"


def make_page(results: list[TaskResult], **options: Any) -> str:
    return page_of(summarise(results), results, **options)


class Page(PageText):
    """The page of results."""

    def __init__(self, results: list[TaskResult], **options: Any) -> None:
        super().__init__(make_page(results, **options))


def of_one_problem(*responses: str, benchmark: str = "aime24", correct: int = 0) -> TaskResult:
    samples = [sample("c" if i == correct else "w", response=text) for i, text in enumerate(responses)]
    return result([ProblemResult(0, "q", "a", samples)], benchmark=benchmark)


def test_the_page_holds_everything():
    page = Page(TWO_RUNS, title="Runs <1> & 2")
    assert [label["name"] for label in page.index["labels"]] == ["grpo@0", "grpo@300"]
    assert {row["benchmark"] for row in page.index["rows"]} == {0, 1, -1}
    # split, index, benchmark, question, and for each run and step its verdicts and how many responses were cut
    assert page.entries[1][:5] == ["", 1, "aime24", "What is problem 1?", [[0, 0, "wwww", 0], [0, 300, "wwwt", 0]]]
    assert [entry[4][0][2] for entry in page.entries] == ["cwwn", "wwww", "cccc", "wwww", "cwww"]
    record = page.record(0)
    assert (record["prompt"], record["truth"], page.index["samples"]["figures"]) == (
        "What is problem 0?",
        "7",
        ["tokens", "ER"],
    )
    last = {"text": ["So it is \\boxed{}.", ""], "left": 0, "truncated": 1, "answer": "", "reason": ""}
    assert record["cells"][0][3] == last | {"figures": [10.0, 3.0]}
    assert "<title>Runs &lt;1&gt; &amp; 2</title>" in page.text


def test_hostile_text_ends_no_element():
    page = Page([hostile_result()])
    page.check_inert()
    assert page.tags == Page([result(["cw"] * 7)]).tags
    assert [page.record(i)["prompt"] for i in range(7)] == list(HOSTILE.values())
    assert [page.record(i)["cells"][0][0]["text"][0] for i in range(7)] == list(HOSTILE.values())
    extras = sample("c", extras={"chars": 7, "parts": ["\ud800", None], "loss": math.nan})
    response = Page([result([ProblemResult(0, "q", "a", [extras])])]).record(0)["cells"][0][0]
    assert response["extra"] == '{"chars": 7, "parts": ["\ud800", null], "loss": null}'


def test_a_conversation_shows_what_the_environment_said():
    said = [{"by": "policy", "text": "2 × 3?"}, {"by": "environment", "text": "6"}, {"by": "policy", "text": "Six."}]
    answered = sample("c", response="2 × 3?\nSix.", conversation=said)
    cell = Page([result([ProblemResult(0, "q", "a", [answered])])]).record(0)["cells"][0][0]
    assert cell["text"] == ["2 × 3?\n┌ environment\n6\n└\nSix.", ""]


def test_long_responses_lose_their_middle():
    text = "begin " + "x" * 1_000_000 + " end \U0001f600"
    page = Page([of_one_problem(text)])
    response = page.record(0)["cells"][0][0]
    head, tail = response["text"]
    assert len(head) + len(tail) == 20_000 and response["left"] == len(text) - 20_000
    assert head.startswith("begin ") and tail.endswith(" end \U0001f600")
    assert "longer than 20,000 characters" in page.index["samples"]["limits"]
    # Without room there are verdicts only.
    page = Page(TWO_RUNS, max_bytes=1)
    assert page.index["samples"]["limits"].startswith("To keep the page small, responses are left out.")
    assert page.record(0)["cells"][0] == [None] * 4 and page.entries[0][4][0][2] == "cwwn"


def noise(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + string.digits, k=length))


@pytest.mark.slow
def test_a_page_of_many_responses_keeps_its_size():
    # 16 benchmarks of 256 samples that hardly compress, 12 MB of them, on a page of 1 MB
    responses = [[noise(3000, 256 * b + s) for s in range(256)] for b in range(16)]
    results = [of_one_problem(*texts, benchmark=f"b{b}", correct=200) for b, texts in enumerate(responses)]
    page = Page(results, max_bytes=1 << 20)
    assert 1 << 19 < len(page.text.encode()) <= 1 << 20
    assert "at most 16 responses per problem and run" in page.index["samples"]["limits"]
    shown = [i for i, response in enumerate(page.record(5)["cells"][0]) if response]
    assert shown == [*range(15), 200] and len(page.entries[5][4][0][2]) == 256
    # The limits that are tried grow narrower.
    sizes = [(limits.characters, 10**9 if limits.responses is None else limits.responses) for limits in LIMITS]
    assert sizes == sorted(sizes, reverse=True)


def test_problems_and_temperatures_of_a_run_are_told_apart():
    other = result([problem(0, "c"), problem(1, "w", question="another")], step=9)
    assert [entry[4] for entry in Page([result(["c", "w"]), other]).entries] == [
        [[0, 0, "c", 0], [0, 9, "c", 0]],
        [[0, 0, "w", 0]],
        [[0, 9, "w", 0]],
    ]
    page = Page([result(["c"]), result(["w"], temperature=0.5)])
    assert [run["name"] for run in page.index["runs"]] == ["grpo T=1", "grpo T=0.5"]
    assert page.entries[0][4] == [[0, 0, "c", 0], [1, 0, "w", 0]]


@pytest.mark.slow
def test_foreign_scripts_are_stopped(chromium):
    image = "<img src='https://example.org/x.png'>"
    page = f"<!doctype html>{image}<script>missing()</script>"
    said = chromium(page, [until("document.readyState === 'complete'")])
    assert said["requests"] == ["https://example.org/x.png"]
    assert any("missing is not defined" in message for message in said["console"])
    page = make_page(TWO_RUNS).replace("</body>", f"<script>window.broken = 1</script>{image}</body>")
    said = chromium(page, [READY, value("String(window.broken)")])
    assert said["values"] == ["undefined"] and said["requests"] == []
    assert len([message for message in said["console"] if "Content Security Policy" in message]) == 2


def filtered(name: str, chosen: str, count: int) -> tuple[dict, dict]:
    """Set a filter, and wait until so many of the five problems remain."""
    return choose(f"filter-{name}", chosen), shows(COUNT, f"{count} of 5 problems")


@pytest.mark.slow
def test_the_page_works_in_a_browser(browser):
    verdict = f"{RIGHT}.querySelector('.cell[aria-pressed=true]').title"
    keyboard = [value("document.getElementById('filters').reset()"), shows(COUNT, "5 of 5 problems")]
    for key, target, expression, text in (
        ("Home", LIST, ITEM, "aime24 · problem 0"),
        ("j", "document.body", ITEM, "aime24 · problem 1"),
        ("p", "document.body", verdict, "Response 4: timeout"),
        ("n", "document.body", verdict, "Response 1: wrong"),
        ("End", LIST, ITEM, "amc23 · problem 1"),
        ("k", "document.body", ITEM, "amc23 · problem 0"),
        ("Home", LIST, ITEM, "aime24 · problem 0"),
        ("/", "document.body", "document.activeElement.id", "filter-text"),
        # A letter that is typed into a field moves nothing.
        ("j", "document.activeElement", ITEM, "aime24 · problem 0"),
    ):
        keyboard += [press(key, target), shows(expression, text)]
    values = browser(
        make_page(TWO_RUNS),
        [
            value(COUNT),
            value("document.querySelector('#results-table tbody tr:last-child').innerText.split(/\\s+/)"),
            value("document.querySelectorAll('#curves-grid svg .line').length"),
            press("Home", "document.querySelector('#curves-grid svg[role]')"),
            value("document.getElementById('tip').innerText.split('\\n')"),
            *(*filtered("source", "amc23", 2), *filtered("source", "", 5), *filtered("verdict", "is:t", 1)),
            until(f"{verdict} === 'Response 4: timeout'"),
            value("[...document.querySelectorAll('.response')].map((e) => e.textContent)"),
            *(*filtered("place", "0,0", 0), value("document.getElementById('detail').textContent")),
            *(*filtered("verdict", "always", 1), *filtered("place", "", 1), *filtered("verdict", "apart", 1)),
            *(value("document.getElementById('filters').reset()"), shows(COUNT, "5 of 5 problems")),
            *filtered("text", "PROBLEM 1", 2),
            *keyboard,
        ],
    )
    assert values[0] == "5 of 5 problems"
    # pass@1: (5/12 + 1/8) / 2 and (2/3 + 1/4) / 2, with intervals and the difference between
    assert values[1][:3] == ["macro", "average", "27.1"] and "45.8" in values[1]
    assert values[2] == 6
    tip = next(value for value in values if isinstance(value, list) and value[0] == "pass@1")
    assert {"45.8%", "27.1%"} <= set(tip)
    assert ["So it is \\boxed{8}.", "So it is \\boxed{9}."] in values and "No problem matches the filters." in values


@pytest.mark.slow
def test_hostile_text_is_text_in_a_browser(browser):
    shown = "document.querySelector('.response').textContent"
    title = "document.querySelector('#detail h3').textContent"
    steps = [value("document.querySelectorAll('.item').length"), value(shown)]
    for _ in range(len(HOSTILE) - 1):
        steps += [value(f"(window.last = {title}, 0)"), press("j"), until(f"{title} !== window.last"), steps[1]]
    steps += [value("String(window.broken)"), value("document.querySelectorAll('img, b > *').length")]
    values = browser(make_page([hostile_result()]), steps)
    texts = [value for value in values if isinstance(value, str)]
    assert values[0] == len(HOSTILE) and values[-2:] == ["undefined", 0]
    visible = {
        "separators": "a⟨U+2028⟩b⟨U+2029⟩c⟨U+0085⟩d\u240be",
        "null": "null \u2400 byte, escape \u241b[31m, bell \u2407",
        "right to left": "⟨U+202E⟩evil⟨U+202C⟩ \u0627\u0644\u062c\u0648\u0627\u0628 ⟨U+2067⟩",
    }
    for name, text in (HOSTILE | visible).items():
        assert valid_unicode(text) in [valid_unicode(shown) for shown in texts], name


@pytest.mark.slow
def test_what_is_long_is_shown_in_part(browser):
    few = value("document.querySelectorAll('.item').length < 60")
    steps = [value(COUNT), few, press("End", LIST), until(f"{ITEM}.includes('2999')"), few]
    values = browser(make_page([result(["cw"] * 3000)]), steps)
    assert values[0] == "3,000 of 3,000 problems" and values[1] and values[-1]
    results = [of_one_problem("x" * 30_000)]
    (shown,) = browser(make_page(results), [value("document.querySelector('.response .cut').textContent")])
    assert shown.strip() == "[… 10,000 characters left out on this page …]"
    said = browser(make_page(results, max_bytes=1), [value("document.getElementById('detail').textContent")])
    assert "This response was left out to keep the page small" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(("results", "problems"), [([], 0), ([result([])], 0), ([result(["", ""])], 2)])
def test_a_page_without_responses(browser, results: list[TaskResult], problems: int):
    values = browser(make_page(results), [value(COUNT), value("document.getElementById('curves').hidden")])
    assert values == [f"{problems} of {problems} problems", True]


UNSEEN = {
    "a\x00\x1b\x7fb": "a\u2400\u241b\u2421b",
    "\x80\x85\x9b": "⟨U+0080⟩⟨U+0085⟩⟨U+009B⟩",
    "\u202a\u202b\u202c\u202d\u202e": "⟨U+202A⟩⟨U+202B⟩⟨U+202C⟩⟨U+202D⟩⟨U+202E⟩",
    "\u2066\u2067\u2068\u2069": "⟨U+2066⟩⟨U+2067⟩⟨U+2068⟩⟨U+2069⟩",
    "\u200e\u200f\u061c": "⟨U+200E⟩⟨U+200F⟩⟨U+061C⟩",
    "\u2028\u2029\u200b\u200d\u2060\ufeff\xad": "⟨U+2028⟩⟨U+2029⟩⟨U+200B⟩⟨U+200D⟩⟨U+2060⟩⟨U+FEFF⟩⟨U+00AD⟩",
    "\U000e0001\U000e0041\U000e0100\u3164\u115f": "⟨U+E0001⟩⟨U+E0041⟩⟨U+E0100⟩⟨U+3164⟩⟨U+115F⟩",
    "line\n\ttab\r\nx² ≤ 5 שלום 你好 😀": "line\n\ttab\nx² ≤ 5 שלום 你好 😀",
}


@pytest.mark.slow
def test_no_character_hides_what_a_response_says(browser):
    shown = value("document.querySelector('.response').textContent")
    (text,) = browser(make_page([of_one_problem("|".join(UNSEEN))]), [shown])
    assert text.split("|") == list(UNSEEN.values())
