"""Structured output: a generated JSON task, and a verifier that rewards its layers one by one (arXiv 2512.00319).

The paper's layers are structural integrity, format correctness, validity and content accuracy. Here: the response holds
a JSON object (validity, 0.2) and nothing else, but for a code fence (format, 0.1), the object has the fields asked for
with values of their types (structure, 0.2), and the share of right values (content, 0.5). Structure and content count
only in what is valid, content only in what has the structure. The weights are assumed: the paper's could not be read.

``python -m verl.recipes.rl_struct FOLDER`` writes ``train.jsonl`` and ``test.jsonl``: prompts such as ``Write as JSON:
name is Ada, age is 31, tags are red and blue.`` with the object as the answer.
"""

import argparse
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DATA_SOURCE = "json_task"
WEIGHTS = {"validity": 0.2, "format": 0.1, "structure": 0.2, "content": 0.5}

LONGEST = 10_000
"""Characters of a response that are read; longer ones are wrong, whatever they hold."""

NAMES = ("Ada", "Alan", "Emmy", "Grace", "Kurt", "Leon", "Mary", "Niels", "Omar", "Rosa")
CITIES = ("Bonn", "Cairo", "Lima", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Turin", "Vienna")
TAGS = ("black", "blue", "green", "red", "white")


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Score one response, for ``reward_score.custom_functions``; correct if every layer is."""
    whole = parsed(solution_str)
    found = parsed(_object_in(solution_str)) if whole is None else whole
    layers = dict.fromkeys(WEIGHTS, 0.0)
    if found is not None:
        layers |= {"validity": 1.0, "format": float(whole is not None)}
    if found is not None and kinds(found) == kinds(ground_truth):
        layers["structure"] = 1.0
        layers["content"] = sum(found[name] == value for name, value in ground_truth.items()) / len(ground_truth)
    total = sum(WEIGHTS[layer] * value for layer, value in layers.items())
    return {"score": total, "correctness": all(value == 1.0 for value in layers.values()), **layers}


def _object_in(text: str) -> str:
    """From the first opening brace of ``text`` to the last closing one; empty if it is too long."""
    return "" if len(text) > LONGEST else text[text.find("{") : text.rfind("}") + 1]


def parsed(text: str) -> dict[str, Any] | None:
    """Parse the whole of ``text`` as a JSON object; None if it is not one, or has a field twice, NaN or infinity."""
    if len(text) > LONGEST:
        return None
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`").removeprefix("json")
    try:
        found = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def kinds(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the type of each field; for a list that of its elements too."""
    return {name: _kind(entry) for name, entry in value.items()}


def _kind(entry: Any) -> str:
    inner = sorted({type(element).__name__ for element in entry}) if isinstance(entry, list) else ""
    return f"{type(entry).__name__} {inner}"


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a field stands twice")
    return dict(pairs)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` different records of the task, at most a few thousand."""
    generator = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        tags = generator.sample(TAGS, 2)
        truth = {"name": generator.choice(NAMES), "age": generator.randint(10, 99), "tags": tags}
        if generator.random() < 0.5:
            truth["city"] = generator.choice(CITIES)
        said = {"tags": f"tags are {tags[0]} and {tags[1]}"}
        phrases = [said.get(name, f"{name} is {value}") for name, value in truth.items()]
        question = f"Write as JSON: {', '.join(phrases)}."
        found[question] = {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {},
        }
    return list(found.values())


def write_task(what: str, make_rows: Callable[[int, int], list[dict[str, Any]]]) -> None:
    """Write a task's files into a folder; a command line."""
    parser = argparse.ArgumentParser(description=f"{what}: train.jsonl and test.jsonl.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=2000, help="training prompts (2000)")
    parser.add_argument("--test", type=int, default=200, help="validation prompts, none of them in training (200)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    written = make_rows(options.train + options.test, options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", written[: options.train]), ("test", written[options.train :])):
        (options.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write_task("Write the JSON task of RL-Struct", rows)
