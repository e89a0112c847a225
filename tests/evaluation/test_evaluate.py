"""A whole evaluation with fake engines: a failure affects nothing else, and existing samples are used."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.evaluation.example_tasks import FakeEngines, evaluation_config
from tests.kit import jsonl
from verl.checkpoint.attempts import run_lock
from verl.cluster.failures import WorkerError
from verl.config import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.data.records import RL_SCHEMA, rl_record, write_parquet
from verl.evaluation import evaluate as evaluate_module
from verl.evaluation import generation
from verl.evaluation.evaluate import run_evaluation
from verl.evaluation.tasks import count_workers
from verl.rewards.pool import VerifierPool
from verl.rollout.requests import EngineModel, sample_stream
from verl.run.session import RaySession

pytestmark = pytest.mark.slow

QUESTIONS = [{"question": f"What is {i} - {i}?", "answer": "0"} for i in range(3)]

BROKEN = 13
"""Response length with which the engine does not start."""


class Started(FakeEngines):
    """In place of the workers."""

    device_type = "cpu"

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def verifiers() -> Iterator[VerifierPool]:
    with VerifierPool(evaluation_config("reward_score.num_workers=1").reward_score) as pool:
        yield pool


@pytest.fixture
def engines(verifiers: VerifierPool, monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineModel, Started]]:
    """What was started, in place of Ray and vLLM."""
    started: list[tuple[EngineModel, Started]] = []

    def start(session: RaySession, model: EngineModel, config: EvaluationConfig) -> Started:
        if model.max_response_length == BROKEN:
            raise WorkerError("worker 0 failed in start:\nTraceback:\n  File engine.py\nValueError: no weights\n")
        started.append((model, Started(model.path)))
        return started[-1][1]

    monkeypatch.setattr(generation, "start_engines", start)
    monkeypatch.setattr(
        generation,
        "Generation",
        lambda workers, *arguments, **_: SimpleNamespace(run=lambda: workers.run(*arguments)),
    )
    # One pool for all tests: a process takes seconds to start.
    kept = SimpleNamespace(config=verifiers.config, score_batch=verifiers.score_batch, close=lambda: None)
    monkeypatch.setattr(evaluate_module, "VerifierPool", lambda *_: kept)
    return started


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("mine", "yours"):
        jsonl(folder / f"{name}.jsonl", *QUESTIONS)
    return folder


@pytest.fixture
def configure(tiny_model: Path, benchmarks: Path, tmp_path: Path) -> Callable[..., EvaluationConfig]:
    fixed = "benchmarks=[mine] n_sampling=2 model.max_response_length=12 trainer.n_gpus_per_node=2 device=cpu".split()
    fixed += [f"model.path={tiny_model}", f"data.benchmark_dir={benchmarks}", f"runs_dir={tmp_path / 'outputs'}"]
    return lambda *overrides: evaluation_config(*fixed, *overrides)


@pytest.fixture
def evaluate(engines, configure, capsys) -> Callable[..., tuple[int, list[str], str]]:
    """Runs an evaluation with overrides: its exit code, the errors it prints, and all of its output."""

    def run(*overrides: str) -> tuple[int, list[str], str]:
        code = 0
        try:
            run_evaluation(configure(*overrides))
        except SystemExit as error:
            code = error.code
        output = capsys.readouterr().out
        return code, [line for line in output.splitlines() if line.startswith("error: ")], output

    return run


def test_the_same_command_again_changes_nothing(engines, evaluate, tmp_path):
    code, errors, output = evaluate()
    assert (code, errors) == (0, [])
    folder = tmp_path / "outputs" / "evaluation" / "embedded" / "model"
    assert str(folder) in output and "pass@2" in output
    for name in ("results.md", "results.csv", "index.html", "config.yaml", "summary.json", "metrics.jsonl"):
        assert (folder / name).is_file(), name
    samples = folder / "model" / "step_0" / "mine" / "T1"
    stored = {"generation.json", "samples.jsonl", "verdicts.jsonl", "results.json", "samples.parquet"}
    assert {path.name for path in samples.iterdir()} == stored
    (model, workers) = engines[0]
    assert (model.stop, model.max_response_length, len(workers.prompts)) == ([], 12, 6)
    (first,) = [line for line in output.splitlines() if line.startswith("model: the first of 3 prompts of mine: ")]
    assert "0-0?" in first.replace(" ", "")
    # Each sample from its own stream, and a problem's samples from its prompt.
    prompts = list(dict.fromkeys(map(tuple, workers.prompts)))
    responses = [json.loads(line) for line in (samples / "samples.jsonl").read_text().splitlines()]
    assert {(row["problem"], row["sample"]): row["response"].partition(" \\")[0] for row in responses} == {
        (i, j): f"{list(prompts[i])} {sample_stream(0, 'mine', i, j)}" for i in range(3) for j in range(2)
    }
    assert len({sample_stream(7, "sums", i, j) for i in range(100) for j in range(100)}) == 10_000
    # As long as the longest prompt and a response.
    assert model.max_model_len == max(map(len, workers.prompts)) + 12
    metrics = (folder / "metrics.jsonl").read_text()
    record = json.loads(metrics)
    assert record["step"] == 0 and 0 <= record["model/mine/pass@1"] <= record["model/mine/pass@2"] <= 1

    before = {path.name: path.read_bytes() for path in samples.iterdir()}
    assert evaluate()[0] == 0 and len(engines) == 1
    assert {path.name: path.read_bytes() for path in samples.iterdir()} == before
    assert (folder / "metrics.jsonl").read_text() == metrics

    assert evaluate("n_sampling=3")[0] == 0 and len(engines[1][1].prompts) == 3
    stored = (samples / "samples.jsonl").read_bytes()
    code, _, output = evaluate("n_sampling=1", "reward_score.timeout_s=3")
    assert code == 0 and "pass@1" in output and "pass@2" not in output and "tok/s" not in output
    assert len(engines) == 2 and (samples / "samples.jsonl").read_bytes() == stored


def test_a_broken_benchmark_does_not_stop_the_others(engines, evaluate, benchmarks):
    (benchmarks / "torn.jsonl").write_text(json.dumps(QUESTIONS[0]) + '\n{"question": "What')
    (benchmarks / "empty.jsonl").write_text("\n\n")
    (benchmarks / "odd.jsonl").write_text('{"frage": "?", "antwort": "0"}\n')
    code, (torn, empty, odd, unknown), output = evaluate("benchmarks=[torn,empty,odd,amie24,mine,yours]")
    assert "torn.jsonl, line 2: " in torn and "empty.jsonl: " in empty
    assert "odd.jsonl: " in odd and "frage" in odd and "antwort" in odd
    assert "benchmarks='amie24': no such benchmark; did you mean 'aime24'?" in unknown
    assert "mine" in output and "4 evaluations failed; see the errors above" in output
    assert "without torn, empty, odd, amie24; docs/evaluation.md says where benchmarks come from" in output
    assert (code, len(engines[0][1].prompts)) == (1, 12)
    code, errors, _ = evaluate("benchmarks=[torn]")
    assert (code, len(errors), len(engines)) == (1, 1, 1)


def test_a_broken_model_does_not_stop_the_others(engines, evaluate, tiny_model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tiny_model / "config.json").read_text())
    code, (gone, no_tokenizer, template, broken), output = evaluate(
        f"+runs.bare={{path: {bare}}}",
        f"+runs.typo={{path: {tiny_model}, template: qwen-boxd}}",
        f"+runs.gone={{path: {tmp_path}/gone}}",
        f"+runs.broken={{path: {tiny_model}, max_response_length: {BROKEN}}}",
        f"+runs.good={{path: {tiny_model}}}",
    )
    assert gone.startswith(f"error: runs.gone.path='{tmp_path}/gone': no config.json there")
    assert no_tokenizer.startswith(f"error: bare@0: model.path='{bare}': no tokenizer there")
    assert template == "error: typo@0: template='qwen-boxd': no such template; did you mean 'qwen-boxed'?"
    results = tmp_path / "outputs" / "evaluation" / "embedded" / "bare+typo+broken+good"
    log = results / "broken" / "step_0" / "engine_error.log"
    assert broken == (f"error: broken@0: worker 0 failed in start: ValueError: no weights; its traceback is in {log}")
    assert "File engine.py" in log.read_text()
    assert (code, len(engines)) == (1, 1) and "good@0" in output
    assert sorted(path.name for path in results.glob("*/step_*/*/T*/results.json")) == ["results.json"]


def test_a_checkpoint_that_vanishes_does_not_stop_the_others(engines, evaluate, tiny_model, tmp_path, monkeypatch):
    # As training does that keeps a few checkpoints alone.
    model = tmp_path / "run" / "global_step_5" / "actor" / "huggingface"
    shutil.copytree(tiny_model, model)
    generate = Started.run

    def run(self: Started, *arguments: Any) -> Any:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return generate(self, *arguments)

    monkeypatch.setattr(Started, "run", run)
    runs = {
        "a": f"path: {tiny_model}",
        "b": f"path: {tmp_path}/run, steps: [5]",
        "c": f"path: {tiny_model}, max_response_length: 8",
    }
    code, errors, output = evaluate(*(f"+runs.{name}={{{run}}}" for name, run in runs.items()))
    assert errors == [f"error: b@5: {model}: the model cannot be read: No such file or directory; was it removed?"]
    assert (code, len(engines)) == (1, 2) and "c@0" in output


def test_prompts_longer_than_the_model_takes_are_unanswered(engines, evaluate, benchmarks, tmp_path):
    long = {"question": "1 + " * 300 + "1", "answer": "301"}
    jsonl(benchmarks / "all_long.jsonl", long)
    jsonl(benchmarks / "some.jsonl", QUESTIONS[0], long, long)
    code, errors, output = evaluate("benchmarks=[all_long,some,mine]", "temperatures=[0.5,1.0]")
    assert (code, errors) == (0, [])
    warnings = [line for line in output.splitlines() if "longer than the model takes, 512 tokens" in line]
    assert [line.partition(" prompts")[0] for line in warnings] == [
        "warning: model@0 on all_long: 1 of 1",
        "warning: model@0 on some: 2 of 3",
    ]
    assert "(the first: problem 1, " in warnings[1] and warnings[1].endswith("count as unanswered, prompt_too_long")
    ((model, workers),) = engines
    # Each of the 4 problems that are left twice.
    assert sorted(workers.temperatures) == [0.5] * 8 + [1.0] * 8
    assert model.max_model_len < 100
    folder = tmp_path / "outputs/evaluation/embedded/model"
    record = json.loads((folder / "metrics.jsonl").read_text())
    assert record["model T=0.5/some/prompt_too_long"] == 4 and record["model T=1/all_long/pass@1"] == 0
    assert record["model T=1/mine/prompt_too_long"] == 0 and record["model T=1/some/pass@1"] <= 1 / 3
    # Lengths are those of responses; there is none to the only problem of the other benchmark.
    assert record["model T=1/some/response_length/mean"] > 0
    assert "model T=1/all_long/response_length/mean" not in record
    task = folder / "model/step_0/some/T1"
    samples = pq.read_table(task / "samples.parquet").to_pylist()
    assert [row["reason"] for row in samples if row["problem"] > 0] == ["prompt_too_long"] * 4
    assert json.loads((task / "results.json").read_text())["figures"]["reason_prompt_too_long"] == 4
    assert "prompt_too_long" in (folder / "results.md").read_text()
    assert evaluate("benchmarks=[all_long,some,mine]", "temperatures=[0.5,1.0]")[0] == 0 and len(engines) == 1
    # A response may be shorter than asked for, so that it fits.
    assert evaluate("model.max_response_length=600", f"trainer.default_local_dir={benchmarks}")[0] == 0
    assert engines[1][0].max_model_len == 512


def test_run_alone_is_evaluated_on_its_validation_files(engines, evaluate, tiny_model, tmp_path):
    run, path = tmp_path / "run", tmp_path / "sums" / "val.parquet"
    shutil.copytree(tiny_model, run / "global_step_5" / "actor" / "huggingface")
    sums = [{"question": f"What is {i} + 1?", "ground_truth": str(i + 1), "index": i} for i in range(3)]
    records = [rl_record(data_source="arithmetic", split="test", **fields) for fields in sums]
    records[2]["prompt"].insert(0, {"role": "system", "content": "Sums!"})
    path.parent.mkdir()
    write_parquet(path, records, RL_SCHEMA)
    data = {"val_files": [str(path)], "prompt_key": "prompt", "reward_fn_key": "data_source", "template": "chat"}
    (run / "config.yaml").write_text(json.dumps({"data": data}))
    command = ["benchmarks=[]", f"model.path={run}", "model.steps=[5]", f"trainer.default_local_dir={tmp_path / 'out'}"]
    assert evaluate(*command)[:2] == (0, [])
    assert (tmp_path / "out" / "run" / "step_5" / "sums_val" / "T1" / "results.json").is_file()
    tokenizer = engines[0][1].tokenizer
    prompts = {tokenizer.decode(ids).replace(" ", "") for ids in engines[0][1].prompts}
    assert len(prompts) == 3 and sum("Sums!" in text and "2+1" in text for text in prompts) == 1
    # Of a run whose files have other columns.
    jsonl(tmp_path / "gsm.jsonl", {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"})
    data = {"prompt_key": "question", "answer_key": "answer", "data_source": "gsm8k", "reward_fn_key": "data_source"}
    data |= {"val_files": [str(tmp_path / "gsm.jsonl")], "template": "chat"}
    (run / "config.yaml").write_text(json.dumps({"data": data}))
    assert evaluate(*command, f"trainer.default_local_dir={tmp_path / 'others'}")[:2] == (0, [])
    ((_, started),) = engines[1:]
    assert "What is 3 + 4?" in tokenizer.decode(started.prompts[0])
    code, (line,), _ = evaluate("benchmarks=[]")
    assert code == 1 and line.startswith("error: benchmarks=[]: a model that is not from a run has no files of")


def test_refusing_chat_template_costs_its_benchmark(engines, evaluate, benchmarks, tiny_model, tmp_path):
    strict = tmp_path / "strict"
    shutil.copytree(tiny_model, strict)
    refusal = (
        "{% if '2 - 2' in messages[0].content %}{{ raise_exception('no twos') }}{% endif %}{{ messages[0].content }}"
    )
    (strict / "chat_template.jinja").write_text(refusal)
    jsonl(benchmarks / "ones.jsonl", {"question": "1?", "answer": "1"})
    code, (line,), _ = evaluate("benchmarks=[mine,ones]", f"model.path={strict}", "model.template=chat")
    assert line.endswith("on mine: problem 2: its question: the tokenizer's chat template refuses the chat: no twos")
    assert (code, len(engines[0][1].prompts)) == (1, 2)


def test_an_interrupt_keeps_samples(evaluate, monkeypatch):
    def interrupted(self: Started, *_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Started, "run", interrupted)
        code, _, output = evaluate()
    assert code == 130 and "interrupted; samples are kept, and the same command resumes from them" in output
    assert evaluate()[0] == 0


def test_a_folder_in_use_is_refused(engines, configure, tmp_path):
    with run_lock(tmp_path / "outputs" / "evaluation" / "embedded" / "model"):
        with pytest.raises(ConfigError, match="another run is using this folder"):
            run_evaluation(configure())
    assert engines == []


def test_workers_are_as_many_as_the_machine_has_in_whole_engines(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    one, two = evaluation_config(), evaluation_config("rollout.tensor_parallel_size=2")
    assert [count_workers(config, device) for config in (one, two) for device in ("cuda", "cpu")] == [5, 1, 4, 2]
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel_size=8: this machine has 5 GPUs; lower it"):
        count_workers(evaluation_config("rollout.tensor_parallel_size=8"), "cuda")
    assert count_workers(evaluation_config("trainer.n_gpus_per_node=3"), "cuda") == 3


def test_the_base_of_two_runs_is_sampled_once(engines, evaluate, tiny_model, tmp_path):
    runs = {"a": "", "b": ", template: qwen-boxed", "c": ""}
    code, errors, output = evaluate(*(f"+runs.{run}={{path: {tiny_model}{more}}}" for run, more in runs.items()))
    assert (code, errors) == (0, [])
    # b asks in another way; c is a under another name.
    assert len(engines) == 2 and "c@0 is the model of a@0, and has its results" in output
    a, c = (next(tmp_path.glob(f"outputs/**/{run}/step_0/mine/T1/samples.parquet")).read_bytes() for run in "ac")
    assert a == c
