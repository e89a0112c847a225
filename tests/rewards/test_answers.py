import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.rewards.answers import (
    Box,
    boxes_in,
    extract_answer,
    extract_boxed,
    extract_gsm8k,
    normalise,
    plain_number,
    quick_equal,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\framebox{7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{x_{1}^{2}} and {", "x_{1}^{2}"),
        (r"} { \boxed{3}", "3"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{\boxed{5} 6}", "5"),
        (r"\boxed{1 \boxed{2}", "2"),
        (r"\boxed{}", None),
        (r"\boxed{  }", None),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_extract_boxed(text: str, content: str | None):
    assert extract_boxed(text) == content


def test_boxes_in():
    assert list(boxes_in(r"\boxed{1} {\fbox{2}} \boxed{3")) == [Box(0, 7, 9), Box(11, 17, 19)]
    assert list(boxes_in(r"\boxed{1 \boxed{2}}")) == [Box(9, 16, 18), Box(0, 7, 19)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 3 = 18\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("#### $-5.50", "-5.50"),
        ("#### 1 and #### 2", "2"),
        ("#### none", None),
        ("#### 2. Solve for x\n#### 7.", "7"),
        ("#### 2. Solve for x", None),
        ("### 5", None),
    ],
)
def test_extract_gsm8k(text: str, number: str | None):
    assert extract_gsm8k(text) == number


@pytest.mark.parametrize(
    ("text", "answer", "boxed"),
    [
        (r"The answer is 3, so \boxed{4}", "4", True),
        (r"The answer is 3.", "3", False),
        ("所以答案是 3。共 5 个", "3", False),
        ("答案：3", "3", False),
        ("答案错误, 3", "3", False),
        (r"The answer is 3.5. It was easy, 100 percent", "3.5", False),
        ("answer: x + 1\nDone 5", "x + 1", False),
        ("The ANSWER is: **12**", "12", False),
        ("First the answer is 5. No, the answer is 6", "6", False),
        ("The answer is\n", None, False),
        ("answer is \x1f", None, False),
        ("2 + 2 = 4, thus 5 - 1", "1", False),
        ("it costs 1,250.75 dollars", "1250.75", False),
        ("the points (1,2,7)", "7", False),
        ("we get -3", "-3", False),
        ("answer is 20\n#### 18", "18", False),
        ("#### 2. Solve\nThe answer is 20.", "20", False),
        (r"\boxed{} 5", "5", False),
        ("no idea", None, False),
        ("", None, False),
    ],
)
def test_extract_answer(text: str, answer: str | None, boxed: bool):
    assert extract_answer(text) == (answer, boxed)


@pytest.mark.parametrize(
    ("text", "number"),
    [("-1, 2.5 and 1,000", "1000"), ("a-3", "3"), ("1.2.3", "1.2"), ("x2", "x2"), ("it is -7", "-7")],
)
def test_the_last_number(text: str, number: str):
    assert extract_answer(text) == (number, False)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"$\dfrac{1}{2}$.", r"\frac{1}{2}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"10{,}000", "10000"),
        (r"50\%", "50"),
        (r"\$ 5\!", "5"),
        (r"\leftarrow", r"\leftarrow"),
        ("1 2", "1 2"),
    ],
)
def test_normalise(answer: str, text: str):
    assert normalise(answer) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", Decimal(5)),
        ("+05", Decimal(5)),
        ("-1,234.50", Decimal("-1234.5")),
        (".5", Decimal("0.5")),
        ("5.", Decimal(5)),
        ("12,34", None),
        ("1e5", None),
        ("\u0663", None),
        ("1_000", None),
        ("", None),
        ("9" * 65, None),
    ],
)
def test_plain_number(text: str, value: Decimal | None):
    assert plain_number(text) == value


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("5", "5", True),
        ("5.0", "5", True),
        ("1,234", "1234", True),
        ("1000000000000000001", "1000000000000000002", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("0.0000003", "0.0000005", False),
        ("4.99999999", "5", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        ("x+1", "x + 1", True),
        ("50%", r"50\%", True),
        ("12", "1 2", None),
        ("x+1", "1+x", None),
        ("$", "$", False),
        ("", "5", False),
        ("x" * 401, "y", False),
        ("x" * 401, "x" * 401, True),
        ("9" * 5000, "5", False),
        ("5" + "~" * 3000 + "x", "5", False),
        ("1{,}5", "15", None),
        ("5\n\n6", "56", None),
    ],
)
def test_quick_equal(answer: str, truth: str, equal: bool | None):
    assert quick_equal(answer, truth) is equal


FRAGMENTS = [*r"\boxed{|\boxed |{|}|\{|\}|\|####|answer is| |5|1,000|.|-".split("|"), "\n"]


@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=30))
def test_any_text_is_read_without_an_error(parts: list[str]):
    text = "".join(parts)
    answer, boxed = extract_answer(text)
    assert not (boxed and answer is None)
    if answer is not None:
        assert answer == answer.strip()
        assert quick_equal(answer, answer) in (True, False)


@pytest.mark.parametrize(
    "fragment", ["\\boxed{", "{", "}", "\\boxed{}", "\\boxed    ", "####", "answer is ", " ", "1,", "9", "\\", "$"]
)
def test_time_is_linear(fragment: str):
    text = fragment * (2_000_000 // len(fragment))
    start = time.perf_counter()
    answer, _ = extract_answer(text)
    quick_equal(text, "5")
    # A quadratic scan of two million characters takes hours; the bound only has to tell these apart.
    assert time.perf_counter() - start < 10
    assert answer is None or len(answer) <= len(text)
