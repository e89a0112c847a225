"""Shared helpers for recipes: saved attributes, hints in prompts, and files with generated tasks."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.data.prompt_record import PromptRecord
from verl.method import Method, ReplayBuffer


class Saving(Method):
    """Method whose checkpoints contain the attributes listed in ``saved``: JSON values, tensors and replay buffers."""

    saved: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        values = ((name, getattr(self, name)) for name in self.saved)
        return {name: value.state_dict() if isinstance(value, ReplayBuffer) else value for name, value in values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            if isinstance(buffer := getattr(self, name), ReplayBuffer):
                buffer.load_state_dict(state[name])
            else:
                setattr(self, name, state[name])


HINT = (
    "\n The following text is the beginning part of the answer, which you can refer to for solving the problem:\n{hint}"
)
"""Template of the hint in GHPO's code."""

NAMES = ("Ada", "Alan", "Emmy", "Grace", "Kurt", "Leon", "Mary", "Niels", "Omar", "Rosa")
CITIES = ("Bonn", "Cairo", "Lima", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Turin", "Vienna")


def hint(solution: str, share: float) -> str:
    """Return the beginning of a solution, with the fraction ``share`` of its characters."""
    return solution[: round(len(solution) * share)]


def with_hint(method: Method, record: PromptRecord, share: float, solution_key: str, text: str = HINT) -> PromptRecord:
    """Append a hint to the question; return ``record`` unchanged if the hint is empty or the result is too long.

    Args:
        share: Fraction of the solution's characters to show, from 0 to 1.
        solution_key: Key of the worked solution in ``extra_info``; prompts without it use the ground truth.
        text: Template of the hint; must contain ``{hint}``.
    """
    part = hint(str(record.extra_info.get(solution_key) or record.ground_truth), share)
    if not part:
        return record
    edited = method.edit_prompt(record, str(record.messages[-1]["content"]) + text.format(hint=part))
    return edited if len(edited.input_ids) <= method.config.data.max_prompt_length else record


def task_row(data_source: str, question: str, ground_truth: Any, **extra_info: Any) -> dict[str, Any]:
    """Return a task as a row of a data file."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def write_task(what: str, make_rows: Callable[[int, int], list[dict[str, Any]]]) -> None:
    """Run a command-line tool that writes ``train.jsonl`` and ``test.jsonl`` with ``make_rows(count, seed)``."""
    parser = argparse.ArgumentParser(description=f"{what}: train.jsonl and test.jsonl.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=2000, help="training prompts (2000)")
    parser.add_argument("--test", type=int, default=200, help="validation prompts, none of them in training (200)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = make_rows(options.train + options.test, options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[: options.train]), ("test", rows[options.train :])):
        (options.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
