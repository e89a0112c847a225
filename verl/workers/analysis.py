"""Worker that runs a policy on finished responses and computes metrics of the policy's internal states.

Hidden states and distributions over the vocabulary stay in the worker, which returns only a few numbers per response.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.batch import Batch
from verl.config.calculator import CalculatorConfig
from verl.config.common import ModelConfig
from verl.models.micro_batches import MicroBatching
from verl.models.policy import Policy
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.stacks import StackedResponses, mean_state_distances, state_motion
from verl.utils.distributed import WorkerPlace, join_world, seed_everything
from verl.workers.measurements import MeasuredPrompt, PrefixMetrics, PromptResponses


class AnalysisWorker:
    """One of the processes that jointly run the policy. Each method must be called on all workers at once."""

    def __init__(
        self, model: ModelConfig, place: WorkerPlace, calculator: CalculatorConfig, layer: int, micro_batch_size: int
    ) -> None:
        """Load the policy. ``layer`` is the index in ``calculator.layers`` of the layer whose states are compared."""
        seed_everything(0)
        mesh = join_world(place)
        self.rank = place.rank
        # Rows keep their order, so that responses to the same prompt stay adjacent.
        scoring = MicroBatching(micro_batch_size, max_tokens=None, packed=False)
        self.policy = Policy(model, mesh, scoring, temperature=1.0, trainable=False)
        self.calculator = RepresentationMetricsCalculator(calculator)
        self.layer = layer

    def measure(self, shares: list[list[PromptResponses]], temperature: float) -> list[MeasuredPrompt]:
        """Run the policy on the responses to this worker's prompts and return their metrics.

        Args:
            shares: Prompts of each worker. The numbers of prompts and of responses per prompt must not vary.
            temperature: Softmax temperature for log-probabilities and entropies.
        """
        prompts = shares[self.rank]
        self.policy.temperature = temperature
        num_responses = len(prompts[0].token_ids)
        stack, stacked = StackedResponses(self.calculator.config), list[dict[str, Tensor]]()
        motions = list[dict[str, Tensor]]()
        num_read = 0

        def measure(states: list[Tensor], _: Batch) -> Batch:
            """Compute metrics of the processed responses, and stack the states of all responses to the same prompt."""
            nonlocal stack, num_read
            for response in states:
                stack.add(response)
                motions.append({name: v.cpu() for name, v in state_motion(response[:, self.layer]).items()})
                num_read += 1
                if num_read % num_responses == 0:
                    stacked.append(stack.metrics())
                    stack = StackedResponses(self.calculator.config)
            return self.calculator.measure(states)

        # All responses, grouped by prompt.
        pairs = [(prompt.prompt_ids, tokens) for prompt in prompts for tokens in prompt.token_ids]
        batch = Batch.of([prompt for prompt, _ in pairs], [tokens for _, tokens in pairs])
        scored = self.policy.compute_logprobs(batch, self.calculator.config.layers, measure)
        by_prompt = [motions[i : i + num_responses] for i in range(0, num_read, num_responses)]
        groups = zip(prompts, scored.split(num_responses), stacked, by_prompt, strict=True)
        return [self._measured(*group) for group in groups]

    def _measured(
        self, prompt: PromptResponses, scored: Batch, stack: dict[str, Tensor], motions: list[dict[str, Tensor]]
    ) -> MeasuredPrompt:
        responses, courses = [], []
        for response, motion in zip(scored.split(1), motions, strict=True):
            by_layer = {name: values[0].tolist() for name, values in response.rank_metrics.items()}
            logprob, entropy = (float(v.double().mean()) for v in (response.logprobs, response.entropy))
            responses.append(by_layer | {"avg_log_probs": [logprob], "avg_logits_entropy": [entropy]})
            courses.append(_course(response, self.layer, motion))
        return MeasuredPrompt(
            prompt.key,
            responses,
            {name: values.tolist() for name, values in stack.items()},
            mean_state_distances(scored.mean_states[:, self.layer]),
            courses,
        )


def _course(response: Batch, layer: int, motion: Mapping[str, Tensor]) -> PrefixMetrics:
    """Return each prefix's rank metrics, motion, and mean log-probability and entropy since the previous prefix."""
    prefixes = {name: values[:, layer] for name, values in response.prefix_metrics.items()}
    measured = torch.stack([~values.isnan() for values in prefixes.values()]).any(dim=0)
    ends = (measured.nonzero()[:, 0] + 1).tolist()
    starts = [0, *ends[:-1]]
    means = {
        name: [float(values[a:b].double().mean()) for a, b in zip(starts, ends, strict=True)]
        for name, values in (("logprob", response.logprobs), ("entropy", response.entropy))
    }
    metrics = {name: values[measured].double().tolist() for name, values in prefixes.items()}
    moved = {name: values[measured.cpu()].tolist() for name, values in motion.items()}
    return PrefixMetrics(ends, metrics | means | moved)
