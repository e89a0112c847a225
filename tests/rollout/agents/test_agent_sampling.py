"""Agents through the real engine: the same task as an environment, and histories that do not continue each other."""

from typing import Any

import pytest
import torch

from tests.kit import changed, ppo_config, user_code
from tests.workers.groups import all_prompts, scored
from verl.batch import Batch
from verl.config import PPOConfig
from verl.models.tokenizer import load_tokenizer
from verl.rollout.environments.conversations import ConversationSetup, with_tools
from verl.rollout.multi_turn import conversation_pool
from verl.single_controller.generation import generate_responses
from verl.single_controller.worker_group import WorkerGroup

pytestmark = pytest.mark.slow

COMPACTS = """
import json, urllib.request

def post(url, **body):
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as reply:
        return json.load(reply)["choices"][0]

def ask(base_url, *messages):
    return post(base_url + "/chat/completions", messages=messages)["message"]

def agent(record, base_url, api_key):
    first = record.messages[0]
    reply = ask(base_url, first)
    again = {"role": "user", "content": first["content"].replace("*", "+")}
    ask(base_url, first, reply, again)
    ask(base_url, again)
    return 0.25

def by_tokens(record, base_url, api_key):
    text = f"<|user|>{record.messages[0]['content']}<|im_end|><|assistant|>"
    first = post(base_url + "/completions", prompt=text)
    tokens = [*first["prompt_token_ids"], *first["token_ids"], *first["prompt_token_ids"]]
    post(base_url + "/completions", prompt=tokens, max_tokens=3)
"""


@pytest.fixture(scope="module")
def config() -> PPOConfig:
    config = ppo_config("experiment=arithmetic_tools", "trainer.n_gpus_per_node=1", "rollout.n=2")
    return changed(config, rollout={"kv_cache_memory_mb": 64, "max_num_seqs": 32}, data={"train_max_samples": 12})


@pytest.fixture(scope="module")
def tokenizer(config: PPOConfig) -> Any:
    return load_tokenizer(config.model.path, False)


def agents(config: PPOConfig, path: str) -> Any:
    agent = {"path": path, "timeout_s": 60.0}
    return changed(config, rollout={"multi_turn": {"tools": [], "num_workers": 2, "agent": agent}}).rollout.multi_turn


def sampled(group: WorkerGroup, config: PPOConfig, tokenizer: Any, path: str | None, num: int) -> Batch:
    data, limit = config.data, config.data.max_response_length
    turns = config.rollout.multi_turn if path is None else agents(config, path)
    arguments = with_tools({}, config.rollout.multi_turn)
    prompts = all_prompts(changed(config, data={"apply_chat_template_kwargs": arguments}), tokenizer)[:num]
    arguments = arguments if path is None else {}
    with conversation_pool(turns) as pool:
        setup = ConversationSetup(turns, data.max_prompt_length, limit, tokenizer, arguments, [], pool)
        options = (config.rollout.train_kwargs, 3, limit, True)
        return generate_responses(group, 1, prompts, *options, conversations=setup)


def test_an_agent_samples_what_its_environment_would(group, config, tokenizer):
    of_environment = sampled(group, config, tokenizer, None, 12)
    of_agent = sampled(group, config, tokenizer, "data/arithmetic_tools/agent.py:agent", 12)
    assert of_environment.turns.max() == 2 and of_agent.further_rows == [[]] * 24
    # The environment answers calls that it cannot read; this agent ends there.
    read = of_environment.call_counts[:, 1] == 0
    assert read.sum() > 12
    for name in of_environment.names:
        ours, theirs = getattr(of_agent[read], name), getattr(of_environment[read], name)
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), name


def test_further_histories_have_the_policys_logprobs(group, config, tokenizer, tmp_path):
    path = user_code(tmp_path, COMPACTS) + ":agent"
    batch = sampled(group, config, tokenizer, path, 4)
    assert batch.turns.tolist() == [3] * 8 and batch.environment_rewards.tolist() == [0.25] * 8
    assert all([row["why"] for row in rows] == [""] for rows in batch.further_rows)
    rows = [row for rows in batch.further_rows for row in rows]
    further = Batch.of([row["prompt_ids"] for row in rows], [row["tokens"] for row in rows])
    further.fill(source=torch.tensor([s for row in rows for s in row["source"]], dtype=torch.uint8))
    for part, logprobs in (
        (batch, batch.rollout_logprobs),
        (further, torch.tensor([value for row in rows for value in row["rollout_logprobs"]])),
    ):
        difference = (scored(group, part.columns("tokens", "source")).logprobs - logprobs).abs()
        assert difference[part.by_policy].max() < 1e-4
    again = sampled(group, config, tokenizer, path, 4)
    assert again.tokens.equal(batch.tokens) and again.further_rows == batch.further_rows
    # The first turn of a completion is that of a chat with the same tokens, and exact tokens continue their row.
    plain = sampled(group, config, tokenizer, f"{path.rpartition(':')[0]}:by_tokens", 4)
    assert plain.further_rows == [[]] * 8 and plain.turns.tolist() == [2] * 8
    firsts = [row["tokens"][: row["source"].index(0)] if 0 in row["source"] else row["tokens"] for row in rows]
    for tokens, chat in zip(plain.response_tokens.split(plain.response_lengths.tolist()), firsts, strict=True):
        assert tokens.tolist()[: len(chat)] == chat
    difference = (scored(group, plain.columns("tokens", "source")).logprobs - plain.rollout_logprobs).abs()
    assert difference[plain.by_policy].max() < 1e-4
