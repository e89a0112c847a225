"""Runs with a judge: a frozen model, the policy itself, and a service between whose answers the run is killed."""

import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from aiohttp import web
from conftest import ROOT, small_overrides
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import Run, assert_resumes, records
from verl.data.templates import render_untrusted
from verl.rewards.judge import JudgeError, judge_prompts, read_answers
from verl.rewards.pool import ANSWERS
from verl.utils.background import start_loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # each process has a limit of its own

SHORT = [
    "reward_score.judge.enable=true",
    *("reward_score.judge.instructions='{mark} {response} {mark}'", "reward_score.judge.max_tokens=24"),
    *("reward_score.judge.model.max_prompt_length=160", "reward_score.on_function_error=zero"),
    *("trainer.save_freq=1", "trainer.max_restarts=0", "reward_manager=unshaped"),
]
"""A prompt that a model of characters can read."""


@pytest.fixture(scope="module")
def small_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, taught that a response which subtracts is right, and to say so in JSON."""
    folder, draw = tmp_path_factory.mktemp("judge") / "model", random.Random(0)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tiny_model")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data/tiny_model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(200):
        rows = []
        for _ in range(16):
            sign, (a, b, c) = draw.choice("--+*"), draw.choices(range(9999), k=3)
            response = f"{a}{sign}{b} \\boxed{{{c}}}"[: draw.randrange(10, 20)]
            mark, right = f"[{draw.getrandbits(64):016x}]", sign == "-"
            prompt = render_untrusted(f"{mark} {response} {mark}", tokenizer)
            rows.append((prompt, [*tokenizer.encode(f'{{"score": {int(right)}}}'), tokenizer.eos_token_id]))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.tensor([[*p, *a, *[tokenizer.pad_token_id] * (width - len(p) - len(a))] for p, a in rows])
        labels = torch.tensor([[*[-100] * len(p), *a, *[-100] * (width - len(p) - len(a))] for p, a in rows])
        loss = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_frozen_judge_scores_what_its_model_says(small_judge: Path, arithmetic_prompts: Path, tmp_path: Path):
    """On two workers, and the same as by transformers alone."""
    folder, log = tmp_path / "run", tmp_path / "log"
    options = small_overrides(ROOT / "data/tiny_model", arithmetic_prompts, folder)
    options += [*SHORT, "trainer.n_gpus_per_node=2", "trainer.test_freq=-1", "data.val_sample_size=8"]
    Run.complete([*options, f"reward_score.judge.model.path={small_judge}"], log, 400)
    assert f"note: judge: {small_judge}, frozen, scores responses, with weight 1\n" in log.read_text()
    assert (folder / "logs/attempt_1/judge/rank_1.log").exists()
    before, first, _ = records(folder)
    assert first["train/judge/failed_share"] < 0.3 and 0 < first["train/judge/score/mean"] < 1
    assert "val/judge/score/mean" in before
    rows = [row for file in (folder / "samples").rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
    judged = [(row["response"], json.loads(row["reward_extra_info"]).get("judge")) for row in rows]
    assert len(judged) > 16 and {score for _, score in judged if score is not None} == {0.0, 1.0}
    tokenizer, model = AutoTokenizer.from_pretrained(small_judge), AutoModelForCausalLM.from_pretrained(small_judge)
    for response, score in judged:
        (prompt,) = judge_prompts("{mark} {response} {mark}", response, None, {})
        ids = torch.tensor([render_untrusted(prompt, tokenizer)])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        try:
            said = read_answers([[tokenizer.decode(answer[0, ids.shape[1] :], True)]], {}, False, 0.5)["score"]
        except JudgeError:
            said = None
        assert score == said, response


@pytest.mark.nightly
def test_frozen_judge_waits_for_updates_beside_a_pool(small_judge: Path, arithmetic_prompts: Path, tmp_path: Path):
    """Engines sample a step ahead, and the judge shares the trainer's devices."""
    folder = tmp_path / "run"
    options = [*small_overrides(ROOT / "data/tiny_model", arithmetic_prompts, folder), *SHORT, "data.val_files=[]"]
    options += ["rollout.nnodes=1", "rollout.n_gpus_per_node=1", "async_training.max_staleness=1"]
    options += ["algorithm.rollout_correction.rollout_is=token", f"reward_score.judge.model.path={small_judge}"]
    Run.complete([*options, "trainer.total_training_steps=3"], tmp_path / "log", 400)
    steps = records(folder)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(0 < step["train/judge/score/mean"] < 1 for step in steps)
    # The checkpoint of step 2 holds the responses of step 3 with the judge's verdicts.
    assert_resumes([*options, "trainer.total_training_steps=3"], folder, 3, 2, tmp_path / "again.log")


@pytest.mark.nightly
def test_policy_that_judges_itself_resumes(small_judge: Path, arithmetic_prompts: Path, tmp_path: Path):
    """Its own answers to the judge's prompts are the same in a resumed run, which remembers none."""
    folder = tmp_path / "run"
    options = [*small_overrides(small_judge, arithmetic_prompts, folder), *SHORT, "data.val_files=[]"]
    options += ["reward_score.judge.model.path=policy", "reward_score.judge.rule_weight=0", "actor.optim.lr=1e-4"]
    # The run's stop string, which ends the policy's responses, does not end its answers as a judge.
    options += ["reward_score.judge.votes=2", "reward_score.judge.temperature=1", "rollout.stop=['}']"]
    Run.complete(options, tmp_path / "log", 400)
    assert (
        "note: judge: the policy itself, with the weights that sampled the responses" in (tmp_path / "log").read_text()
    )
    shares = [step["train/judge/failed_share"] for step in records(folder)]
    assert len(shares) == 2 and min(shares) < 0.5 and not (folder / ANSWERS).exists()
    assert_resumes(options, folder, 2, 1, tmp_path / "again.log")


class JudgeServer:
    """A judge on loopback whose verdict is a digest of what it reads, and which tells of each request."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.on_request: Callable[[int], None] = lambda number: None
        port = asyncio.run_coroutine_threadsafe(self._start(), start_loop()).result()
        self.address = f"http://127.0.0.1:{port}/v1"

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    async def _answer(self, request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        self.asked.append(text)
        self.on_request(len(self.asked))
        number = int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16)
        pair = "second response" in text
        verdict: dict[str, Any] = {"better": ["first", "second"][number % 2]} if pair else {"score": number % 11 / 10}
        return web.json_response({"choices": [{"message": {"content": json.dumps({"reason": "-", **verdict})}}]})


@pytest.fixture
def server() -> JudgeServer:
    return JudgeServer()


def without_calls(folder: Path) -> list[dict[str, float]]:
    """Records but for how many answers came from the cache."""
    return [
        {k: v for k, v in step.items() if "/calls/" not in k and "/from_cache/" not in k} for step in records(folder)
    ]


def num_answers(folder: Path) -> int:
    with closing(sqlite3.connect(folder / ANSWERS)) as database:
        return int(database.execute("SELECT count(*) FROM answers").fetchone()[0])


@pytest.mark.nightly
@pytest.mark.parametrize("pairs", [False, True])
def test_killed_run_asks_its_judge_nothing_twice(
    server: JudgeServer, tiny_model: Path, arithmetic_prompts: Path, tmp_path: Path, pairs: bool
):
    def options(folder: Path) -> list[str]:
        small = small_overrides(tiny_model, arithmetic_prompts, folder)
        judge = [f"reward_score.judge.base_url={server.address}", "reward_score.judge.model.name=m", *SHORT[4:]]
        judge += [
            "reward_score.judge.enable=true",
            "reward_score.judge.weight=0.5",
            f"reward_score.judge.pairs={pairs}",
        ]
        return [*small, *judge, "data.val_files=[]", "rollout.name=hf", "reward_score.async_functions.max_in_flight=4"]

    # 1. A run that nothing interrupts. It tries its functions before it starts, and remembers nothing of that.
    whole = tmp_path / "whole"
    Run.complete(options(whole), tmp_path / "whole.log")
    num_tried, total = 2, num_answers(whole)
    questions = len(server.asked) - num_tried
    assert questions == total * (2 if pairs else 1) and total > 16
    # 2. Killed after a service has answered, and before the answer is kept: the process that would keep it is stopped.
    killed, log = tmp_path / "killed", tmp_path / "killed.log"
    server.asked.clear()
    run = Run(options(killed), log)

    def kill(number: int) -> None:
        if number == num_tried + questions * 2 // 3:
            verifiers = [pid for pid, name in run.processes().items() if "spawn_main" in name]
            for pid in verifiers:
                os.kill(pid, signal.SIGSTOP)
            Thread(target=kill_soon, args=([run.driver, *verifiers],)).start()

    def kill_soon(pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    server.on_request = kill
    assert run.finish() == 137
    kept = num_answers(killed)
    assert 0 < kept < total
    # 3. The same numbers, and only what was not kept is asked for.
    server.asked.clear()
    server.on_request = lambda number: None
    Run.complete(options(killed), tmp_path / "again.log")
    assert without_calls(killed) == without_calls(whole) and num_answers(killed) == total
    assert len(server.asked) - num_tried == (total - kept) * (2 if pairs else 1)
    # 4. The file of answers is cut in the middle of a record: what can be read is not asked for again.
    server.asked.clear()
    os.truncate(killed / ANSWERS, (killed / ANSWERS).stat().st_size * 2 // 3 - 100)
    for step in (1, 2):
        shutil.rmtree(killed / f"global_step_{step}", ignore_errors=True)
    (killed / "summary.json").unlink()
    Run.complete(options(killed), tmp_path / "cut.log")
    assert without_calls(killed) == without_calls(whole) and num_answers(killed) == total
    assert 0 < len(server.asked) - num_tried < questions and (killed / ANSWERS).with_suffix(".damaged").exists()
