"""Prompts that reasoning-gym generates, with all that their verifier needs."""

import ast
import json
import random
from typing import Any

from verl.config.data import GeneratedSet
from verl.config.errors import ConfigError
from verl.verifiers.reasoning_gym import load_generator

Row = dict[str, Any]


def generated_rows(name: str, generated: GeneratedSet) -> list[Row]:
    """Return the problems of a generated set, which error messages call ``name``, as rows in veRL's layout.

    Raises ``ConfigError`` if reasoning-gym is not installed, lacks the generator, refuses its options or fails.
    """
    options = dict(generated.options) | {"seed": generated.seed, "size": generated.size}
    dataset, rows = load_generator(generated.dataset, json.dumps(options, sort_keys=True)), []
    for index in range(len(dataset)):
        try:
            random.seed(generated.seed + index)  # a few generators draw from the shared random numbers
            entry = dataset[index]
            problem = repr(_plain(entry))
            copy = ast.literal_eval(problem)
            usable = index > 0 or _score(dataset, copy) == _score(dataset, entry)
        except Exception as error:  # a generator may fail for some options and indices only
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(f"{name}: problem {index}: {reason}; choose other options or another set") from error
        if not usable:
            raise ConfigError(f"{name}: its problems hold objects that no process can get; choose another set")
        truth = {"answer": entry["answer"] or "", "dataset": generated.dataset, "options": options, "problem": problem}
        rows.append(
            {
                "data_source": f"reasoning_gym/{generated.dataset}",
                "prompt": [{"role": "user", "content": entry["question"]}],
                "reward_model": {"ground_truth": truth},
                "extra_info": {"index": index, "set": name},
            }
        )
    return rows


def _score(dataset: Any, problem: Row) -> float:
    """Return the score of a problem's answer."""
    return float(dataset.score_answer(problem["answer"], problem))


def _plain(value: Any) -> Any:
    """Return a value of which Python can write a literal; arrays become lists, and other objects their text."""
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [_plain(entry) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries if isinstance(value, list) else set(entries)
    if value is None or type(value) in (str, bool, int, float, complex, bytes):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)
