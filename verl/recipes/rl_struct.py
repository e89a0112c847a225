"""RL-Struct (arXiv 2512.00319): a generated JSON task and a verifier that rewards each layer of structured output.

The layers follow the paper, whose weights we could not read, so the weights below are assumptions:

- validity, 0.2: the response contains a JSON object;
- format, 0.1: the response contains nothing but the object, optionally in a code fence;
- structure, 0.2: the object has the requested fields with values of the right types;
- content, 0.5: the fraction of correct values, or 0 if the structure is wrong.

``python -m verl.recipes.rl_struct FOLDER`` writes ``train.jsonl`` and ``test.jsonl``, with prompts such as ``Write as
JSON: name is Ada, age is 31, tags are red and blue.`` and the JSON object as the answer.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

from verl.recipes.common import CITIES, NAMES, task_row, write_task

DATA_SOURCE = "json_task"
WEIGHTS = {"validity": 0.2, "format": 0.1, "structure": 0.2, "content": 0.5}

MAX_LENGTH = 10_000
"""Maximum length of a response in characters; longer responses are not parsed."""

TAGS = ("black", "blue", "green", "red", "white")


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Score a response for ``reward_score.custom_functions``; it is correct if every layer is correct."""
    text = solution_str if len(solution_str) <= MAX_LENGTH else ""
    whole = parsed(text)
    answer = parsed(text[text.find("{") : text.rfind("}") + 1]) if whole is None else whole
    layers = dict.fromkeys(WEIGHTS, 0.0)
    if answer is not None:
        layers |= {"validity": 1.0, "format": float(whole is not None)}
    if answer is not None and kinds(answer) == kinds(ground_truth):
        layers["structure"] = 1.0
        layers["content"] = sum(answer[name] == value for name, value in ground_truth.items()) / len(ground_truth)
    total = sum(WEIGHTS[layer] * value for layer, value in layers.items())
    return {"score": total, "acc": all(value == 1.0 for value in layers.values()), **layers}


def parsed(text: str) -> dict[str, Any] | None:
    """Parse ``text`` as a JSON object, or return None if it is invalid or has duplicate fields, NaN or infinity."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`").removeprefix("json")
    try:
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_reject)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def kinds(value: Mapping[str, Any]) -> dict[str, tuple[type, set[type]]]:
    """Return the type of each field, and the element types of fields that are lists."""
    return {
        name: (type(entry), {type(element) for element in entry} if isinstance(entry, list) else set())
        for name, entry in value.items()
    }


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate field")
    return dict(pairs)


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Generate ``count`` distinct tasks; at most a few thousand are possible."""
    generator = random.Random(seed)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        tags = generator.sample(TAGS, 2)
        truth = {"name": generator.choice(NAMES), "age": generator.randint(10, 99), "tags": tags}
        if generator.random() < 0.5:
            truth["city"] = generator.choice(CITIES)
        tags_phrase = {"tags": f"tags are {tags[0]} and {tags[1]}"}
        phrases = [tags_phrase.get(name, f"{name} is {value}") for name, value in truth.items()]
        question = f"Write as JSON: {', '.join(phrases)}."
        made[question] = task_row(DATA_SOURCE, question, truth)
    return list(made.values())


if __name__ == "__main__":
    write_task("Write the JSON task of RL-Struct", rows)
