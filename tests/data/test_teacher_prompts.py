"""Prompts under which a teacher reads the policy's responses."""

from dataclasses import replace

import pytest
import torch

from tests.kit import data_options, user_code
from tests.tables import refusals
from verl.batch import ENVIRONMENT, POLICY, Batch
from verl.data.prompt_record import PromptRecord
from verl.data.teacher_prompts import TeacherPrompts
from verl.verifiers.verdict import Verdict

SOURCE = """
def solved(record):
    record.messages[-1]["content"] += f" It is {record.ground_truth}."
    return record.messages

def text(record):
    return "What is 1 + 1?"

def nothing(record):
    return []

def fails(record):
    return record.extra_info["solution"]

def retold(record, siblings, *, verdict, response="none"):
    read = [f"{text} {other.extras.get('note')}" for text, other in siblings]
    verdict.extras["note"] = record.extra_info["note"] = record.messages[0]["content"] = "changed"
    return None if verdict.correct else f"{response} {verdict.reason} {read}" + "!" * 60 * (response == "e")
"""


@pytest.fixture
def prompts(tmp_path, tiny_tokenizer):
    file = user_code(tmp_path, SOURCE)

    def of(name: str, limit: int | None = 64) -> TeacherPrompts:
        return TeacherPrompts(f"{file}:{name}", data_options(template="chat"), tiny_tokenizer, limit)

    return of


def records(tokenizer) -> list[PromptRecord]:
    chats = [[{"role": "user", "content": f"What is {i} + 2?"}] for i in (1, 30)]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    return [PromptRecord(i, texts[i], "arithmetic", str(i), {}, chats[i], False) for i in (0, 1)]


def test_responses_follow_the_teachers_prompts(prompts, tiny_tokenizer):
    rows = records(tiny_tokenizer)
    source = torch.tensor([POLICY, ENVIRONMENT, POLICY], dtype=torch.uint8)
    batch = Batch.of([row.input_ids for row in rows], [[9, 8], [7]], source=source, records=rows)
    found = batch.after(prompts("solved").of_batch(batch))
    texts = [tiny_tokenizer.decode(ids) for ids in found.tokens.split(found.lengths.tolist())]
    assert "What is 1 + 2? It is 0." in texts[0] and "What is 30 + 2? It is 1." in texts[1]
    assert found.response_tokens.tolist() == [9, 8, 7] and torch.equal(found.source, source)
    # The policy's own records are as they were.
    assert [row.messages[0]["content"] for row in rows] == ["What is 1 + 2?", "What is 30 + 2?"]
    plain = batch.without("source").after(prompts("text").of_batch(batch))
    assert plain.prompt_lengths.tolist() == [len(rows[0].input_ids)] * 2 and "source" not in plain


def test_prompts_of_a_response_its_verdict_and_siblings(prompts, tiny_tokenizer):
    first, second = records(tiny_tokenizer)
    rows = [first, second, first, first, second]
    right = (False, True, True, False, False)
    verdicts = [Verdict(correct, True, "exact" if correct else "different", extras={}) for correct in right]
    batch = Batch.of([row.input_ids for row in rows], [[7]] * 5, records=rows, texts=[*"abcde"])
    batch.fill(verdicts=verdicts, group=torch.tensor([5, 3, 5, 5, 3]))
    made = prompts("retold", limit=64)
    made.try_on(first, group_size=3)
    assert made.read_verdicts and not prompts("solved").read_verdicts
    found = made.of_batch(batch)
    texts = [tiny_tokenizer.decode(ids) for ids in (found[0], found[3])]
    # A response is not its own sibling.
    assert "a different ['c None', 'd None']" in texts[0] and "d different ['a " in texts[1]
    # What is right has no prompt, and what is too long for the teacher has none.
    assert found[1] is found[2] is found[4] is None
    # The function got copies.
    assert all(not verdict.extras for verdict in verdicts) and not first.extra_info
    assert first.messages[0]["content"] == "What is 1 + 2?"


def test_edited_prompt_is_another_one(prompts, tiny_tokenizer):
    (first, _), made = records(tiny_tokenizer), prompts("solved")
    edited = replace(first, input_ids=[*first.input_ids, 9], messages=[{"role": "user", "content": "What is 5 + 2?"}])
    batch = Batch.of([first.input_ids, edited.input_ids], [[7], [7]], records=[first, edited])
    texts = [tiny_tokenizer.decode(ids) for ids in made.of_batch(batch)]
    assert "What is 1 + 2? It is 0." in texts[0] and "What is 5 + 2? It is 0." in texts[1]


@pytest.mark.parametrize(("name", "limit", "line"), refusals("data/refusals.txt", "teachers"))
def test_prompt_that_cannot_be_used_is_refused(name: str, limit: str, line: str, prompts, tiny_tokenizer, refused):
    rows = records(tiny_tokenizer)[:1]
    with refused(line):
        prompts(name, int(limit)).of_batch(Batch.of([rows[0].input_ids], [[9, 8]], records=rows))
