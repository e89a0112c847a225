"""Prompts under which a teacher reads the policy's responses."""

import pytest
import torch

from tests.kit import data_options, user_code
from verl.batch import ENVIRONMENT, POLICY, Batch
from verl.data.prompt_record import PromptRecord
from verl.data.teacher_prompts import TeacherPrompts

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
    found = prompts("solved").batch(batch)
    texts = [tiny_tokenizer.decode(ids) for ids in found.tokens.split(found.lengths.tolist())]
    assert "What is 1 + 2? It is 0." in texts[0] and "What is 30 + 2? It is 1." in texts[1]
    assert found.response_tokens.tolist() == [9, 8, 7] and torch.equal(found.source, source)
    # The policy's own records are as they were.
    assert [row.messages[0]["content"] for row in rows] == ["What is 1 + 2?", "What is 30 + 2?"]
    plain = prompts("text").batch(batch.without("source"))
    assert plain.prompt_lengths.tolist() == [len(rows[0].input_ids)] * 2 and "source" not in plain


@pytest.mark.parametrize(
    ("name", "limit", "line"),
    [
        ("nothing", 64, "...prompt 0: prompt: the prompt is empty..."),
        ("fails", 64, "...KeyError: 'solution'..."),
        (
            "solved",
            12,
            "...the teacher's prompt 0 and its response have ... tokens, and the teacher reads 12; return...",
        ),
    ],
)
def test_prompt_that_cannot_be_used_is_refused(name, limit, line, prompts, tiny_tokenizer, refused):
    rows = records(tiny_tokenizer)[:1]
    with refused(line):
        prompts(name, limit).batch(Batch.of([rows[0].input_ids], [[9, 8]], records=rows))
