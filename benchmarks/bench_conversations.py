"""How long conversations with a slow ``async`` tool take: the project's loop and processes, with an engine that counts.

A conversation has 8 turns, each of 8 tokens that take one to four rounds of an engine, and its tool answers after a
second. In one chain that is 8 s of waiting besides the rounds; one after another it would be hours. With ``--agents``,
agents ask for the turns over HTTP and think for up to two seconds in between, drawn for each session.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl.batch import EPISODE, POLICY, Batch
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.models.tokenizer import load_tokenizer
from verl.rollout.environments.conversations import ConversationSetup
from verl.rollout.multi_turn import conversation_pool
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import ResponseRequests
from verl.single_controller import generation

TURNS, TOKENS, TOOL_S, ROUND_S, ROUNDS = 8, 8, 1.0, 0.05, 4

ENVIRONMENT = f"""
import asyncio

class Slow:
    def start(self, record):
        return 0

    async def step(self, state, turn):
        await asyncio.sleep({TOOL_S})
        return state + 1, [{{"role": "user", "content": "go on"}}], state + 1 == {TURNS}, 0.0
"""

AGENT = f"""
import asyncio, json, random, urllib.request

def post(url, messages):
    body = json.dumps({{"messages": messages}}).encode()
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body)) as reply:
        return json.load(reply)["choices"][0]["message"]

async def agent(record, base_url, api_key):
    draws, messages = random.Random(record.uid), [{{"role": "user", "content": "1+1="}}]
    for _ in range({TURNS}):
        messages += [await asyncio.to_thread(post, base_url, messages), {{"role": "user", "content": "go on"}}]
        await asyncio.sleep(draws.uniform(0, 2 * {TOOL_S}))
"""


class Engine:
    """In place of a worker group with one engine, and of its exchange of messages. Tokens take time, nothing else."""

    def __init__(self, slots: int) -> None:
        self.slots, self.running, self.reply = slots, dict[int, tuple[Batch, int]](), False

    def check(self) -> None:
        """Nothing to supervise."""

    def run_living(self, method: str) -> list[Any]:
        """One engine, which measures nothing."""
        return [EngineCapacity(self.slots, self.slots) if method == "start_generation" else None]

    @property
    def busy(self) -> bool:
        """Whether a reply is to come."""
        return self.reply

    def send(self, engine: int, requests: ResponseRequests, max_steps: int) -> None:
        """Take requests."""
        for i, place in enumerate(requests.rows):
            assert requests.partial is not None
            self.running[place] = (requests.partial[[i]], random.randint(1, ROUNDS))
        self.reply = True

    def receive(self, from_all: bool) -> list[tuple[int, tuple[Batch | None, int]]]:
        """One round, with the turns that end in it."""
        self.reply = False
        time.sleep(ROUND_S)
        ended = [place for place, (_, rounds) in self.running.items() if rounds == 1]
        self.running = {place: (row, rounds - 1) for place, (row, rounds) in self.running.items()}
        rows = [_longer(self.running.pop(place)[0], place) for place in ended]
        return [(0, (Batch.join(rows) if rows else None, 0))]


def _longer(begun: Batch, place: int) -> Batch:
    prompt, response = begun.tokens[~begun.in_response].tolist(), begun.response_tokens.tolist()
    row = Batch.of([prompt], [[*response, *[40] * (TOKENS - 1), 2]])
    row.fill(
        source=torch.cat([begun.source, torch.full((TOKENS,), POLICY, dtype=torch.uint8)]),
        rollout_logprobs=torch.cat([begun.rollout_logprobs, torch.zeros(TOKENS)]),
        truncated=torch.zeros(1, dtype=torch.bool),
    )
    calls = [{"calls": [], "malformed": False, "prefilled": 1, "mark": None, "unsupported": ""}]
    return row.fill(EPISODE, request=torch.tensor([place]), calls=calls)


def measure(config: PPOConfig, conversations: int, deterministic: bool, agents: bool) -> dict[str, Any]:
    """Seconds for so many conversations."""
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow.py").write_text(AGENT if agents else ENVIRONMENT)
        turns = config.rollout.multi_turn
        if agents:
            agent = replace(turns.agent, path=f"{folder}/slow.py:agent", max_sessions=conversations)
            turns = replace(turns, enable=True, agent=agent, num_workers=1)
        else:
            turns = replace(turns, enable=True, environment=f"{folder}/slow.py:Slow")
        records = [PromptRecord(uid, [7] * 9, "arithmetic", "7", {}, [], False) for uid in range(conversations)]
        sampling = replace(config.rollout.train_kwargs, n=1)
        tokenizer = load_tokenizer(config.model.path, False)
        with conversation_pool(turns) as pool:
            setup = ConversationSetup(turns, 4096, 4096, tokenizer, {}, [], pool)
            pool.submit(list).result()
            started, worked = time.perf_counter(), time.process_time()
            batch = _generate(Engine(conversations), records, sampling, deterministic, setup)
            seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    assert (batch.turns == TURNS).all()
    row: dict[str, Any] = {"agents" if agents else "conversations": conversations, "deterministic": deterministic}
    return row | {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}


def _generate(engine: Engine, records: Sequence[PromptRecord], *arguments: Any) -> Batch:
    sampling, deterministic, setup = arguments
    made: Any = engine
    generation.EngineCalls = lambda *_: made  # type: ignore[misc,assignment]
    return generation.generate_responses(made, 1, records, sampling, 3, 4096, deterministic, conversations=setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--agents", action="store_true", help="agents over HTTP instead of an environment")
    options, config = parser.parse_args(), load_config(PPOConfig, "ppo_trainer", [])
    for conversations in options.conversations:
        for deterministic in (False, True)[: 1 + (conversations < 1000)]:
            print(json.dumps(measure(config, conversations, deterministic, options.agents)), flush=True)


if __name__ == "__main__":
    main()
