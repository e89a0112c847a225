"""Search-R1 (arXiv 2503.09516): the policy searches documents before it answers.

As in the authors' code, the environment responds to the first ``<search>query</search>`` in a turn with the three best
documents in an ``<information>`` tag. The first ``<answer>`` ends the conversation, with a reward of 1 if it is correct
and 0 otherwise. Answers are compared ignoring case, punctuation, articles and extra spaces. If a turn contains neither
tag, the environment replies with instructions. We assume that the corpus is ``extra_info["documents"]``, as in HotpotQA
with distractors, ranked by BM25 with k1 = 0.9 and b = 0.4. Documents that share no word with the query are ignored.

``python -m verl.recipes.search_r1 FOLDER`` writes a small two-hop task.
"""

import math
import random
import re
import string
from collections import Counter
from typing import Any

from verl.recipes.common import CITIES, NAMES, task_row, write_task
from verl.verifiers.search_r1 import squad

TOP = 3
K1, B = 0.9, 0.4
COUNTRIES = ("Germany", "Egypt", "Peru", "Norway", "France", "Ecuador", "Italy", "Korea", "Italy", "Austria")
"""Country of each city in ``CITIES``."""


class Search:
    """Search environment for ``rollout.multi_turn.environment``, to be used with ``reward=only``."""

    def start(self, record: Any) -> dict[str, Any]:
        truth = record.ground_truth
        return {"documents": record.extra_info["documents"], "answers": truth if isinstance(truth, list) else [truth]}

    def step(self, state: dict[str, Any], turn: Any) -> tuple[dict[str, Any], list[dict[str, str]], bool, float]:
        action, content = action_in(turn.text)
        if action == "answer":
            return state, [], True, float(squad(content) in [squad(str(answer)) for answer in state["answers"]])
        reply = "Write <search>your query</search> to search, or <answer>your answer</answer>."
        if action == "search":
            reply = f"<information>{' '.join(best(content, state['documents']))}</information>"
        return state, [{"role": "user", "content": reply}], False, 0.0


def action_in(text: str) -> tuple[str, str]:
    """Return the first complete tag, ``search`` or ``answer``, and its content, or empty strings if there is none."""
    actions = []
    for action in ("search", "answer"):
        before, opened, rest = text.partition(f"<{action}>")
        content, closed, _ = rest.partition(f"</{action}>")
        if opened and closed:
            actions.append((len(before), action, content.strip()))
    return min(actions)[1:] if actions else ("", "")


def best(query: str, documents: list[str]) -> list[str]:
    """Return the ``TOP`` documents with the highest positive BM25 scores; ties are broken by document order.

    A query word with f occurrences in a document of l words (m on average) that appears in d of N documents adds
    ln(1 + (N - d + 0.5) / (d + 0.5)) f / (f + K1 (1 - B + B l / m)).
    """
    counts = [Counter(re.findall(r"\w+", text.lower())) for text in documents]
    mean = sum(c.total() for c in counts) / max(1, len(counts))
    scores = [0.0] * len(documents)
    for word in set(re.findall(r"\w+", query.lower())):
        num_with = sum(word in c for c in counts)
        idf = math.log(1 + (len(counts) - num_with + 0.5) / (num_with + 0.5))
        for i, c in enumerate(counts):
            scores[i] += idf * c[word] / (c[word] + K1 * (1 - B + B * c.total() / mean)) if c[word] else 0.0
    ranked = sorted(range(len(documents)), key=lambda i: -scores[i])
    return [documents[i] for i in ranked[:TOP] if scores[i] > 0]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Generate ``count`` distinct tasks whose questions require two documents; at most 6000 are possible."""
    generator, made = random.Random(seed), dict[str, dict[str, Any]]()
    while len(made) < count:
        people = [f"{name} {''.join(generator.choices(string.ascii_uppercase, k=2))}" for name in NAMES]
        homes = dict(zip(people, generator.sample(range(len(CITIES)), len(people)), strict=True))
        documents = [f"{person} lives in {CITIES[place]}." for person, place in homes.items()]
        documents += [f"{city} is in {country}." for city, country in zip(CITIES, COUNTRIES, strict=True)]
        person = generator.choice(people)
        question = f"In which country does {person} live? Use <search>query</search>, then <answer>country</answer>."
        shuffled = generator.sample(documents, len(documents))
        # The data source is required but unused, because no verifier runs with reward=only.
        made[question] = task_row("open_answer", question, COUNTRIES[homes[person]], documents=shuffled)
    return list(made.values())


if __name__ == "__main__":
    write_task("Write a task of Search-R1", rows)
