"""Jobs: prompts, settings that samples depend on, and what an engine has to hold."""

import json
from pathlib import Path

import pytest

from tests.evaluation.fakes import evaluation_config
from verl.config import ConfigError
from verl.evaluation.jobs import (
    demonstrations_of,
    engine_model,
    load_problems,
    load_target_tokenizer,
    make_jobs,
)
from verl.evaluation.targets import Target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"frage": f"What is {i} + 1?", "zahl": i + 1} for i in range(5)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def mapped(folder: Path, *overrides: str):
    fields = "+data.fields.mine={question: frage, answer: zahl}"
    return evaluation_config("benchmarks=[mine]", f"data.benchmark_dir={folder}", fields, *overrides)


def test_mapped_fields_and_the_first_problems(folder):
    problems = load_problems("mine", mapped(folder, "data.max_problems=2"))
    assert [(problem.index, problem.question, problem.answer) for problem in problems] == [
        (0, "What is 0 + 1?", "1"),
        (1, "What is 1 + 1?", "2"),
    ]
    assert len(load_problems("mine", mapped(folder))) == 5
    with pytest.raises(ConfigError, match="frage, zahl"):
        load_problems("mine", evaluation_config(f"data.benchmark_dir={folder}"))


def test_a_job_for_each_benchmark_and_temperature(folder, tiny_model, tmp_path):
    config = mapped(folder, "temperatures=[0.6,1.0]", "seed=5", "top_p=0.9")
    target = Target("run", 80, str(tiny_model), "chat", 24)
    tokenizer = load_target_tokenizer(target, trust_remote_code=False)
    problems = load_problems("mine", config)
    cool, warm = make_jobs(target, tokenizer, {"mine": problems}, config, tmp_path / "out", "cpu")
    assert cool.folder == tmp_path / "out" / "run" / "step_80" / "mine" / "T0.6"
    assert (warm.temperature, warm.label) == (1.0, "run@80 on mine")
    assert cool.prompts == warm.prompts
    assert "Whatis3+1?" in tokenizer.decode(cool.prompts[3]).replace(" ", "")
    assert {name: cool.settings[name] for name in cool.settings if name != "model"} == {
        "template": "chat",
        "stop": [],
        "stop_token_ids": [],
        "few_shot": False,
        "max_response_length": 24,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": -1,
        "seed": 5,
        "dtype": "float32",
        "calculator": None,
    }
    (measured,) = make_jobs(
        target, tokenizer, {"mine": problems}, mapped(folder, "calculator.enable=true"), tmp_path, "cuda"
    )
    assert measured.settings["dtype"] == "bfloat16"
    assert measured.settings["calculator"]["compute_diff"] is True


def test_demonstrations_only_where_asked_for_and_known(folder, tiny_model, tmp_path):
    assert demonstrations_of("mine") == [] != demonstrations_of("gsm8k")
    target = Target("run", 0, str(tiny_model), "question-answer", 24)
    tokenizer = load_target_tokenizer(target, trust_remote_code=False)
    problems = load_problems("mine", mapped(folder))
    lengths = {}
    for few_shot in (False, True):
        config = mapped(folder, f"data.few_shot={few_shot}")
        (job,) = make_jobs(target, tokenizer, {"gsm8k": problems}, config, tmp_path, "cpu")
        lengths[few_shot] = len(job.prompts[0])
        assert job.settings["few_shot"] is few_shot
    assert lengths[True] > 10 * lengths[False]


def test_an_engine_holds_the_longest_prompt_and_a_response(folder, tiny_model, tmp_path):
    config = mapped(folder, "seed=3")
    target = Target("run", 0, str(tiny_model), "abel", 100)
    tokenizer = load_target_tokenizer(target, trust_remote_code=False)
    (job,) = make_jobs(target, tokenizer, {"mine": load_problems("mine", config)}, config, tmp_path, "cpu")
    model = engine_model(job, [[1] * 7, [1] * 30], config, limit=None)
    assert (model.max_model_len, model.max_response_length, model.seed) == (130, 100, 3)
    assert model.stop == ["\nQuestion:", "<|im_end|>", "<|endoftext|>", "</s>"]
    assert model.stop_token_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert engine_model(job, [[1] * 30], config, limit=64).max_model_len == 64
