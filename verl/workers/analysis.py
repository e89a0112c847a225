"""The analysis worker: a policy that reads finished responses, and what can be said of them only where its states are.

Hidden states and distributions over the vocabulary stay in the worker; a few figures per response and prompt leave it.
"""

import torch
from torch import Tensor

from verl.batch import Batch, RankMetrics
from verl.config.calculator import CalculatorConfig
from verl.config.common import ModelConfig
from verl.models.micro_batches import MicroBatching
from verl.models.policy import Policy
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.stacks import StackedResponses, mean_state_distances
from verl.rollout.requests import Course, MeasuredPrompt, PromptResponses
from verl.utils.distributed import WorkerPlace, join_world, seed_everything


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
        # All responses, those to one prompt next to each other.
        pairs = [(prompt.prompt_ids, tokens) for prompt in prompts for tokens in prompt.token_ids]
        batch = Batch.of([prompt for prompt, _ in pairs], [tokens for _, tokens in pairs])
        with self.policy.parameters.loaded():
            scored = self.policy.compute_logprobs(batch, self.calculator.config.layers, stacks.measure)
        groups = zip(prompts, scored.split(len(prompts[0].token_ids)), stacks.finished, strict=True)
        return [self._measured(prompt, group, stack) for prompt, group, stack in groups]

    def _measured(self, prompt: PromptResponses, scored: Batch, stack: dict[str, Tensor]) -> MeasuredPrompt:
        """``scored``: the responses to the prompt."""
        metrics, responses, courses = scored.rank_metrics, [], []
        for row, response in enumerate(scored.split(1)):
            by_layer = {name: metrics.by_name[name][row].tolist() for name in metrics.metric_names}
            logprob, entropy = (float(v.double().mean()) for v in (response.logprobs, response.entropy))
            responses.append(by_layer | {"avg_log_probs": [logprob], "avg_logits_entropy": [entropy]})
            courses.append(_course(response, self.layer))
        return MeasuredPrompt(
            prompt.key,
            responses,
            {name: values.tolist() for name, values in stack.items()},
            mean_state_distances(metrics.mean_states[:, self.layer]),
            courses,
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


def _course(response: Batch, layer: int) -> Course:
    """The rank metrics of the prefixes of one response, and means of its tokens since the prefix before."""
    by_prefix, length = response.rank_metrics.by_prefix, response.longest_response
    assert by_prefix is not None, "calculator.keep_prefixes is on"
    prefixes: dict[str, Tensor] = {str(name): by_prefix[name][0, layer, :length] for name in by_prefix.keys()}
    measured = torch.stack([~values.isnan() for values in prefixes.values()]).any(dim=0)
    ends = (measured.nonzero()[:, 0] + 1).tolist()
    starts = [0, *ends[:-1]]
    means = {
        name: [float(values[a:b].double().mean()) for a, b in zip(starts, ends, strict=True)]
        for name, values in (("logprob", response.logprobs), ("entropy", response.entropy))
    }
    metrics = {name: values[measured].double().tolist() for name, values in prefixes.items()}
    return Course(ends, metrics | means)
