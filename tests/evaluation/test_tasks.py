"""Tasks: prompts, the settings that samples depend on, and what an engine must hold."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from tests.evaluation.example_tasks import evaluation_config
from tests.kit import jsonl
from verl.config import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.evaluation.targets import Target
from verl.evaluation.tasks import (
    EvaluationTask,
    Job,
    engine_model,
    few_shot_examples,
    load_problems,
    load_target_tokenizer,
    validation_problems,
)
from verl.models.hub import model_digest
from verl.run.display import RunDisplay


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., EvaluationConfig]:
    """A configuration with a benchmark of five problems whose fields are mapped."""
    jsonl(tmp_path / "mine.jsonl", *({"frage": f"What is {i} + 1?", "zahl": i + 1} for i in range(5)))
    fields = "+data.fields.mine={question: frage, answer: zahl}"
    return lambda *more: evaluation_config("benchmarks=[mine]", f"data.benchmark_dir={tmp_path}", fields, *more)


def job_of(config: EvaluationConfig, folder: Path, benchmarks: Any, tokenizers: Any, device: str = "cpu") -> Job:
    session: Any = SimpleNamespace(device_type=device)
    return Job(config, RunDisplay("", 0, {}), folder, session, benchmarks, tokenizers)


@pytest.fixture
def tasks_of(tiny_model: Path, tmp_path: Path) -> Callable[..., list[EvaluationTask]]:
    """The tasks of a target with the tiny model."""

    def make(
        config: EvaluationConfig, template: str = "chat", length: int = 24, name: str = "mine", device: str = "cpu"
    ) -> list[EvaluationTask]:
        target = Target("run", 80, str(tiny_model), template, length)
        tokenizer = load_target_tokenizer(target, trust_remote_code=False)
        problems = {name: load_problems("mine", config)}
        return job_of(config, tmp_path / "out", problems, {target: tokenizer}, device).tasks_of(target)

    return make


def test_options_name_the_columns(configure, tmp_path):
    problems = load_problems("mine", configure("data.max_problems=2"))
    assert [(p.index, p.question, p.answer) for p in problems] == [(i, f"What is {i} + 1?", str(i + 1)) for i in (0, 1)]
    assert len(load_problems("mine", configure())) == 5
    # As in training.
    rows = [{"frage": f"What is {i} + 1?", "zahl": f"So it is\n#### {i + 1}", "level": 2} for i in range(2)]
    jsonl(tmp_path / "mine.jsonl", *rows)
    jsonl(tmp_path / "gap.jsonl", rows[0] | {"zahl": None})
    options = [f"data.benchmark_dir={tmp_path}", "data.prompt_key=frage", "data.answer_key=zahl"]
    found = load_problems("mine", evaluation_config(*options, "data.data_source=gsm8k"))
    expected = [(f"What is {i} + 1?", str(i + 1), "gsm8k") for i in (0, 1)]
    assert [(p.question, p.answer, p.data_source) for p in found] == expected
    with pytest.raises(ConfigError, match=r"gap.jsonl, line 1: has no answer in zahl; fill it in or remove the row$"):
        load_problems("gap", evaluation_config(*options))
    with pytest.raises(ConfigError, match=r"mine.jsonl, line 1: zahl: '1' must say of each person"):
        load_problems("mine", evaluation_config(*options, "data.data_source=kk"))
    # Published benchmarks keep their columns and verifier.
    assert load_problems("arithmetic", evaluation_config(*options))[0].data_source == "arithmetic"


def test_incomparable_answer_is_named_first(tmp_path):
    rows = [{"question": "?", "answer": answer, "kind": "countdown"} for answer in ('{"target":1,"numbers":[1]}', "24")]
    jsonl(tmp_path / "sums.jsonl", *rows)
    options = [f"data.benchmark_dir={tmp_path}", "+data.fields.sums.verifier=kind"]
    with pytest.raises(ConfigError, match=r"^\S+sums.jsonl, line 2: .*: '24' must give a target and"):
        load_problems("sums", evaluation_config(*options))
    assert len(load_problems("sums", evaluation_config(*options, "data.max_problems=1"))) == 1
    own = "reward_score.custom_functions=['countdown=my_rewards:score']"
    assert len(load_problems("sums", evaluation_config(*options, own))) == 2


def test_function_of_a_run_is_named_and_not_run(tmp_path, refused):
    rows = jsonl(tmp_path / "val.jsonl", {"question": "What is 1 + 1?", "answer": "2"})
    data = {"val_files": [rows], "prompt_key": "question", "answer_key": "answer", "data_source": "mine"}
    data |= {"reward_fn_key": "data_source", "apply_chat_template_kwargs": {}}
    functions = ["mine=own.py:score"]
    (tmp_path / "config.yaml").write_text(json.dumps({"data": data, "reward_score": {"custom_functions": functions}}))
    target = Target("run", 1, "model", "chat", 24, folder=str(tmp_path))
    with refused(
        "...data_source='mine': must be one of ...; the run has reward_score.custom_functions; give it too, ..."
    ):
        validation_problems([target], evaluation_config("benchmarks=[]", f"model.path={tmp_path}"))


def test_a_task_for_each_benchmark_and_temperature(configure, tasks_of, tiny_model, tmp_path):
    cool, warm = tasks_of(configure("temperatures=[0.6,1.0]", "seed=5", "top_p=0.9"))
    assert cool.folder == tmp_path / "out" / "run" / "step_80" / "mine" / "T0.6"
    assert (warm.temperature, warm.label) == (1.0, "run@80 on mine")
    assert cool.prompts == warm.prompts
    tokenizer = load_target_tokenizer(cool.target, trust_remote_code=False)
    assert "Whatis3+1?" in tokenizer.decode(cool.prompts[3]).replace(" ", "")
    decoding = {"max_response_length": 24, "temperature": 0.6, "top_p": 0.9, "top_k": -1, "seed": 5, "dtype": "float32"}
    template = {"template": "chat", "stop": [], "stop_token_ids": [], "few_shot": False}
    template["apply_chat_template_kwargs"] = None
    assert cool.settings == {"model": model_digest(str(tiny_model)), **template, **decoding, "calculator": None}
    # Only where they differ from the neutral value, as samples of earlier versions do not have them.
    narrowed = configure("min_p=0.1", "repetition_penalty=1.2", "+rollout.engine_kwargs.block_size=32")
    (task,) = tasks_of(narrowed)
    further = {"min_p": 0.1, "repetition_penalty": 1.2, "engine_kwargs": {"block_size": 32}}
    assert {name: task.settings.get(name) for name in further} == further
    (measured,) = tasks_of(configure("calculator.enable=true"), device="cuda")
    assert measured.settings["dtype"] == "bfloat16"
    assert measured.settings["calculator"]["compute_diff"] is True


def test_arguments_of_the_chat_template_are_part_of_the_settings(configure, tiny_model, tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if think is defined %} {{ think }}{% endif %}"
    target = Target("run", 80, str(tiny_model), "chat", 24, {"think": "no"})
    config = configure("data.max_problems=1")
    problems = {"mine": load_problems("mine", config)}
    (task,) = job_of(config, tmp_path, problems, {target: tokenizer}).tasks_of(target)
    assert tokenizer.decode(task.prompts[0]) == "What is 0 + 1? no"
    assert task.settings["apply_chat_template_kwargs"] == {"think": "no"}
    assert {target: 1}[replace(target)] == 1


def test_few_shot_examples_only_if_asked_for_and_known(configure, tasks_of):
    assert few_shot_examples("mine", "qwen") == [] != few_shot_examples("gsm8k", "qwen")
    assert "def solution():" in few_shot_examples("mine", "pal")[0][1]
    (bare,) = tasks_of(configure("data.few_shot=False"), "question-answer", name="gsm8k")
    assert tasks_of(configure("data.max_problems=1"), "deepseek-r1")[0].opens_thought and not bare.opens_thought
    (full,) = tasks_of(configure("data.few_shot=True"), "question-answer", name="gsm8k")
    assert (bare.settings["few_shot"], full.settings["few_shot"]) == (False, True)
    assert len(full.prompts[0]) > 10 * len(bare.prompts[0])


def test_an_engine_holds_the_longest_prompt_and_a_response(configure, tasks_of):
    config = configure("seed=3", "temperatures=[0.6,1.0]")
    tasks = tasks_of(config, "abel", 100)
    longest = max(map(len, tasks[0].prompts))
    model = engine_model(tasks, config)
    assert (model.max_model_len, model.max_response_length, model.seed) == (longest + 100, 100, 3)
    assert model.stop == ["\nQuestion:", "<|im_end|>", "<|endoftext|>", "</s>"]
    tokenizer = load_target_tokenizer(tasks[0].target, trust_remote_code=False)
    assert model.stop_token_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_models_differ_by_content_and_not_by_place(tmp_path: Path):
    def digest(name: str, weights: bytes, end: int = 2) -> str:
        (folder := tmp_path / name).mkdir()
        contents = {"config.json": "{}", "generation_config.json": f'{{"eos_token_id": {end}}}', "README.md": name}
        for file, text in contents.items():
            (folder / file).write_text(text)
        (folder / "model.safetensors").write_bytes(weights)
        return model_digest(str(folder))

    zeros = b"0" * 3_000_000
    assert digest("a", zeros) == digest("b", zeros)
    assert len({digest("c", zeros), digest("d", zeros[:-1] + b"1"), digest("e", zeros, end=3)}) == 3
    # Of a large file, pieces all over it.
    large = b"0" * 14_500_000
    assert digest("f", large + b"0" * 1_000_000 + large) != digest("g", large + b"1" * 1_000_000 + large)
    assert model_digest("Qwen/Qwen2.5-1.5B") == "Qwen/Qwen2.5-1.5B"
    with pytest.raises(ConfigError, match="gone: the model cannot be read: No such file or directory; was it removed"):
        model_digest(str(tmp_path / "gone"))
