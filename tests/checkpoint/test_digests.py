"""A resumed run notices what has changed besides its options."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.normalizers import Lowercase

from tests.kit import changed, data_options, edit_json, jsonl, parquet, refused, user_code
from verl.checkpoint.digests import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_RULES, VERIFIERS, data_by_file, run_digests
from verl.checkpoint.resume import Resumption, check_unchanged
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.data.prompts import PromptDataset

ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {i} + 1?"}], "data_source": "math", "extra_info": {"index": i}}
    | {"reward_model": {"style": "rule", "ground_truth": str(i + 1)}}
    for i in range(4)
]


@pytest.fixture
def digests(small_config: PPOConfig, tiny_tokenizer: Any) -> Callable[..., dict[str, str]]:
    def digests(*files: str, **options: Any) -> dict[str, str]:
        dataset = PromptDataset(files, tiny_tokenizer, data_options())
        return run_digests(changed(small_config, **options), tiny_tokenizer, data_by_file(dataset))

    return digests


def differing(before: dict[str, str], now: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def test_data_counts_by_content_not_by_file(digests, tmp_path: Path):
    first, other = jsonl(tmp_path / "a.jsonl", *ROWS), jsonl(tmp_path / "b.jsonl", ROWS[0])
    before = digests(first, other)
    assert digests(parquet(tmp_path / "moved.parquet", *ROWS), other) == before
    backwards = jsonl(tmp_path / "backwards.jsonl", *reversed(ROWS))
    assert differing(before, digests(backwards, other)) == {"data.train_files[0]"}
    answer = ROWS[0] | {"reward_model": {"ground_truth": "7"}}
    assert differing(before, digests(first, jsonl(tmp_path / "c.jsonl", answer))) == {"data.train_files[1]"}


def test_tools_of_a_record_and_rules_of_the_tokenizer_count(small_config: PPOConfig, tiny_tokenizer: Any):
    def digests(*tools: dict[str, Any]) -> dict[str, str]:
        record = PromptRecord(0, [5], "math", "7", {}, [], False, tools=tools)
        return run_digests(small_config, tokenizer, data_by_file(SimpleNamespace(sizes=[1], records=[record])))

    tokenizer = copy.deepcopy(tiny_tokenizer)
    before = digests()
    assert differing(before, digests({"type": "function"})) == {"data.train_files[0]"}
    tokenizer("padded", padding="max_length", max_length=8, truncation=True)
    assert digests() == before
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    assert differing(before, digests()) == {TOKENIZER_RULES}


def test_classes_of_a_tool_file_are_noticed(digests, tmp_path: Path):
    data, file = jsonl(tmp_path / "a.jsonl", *ROWS), tmp_path / "tools.yaml"
    file.write_text("tools: [{class_name: my.search.Search, config: {type: native}}, {class_name: gone.A}]")
    options = {"rollout": {"multi_turn": {"tool_config_path": str(file)}}}
    user_code(tmp_path, "limit = 1", "search.py")
    before = digests(data, **options)
    user_code(tmp_path, "limit = 2", "search.py")
    changed_names = differing(before, digests(data, **options))
    assert changed_names == {"rollout.multi_turn.tool_config_path, my.search.Search"}


def test_sources_that_share_a_teacher_may_part(digests, tiny_model: Path, tmp_path: Path):
    data, teachers = jsonl(tmp_path / "a.jsonl", *ROWS), [f"a={tiny_model}", f"b={tiny_model}"]
    before = digests(data, teacher={"by_source": teachers})
    now = digests(data, teacher={"by_source": [teachers[0], "b=another/model"]})
    assert before.keys() == now.keys() and differing(before, now) == {"teacher.by_source[b]"}


def test_changed_teacher_address_is_noticed(digests, tmp_path: Path):
    data, address = jsonl(tmp_path / "a.jsonl", *ROWS), "http://t/v1"

    def served(*by_source: str, **server: Any) -> dict[str, str]:
        return digests(data, teacher={"server": {"address": address} | server, "by_source": [*by_source]})

    before = served(f"a={address}", "b=http://u/v1")
    assert served(f"a={address}", "b=http://u/v1", address=f"{address}/") == before
    now = served(f"a={address}", "b=http://w/v1", address="http://v/v1", model="large")
    assert differing(before, now) == {"teacher.server.address", "teacher.server.model", "teacher.by_source[b]"}


CODE = {
    "reward_score.custom_functions[0]": {"reward_score": {"custom_functions": ["math=FILE:score"]}},
    "rollout.multi_turn.environment": {"rollout": {"multi_turn": {"environment": "FILE:Game"}}},
    "rollout.multi_turn.environment.shell": {"rollout": {"multi_turn": {"environment": {"shell": "FILE:Shell"}}}},
    "rollout.multi_turn.reward_functions[0]": {"rollout": {"multi_turn": {"reward_functions": ["0.5*FILE:short"]}}},
    "rollout.multi_turn.tools[0]": {"rollout": {"multi_turn": {"tools": ["FILE:search"]}}},
    "rollout.multi_turn.tool_config_path": {"rollout": {"multi_turn": {"tool_config_path": "FILE"}}},
    "rollout.multi_turn.agent.command": {"rollout": {"multi_turn": {"agent": {"command": "python FILE --fast"}}}},
    "data.sampler.class_path": {"data": {"sampler": {"class_path": "FILE", "class_name": "Mine"}}},
    "trainer.method": {"trainer": {"method": "FILE:Mine"}},
    "calculator.own_metrics[0]": {"calculator": {"own_metrics": ["mine_of_a_test:metric"]}},
}


def filled(options: Any, file: str) -> Any:
    if isinstance(options, dict):
        return {name: filled(value, file) for name, value in options.items()}
    if isinstance(options, list):
        return [filled(value, file) for value in options]
    return options.replace("FILE", file)


@pytest.mark.parametrize("name", CODE)
def test_edited_code_of_the_user_is_noticed(name: str, digests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    data, file = jsonl(tmp_path / "a.jsonl", *ROWS), user_code(tmp_path, "score = 1", "mine_of_a_test.py")
    options = filled(CODE[name], file)
    before = digests(data, **options)
    assert digests(data, **options) == before
    user_code(tmp_path, "score = 2", "mine_of_a_test.py")
    assert differing(before, digests(data, **options)) == {name}


def test_models_and_templates_are_noticed(digests, small_config, tiny_tokenizer, monkeypatch, tmp_path: Path):
    data, model = jsonl(tmp_path / "a.jsonl", *ROWS), tmp_path / "judge"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 2}')
    options = {"algorithm": {"adv_estimator": "gae"}, "critic": {"model": {"path": str(model)}}}
    before = digests(data, **options)
    edit_json(model / "config.json", hidden_size=4)
    assert differing(before, digests(data, **options)) == {"critic.model.path"}
    monkeypatch.setattr(tiny_tokenizer, "chat_template", tiny_tokenizer.chat_template + " ")
    assert differing(before, digests(data, **options)) == {"critic.model.path", CHAT_TEMPLATE}


def test_what_makes_another_run_is_refused_unless_allowed(small_config: PPOConfig, tmp_path: Path):
    before = {"data.train_files[0]": "1", TOKENIZER: "1", VERIFIERS: "1", "trainer.method": "1", "gone": "1"}
    resumption, trainer = Resumption(tmp_path, 4, {"digests": before}), small_config.trainer
    now = {name: value for name, value in before.items() if name != "gone"} | {"rollout.multi_turn.environment": "1"}
    assert check_unchanged(resumption, now, trainer) == []
    # A checkpoint of an older version has none, and one of a hostile author has anything.
    for state in ({}, {"digests": 5}):
        assert check_unchanged(Resumption(tmp_path, 4, state), now, trainer) == []
    (line,) = check_unchanged(resumption, now | {"trainer.method": "2"}, trainer)
    assert line == f"trainer.method: not what it was when {tmp_path} was written"
    now |= {"data.train_files[0]": "2", "trainer.method": "2"}
    with refused(
        "data.train_files[0]: not what it was when TMP was written, so this would be another...", TMP=tmp_path
    ):
        check_unchanged(resumption, now, trainer)
    with refused(f"data.train_files[0], {VERIFIERS}: not what they were when ..."):
        check_unchanged(resumption, now | {VERIFIERS: "2"}, trainer)
    (line,) = check_unchanged(resumption, now, changed(trainer, resume_changed="warn"))
    assert line.startswith("data.train_files[0], trainer.method: not what they were")
