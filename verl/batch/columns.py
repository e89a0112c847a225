"""The columns of a batch: shape, type, and the stage that fills each.

Legend: B episodes, N tokens, M of them in responses (everything after the prompt), P and R the columns of padded
prompts and responses, L captured layers, D hidden width.
"""

from typing import Annotated, Any, get_type_hints

from torch import Tensor

TOKEN, RESPONSE_TOKEN, EPISODE = "token", "response token", "episode"
"""Kinds of columns: one entry per token, response token or episode."""

PerToken = Annotated[Tensor, TOKEN]
PerResponseToken = Annotated[Tensor, RESPONSE_TOKEN]
PerEpisode = Annotated[Tensor, EPISODE]
FewPerResponseToken = Annotated[Tensor, RESPONSE_TOKEN, "[M, k]"]
EpisodeList = Annotated[list[Any], EPISODE]

POLICY, ENVIRONMENT = 0, 1
"""Who wrote a token, in the column ``source``."""

TURN_RANK = "turn_rank/"
"""Prefix of columns of rank metrics by turn: [B, K, L] float64 for the first K turns, NaN where there are fewer."""
RANK, PREFIX, TRAINER_RANK = "rank/", "prefix/", "trainer_rank/"
"""Prefixes of columns of rank metrics; see ``Columns.mean_states``. With ``calculator.compare_versions`` the first two
are the engine's, and the last is the policy's before the update."""


class Columns:
    """The declared columns. Custom ones may be filled too; their kind follows from their length."""

    # --- Filled by the data set and the engine ---
    tokens: PerToken
    """[N] int64, prompt then response of each episode. Engine."""
    source: PerResponseToken
    """[M] uint8, ``POLICY`` or ``ENVIRONMENT``. Engine; not filled where the policy wrote every token."""
    version: PerResponseToken
    """[M] int32, the version of the weights that sampled the token. Engine; not filled where all are of this step."""
    rollout_logprobs: PerResponseToken
    """[M] float32, log-probability in nats under the distribution that the token was sampled from. Engine."""
    truncated: PerEpisode
    """[B] bool, the response was cut at its maximal length. Engine."""
    mean_states: PerEpisode
    """[B, L, D] float32, the mean hidden state of each response. Engine, or the policy's pass with
    ``calculator.source=actor``; not filled where nothing is captured. Beside it stand ``"rank/<name>"``, [B, L]
    float64, of each rank metric, layers in the order they were captured (``rank_metrics``), and with
    ``calculator.keep_prefixes`` ``"prefix/<name>"``, [M, L] float32, at each token the metric of the response up to it,
    NaN where it was not measured (``prefix_metrics``)."""
    group: PerEpisode
    """[B] int64, equal for the responses to one prompt. Sampler."""
    turns: PerEpisode
    """[B] int64, turns of the policy. Filled, as the next three columns are, for conversations alone."""
    environment_rewards: PerEpisode
    """[B] float64, the sum of the environment's rewards."""
    call_counts: PerEpisode
    """[B, 5] int64, :data:`verl.rollout.environments.pool.COUNTS`: calls of tools and what became of them."""
    environment_states: EpisodeList
    """B texts, the environment's state as JSON, between two turns; "" before the first."""
    step: PerEpisode
    """[B] int64, the training step in which the response was sampled. Sampler."""
    learned: PerEpisode
    """[B] bool, false for responses that only fill up a batch or enter the statistics of their group. Sampler."""

    # --- Lists, which stay on the driver. Filled by the sampler and the verifiers ---
    records: EpisodeList
    """B :class:`verl.data.prompt_rows.PromptRecord`, the prompt as it was sampled."""
    texts: EpisodeList
    """B texts, what verifiers read of each response."""
    verdicts: EpisodeList
    """B :class:`verl.verifiers.verdict.Verdict`."""

    # --- Filled by the verifiers ---
    first_records: EpisodeList
    first_verdicts: EpisodeList
    """B each, the prompt and the verdict before a method edited any prompt; not filled where it edits none."""
    scores: PerEpisode
    """[B], the verifiers' scores as they are."""
    correct: PerEpisode
    """[B] bool, the verifiers' verdicts."""

    # --- Filled by the models, before the update ---
    logprobs: PerResponseToken
    """[M] float32, log-probability under the policy. NaN where the update computes it (``PPOConfig.scores_in_update``);
    not filled where ``actor.bypass_mode`` saves that."""
    entropy: PerResponseToken
    """[M] float32 in nats, of the policy's distribution. As ``logprobs``."""
    logsumexp: PerResponseToken
    mean_logprob: PerResponseToken
    sum_pi_squared: PerResponseToken
    """[M] float32 each, of the policy's distribution (:data:`verl.models.output_head.STATISTICS`); only those that an
    advantage estimator or a policy loss asks for."""
    top_k_logprobs: FewPerResponseToken
    top_k_ids: FewPerResponseToken
    """[M, k] float32 and int64, the likeliest tokens, for a policy loss that asks for them."""
    old_logprobs: PerResponseToken
    """[M] float32, the denominator of the policy's ratios: ``logprobs``, or the engine's with ``actor.bypass_mode``."""
    ref_logprobs: PerResponseToken
    """[M] float32, under the reference policy; not filled without one."""
    values: PerResponseToken
    """[M] float32, the critic's, in units of reward; not filled without a critic."""

    # --- Filled by the algorithms ---
    rewards: PerEpisode
    """[B] float64, what advantages are estimated from: verifier, reward model, overlong penalty, Phi, KL divergence."""
    token_rewards: PerResponseToken
    """[M] float64, the rewards where they come: at the last token, less the KL divergence at each."""
    scores_with_phi: PerEpisode
    """[B] float64, what the verifiers' scores and rank shaping give together."""
    phi: PerEpisode
    """[B] float64, the auxiliary signal of rank shaping; not filled where the reward manager gives none."""
    learn_mask: PerResponseToken
    """[M] bool, whether the token enters the losses and their denominators."""
    unshaped_advantages: PerResponseToken
    """[M] float32, before rank shaping."""
    advantages: PerResponseToken
    """[M] float32, what the policy learns from."""
    returns: PerResponseToken
    """[M] float32, the critic's targets; not filled without a critic."""

    # --- Filled on the way to and from a worker ---
    request: PerEpisode
    """[B] int64, the place of a response among those asked for. Engine, until all have ended."""
    unit: PerEpisode
    """[B] int64, equal on rows that must be in one micro-batch, for a policy loss that needs whole groups."""
    states: EpisodeList
    """For each response of n tokens the hidden states [n, L, D] that these are drawn from; until they are measured."""


KINDS = {
    name: next(note for note in hint.__metadata__ if note in (TOKEN, RESPONSE_TOKEN, EPISODE))
    for name, hint in get_type_hints(Columns, include_extras=True).items()
}
"""Declared column -> its kind."""

FEW = {name for name, hint in Columns.__annotations__.items() if hint is FewPerResponseToken}
"""Declared columns with k numbers per response token."""


def declared_kind(name: str) -> str | None:
    """Return the kind of a declared column or of a family of columns; None for a custom one."""
    in_family = RESPONSE_TOKEN if name.startswith(PREFIX) else EPISODE if name.startswith((RANK, TURN_RANK)) else None
    return KINDS.get(name, in_family)
