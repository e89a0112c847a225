"""Clients from the package index, each in a virtual environment of its own, as agents of trainings and evaluations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import in_shell

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

MINI_SWE_AGENT = """
import json, os, sys
os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

record = json.load(sys.stdin)
options = yaml.safe_load((package_dir / "config/default.yaml").read_text())
options["model"]["model_kwargs"]["max_tokens"] = 48
model = LitellmTextbasedModel(model_name="openai/policy", **options["model"])
agent = DefaultAgent(model, LocalEnvironment(timeout=10), **options["agent"] | {"step_limit": 2})
result = agent.run(record["messages"][-1]["content"])
print(json.dumps({"reward": float(str(record["ground_truth"]) in result["submission"])}))
"""

SECOND_TRY = """
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Chat", "Problems", "SecondTry"]


class Problem(vf.TaskData):
    answer: str


class Solve(vf.Task[Problem, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, task, trace) -> float:
        return float(task.answer in trace.last_reply)


class Problems(vf.Taskset[Solve, vf.TasksetConfig]):
    def load(self):
        return []


class Chat(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        await client.chat.completions.create(model=ctx.model, messages=[message_to_wire(m) for m in prompt])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class SecondTryConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), harness={"id": "second_try"})


class SecondTry(vf.Env[SecondTryConfig]):
    async def run(self, task, agents):
        async with agents.solver.interaction(task) as chat:
            reply = await chat.turn()
            if task.data.answer not in reply.last_reply:
                await chat.turn("Your answer is wrong. Try again.")
"""

VERIFIERS = """
import asyncio, json, os, sys
import verifiers.v1 as vf
from second_try import Problem, SecondTryConfig, Solve

async def play(record):
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    policy = vf.ModelContext("policy", client, vf.SamplingConfig(max_tokens=48))
    task = Solve(Problem(prompt=record["messages"][-1]["content"], answer=str(record["ground_truth"])))
    env = vf.load_environment(SecondTryConfig(taskset={"id": "second_try"}))
    async with env.serving():
        episode = await env.run_episode(task, policy)
    assert episode.ok, [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return episode.traces[0].reward

print(json.dumps({"reward": asyncio.run(play(json.load(sys.stdin)))}))
"""

TINY = "experiment=arithmetic_tools rollout.multi_turn.tools=[] data.max_prompt_length=400"
SMALL = "preset=small data=word_problems experiment=grpo calculator.enable=false reward_manager=unshaped"

TURNS = "trainer.n_gpus_per_node=1 rollout.multi_turn.enable=true rollout.multi_turn.reward=only"


def run(folder: Path, script: str, *options: str) -> None:
    """Run a training or an evaluation with the agent in ``folder`` and the output in ``folder/run``."""
    in_shell(script, *TURNS.split(), *options, f"trainer.default_local_dir={folder}/run")


def install(folder: Path, package: str, program: str, words: str = "") -> str:
    """Return the option for an agent ``agents/agent.py``, with the arguments ``words``, that finds ``package``."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "client")], check=True)
    subprocess.run([str(folder / "client/bin/pip"), "install", "-q", package, "openai"], check=True)
    (folder / "agents").mkdir(exist_ok=True)
    (folder / "agents/agent.py").write_text(program)
    agent = f"{folder}/client/bin/python {folder}/agents/agent.py {words}".strip()
    return f"rollout.multi_turn.agent.command='{agent}'"


def train(folder: Path, agent: str, *options: str, steps: int = 1) -> list[dict[str, float]]:
    """Train with small batches, and return the metrics of each step, in which no agent may have failed."""
    shared = (
        "trainer.val_before_train=false trainer.test_freq=-1 data.train_batch_size=2 actor.ppo_mini_batch_size=2 "
        f"rollout.n=2 trainer.total_training_steps={steps} trainer.save_freq={-1 if steps == 1 else steps}"
    )
    run(folder, "train.sh", *options, *shared.split(), agent)
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    log = (folder / "run/environment.log").read_text()
    assert len(metrics) == steps, metrics
    assert all(step["environment/failures"] == step["environment/timeouts"] == 0 for step in metrics), log
    return metrics


def evaluate(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Evaluate the last step of the training in ``folder`` on two problems, and return the samples."""
    problems = [{"problem": "What is 3 plus 4?", "answer": "7"}, {"problem": "What is 2 times 3?", "answer": "6"}]
    (folder / "two.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (folder / "evaluation").mkdir()
    shared = f"model.path={folder}/run model.steps=[-1] n_sampling=1 benchmarks=two data.benchmark_dir={folder}"
    run(folder / "evaluation", "eval.sh", *shared.split(), *options)
    (samples,) = (folder / "evaluation/run").rglob("samples.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def heard(sample: dict[str, Any]) -> str:
    """Return what the policy read after its first words."""
    return "".join(part["text"] for part in sample["conversation"][1:] if part["by"] == "environment")


@pytest.mark.nightly
@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_openai_agents_call_tools_in_one_history(tmp_path: Path, interface: str):
    (metrics,) = train(tmp_path, install(tmp_path, "openai-agents", OPENAI_AGENTS, interface), *TINY.split())
    assert metrics["environment/calls"] > 0 and metrics["agent/histories/mean"] == 1


@pytest.mark.nightly
def test_smolagents_plan_and_retry(tmp_path: Path, smollm2: Path):
    sizes = ["data.max_prompt_length=4096", "data.max_response_length=256", f"model.path={smollm2}"]
    (metrics,) = train(tmp_path, install(tmp_path, "smolagents", SMOLAGENTS), *SMALL.split(), *sizes)
    # It writes its last answer in a conversation of its own.
    assert metrics["turns/min"] >= 2 and metrics["agent/further_histories/other"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("sandbox")
def test_mini_swe_agent_trains_and_evaluates(tmp_path: Path, smollm2: Path):
    agent = install(tmp_path, "mini-swe-agent~=2.4", MINI_SWE_AGENT)
    sandbox = "rollout.multi_turn.agent.sandbox=true"
    sizes = ["data.max_prompt_length=2048", "data.max_response_length=768", f"model.path={smollm2}"]
    metrics = train(tmp_path, agent, sandbox, *SMALL.split(), *sizes, steps=2)
    # It leaves replies without a command out of the next request.
    assert all(step["turns/max"] == 2 and step["agent/further_histories/assistant"] > 0 for step in metrics)
    for sample in evaluate(tmp_path, agent, sandbox):
        assert sample["environment"]["turns"] == 2 and sample["environment"]["failures"] == 0
        assert any(text in heard(sample) for text in ("output token limit", "Format error", "<returncode>"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_verifiers_environment_trains_and_evaluates(tmp_path: Path, smollm2: Path):
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents/second_try.py").write_text(SECOND_TRY)
    agent = install(tmp_path, "verifiers~=0.4.0", VERIFIERS)
    metrics = train(tmp_path, agent, *SMALL.split(), "data.max_response_length=256", f"model.path={smollm2}", steps=2)
    assert all(step["turns/max"] <= 2 and step["agent/histories/mean"] == 1 for step in metrics)
    assert any(step["turns/max"] == 2 for step in metrics)
    for sample in evaluate(tmp_path, agent):
        assert sample["environment"]["reward"] == 1 or "Your answer is wrong" in heard(sample)
