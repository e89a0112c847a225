"""Gymnasium's interface: replayed actions, seeded draws, and errors that name the user's class."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.rollout.kit import RECORD, contents, start, take
from verl.rollout.gym_environment import GymEnvironment


class Walk:
    """In place of an environment of Gymnasium's: from the seed to 3 in steps; its state is in itself."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, *, seed=None, options=None):
        self.place, self.steps = seed, 0
        return self.place, {}

    def step(self, action):
        self.place, self.steps = self.place + action, self.steps + 1
        return self.place, -0.5, self.place == 3, self.steps == 4, {}


class Walking(GymEnvironment):
    def make(self):
        return Walk()

    def action(self, text):
        if text not in ("1", "-1"):
            raise ValueError("Say 1 or -1.")
        return int(text)

    def show(self, observation):
        return f"at {observation}"


@pytest.mark.parametrize(
    ("seed", "actions", "heard"),
    [
        (1, ["1", "up", "1"], [("at 2", False), ("Say 1 or -1.", False), ("at 3", True)]),
        (9, ["1", "-1", "-1", "-1"], [("at 10", False), ("at 9", False), ("at 8", False), ("at 7", True)]),
    ],
)
@pytest.mark.parametrize("travels", [False, True])
def test_gymnasiums_interface(seed: int, actions: list[str], heard: list[tuple[str, bool]], travels: bool):
    environment, state, answers = Walking(), "", []
    record = replace(RECORD, extra_info={"seed": seed})
    for asked, place in ((record, seed), (RECORD, RECORD.uid)):
        assert start(environment, asked)[1] == [f"at {place}"]
    Walk.made = 0
    for text in actions:
        # In another process the actions so far are taken again.
        environment = Walking() if travels else environment
        answers.append(take(environment, state=state, record=record, text=text))
        state = answers[-1].state
    assert [(contents(answer)[0], answer.done) for answer in answers] == heard
    moves = [answer.reward for answer in answers if answer.counts[2] == 0]
    assert moves == [-0.5] * (len(actions) - actions.count("up"))
    assert Walk.made == (len(moves) if travels else 1)


class Drawing(Walk):
    """Draws from the shared random numbers, as several of TextArena's games do."""

    def step(self, action):
        assert action != 2, "no such direction"
        return f"{random.random()} {np.random.rand()} {action}", 0.0, False, False, {}


class Numpys(Walking):
    def make(self):
        return Drawing()

    def action(self, text):
        return {"number": np.int64(1), "array": np.ones(1), "tuple": (1, 2), "set": {1}, "two": 2}[text]


def test_games_of_one_process_draw_apart():
    def played(environments: list[Numpys], seeds: list[int]) -> list[list[str]]:
        states, heard = [""] * len(seeds), [list[str]() for _ in seeds]
        for text in ("number", "array", "tuple"):
            for i, seed in enumerate(seeds):
                record = replace(RECORD, extra_info={"seed": seed})
                answer = take(environments.pop(0), state=states[i], record=record, text=text)
                states[i] = answer.state
                heard[i] += contents(answer)
        return heard

    one = Numpys()
    (alone,) = played([one] * 3, [1])
    assert played([one] * 6, [1, 2])[0] == alone
    # In other processes, the actions are taken again, as a checkpoint holds them.
    assert played([Numpys() for _ in range(3)], [1]) == [alone]
    assert [text.rpartition("0.")[2].partition(" ")[2] for text in alone] == ["1", "[1.0]", "[1, 2]"]
    assert played([one] * 3, [2]) != [alone]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "two",
            "...Numpys: its environment's step(2), where action(text) returned that, raised AssertionError: no suc...",
        ),
        ("set", "...TypeError: action(text) returned set; an action must be a JSON value..."),
    ],
)
def test_wrong_action_is_named(refused, text: str, line: str):
    with refused(line):
        take(Numpys(), text=text)


def test_wrong_reward_names_the_users_class(refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Walk, "step", lambda *_: (0, float("nan"), False, False, {}))
    with refused("...Walking: step(state, turn) (...test_gym.py, line ...) returned the reward nan..."):
        take(Walking(), text="1")
