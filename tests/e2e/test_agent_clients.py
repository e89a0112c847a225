"""Clients from the package index, each in a virtual environment of its own, as agents of a training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

OPENAI_AGENTS = """
import asyncio, json, sys
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)

@function_tool
def multiply(a: int, b: int) -> int:
    \"\"\"Multiplies two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    \"\"\"
    return a * b

record = json.load(sys.stdin)
kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[sys.argv[1]]
agent = Agent(name="calculator", tools=[multiply], model=kind(model="policy", openai_client=AsyncOpenAI()))
result = asyncio.run(Runner.run(agent, record["messages"][0]["content"], max_turns=4))
print(json.dumps({"reward": float(str(record["ground_truth"]) in result.final_output)}))
"""

SMOLAGENTS = """
import json, os, sys
from smolagents import CodeAgent, OpenAIServerModel
record = json.load(sys.stdin)
address = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAIServerModel(model_id="policy", max_tokens=48, **address)
answer = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0).run(record["messages"][-1]["content"])
print(json.dumps({"reward": float(str(record["ground_truth"]) in str(answer))}))
"""

TINY = "experiment=arithmetic_tools rollout.multi_turn.tools=[] data.max_prompt_length=400"
SMALL = "preset=small data=word_problems experiment=grpo calculator.enable=false reward_manager=unshaped"


def train(folder: Path, package: str, program: str, words: str, *options: str) -> dict[str, float]:
    """Metrics of a step whose agents are ``program`` with the arguments ``words``, next to ``package``."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "client")], check=True)
    subprocess.run([str(folder / "client/bin/pip"), "install", "-q", package, "openai"], check=True)
    (folder / "agent.py").write_text(program)
    agent = f"{folder}/client/bin/python {folder}/agent.py {words}".strip()
    shared = (
        "trainer.n_gpus_per_node=1 trainer.total_training_steps=1 trainer.val_before_train=false trainer.test_freq=-1 "
        "data.train_batch_size=2 actor.ppo_mini_batch_size=2 rollout.n=2 rollout.multi_turn.enable=true "
        "rollout.multi_turn.reward=only trainer.save_freq=-1"
    )
    command = ["bash", str(ROOT / "train.sh"), *options, *shared.split(), f"trainer.default_local_dir={folder}/run"]
    command.append(f"rollout.multi_turn.agent.command='{agent}'")
    run = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    metrics: dict[str, float] = json.loads((folder / "run/metrics.jsonl").read_text())
    log = (folder / "run/environment.log").read_text()
    assert metrics["environment/failures"] == metrics["environment/timeouts"] == 0, log
    return metrics


@pytest.mark.nightly
@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_openai_agents_call_tools_in_one_history(tmp_path: Path, interface: str):
    metrics = train(tmp_path, "openai-agents", OPENAI_AGENTS, interface, *TINY.split())
    assert metrics["environment/calls"] > 0 and metrics["agent/histories/mean"] == 1


@pytest.mark.nightly
def test_smolagents_plan_and_retry(tmp_path: Path, smollm2: Path):
    sizes = ["data.max_prompt_length=4096", "data.max_response_length=256", f"model.path={smollm2}"]
    metrics = train(tmp_path, "smolagents", SMOLAGENTS, "", *SMALL.split(), *sizes)
    # It writes its last answer in a conversation of its own.
    assert metrics["turns/min"] >= 2 and metrics["agent/further_histories/other"] > 0
