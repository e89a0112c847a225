"""What prompt files hold: the layouts that veRL's and other projects' scripts write, in templates, and flaws."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import data_options
from tiny_tokenizer import make_tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from scripts.prepare_data import BOXED_INSTRUCTION
from verl.config import ConfigError, DataConfig
from verl.config.data import CustomDatasetConfig
from verl.data.prompts import PromptDataset, train_loader
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
    """That of a base model: without a chat template."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def config_of(**changes: Any) -> DataConfig:
    return data_options(**({"max_prompt_length": 400, "train_batch_size": 2} | changes))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def row(prompt: Any = "1?", **columns: Any) -> dict[str, Any]:
    return {"data_source": "math", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "4"}} | columns


def simplerl_zoo(prompt: str) -> dict[str, Any]:
    """A row as SimpleRL-Zoo's files have it: the template is part of the message."""
    return {
        "question": QUESTION,
        "gt_answer": "4",
        "level": 3,
        "subject": "Algebra",
        "target": "",
        "data_source": "simplelr_math_35",
        "prompt": user(prompt),
        "ability": "math",
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"answer": "4", "index": 0, "level": 3, "question": QUESTION, "split": "train"},
    }


GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": user(f'{QUESTION} Let\'s think step by step and output the final answer after "####".'),
    "ability": "math",
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "extra_info": {"answer": "2 + 2 = <<2+2=4>>4\n#### 4", "index": 0, "question": QUESTION, "split": "train"},
}
COUNTDOWN = {
    "target": 24,
    "nums": [3, 8],
    "data_source": "countdown",
    "prompt": user("Using the numbers [3, 8], create an equation that equals 24."),
    "ability": "math",
    "reward_model": {"ground_truth": {"numbers": [3, 8], "target": 24}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}


def parquet(path: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


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
def test_prompts_of_a_base_model(
    tmp_path: Path, base_tokenizer, monkeypatch, template: str, record: dict[str, Any], text: str
):
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "countdown", "mine:score")
    dataset = PromptDataset([parquet(tmp_path / "a.parquet", record)], base_tokenizer, config_of(template=template))
    assert texts(dataset) == [text] and dataset.notes == []
    assert dataset[0].ground_truth == record["reward_model"]["ground_truth"]
    assert dataset[0].extra_info == record.get("extra_info", {})


def test_a_base_model_needs_a_template_of_ours(tmp_path: Path, base_tokenizer):
    path = parquet(tmp_path / "a.parquet", GSM8K)
    with pytest.raises(ConfigError) as caught:
        PromptDataset([path], base_tokenizer, config_of())
    assert str(caught.value).startswith(
        "data.template='chat': the model's tokenizer has no chat template; set data.template=raw for prompts that are "
        "already in the model's form, or one of raw, plain, plain-boxed, question-answer, "
    )


def test_the_whole_chat_is_for_the_tokenizers_template(tmp_path: Path):
    system = [{"role": "system", "content": "Be short."}, *user("1?")]
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row(system))
    assert texts(PromptDataset([path], CHAT, config_of())) == [
        "<|user|>1?<|im_end|><|assistant|>",
        "<|system|>Be short.<|im_end|><|user|>1?<|im_end|><|assistant|>",
    ]
    with pytest.raises(ConfigError) as caught:
        PromptDataset([path], CHAT, config_of(template="abel"))
    assert str(caught.value) == (
        f"{path}, row 1: prompt: data.template='abel' takes one user message, not system, user; set data.template=chat"
    )
    strict = make_tiny_tokenizer()
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}1"
    with pytest.raises(
        ConfigError, match=f"^{path}, row 1: prompt: the tokenizer's chat template refuses the chat: no system$"
    ):
        PromptDataset([path], strict, config_of())


def test_a_chat_template_that_fails_is_one_line(tmp_path: Path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content + extra }}"
    path = jsonl(tmp_path / "a.jsonl", row("1?"))
    config = config_of(apply_chat_template_kwargs={"extra": 1})
    with pytest.raises(ConfigError) as caught:
        PromptDataset([path], tokenizer, config)
    assert str(caught.value) == (
        f"{path}, row 0: prompt: the tokenizer's chat template fails on the chat with apply_chat_template_kwargs="
        "{'extra': 1}: TypeError: can only concatenate str (not \"int\") to str"
    )


def test_a_template_on_top_of_another_is_told(tmp_path: Path):
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
def test_answers_of_any_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any):
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "mine", "my_module:my_function")
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
def test_extra_info_of_any_shape(tmp_path: Path, value: Any, expected: dict[str, Any]):
    path = jsonl(tmp_path / "a.jsonl", row(extra_info=value))
    assert PromptDataset([path], CHAT, config_of())[0].extra_info == expected


def test_columns_of_other_names(tmp_path: Path):
    record = {"source": "math", "chat": user("1?"), "reward_model": '{"ground_truth": 4}', "prompt": "unused"}
    path = jsonl(tmp_path / "a.jsonl", record)
    dataset = PromptDataset([path], CHAT, config_of(prompt_key="chat", reward_fn_key="source"))
    assert texts(dataset) == ["<|user|>1?<|im_end|><|assistant|>"]
    assert (dataset[0].data_source, dataset[0].ground_truth, dataset[0].messages) == ("math", 4, user("1?"))
    with pytest.raises(
        ConfigError, match=r"lacks the columns \['data_source'\]; .* set data.prompt_key or data.reward_f"
    ):
        PromptDataset([path], CHAT, config_of())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (row(""), "prompt: the prompt is empty; remove the row"),
        (row(user(" \n")), "prompt: the prompt is empty; remove the row"),
        (row(None), "prompt=None: must be text or a list of messages, each with role and content; set data.prompt_key"),
        (row([{"text": "1?"}]), "prompt=[{'text': '1?'}]: must be text or a list of messages, each with role and con"),
        (row(user([{"type": "image"}])), "prompt: the content of a message must be text: [{'type': 'image'}]"),  # type: ignore[arg-type]
        (row([{"role": None, "content": "1?"}]), "prompt: the role of a message must be text: None"),
        (row("1\ud800?"), "prompt: the content of a message must be text: '1\\ud800?'"),
        (row(images=["a.png"]), "has images; prompts with images or videos are not supported"),
        (row(agent_name="tool_agent"), "agent_name='tool_agent': needs tools; set rollout.multi_turn.enable=true"),
        (row(extra_info={"need_tools_kwargs": True}), "extra_info.need_tools_kwargs=True: needs tools; set"),
        (row(data_source=None), "data_source=None: must name a verifier; data.reward_fn_key is its column"),
        (row(data_source="maths"), "data_source='maths': must be one of "),
        (row(reward_model="4"), "reward_model='4': must be a mapping that holds ground_truth, or the JSON text of one"),
        (row(reward_model=[{"ground_truth": "4"}]), "reward_model=[{'ground_truth': '4'}]: must be a mapping that"),
        (row(reward_model='{"ground_truth": '), "reward_model='{\"ground_truth\": ': must be a mapping that"),
        (row(data_source="kk", reward_model={"ground_truth": "nobody"}), "reward_model.ground_truth: "),
        (row(data_source="open_answer", extra_info='{"tolerance": Infinity}'), "extra_info.tolerance=inf: must be a"),
        (row(extra_info=json.loads("[" * 40 + "]" * 40)), "extra_info is nested more than 32 levels deep; flatten it"),
        (
            row(reward_model={"ground_truth": None}),
            "reward_model.ground_truth: None: no answer to check against; remove",
        ),
        (
            row(reward_model={"ground_truth": float("nan")}),
            "reward_model.ground_truth: nan: no answer to check against",
        ),
    ],
)
def test_a_row_that_cannot_train_is_named(tmp_path: Path, record: dict[str, Any], message: str):
    path = jsonl(tmp_path / "a.jsonl", row(), record)
    with pytest.raises(ConfigError, match="^" + re.escape(f"{path}, row 1: {message}")):
        PromptDataset([path], CHAT, config_of())


@pytest.mark.parametrize(
    "options", [{"truncation": "filter"}, {"filter_overlong_prompts": True, "truncation": "error"}]
)
def test_prompts_that_are_too_long_are_left_out(tmp_path: Path, options: dict[str, Any]):
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row("1 + 1?"), row("2?"), row("1 + 1 + 1?"))
    dataset = PromptDataset([path], CHAT, config_of(max_prompt_length=5, **options))
    assert texts(dataset) == ["<|user|>1?<|im_end|><|assistant|>", "<|user|>2?<|im_end|><|assistant|>"]
    assert [record.uid for record in dataset.records] == [0, 1]
    assert dataset.notes == [
        "left out 2 of 4 prompts that are longer than data.max_prompt_length=5, the longest with 13 tokens (the first: "
        f"{path}, row 1)"
    ]
    with pytest.raises(ConfigError) as caught:
        PromptDataset([path], CHAT, config_of(max_prompt_length=4, **options))
    assert str(caught.value) == (
        f"data.max_prompt_length=4: all 4 prompts of ['{path}'] are longer, of 5 to 13 tokens; raise it"
    )


def test_prompts_that_are_cut_or_repeat_are_told(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", row("1?"), row("2?"), row("1?"), row("1 + 1?"), row("1?"))
    assert PromptDataset([path], CHAT, config_of(max_prompt_length=5, truncation="right")).notes == [
        "cut 1 of 5 prompts to data.max_prompt_length=5 tokens with data.truncation=right, the longest has 9",
        f"2 of 5 prompts occur more than once (the first: {path}, row 2 repeats {path}, row 0)",
    ]


def test_a_part_of_the_prompts(tmp_path: Path):
    files = [jsonl(tmp_path / f"{name}.jsonl", *(row(f"{name}{i}?") for i in range(20))) for name in "ab"]
    drawn = [texts(PromptDataset(files, CHAT, config_of(), 8, seed)) for seed in (0, 0, 1)]
    assert [len(set(found)) for found in drawn] == [8, 8, 8] and drawn[0] == drawn[1] != drawn[2]
    whole = texts(PromptDataset(files, CHAT, config_of()))
    assert [whole.index(text) for text in drawn[0]] == sorted(whole.index(text) for text in drawn[0])
    assert texts(PromptDataset(files, CHAT, config_of(shuffle=False), 23, 0)) == whole[:23]
    assert PromptDataset(files, CHAT, config_of(shuffle=False), 23, 0).sizes == [20, 3]


def test_a_mixture_of_files(tmp_path: Path):
    files = [jsonl(tmp_path / f"{name}.jsonl", *(row(f"{name}{i}?") for i in range(20))) for name in "abc"]
    config = config_of(train_files=files, train_weights=[3, 1, 0], train_batch_size=4)
    dataset = PromptDataset(files, CHAT, config)

    def epoch(seed: int) -> list[int]:
        return [record.uid for batch in train_loader(dataset, config, seed) for record in batch]

    first = epoch(0)
    # An epoch is as long as all files together: 45 of the 20 prompts of the first file, 15 of the second.
    assert len(first) == 60 and sum(uid < 20 for uid in first) == 45 and max(first) < 40
    assert first == epoch(0) != epoch(1)
    short = replace(config, max_prompt_length=4, truncation="filter", train_batch_size=1)
    with pytest.raises(ConfigError, match="are longer"):
        PromptDataset(files, CHAT, short)
    long = jsonl(tmp_path / "long.jsonl", row("a" * 500))
    filtered = replace(config, train_files=[files[0], long, files[1]], filter_overlong_prompts=True)
    with pytest.raises(ConfigError, match=rf"^data.train_weights=\[3, 1, 0\]: no prompt of {long} is left to draw$"):
        train_loader(PromptDataset(filtered.train_files, CHAT, filtered), filtered, 0)
    rare = replace(config, train_weights=[200, 1, 0])
    with pytest.raises(ConfigError, match=f"the share of {files[1]} in an epoch of 60 prompts is none; raise it$"):
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


def test_a_data_set_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_sums.py").write_text(OWN)
    path = str(tmp_path / "own_sums.py")
    monkeypatch.syspath_prepend(tmp_path)  # as a module it is found there
    for place in (path, "own_sums"):
        config = config_of(template="raw", custom_cls=CustomDatasetConfig(place, "Sums"))
        dataset = PromptDataset(["1", "2"], CHAT, config)
        assert texts(dataset) == ["0 + 0?", "0 + 0?", "1 + 1?"]
        assert [record.ground_truth for record in dataset.records] == [0, 0, 2]
    for place, name, message in [
        (
            path,
            "Numbers",
            "data.custom_cls.name='Numbers': its record 0 lacks ['data_source', 'prompt', 'reward_model']",
        ),
        (path, "Quits", f"data.custom_cls.name='Quits': its iterator raised SystemExit: 0 ({path}, line 19)"),
        ("nowhere.py", "Sums", "data.custom_cls.path='nowhere.py': no such file ("),
    ]:
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            PromptDataset(["1"], CHAT, config_of(custom_cls=CustomDatasetConfig(place, name)))


@pytest.mark.parametrize("template", ["chat", "plain", "qwen", "llama"])
def test_training_and_evaluation_ask_in_the_same_words(tmp_path: Path, template: str):
    assert BOXED == BOXED_INSTRUCTION == IN_TEMPLATES
    record = rl_record(
        data_source="math", question=QUESTION, ground_truth="4", split="train", index=0, instruction=BOXED_INSTRUCTION
    )
    dataset = PromptDataset([jsonl(tmp_path / "a.jsonl", record)], CHAT, config_of(template=template))
    assert dataset[0].input_ids == render_prompt(f"{template}-boxed", QUESTION, CHAT)


def test_a_prompt_that_ends_in_an_open_thought(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", row("1?<|assistant|><think>\n"), row("<think> 1?"))
    records = PromptDataset([path], CHAT, config_of(template="raw")).records
    assert [record.opens_thought for record in records] == [True, False]
