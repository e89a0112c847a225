import json
import math

from verl.config.errors import visible
from verl.utils.portable import finite_or_null, valid_unicode


def test_lone_surrogates_become_replacement_characters():
    assert valid_unicode("a\ud800b \U0001f600") == "a\ufffdb \U0001f600"


def test_json_has_no_numbers_that_are_not_finite():
    value = {"a": math.nan, 1: [math.inf, (-math.inf, 2.0)], "text": "NaN"}
    assert finite_or_null(value) == {"a": None, "1": [None, [None, 2.0]], "text": "NaN"}
    assert json.dumps(finite_or_null(value), allow_nan=False)


def test_nothing_steers_a_terminal():
    assert visible("a\nb\tc\x1b[31m\x9b\u202eé\u2028\r") == "a\nb\\tc\\x1b[31m\\x9b\\u202eé\\u2028\\r"
