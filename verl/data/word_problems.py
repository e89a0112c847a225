"""Generated word problems with one or two steps and varied wording, for first runs with small pretrained models.

The problems are easy enough that an instruction-tuned model with 0.1 to 0.6 billion parameters solves some of them
before training. A solution shows the steps and ends with a line ``#### ANSWER``, as in GSM8K::

    Ana has 7 apples and buys 2 more. How many apples does Ana have now?   ->   7 + 2 = 9\\n#### 9
"""

import random
from collections.abc import Callable

from verl.data.generated import GeneratedProblem, draw_split

INSTRUCTION = "Answer in one short sentence."
"""Last sentence of every question. Small models write long answers without it, or if asked only for a number."""

NAMES = "Ana Ben Carla Deniz Emil Fatou Grace Hugo Ines Jun Kofi Lena Mina Noor".split()
THINGS = ("apples", "books", "buttons", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers")
HOLDERS = {"box": "boxes", "bag": "bags", "basket": "baskets", "shelf": "shelves", "tray": "trays"}


def split(name: str, size: int, seed: int) -> list[GeneratedProblem]:
    """Draw a dataset split of ``size`` problems; see :func:`draw_split`."""
    return draw_split("word_problems", draw, name, size, seed)


def draw(rng: random.Random) -> GeneratedProblem:
    kind = rng.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    question, steps, answer = KINDS[kind][1](rng)
    return GeneratedProblem(f"{question} {INSTRUCTION}", f"{steps}\n#### {answer}", str(answer), kind)


Parts = tuple[str, str, int]
"""Question without ``INSTRUCTION``, worked steps, and answer."""


def _more(rng: random.Random) -> Parts:
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9), rng.randint(1, 9)
    verb = rng.choice(("finds", "buys", "gets", "wins"))
    ending = rng.choice((f"How many {thing} does {name} have now?", f"How many {thing} is that in all?"))
    return f"{name} has {a} {thing} and {verb} {b} more. {ending}", f"{a} + {b} = {a + b}", a + b


def _together(rng: random.Random) -> Parts:
    (name, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    ending = rng.choice((f"How many {thing} do they have together?", f"How many {thing} do they have in all?"))
    return f"{name} has {a} {thing} and {other} has {b}. {ending}", f"{a} + {b} = {a + b}", a + b


def _fewer(rng: random.Random) -> Parts:
    name, thing, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(1, 8)
    a = rng.randint(b + 1, 9)
    verb = rng.choice(("gives away", "loses", "sells", "lends out"))
    ending = rng.choice((f"How many {thing} are left?", f"How many {thing} does {name} still have?"))
    return f"{name} has {a} {thing} and {verb} {b} of them. {ending}", f"{a} - {b} = {a - b}", a - b


def _apart(rng: random.Random) -> Parts:
    (name, other), thing, b = rng.sample(NAMES, 2), rng.choice(THINGS), rng.randint(1, 8)
    a = rng.randint(b + 1, 9)
    ending = f"How many more {thing} does {name} have?"
    return f"{name} has {a} {thing} and {other} has {b}. {ending}", f"{a} - {b} = {a - b}", a - b


def _groups(rng: random.Random) -> Parts:
    holder, thing, a, b = rng.choice(list(HOLDERS)), rng.choice(THINGS), rng.randint(2, 5), rng.randint(2, 5)
    question = rng.choice(
        (
            f"A {holder} holds {a} {thing}. How many {thing} are in {b} {HOLDERS[holder]}?",
            f"There are {b} {HOLDERS[holder]} with {a} {thing} each. How many {thing} are there in all?",
        )
    )
    return question, f"{b} * {a} = {a * b}", a * b


def _more_and_more(rng: random.Random) -> Parts:
    name, thing, (a, b, c) = rng.choice(NAMES), rng.choice(THINGS), [rng.randint(2, 6) for _ in range(3)]
    question = f"{name} has {a} {thing}, buys {b} and finds {c}. How many {thing} does {name} have now?"
    return question, f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}", a + b + c


def _more_and_fewer(rng: random.Random) -> Parts:
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9), rng.randint(1, 5)
    c = rng.randint(1, min(9, a + b - 1))
    question = f"{name} has {a} {thing}, gets {b} more and then gives away {c}. How many {thing} does {name} have now?"
    return question, f"{a} + {b} = {a + b}\n{a + b} - {c} = {a + b - c}", a + b - c


KINDS: dict[str, tuple[float, Callable[[random.Random], Parts]]] = {
    "more": (4, _more),
    "together": (3, _together),
    "fewer": (4, _fewer),
    "apart": (2, _apart),
    "groups": (1, _groups),
    "more_and_more": (1, _more_and_more),
    "more_and_fewer": (1, _more_and_fewer),
}
"""Maps each kind of problem to its relative frequency and a function that draws a problem."""
