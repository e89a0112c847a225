import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizer import make_tiny_tokenizer
from transformers import AutoTokenizer

from tests.kit import jsonl, parquet
from tests.tables import refusals
from verl.config import SFTConfig, SFTDataConfig, load_config
from verl.data.conversations import ConversationDataset, conversation_batch, conversation_loader, tokenize_conversation
from verl.data.records import SFT_SCHEMA, write_parquet
from verl.data.templates import render_chat, render_record

TOKENIZER = make_tiny_tokenizer()
TOOL_MODEL = Path(__file__).resolve().parents[2] / "data" / "tiny_tool_model"
# Ids: <|im_end|> 2, <|user|> 4, <|assistant|> 5, "1" 22, "2" 23, "3" 24, "4" 25.
ONE_TURN = [4, 22, 2, 5, 23, 2]


def chat(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write_chats(path: Path, chats: list[list[dict[str, str]]]) -> str:
    write_parquet(path, [{"messages": messages} for messages in chats], SFT_SCHEMA)
    return str(path)


def data_config(max_length: int = 16, truncation: str = "error") -> SFTDataConfig:
    return replace(load_config(SFTConfig, "sft").data, max_length=max_length, truncation=truncation)


@pytest.mark.parametrize(
    ("contents", "ids", "mask"),
    [
        (["1", "2"], ONE_TURN, [0, 0, 0, 0, 1, 1]),
        (["1", "2", "3", "44"], [*ONE_TURN, 4, 24, 2, 5, 25, 25, 2], [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]),
        (["1", "2", "3"], [*ONE_TURN, 4, 24, 2], [0, 0, 0, 0, 1, 1, 0, 0, 0]),
    ],
)
def test_assistant_turns_are_learned_with_their_end(contents: list[str], ids: list[int], mask: list[int]):
    assert tokenize_conversation(chat(*contents), TOKENIZER, "here") == (ids, mask)


def test_turn_of_weight_0_is_not_learned():
    messages = chat("1", "2", "3", "44")
    messages[1] |= {"weight": 0}
    messages[3] |= {"weight": 1}
    ids, mask = tokenize_conversation(messages, TOKENIZER, "here")
    assert (ids, sum(mask)) == (tokenize_conversation(chat("1", "2", "3", "44"), TOKENIZER, "here")[0], 3)
    assert mask[-3:] == [1, 1, 1]


TURN = {"role": "user", "content": "1"}


@pytest.mark.parametrize(("messages", "line"), refusals("data/refusals.txt", "conversations"))
def test_conversation_without_a_lesson_is_refused(tmp_path: Path, refused, messages: str, line: str):
    tokenizer = make_tiny_tokenizer()
    refusal = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no no') }}{% endif %}{% endfor %}"
    tokenizer.chat_template = f"{refusal}{tokenizer.chat_template}"
    rows = [{"messages": chat("1", "2")}, {"messages": eval(messages, {"chat": chat, "TURN": TURN})}]
    with refused(line):
        ConversationDataset([jsonl(tmp_path / "a.jsonl", *rows)], tokenizer, data_config())


def test_digests_are_those_of_whole_conversations(tmp_path: Path):
    chats = [chat("1", "2"), chat("2", "3")]
    path, backwards = write_chats(tmp_path / "a.parquet", chats), write_chats(tmp_path / "b.parquet", chats[::-1])
    digests = ConversationDataset([path], TOKENIZER, data_config()).digests
    assert ConversationDataset([path], TOKENIZER, data_config(5, "right")).digests == digests
    assert digests.keys() == {"data.train_files[0]"}
    other = ConversationDataset([backwards], TOKENIZER, data_config()).digests["data.train_files[0]"]
    assert other == digests["data.train_files[0]"][::-1] != other[::-1]


def test_truncation_must_leave_something_to_learn(tmp_path: Path):
    # Else the row counts as a sequence of probability 1 at validation, and a batch of such rows divides by zero.
    path = write_chats(tmp_path / "a.parquet", [chat("1", "2")])
    dataset = ConversationDataset([path], TOKENIZER, data_config(max_length=5, truncation="right"))
    assert list(dataset) == [(ONE_TURN[:5], [0, 0, 0, 0, 1])]


def test_first_token_is_never_learned():
    batch = conversation_batch([([5, 3, 6], [0, 0, 1]), ([5, 6, 26, 26, 3], [0, 0, 1, 1, 1])])
    assert batch.tokens.tolist() == [5, 3, 6, 5, 6, 26, 26, 3]
    assert (batch.prompt_lengths.tolist(), batch.response_lengths.tolist()) == ([1, 1], [2, 4])
    assert batch.learn_mask.tolist() == [False, True, False, True, True, True]


def test_fewer_conversations_than_a_batch_are_refused(tmp_path: Path, refused):
    dataset = ConversationDataset([write_chats(tmp_path / "a.parquet", [chat("1", "2")])], TOKENIZER, data_config())
    with refused("data.train_batch_size=2: there are only 1 conversations; lower it"):
        conversation_loader(dataset, 2, seed=0)


def test_turns_beyond_the_length_are_not_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    renders = []

    def count(render: Callable[..., Any], turns: list[Any], *rest: Any, **options: Any) -> Any:
        renders.append(len(turns))
        return render(turns, *rest, **options)

    for render in (render_chat, render_record):
        monkeypatch.setattr(f"verl.data.conversations.{render.__name__}", partial(count, render))
    path = write_chats(tmp_path / "a.parquet", [chat(*"12" * 1000)])
    ids, mask = ConversationDataset([path], TOKENIZER, data_config(12, "right"))[0]
    assert (ids, mask) == (ONE_TURN * 2, [0, 0, 0, 0, 1, 1] * 2)
    assert renders == [2000, 1, 2, 3, 4, 5]


CALLING = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template in the form of Hermes' and Qwen2.5's."""


def tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


NUMBER = {"type": "number"}
WITH_TOOLS = [
    {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": None, "tool_calls": [call("add", a=1, b=2), call("at", where={"x": 3})]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "3"},
        ],
        "tools": [tool("add", a=NUMBER, b=NUMBER), tool("at", where={"type": "object", "properties": {"x": NUMBER}})],
    },
    {
        "messages": [
            {"role": "user", "content": "2"},
            {"role": "assistant", "content": "", "tool_calls": [call("all", of=[{"a": 1}, {"c": [{"d": 2}, {}]}])]},
        ],
        "tools": [tool("all", of={"type": "array", "items": NUMBER})],
    },
    {"messages": chat("1", "2"), "tools": None},
]


def calling_tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(TOOL_MODEL)
    tokenizer.chat_template = CALLING
    return tokenizer


def with_text_arguments(row: dict[str, Any]) -> dict[str, Any]:
    row = copy.deepcopy(row)
    for made in (made for message in row["messages"] for made in message.get("tool_calls", [])):
        made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    return row | {"tools": json.dumps(row["tools"])}


def with_parts(row: dict[str, Any]) -> dict[str, Any]:
    parts = [
        message | {"content": [{"type": "text", "text": part} for part in message["content"] or ""]}
        for message in row["messages"]
    ]
    return row | {"messages": parts}


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("change", [dict, with_text_arguments, with_parts])
def test_tool_records_are_those_of_the_template(tmp_path: Path, form: str, change: Callable[..., dict[str, Any]]):
    path, rows = tmp_path / f"a.{form}", [change(row) for row in WITH_TOOLS]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)))
    tokenizer = calling_tokenizer()
    dataset = ConversationDataset([str(path)], tokenizer, data_config(max_length=9999))
    for (ids, mask), row in zip(dataset, WITH_TOOLS, strict=True):
        expected = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False)
        assert tokenizer.decode(ids) == tokenizer.decode(expected) and ids == expected
        learned = tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts])
        assert learned.count("<tool_call>") == sum(len(m.get("tool_calls", ())) for m in row["messages"])
        assert "<|system|>" not in learned and learned.endswith("<|im_end|>")


def test_null_argument_of_a_json_file_is_kept(tmp_path: Path):
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": [call("add", a=None)]}]
    tokenizer = calling_tokenizer()
    path = jsonl(tmp_path / "a.jsonl", {"messages": messages, "tools": [tool("add")]})
    ((ids, _),) = ConversationDataset([path], tokenizer, data_config(max_length=9999))
    assert '"arguments": {"a": null}' in tokenizer.decode(ids)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_calls_without_arguments_have_empty_ones(tmp_path: Path, form: str):
    rows = []
    for missing in ({}, {"arguments": None}, {"arguments": "{}"}):
        called = {"type": "function", "function": {"name": "now", **missing}}
        messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [called]}]
        rows.append({"messages": messages, "tools": [tool("now", zone=NUMBER)]})
    path = (parquet if form == "parquet" else jsonl)(tmp_path / f"a.{form}", *rows)
    tokenizer = calling_tokenizer()
    dataset = ConversationDataset([path], tokenizer, data_config(max_length=9999))
    texts = [tokenizer.decode(ids) for ids, _ in dataset]
    assert all('{"name": "now", "arguments": {}}' in text for text in texts) and len(set(texts)) == 1


# Like templates that strip the reasoning of all turns but the last: no mask can be found, and none may be guessed.
REWRITES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] if loop.last else '') + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize(("options", "rows", "line"), refusals("data/refusals.txt", "chats"))
def test_files_that_do_not_fit_the_options_are_refused(tmp_path: Path, refused, options: str, rows: str, line: str):
    names = {"chat": chat, "CALLING": CALLING, "REWRITES": REWRITES, "WITH_TOOLS": WITH_TOOLS}
    values = eval(f"dict({options})", names)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = values.pop("chat_template", tokenizer.chat_template)
    path = jsonl(tmp_path / "a.jsonl", *eval(f"[{rows}]", names))
    with refused(line):
        ConversationDataset([path], tokenizer, data_config(**values))


def test_template_that_takes_arguments_as_text():
    tokenizer = calling_tokenizer()
    tokenizer.chat_template = CALLING.replace("call.function.arguments | tojson", "'' + call.function.arguments")
    ids, _ = tokenize_conversation(WITH_TOOLS[0]["messages"], tokenizer, "here", tools=WITH_TOOLS[0]["tools"])
    assert '"arguments": {"a": 1, "b": 2}' in tokenizer.decode(ids)
