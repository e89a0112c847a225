"""Declared columns of a batch, with their shapes, types, and the stage that fills each.

Legend: B episodes, N tokens, M response tokens, L captured layers, D hidden width, K turns.
"""

from typing import Annotated, Any, get_type_hints

from torch import Tensor

TOKEN, RESPONSE_TOKEN, EPISODE = "token", "response token", "episode"
"""Kinds of columns, with one entry per token, response token or episode."""

PerToken = Annotated[Tensor, TOKEN]
PerResponseToken = Annotated[Tensor, RESPONSE_TOKEN]
PerEpisode = Annotated[Tensor, EPISODE]
TopKPerResponseToken = Annotated[Tensor, RESPONSE_TOKEN, "[M, k]"]
EpisodeList = Annotated[list[Any], EPISODE]

POLICY, ENVIRONMENT = 0, 1
"""Writers of a token, in the column ``source``."""

TURN_RANK = "turn_rank/"
"""Prefix of columns with rank metrics by turn, [B, K, L] float64; NaN for turns that an episode does not have."""
RANK, PREFIX, TRAINER_RANK = "rank/", "prefix/", "trainer_rank/"
"""Prefixes of columns with rank metrics; see ``Columns.mean_states``. With ``calculator.compare_versions``, ``rank/``
and ``prefix/`` are measured by the engine and ``trainer_rank/`` by the policy before the update."""


class Columns:
    """Declared columns. Custom columns may be filled too; their kind is inferred from their length."""

    # --- Filled by the data set and the engine ---
    tokens: PerToken
    """[N] int64, the prompt and response of each episode in turn."""
    source: PerResponseToken
    """[M] uint8, ``POLICY`` or ``ENVIRONMENT``; not filled if the policy wrote every token."""
    version: PerResponseToken
    """[M] int32, version of the weights that sampled the token; not filled if all are from this step."""
    rollout_logprobs: PerResponseToken
    """[M] float32, log-probability in nats under the engine's sampling distribution."""
    truncated: PerEpisode
    """[B] bool, the response reached its maximum length and was cut."""
    mean_states: PerEpisode
    """[B, L, D] float32, mean hidden state of each response, from the engine or, with ``calculator.source=actor``, the
    policy; not filled if no states are captured. Rank metrics are filled with it: ``"rank/<name>"``, [B, L] float64,
    layers in capture order (``rank_metrics``), and with ``calculator.keep_prefixes`` ``"prefix/<name>"``, [M, L]
    float32, the metric of the response up to each token, NaN where it was not measured (``prefix_metrics``)."""
    group: PerEpisode
    """[B] int64, equal for all responses to one prompt."""
    turns: PerEpisode
    """[B] int64, turns of the policy. This and the next three columns are filled for conversations only."""
    environment_rewards: PerEpisode
    """[B] float64, sum of the environment's rewards."""
    call_counts: PerEpisode
    """[B, 5] int64, tool calls and their outcomes, as in :data:`verl.rollout.environments.pool.COUNTS`."""
    environment_states: EpisodeList
    """B strings, the environment's state between two turns as JSON; "" before the first turn."""
    step: PerEpisode
    """[B] int64, training step in which the response was sampled."""
    learned: PerEpisode
    """[B] bool, false for responses that only fill up a batch or enter the statistics of their group."""

    # --- Lists, which stay on the driver ---
    records: EpisodeList
    """B :class:`verl.data.prompt_rows.PromptRecord`, the sampled prompts."""
    texts: EpisodeList
    """B strings, the part of each response that verifiers read."""
    verdicts: EpisodeList
    """B :class:`verl.verifiers.verdict.Verdict`."""

    # --- Filled by the verifiers ---
    first_records: EpisodeList
    first_verdicts: EpisodeList
    """B each, prompts and verdicts before a method edited any prompt; not filled if it edits none."""
    scores: PerEpisode
    """[B], the verifiers' scores."""
    correct: PerEpisode
    """[B] bool, the verifiers' decisions."""

    # --- Filled by the models, before the update ---
    logprobs: PerResponseToken
    """[M] float32, log-probability under the policy. NaN if the update computes it (``PPOConfig.scores_in_update``);
    not filled if ``actor.bypass_mode`` makes it unnecessary."""
    entropy: PerResponseToken
    """[M] float32 in nats, of the policy's distribution; filled when ``logprobs`` is."""
    logsumexp: PerResponseToken
    mean_logprob: PerResponseToken
    sum_pi_squared: PerResponseToken
    """[M] float32 each, statistics of the policy's distribution (:data:`verl.models.output_head.STATISTICS`); filled if
    an advantage estimator or a policy loss requires them."""
    top_k_logprobs: TopKPerResponseToken
    top_k_ids: TopKPerResponseToken
    """[M, k] float32 and int64, the most likely tokens; filled if a policy loss requires them."""
    old_logprobs: PerResponseToken
    """[M] float32, the ratio's denominator: ``logprobs``, or ``rollout_logprobs`` with ``actor.bypass_mode``."""
    ref_logprobs: PerResponseToken
    """[M] float32, log-probability under the reference policy; not filled without one."""
    values: PerResponseToken
    """[M] float32, the critic's values in units of reward; not filled without a critic."""

    # --- Filled by the algorithms ---
    rewards: PerEpisode
    """[B] float64, sum of ``token_rewards``."""
    token_rewards: PerResponseToken
    """[M] float64, rewards that advantages are estimated from: verifier, reward model, overlong penalty and Phi at the
    last token, less the KL divergence at each."""
    scores_with_phi: PerEpisode
    """[B] float64, ``rewards`` before the KL divergence is subtracted."""
    phi: PerEpisode
    """[B] float64, auxiliary signal of rank shaping; not filled without it."""
    learn_mask: PerResponseToken
    """[M] bool, whether the token enters the losses and their denominators."""
    unshaped_advantages: PerResponseToken
    """[M] float32, advantages before rank shaping."""
    advantages: PerResponseToken
    """[M] float32, advantages that the policy learns from."""
    returns: PerResponseToken
    """[M] float32, the critic's targets; not filled without a critic."""

    # --- Filled on the way to and from a worker ---
    request: PerEpisode
    """[B] int64, index of a response among the requested ones; dropped once all have ended."""
    unit: PerEpisode
    """[B] int64, equal on rows that must be in one micro-batch, for a policy loss that needs whole groups."""
    states: EpisodeList
    """B tensors [n, L, D], hidden states from which a response's n tokens are predicted; dropped once measured."""


KINDS = {
    name: next(note for note in hint.__metadata__ if note in (TOKEN, RESPONSE_TOKEN, EPISODE))
    for name, hint in get_type_hints(Columns, include_extras=True).items()
}
"""Declared column -> its kind."""

TOP_K = {name for name, hint in Columns.__annotations__.items() if hint is TopKPerResponseToken}
"""Declared columns with k numbers per response token."""


def declared_kind(name: str) -> str | None:
    """Return the kind of a declared column, or of one with a declared prefix; None for a custom column."""
    in_family = RESPONSE_TOKEN if name.startswith(PREFIX) else EPISODE if name.startswith((RANK, TURN_RANK)) else None
    return KINDS.get(name, in_family)
