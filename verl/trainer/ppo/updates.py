"""Updates of the policy and the critic on a step's mini-batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from verl.algorithms.losses import BatchSize
from verl.algorithms.rollout_correction import mean_rollout_weight, rejection_mask
from verl.batch import Batch
from verl.config.actor import ActorConfig
from verl.config.ppo import CriticConfig, PPOConfig
from verl.single_controller.roles import ModelWorkers, PolicyWorkers
from verl.trainer.logging.rollout_metrics import filtered_length_metrics
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.trainer.ppo.advantages import learned_responses
from verl.trainer.ppo.further_rows import with_further_rows
from verl.trainer.training import SkippedUpdates
from verl.workers.policy_loss import CustomLoss

ACTOR_COLUMNS = (
    *("tokens", "source", "learn_mask", "old_logprobs", "advantages"),
    *("ref_logprobs", "teacher_logprobs", "teacher_top_k_logprobs", "teacher_top_k_ids"),
    *("teacher", "teacher_prompts", "taught"),
)
CRITIC_COLUMNS = ("tokens", "learn_mask", "values", "returns")

Metrics = dict[str, float]


@dataclass(eq=False)
class Updates:
    """Mini-batch updates of policy and critic, with counts of skipped updates."""

    config: PPOConfig
    policy: PolicyWorkers
    critic: ModelWorkers | None
    loss: CustomLoss
    timer: PhaseTimer

    def __post_init__(self) -> None:
        self.skipped = {
            "actor": SkippedUpdates("actor", "actor.optim", self.config.actor.optim),
            "critic": SkippedUpdates("critic", "critic.optim", self.config.critic.optim),
        }

    def update_critic(self, batch: Batch, rows: Tensor | None, step: int) -> Metrics:
        """Update the critic on ``rows`` of the batch, or on all rows if ``rows`` is None."""
        critic = self.critic
        if critic is None:
            return {}

        def update(mini: Batch, num_tokens: int, num_sequences: int) -> Metrics:
            return critic.run_update("critic.update", mini, num_tokens)

        return self._run("critic", batch.columns(*CRITIC_COLUMNS), rows, update, step)

    def update_actor(self, batch: Batch, rows: Tensor | None, step: int, num_in_update: int) -> Metrics:
        """Update the policy on ``rows`` of the batch, or on all rows if ``rows`` is None.

        The first update fills ``logprobs`` and ``entropy`` of the first ``num_in_update`` responses in place.
        """
        rules = self.config.algorithm.rollout_correction
        metrics: Metrics = {}
        weights = () if rules.rollout_is is None else ("rollout_logprobs",)
        agents = ("further_rows",) if "further_rows" in batch else ()
        columns = batch.columns(*ACTOR_COLUMNS, *weights, *self.loss.needs.batch_columns, *agents)
        if rules.rollout_is_batch_normalize and rules.rollout_is is not None:
            pair = (batch.padded("logprobs"), batch.padded("rollout_logprobs"))
            mean = mean_rollout_weight(*pair, batch.policy_mask.long(), rules.rollout_is, **rules.weight_bounds)
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
            columns.fill(advantages=batch.advantages / mean)
        max_length = self.config.data.max_response_length
        metrics |= filtered_length_metrics(batch, max_length)

        def update(mini: Batch, num_tokens: int, num_sequences: int) -> Metrics:
            nonlocal num_in_update
            mini = self.loss.prepared(mini, BatchSize(num_tokens, num_sequences, max_length))
            if not num_in_update:
                return self.policy.run_update("actor.update", mini, num_tokens, num_sequences)
            num_in_update = 0
            sizes = (num_tokens, num_sequences)
            of_update, scored = self.policy.run_scoring_update("actor.update_on_policy", mini, *sizes)
            fill_first(batch, scored)
            return of_update

        if agents:
            columns.fill(learned=learned_responses(batch, self.config))
            columns = columns if rows is None else columns[rows]
            mean_of_tokens = self.config.actor.loss_aggregation == "seq-mean-token-mean"
            columns, rows = with_further_rows(columns, self._score, mean_of_tokens), None
        return metrics | self._run("actor", columns, rows, update, step)

    def _score(self, further: Batch) -> Batch:
        """Return the log-probabilities and ``learn_mask`` that an update needs for agents' additional histories."""
        with self.timer.phase("old_log_prob"):
            scored = self.policy.compute_logprobs(further)
        self.timer.count("old_log_prob", Work.of(further.lengths))
        scored.fill(old_logprobs=further.rollout_logprobs if self.config.actor.bypass_mode else scored.logprobs)
        if self.config.uses_reference:
            with self.timer.phase("ref"):
                reference = self.policy.map_rows("compute_ref_logprobs", further.columns("tokens"))
            scored.fill(ref_logprobs=reference.logprobs)
        mask, rules = further.policy_mask, self.config.algorithm.rollout_correction.rejections
        if rules:
            pair = (further.pad(scored.logprobs, 0.0), further.padded("rollout_logprobs"))
            mask, _ = rejection_mask(*pair, mask, rules)
        return scored.fill(learn_mask=mask)

    def _run(
        self,
        model: Literal["actor", "critic"],
        batch: Batch,
        rows: Tensor | None,
        update: Callable[[Batch, int, int], Metrics],
        step: int,
    ) -> Metrics:
        """Update ``model`` on ``rows`` of the batch in mini-batches and return their mean metrics."""
        config: ActorConfig | CriticConfig = getattr(self.config, model)
        phase, updates = f"update_{model}", list[Metrics]()
        with self.timer.phase(phase):
            chosen = batch if rows is None else batch[rows]
            for _ in range(config.ppo_epochs):
                num_rows = config.ppo_mini_batch_size * self.config.rollout.n
                for mini, num_tokens, num_sequences in mini_batches(chosen, num_rows):
                    updates.append(update(mini, num_tokens, num_sequences))
                    self.timer.count(phase, Work.of(mini.lengths))
            return self.skipped[model].summarise(updates, step)


def mini_batches(batch: Batch, num_rows: int) -> Iterator[tuple[Batch, int, int]]:
    """Yield mini-batches of ``num_rows`` responses, and the number of tokens and responses to train on in each.

    For batches with the column ``episode``, ``num_rows`` is the number of agent sessions, which are never split.

    Mini-batches with nothing to learn from are skipped, because AdamW's moments and weight decay would change the
    parameters even with zero gradients.
    """
    minis = batch.split(num_rows)
    if "episode" in batch:
        starts = range(0, int(batch.episode[-1]) + 1, num_rows)
        minis = (batch[(batch.episode >= start) & (batch.episode < start + num_rows)] for start in starts)
    for mini in minis:
        num_tokens = int(mini.learn_mask.sum())
        if num_tokens:
            learned = mini.learned_responses
            num_sequences = int(learned.sum() if "episode" not in mini else len(mini.episode[learned].unique()))
            yield mini, num_tokens, num_sequences


def fill_first(batch: Batch, scored: Batch) -> None:
    """Copy log-probabilities and entropies of the first responses into ``batch``, for later epochs and for logging.

    The values are copied in place, because ``old_logprobs`` is the same tensor as ``logprobs``.
    """
    assert batch.old_logprobs is batch.logprobs, "PPOConfig.first_update_scores"
    num = len(scored.logprobs)
    batch.logprobs[:num] = scored.logprobs
    batch.entropy[:num] = scored.entropy
