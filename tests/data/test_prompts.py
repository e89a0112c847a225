"""Prompts from files: the layouts that veRL's and other projects' scripts write, templates, flaws, and batches."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import make_tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from scripts.prepare_data import BOXED_INSTRUCTION
from tests.kit import data_options, jsonl, parquet, user_code
from tests.tables import refusals
from verl.config import DataConfig
from verl.config.data import CustomDatasetConfig
from verl.data.prompt_record import PromptRecord
from verl.data.prompts import PromptDataset, PromptLayout, train_loader, val_batches
from verl.data.records import rl_record
from verl.data.templates import BOXED as IN_TEMPLATES
from verl.data.templates import render_prompt
from verl.rewards.registry import CUSTOM_FUNCTIONS

CHAT = make_tiny_tokenizer()
"""Adds nothing but ``<|user|>``, ``<|im_end|>`` and ``<|assistant|>``; one token is one byte."""

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
QUESTION = "What is 2 + 2?"
ABEL = "Question:\nWhat is 2 + 2?\nAnswer:\nLet's think step by step.\n"
QWEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\nWhat is 2 + 2?\n{BOXED}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def base_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of a base model, which has no chat template."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


CUSTOM = "verl.rewards:compute_score"
"""A function with veRL's signature."""


def config_of(**changes: Any) -> DataConfig:
    return data_options(**({"max_prompt_length": 400, "train_batch_size": 2} | changes))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def row(prompt: Any = "1?", **columns: Any) -> dict[str, Any]:
    return {"data_source": "math", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "4"}} | columns


def simplerl_zoo(prompt: str) -> dict[str, Any]:
    """A row as SimpleRL-Zoo's files have it: the template is part of the message."""
    columns = {"question": QUESTION, "gt_answer": "4", "level": 3, "target": "", "data_source": "simplelr_math_35"}
    return row(user(prompt), **columns, extra_info={"answer": "4", "index": 0, "split": "train"})


GSM8K = row(
    user(f'{QUESTION} Let\'s think step by step and output the final answer after "####".'),
    data_source="openai/gsm8k",
    extra_info={"answer": "2 + 2 = <<2+2=4>>4\n#### 4", "index": 0, "question": QUESTION, "split": "train"},
)
COUNTDOWN = row(
    user("Using the numbers [3, 8], create an equation that equals 24."),
    data_source="countdown",
    reward_model={"ground_truth": {"numbers": [3, 8], "target": 24}, "style": "rule"},
    nums=[3, 8],
)


def texts(dataset: PromptDataset) -> list[str]:
    return [CHAT.decode(record.input_ids) for record in dataset.records]


@pytest.mark.parametrize(
    ("template", "record", "text"),
    [
        ("raw", simplerl_zoo(ABEL), ABEL),
        ("raw", simplerl_zoo(QWEN), QWEN),
        ("abel", row(user(QUESTION)), ABEL),
        ("qwen-boxed", row(QUESTION), QWEN),
        ("question-answer", GSM8K, f"Question: {GSM8K['prompt'][0]['content']}\nAnswer:"),
        ("plain", COUNTDOWN, "Using the numbers [3, 8], create an equation that equals 24.\n"),
    ],
)
def test_prompt_templates_of_a_base_model(
    tmp_path: Path, base_tokenizer, monkeypatch, template: str, record: dict[str, Any], text: str
):
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "countdown", CUSTOM)
    dataset = PromptDataset([parquet(tmp_path / "a.parquet", record)], base_tokenizer, config_of(template=template))
    assert texts(dataset) == [text] and dataset.notes == []
    assert dataset[0].ground_truth == record["reward_model"]["ground_truth"]
    assert dataset[0].extra_info == record.get("extra_info", {})


def test_chat_is_rendered_by_the_tokenizer(tmp_path: Path):
    system = [{"role": "system", "content": "Be short."}, *user("1?")]
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row(system))
    assert texts(PromptDataset([path], CHAT, config_of())) == [
        "<|user|>1?<|im_end|><|assistant|>",
        "<|system|>Be short.<|im_end|><|user|>1?<|im_end|><|assistant|>",
    ]


def test_prompts_read_the_tools_of_their_records(tmp_path: Path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.name }}={{ tool.of | tojson }};{% endfor %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.arguments | tojson }}{% endfor %};"
        "{% endfor %}"
    )
    earlier = [
        *user("1?"),
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
    ]
    first = row([*earlier, {"role": "tool", "content": "2"}], tools=[{"name": "f", "of": {"a": "int"}}])
    other = row(user("3?"), tools=[{"name": "g", "of": {"b": "int"}}])
    path = parquet(tmp_path / "a.parquet", first, other, row(user("5?")))
    given = config_of(apply_chat_template_kwargs={"tools": [{"name": "h", "of": {}}]})
    records = PromptDataset([path], tokenizer, given).records
    assert [tokenizer.decode(record.input_ids) for record in records] == [
        'f={"a": "int"};user:1?;assistant:{"a": 1};tool:2;',
        'g={"b": "int"};user:3?;',
        "h={};user:5?;",
    ]
    assert [list(record.tools) for record in records] == [first["tools"], other["tools"], []]


def test_template_on_top_of_another_is_noted(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row(user(QWEN)), row(user(ABEL)))
    (note,) = PromptDataset([path], CHAT, config_of()).notes
    assert note == (
        "2 of 3 prompts already hold a template, and data.template=chat is added to it (the first: "
        f"{path}, row 1 has '<|im_start|>'); data.template=raw takes prompts as they are"
    )
    assert PromptDataset([path], CHAT, config_of(template="raw")).notes == []
    boxed = jsonl(tmp_path / "b.jsonl", row(f"1?\n{BOXED}"))
    (note,) = PromptDataset([boxed], CHAT, config_of(template="qwen-boxed")).notes
    assert note == (
        f"1 of 1 prompts already ask for an answer in a box, and data.template=qwen-boxed asks again (the first: "
        f"{boxed}, row 0)"
    )


@pytest.mark.parametrize(
    "truth", ["4", 4, 4.5, True, False, 0, "", ["4", "5"], {"target": 24, "numbers": [3, 8]}, [{"a": None}]]
)
def test_ground_truth_of_any_type_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any):
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "mine", CUSTOM)
    record = row(data_source="mine", reward_model={"style": "rule", "ground_truth": truth})
    for path in (jsonl(tmp_path / "a.jsonl", record), parquet(tmp_path / "a.parquet", record)):
        found = PromptDataset([path], CHAT, config_of())[0].ground_truth
        assert found == truth and type(found) is type(truth)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"index": 3, "tools": {"a": [1]}}, {"index": 3, "tools": {"a": [1]}}),
        (None, {}),
        ({}, {}),
        ('{"index": 3}', {"index": 3}),
        ("{}", {}),
        ("", {}),
        ("a note", {"value": "a note"}),
        ([1, 2], {"value": [1, 2]}),
        (7, {"value": 7}),
    ],
)
def test_extra_info_of_any_shape_becomes_a_mapping(tmp_path: Path, value: Any, expected: dict[str, Any]):
    path = jsonl(tmp_path / "a.jsonl", row(extra_info=value))
    assert PromptDataset([path], CHAT, config_of())[0].extra_info == expected


def test_named_prompt_column_wins_over_prompt(monkeypatch):
    """A function's parameter ``prompt`` gets the task, not a column that happens to have this name."""
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "math", "verl.rewards.judge:judge")
    record = {"data_source": "math", "chat": "1?", "reward_model": {}, "prompt": "unused"}
    assert PromptLayout("chat").completed(record)["extra_info"]["prompt"] == "1?"


def test_columns_of_other_names_are_read(tmp_path: Path):
    record = {"source": "math", "chat": user("1?"), "reward_model": '{"ground_truth": 4}', "prompt": "unused"}
    path = jsonl(tmp_path / "a.jsonl", record)
    dataset = PromptDataset([path], CHAT, config_of(prompt_key="chat", reward_fn_key="source"))
    assert texts(dataset) == ["<|user|>1?<|im_end|><|assistant|>"]
    assert (dataset[0].data_source, dataset[0].ground_truth, dataset[0].messages) == ("math", 4, user("1?"))


def test_questions_and_answers_are_read(tmp_path: Path):
    solution = "2 + 2 = <<2+2=4>>4.\n#### 1,004"
    path = jsonl(tmp_path / "a.jsonl", {"question": "1?", "answer": solution}, {"question": "2?", "answer": "7 cm"})
    options = {"prompt_key": "question", "answer_key": "answer", "data_source": "gsm8k"}
    dataset = PromptDataset([path], CHAT, config_of(**options))
    assert [(r.data_source, r.ground_truth) for r in dataset.records] == [("gsm8k", "1004"), ("gsm8k", "7 cm")]
    assert texts(dataset)[0] == "<|user|>1?<|im_end|><|assistant|>"


def test_columns_of_the_file_come_before_data_source(tmp_path: Path):
    trl = {"prompt": user("1?"), "answer": 4}
    path = jsonl(tmp_path / "a.jsonl", trl | {"data_source": "gsm8k"}, trl | {"data_source": None})
    dataset = PromptDataset([path], CHAT, config_of(answer_key="answer", data_source="math"))
    assert [(r.data_source, r.ground_truth) for r in dataset.records] == [("gsm8k", 4), ("math", 4)]


@pytest.mark.parametrize(("record", "line"), refusals("data/refusals.txt", "prompts"))
def test_row_that_cannot_train_is_refused(tmp_path: Path, refused, record: str, line: str):
    path = jsonl(tmp_path / "a.jsonl", row(), eval(record, {"row": row, "user": user, "json": json}))
    with refused(line):
        PromptDataset([path], CHAT, config_of())


@pytest.mark.parametrize(("options", "rows", "line"), refusals("data/refusals.txt", "layouts"))
def test_files_that_do_not_fit_the_options_are_refused(tmp_path: Path, refused, options: str, rows: str, line: str):
    values = eval(f"dict({options})")
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = values.pop("chat_template", tokenizer.chat_template)
    path = jsonl(tmp_path / "a.jsonl", *eval(f"[{rows}]", {"row": row, "user": user}))
    with refused(line):
        PromptDataset([path], tokenizer, config_of(**values))


@pytest.mark.parametrize("options", [{"truncation": "filter"}, {"filter_overlong_prompts": True}])
def test_overlong_prompts_are_left_out(tmp_path: Path, options: dict[str, Any]):
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row("1 + 1?"), row("2?"), row("1 + 1 + 1?"))
    dataset = PromptDataset([path], CHAT, config_of(max_prompt_length=5, **options))
    assert texts(dataset) == ["<|user|>1?<|im_end|><|assistant|>", "<|user|>2?<|im_end|><|assistant|>"]
    assert [record.uid for record in dataset.records] == [0, 1]
    assert dataset.notes == [
        "left out 2 of 4 prompts that are longer than data.max_prompt_length=5, the longest with 13 tokens (the first: "
        f"{path}, row 1)"
    ]


def test_cut_and_repeated_prompts_are_noted(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row("2?"), row("1?"), row("1 + 1?"), row("1?"))
    assert PromptDataset([path], CHAT, config_of(max_prompt_length=5, truncation="right")).notes == [
        "cut 1 of 5 prompts to data.max_prompt_length=5 tokens with data.truncation=right, the longest has 9",
        f"2 of 5 prompts occur more than once (the first: {path}, row 2 repeats {path}, row 0)",
    ]


def test_prompt_that_ends_with_an_answer_is_noted(tmp_path: Path):
    answered = [*user("1 + 1?"), {"role": "assistant", "content": "2"}]
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row(answered), row([*answered, *user("3?")]))
    (note,) = PromptDataset([path], CHAT, config_of()).notes
    assert note.startswith("1 of 3 prompts end with a message of the assistant") and f"{path}, row 1" in note


def test_random_part_of_the_prompts(tmp_path: Path):
    files = [jsonl(tmp_path / f"{name}.jsonl", *(row(f"{name}{i}?") for i in range(20))) for name in "ab"]
    drawn = [texts(PromptDataset(files, CHAT, config_of(), 8, seed)) for seed in (0, 0, 1)]
    assert [len(set(found)) for found in drawn] == [8, 8, 8] and drawn[0] == drawn[1] != drawn[2]
    whole = texts(PromptDataset(files, CHAT, config_of()))
    assert [whole.index(text) for text in drawn[0]] == sorted(whole.index(text) for text in drawn[0])
    assert texts(PromptDataset(files, CHAT, config_of(shuffle=False), 23, 0)) == whole[:23]
    assert PromptDataset(files, CHAT, config_of(shuffle=False), 23, 0).sizes == [20, 3]


def test_files_are_mixed_by_their_weights(tmp_path: Path, refused):
    files = [jsonl(tmp_path / f"{name}.jsonl", *(row(f"{name}{i}?") for i in range(20))) for name in "abc"]
    config = config_of(train_files=files, train_weights=[3, 1, 0], train_batch_size=4)
    dataset = PromptDataset(files, CHAT, config)

    def epoch(seed: int) -> list[int]:
        return [record.uid for batch in train_loader(dataset, config, seed) for record in batch]

    first = epoch(0)
    # An epoch is as long as all files together: 45 of the 20 prompts of the first file, 15 of the second.
    assert len(first) == 60 and sum(uid < 20 for uid in first) == 45 and max(first) < 40
    assert first == epoch(0) != epoch(1)
    long = jsonl(tmp_path / "long.jsonl", row("a" * 500))
    filtered = replace(config, train_files=[files[0], long, files[1]], filter_overlong_prompts=True)
    with refused("data.train_weights=[3, 1, 0]: no prompt of TMP/long.jsonl is left to draw"):
        train_loader(PromptDataset(filtered.train_files, CHAT, filtered), filtered, 0)
    rare = replace(config, train_weights=[200, 1, 0])
    with refused("...the share of TMP/b.jsonl in an epoch of 60 prompts is none; raise it"):
        train_loader(dataset, rare, 0)


OWN = """
class Sums:
    def __init__(self, files, config):
        self.files = files

    def __iter__(self):
        for name in self.files:
            for i in range(int(name)):
                yield {"data_source": "math", "prompt": f"{i} + {i}?", "reward_model": {"ground_truth": 2 * i}}


class Numbers(Sums):
    def __iter__(self):
        return iter([5])


class Quits(Sums):
    def __iter__(self):
        raise SystemExit(0)
"""


def test_custom_data_set_is_read(tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch):
    path = user_code(tmp_path, OWN, "own_sums.py")
    monkeypatch.syspath_prepend(tmp_path)  # as a module it is found there
    for place in (path, "own_sums"):
        config = config_of(template="raw", custom_cls=CustomDatasetConfig(place, "Sums"))
        dataset = PromptDataset(["1", "2"], CHAT, config)
        assert texts(dataset) == ["0 + 0?", "0 + 0?", "1 + 1?"]
        assert [record.ground_truth for record in dataset.records] == [0, 0, 2]
    for place, name, line in [
        (path, "Numbers", "name='Numbers': its record 0 lacks ['prompt', 'reward_model', 'data_source']..."),
        (path, "Quits", "name='Quits': its iterator raised SystemExit: 0 (TMP/own_sums.py, line 19)"),
        ("nowhere.py", "Sums", "path='nowhere.py': no such file (..."),
    ]:
        with refused(f"data.custom_cls.{line}"):
            PromptDataset(["1"], CHAT, config_of(custom_cls=CustomDatasetConfig(place, name)))


@pytest.mark.parametrize("template", ["chat", "plain", "qwen", "llama"])
def test_training_and_evaluation_prompts_are_the_same(tmp_path: Path, template: str):
    assert BOXED == BOXED_INSTRUCTION == IN_TEMPLATES
    record = rl_record(
        data_source="math", question=QUESTION, ground_truth="4", split="train", index=0, instruction=BOXED_INSTRUCTION
    )
    dataset = PromptDataset([jsonl(tmp_path / "a.jsonl", record)], CHAT, config_of(template=template))
    assert dataset[0].input_ids == render_prompt(f"{template}-boxed", QUESTION, CHAT)


def prompts_of(folder: Path, *questions: str, **changes: Any) -> PromptDataset:
    """Prompts of at most eight tokens."""
    path = jsonl(folder / f"{len(questions)}.jsonl", *map(row, questions))
    return PromptDataset([path], CHAT, config_of(**({"max_prompt_length": 8} | changes)))


def numbered(folder: Path, count: int) -> PromptDataset:
    return prompts_of(folder, *map(str, range(count)))


def uids(batches: list[list[PromptRecord]]) -> list[int]:
    return [record.uid for batch in batches for record in batch]


LONG = [4, 22, 16, 23, 2, 5]
"""``<|user|>`` 4, "1" 22, "+" 16, "2" 23, ``<|im_end|>`` 2 and ``<|assistant|>`` 5."""


@pytest.mark.parametrize(
    ("limit", "truncation", "expected"),
    [
        (6, "error", LONG),
        (4, "left", LONG[2:]),
        (4, "right", LONG[:4]),
        # The larger half is the end's, as in veRL.
        (5, "middle", LONG[:2] + LONG[3:]),
        (1, "middle", LONG[5:]),
    ],
)
def test_truncation_drops_the_named_side(tmp_path: Path, limit: int, truncation: str, expected: list[int]):
    dataset = prompts_of(tmp_path, "1+2", max_prompt_length=limit, truncation=truncation)
    assert dataset[0].input_ids == expected


def test_prompt_that_opens_a_thought_is_marked(tmp_path: Path):
    records = prompts_of(tmp_path, "1?<|assistant|><think>\n", "<think> 1?", template="raw", max_prompt_length=400)
    assert [record.opens_thought for record in records] == [True, False]


def test_batches_have_the_size_of_a_generation_batch(tmp_path: Path, refused):
    config = config_of(train_batch_size=2, gen_batch_size=5)
    loader = train_loader(numbered(tmp_path, 12), config, seed=0)
    assert [len(batch) for batch in loader] == [5, 5] and len(loader) == 2
    assert [len(batch) for batch in train_loader(numbered(tmp_path, 12), config, seed=0, candidates=2)] == [10]
    with refused("data.gen_batch_size=5: there are only 3 training prompts; lower it"):
        train_loader(numbered(tmp_path, 3), config, seed=0)
    with refused("data.gen_batch_size=5 times 2 candidates a prompt ...: there are only 9..."):
        train_loader(numbered(tmp_path, 9), config, seed=0, candidates=2)


def test_order_depends_on_the_seed_and_the_epoch(tmp_path: Path):
    def epochs(seed: int, shuffle: bool = True) -> list[list[int]]:
        loader = train_loader(numbered(tmp_path, 10), config_of(train_batch_size=2, shuffle=shuffle), seed=seed)
        return [uids(list(loader)) for _ in range(2)]

    first, second = epochs(seed=0)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert [first, second] == epochs(seed=0) != epochs(seed=1)
    assert epochs(seed=0, shuffle=False) == [list(range(10))] * 2


@pytest.mark.parametrize(
    ("num_prompts", "val_batch_size", "sizes"),
    [(4, 4, [4]), (10, 4, [3, 3, 4]), (5, 4, [2, 3]), (3, 1, [1, 1, 1]), (3, 100, [3])],
)
def test_validation_batches(tmp_path: Path, num_prompts: int, val_batch_size: int, sizes: list[int]):
    batches = val_batches(numbered(tmp_path, num_prompts), config_of(val_batch_size=val_batch_size), seed=0)
    assert [len(batch) for batch in batches] == sizes
    assert uids(batches) == list(range(num_prompts))


def test_sample_of_the_validation_prompts(tmp_path: Path):
    dataset, config = numbered(tmp_path, 20), config_of(val_batch_size=4, val_sample_size=6)
    drawn = {seed: uids(val_batches(dataset, config, seed=seed)) for seed in (0, 1)}
    assert [len(set(some)) for some in drawn.values()] == [6, 6]
    assert drawn[0] != drawn[1] and drawn[0] == sorted(drawn[0])
    more = config_of(val_batch_size=100, val_sample_size=100)
    assert uids(val_batches(dataset, more, seed=0)) == list(range(20))
