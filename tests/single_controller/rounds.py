"""Sampling in rounds: every response is cut after each, and resumed in the next."""

import itertools
from typing import Any

import torch

from verl.batch import Batch
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.conversations import ConversationSetup, add_rank_metrics, new_conversations, to_rows
from verl.rollout.multi_turn import begin_conversations
from verl.rollout.requests import ResponseRequests, response_stream
from verl.single_controller.generation import Generation


def in_rounds(
    workers: Any,
    prompts: list[PromptRecord],
    sampling: SamplingConfig,
    seed: int,
    setup: ConversationSetup | None = None,
    **settings: Any,
) -> Batch:
    """The responses to ``prompts`` in order; their ``version`` counts the rounds.

    Args:
        setup: of conversations; None: responses have one turn.
        settings: of :class:`ResponseRequests`.
    """
    records = [record for record in prompts for _ in range(sampling.n)]
    streams = [response_stream(seed, record.uid, i % sampling.n) for i, record in enumerate(records)]
    left = to_rows(new_conversations(records)).fill("response token", version=torch.zeros(0, dtype=torch.int32))
    left = left if setup is not None else left.columns("tokens", "rollout_logprobs", "version")
    ended, places = list[Batch](), torch.arange(len(records))
    for version in itertools.count():
        current = [records[i] for i in places]
        requests = ResponseRequests(
            rows=range(len(places)),
            prompt_ids=[record.input_ids for record in current],
            streams=[streams[i] for i in places],
            sampling=sampling,
            partial=left,
            version=version,
            **settings,
        )
        parts: list[Batch] = []
        talks = None if setup is None else begin_conversations(setup, current, left)
        cut, metrics = Generation(workers, 1, requests, True, parts.append, lambda ended: True, talks).run()
        if parts:
            part = Batch.join(parts)
            part = add_rank_metrics(part[part.request.argsort()], metrics)
            ended.append(part.without("request").fill("episode", place=places[part.request]))
        if not cut:
            break
        left = Batch.join(cut)
        places, left = places[left.request], left.without("request")
    whole = Batch.join(ended)
    return whole[whole.place.argsort()]
