"""The analysis worker: a policy that reads finished responses, and what can be said of them only where its states are.

Hidden states and distributions over the vocabulary stay in the worker; a few figures per response and prompt leave it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.config.calculator import CalculatorConfig
from verl.config.common import ModelConfig
from verl.models.micro_batches import MicroBatching
from verl.models.policy import Policy
from verl.protocol import PolicyScores, PromptBatch, RankMetrics, RolloutBatch
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.stacks import StackedResponses, mean_state_distances
from verl.rollout.base import FinishedResponses, SampledResponse, collect
from verl.rollout.requests import Course, MeasuredPrompt, PromptResponses
from verl.utils.distributed import WorkerPlace, join_world, seed_everything

PAD = 0
"""Any token: attention never sees it."""


class AnalysisWorker:
    """One of the processes that together hold the policy. Every method is called on all workers at once."""

    def __init__(
        self, model: ModelConfig, place: WorkerPlace, calculator: CalculatorConfig, layer: int, micro_batch_size: int
    ) -> None:
        """``layer``: place in ``calculator.layers`` of the layer whose states are compared between responses."""
        seed_everything(0)
        mesh = join_world(place)
        self.rank = place.rank
        # Rows stay in their order: responses to one prompt follow each other.
        scoring = MicroBatching(micro_batch_size, max_tokens=None, packed=False)
        self.policy = Policy(model, mesh, scoring, temperature=1.0, trainable=False)
        self.calculator = RepresentationMetricsCalculator(calculator)
        self.layer = layer

    def measure(self, shares: list[list[PromptResponses]], temperature: float) -> list[MeasuredPrompt]:
        """Read the responses to the prompts of this worker.

        Args:
            shares: prompts of each worker, as many for each, all with as many responses.
            temperature: of the softmax whose log-probabilities and entropies are wanted.
        """
        prompts = shares[self.rank]
        self.policy.temperature = temperature
        stacks = _Stacks(self.calculator, len(prompts[0].token_ids))
        with self.policy.parameters.loaded():
            scores = self.policy.compute_logprobs(_batch(prompts), self.calculator.config.layers, stacks.measure)
        found, start = [], 0
        for prompt, stack in zip(prompts, stacks.finished, strict=True):
            rows = scores[start : start + len(prompt.token_ids)]
            start += len(prompt.token_ids)
            found.append(self._measured(prompt, rows, stack))
        return found

    def _measured(self, prompt: PromptResponses, scores: PolicyScores, stack: dict[str, Tensor]) -> MeasuredPrompt:
        metrics = scores.rank_metrics
        lengths = [len(tokens) for tokens in prompt.token_ids]
        responses = []
        for row, length in enumerate(lengths):
            by_layer = {name: metrics.by_name[name][row].tolist() for name in metrics.metric_names}
            logprob, entropy = (float(v[row, :length].double().mean()) for v in (scores.logprobs, scores.entropy))
            responses.append(by_layer | {"avg_log_probs": [logprob], "avg_logits_entropy": [entropy]})
        return MeasuredPrompt(
            prompt.key,
            responses,
            {name: values.tolist() for name, values in stack.items()},
            mean_state_distances(metrics.mean_states[:, self.layer]),
            [_course(scores, row, length, self.layer) for row, length in enumerate(lengths)],
        )


class _Stacks:
    """Measures responses as they are read, and stacks those of each prompt on the side."""

    def __init__(self, calculator: RepresentationMetricsCalculator, num_responses: int) -> None:
        self.calculator = calculator
        self.num_responses = num_responses
        self.finished: list[dict[str, Tensor]] = []
        self._stack = StackedResponses(calculator.config)
        self._stacked = 0

    def measure(self, states: list[Tensor]) -> RankMetrics:
        for response in states:
            self._stack.add(response)
            self._stacked += 1
            if self._stacked == self.num_responses:
                self.finished.append(self._stack.metrics())
                self._stack, self._stacked = StackedResponses(self.calculator.config), 0
        return self.calculator.measure(states)


def _batch(prompts: Sequence[PromptResponses]) -> RolloutBatch:
    """All responses as rows, those to one prompt next to each other."""
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.prompt_ids) :] = torch.tensor(prompt.prompt_ids)
        mask[row, longest - len(prompt.prompt_ids) :] = 1
    batch = PromptBatch(ids, mask, torch.arange(len(prompts)), batch_size=[len(prompts)])
    responses = [
        SampledResponse(tokens, [0.0] * len(tokens), False, None) for prompt in prompts for tokens in prompt.token_ids
    ]
    longest_response = max(len(response.token_ids) for response in responses)
    part = FinishedResponses.of(dict(enumerate(responses)), longest_response)
    return collect(batch, [part], len(prompts[0].token_ids), longest_response, PAD)


def _course(scores: PolicyScores, row: int, length: int, layer: int) -> Course:
    """The rank metrics of a response's prefixes, and means of its tokens since the prefix before."""
    by_prefix = scores.rank_metrics.by_prefix
    assert by_prefix is not None, "calculator.keep_prefixes is on"
    prefixes: dict[str, Tensor] = {str(name): by_prefix[name][row, layer, :length] for name in by_prefix.keys()}
    measured = torch.stack([~values.isnan() for values in prefixes.values()]).any(dim=0)
    ends = (measured.nonzero()[:, 0] + 1).tolist()
    starts = [0, *ends[:-1]]
    means = {
        name: [float(values[row, a:b].double().mean()) for a, b in zip(starts, ends, strict=True)]
        for name, values in (("logprob", scores.logprobs), ("entropy", scores.entropy))
    }
    metrics = {name: values[measured].double().tolist() for name, values in prefixes.items()}
    return Course(ends, metrics | means)
