"""Declares the columns of a batch, with the shape and dtype of each column and the stage that fills it.

Shapes: B episodes, N tokens, M response tokens, L captured layers, D hidden size, K turns.
"""

from typing import Annotated, Any, get_type_hints

from torch import Tensor

TOKEN, RESPONSE_TOKEN, EPISODE = "token", "response token", "episode"
"""Kinds of columns, which have one entry per token, per response token or per episode."""

PerToken = Annotated[Tensor, TOKEN]
PerResponseToken = Annotated[Tensor, RESPONSE_TOKEN]
PerEpisode = Annotated[Tensor, EPISODE]
TopKPerResponseToken = Annotated[Tensor, RESPONSE_TOKEN, "[M, k]"]
EpisodeList = Annotated[list[Any], EPISODE]

POLICY, ENVIRONMENT = 0, 1
"""Values of the column ``source`` for tokens written by the policy and by the environment."""

TURN_RANK = "turn_rank/"
"""Prefix of columns with per-turn rank metrics, [B, K, L] float64, with NaN for turns that do not exist."""
RANK, PREFIX, TRAINER_RANK, TEACHER_RANK = "rank/", "prefix/", "trainer_rank/", "teacher_rank/"
"""Prefixes of columns with rank metrics (see ``Columns.mean_states``). With ``calculator.compare_versions``, ``rank/``
and ``prefix/`` are measured by the engine, and ``trainer_rank/`` by the policy before the update. With
``teacher.rank_metrics``, ``teacher_rank/`` is measured by the teacher."""


class Columns:
    """Declared columns. A batch can also contain custom columns, whose kind is inferred from their length."""

    # --- Filled by the data set and the engine ---
    tokens: PerToken
    """[N] int64, token ids of the prompts and responses, concatenated over episodes."""
    source: PerResponseToken
    """[M] uint8, author of the token, ``POLICY`` or ``ENVIRONMENT``; not filled if the policy wrote all tokens."""
    version: PerResponseToken
    """[M] int32, version of the weights that sampled the token; not filled if all tokens are from this step."""
    rollout_logprobs: PerResponseToken
    """[M] float32, log-probability of the token under the engine's sampling distribution, in nats."""
    truncated: PerEpisode
    """[B] bool, whether the response was truncated at its maximum length."""
    mean_states: PerEpisode
    """[B, L, D] float32, mean hidden state of each response, from the engine or, with ``calculator.source=actor``, from
    the policy; not filled if no states are captured. Rank metrics are filled at the same time. ``"rank/<name>"``
    (``rank_metrics``) is [B, L] float64, with layers in capture order. With ``calculator.keep_prefixes``,
    ``"prefix/<name>"`` (``prefix_metrics``) is [M, L] float32, the metric of the prefix up to each token, or NaN."""
    group: PerEpisode
    """[B] int64, id shared by all responses to the same prompt."""
    turns: PerEpisode
    """[B] int64, number of policy turns. This column and the next three are filled only for conversations."""
    environment_rewards: PerEpisode
    """[B] float64, sum of the environment's rewards."""
    call_counts: PerEpisode
    """[B, 6] int64, counts of tool calls and related events (:data:`verl.rollout.environments.pool.COUNTS`)."""
    environment_states: EpisodeList
    """B strings, the environment's state between turns as JSON, or "" before the first turn."""
    further_rows: EpisodeList
    """B lists, the additional histories of each agent session. Each history is a mapping with ``prompt_ids``,
    ``tokens``, ``source``, ``rollout_logprobs``, ``truncated`` and ``why``. Filled only for agents."""
    opened_by: EpisodeList
    """B strings, the reason for opening the history with the session's last turn, or "" for the first history."""
    step: PerEpisode
    """[B] int64, training step in which the response was sampled."""
    learned: PerEpisode
    """[B] bool, false if a response only fills up the batch or only contributes to its group's statistics."""

    # --- Lists, which stay on the driver ---
    records: EpisodeList
    """B :class:`verl.data.prompt_record.PromptRecord` objects, the sampled prompts."""
    texts: EpisodeList
    """B strings, the part of each response that the verifiers read."""
    verdicts: EpisodeList
    """B :class:`verl.verifiers.verdict.Verdict` objects."""

    # --- Filled by the verifiers ---
    first_records: EpisodeList
    first_verdicts: EpisodeList
    """B prompts and verdicts before any resampling, filled only if the method overrides ``resample``."""
    scores: PerEpisode
    """[B], scores from the verifiers."""
    correct: PerEpisode
    """[B] bool, whether the verifiers judged the response correct."""

    # --- Filled by the models, before the update ---
    logprobs: PerResponseToken
    """[M] float32, log-probability under the policy, or NaN until the update computes it
    (``PPOConfig.first_update_scores``); not filled if ``actor.bypass_mode`` makes it unnecessary."""
    entropy: PerResponseToken
    """[M] float32, entropy of the policy's distribution in nats; filled together with ``logprobs``."""
    logsumexp: PerResponseToken
    mean_logprob: PerResponseToken
    sum_pi_squared: PerResponseToken
    """[M] float32 each, statistics of the policy's distribution (:data:`verl.models.output_head.STATISTICS`); filled
    only if an advantage estimator or a policy loss requires them."""
    top_k_logprobs: TopKPerResponseToken
    top_k_ids: TopKPerResponseToken
    """[M, k] float32 and int64, the k most likely tokens; filled only if a policy loss requires them."""
    old_logprobs: PerResponseToken
    """[M] float32, denominator of the ratio: ``logprobs``, or ``rollout_logprobs`` with ``actor.bypass_mode``."""
    ref_logprobs: PerResponseToken
    """[M] float32, log-probability under the reference policy; filled only with a reference policy."""
    teacher_logprobs: PerResponseToken
    """[M] float32, log-probability under the teacher; filled only if ``TeacherConfig.scores_samples``."""
    teacher_top_k_logprobs: TopKPerResponseToken
    teacher_top_k_ids: TopKPerResponseToken
    """[M, k] float32 and int64, a server's k most likely tokens, whose ids may be ``NO_TOKEN``; filled only if
    ``teacher.loss`` compares them."""
    teacher: PerEpisode
    """[B] int64, index of the teacher of the response (``TeacherConfig.index_of``); filled only with several teachers
    in the workers."""
    teacher_prompts: EpisodeList
    """B lists of token ids, the teacher's prompts for scoring the responses during the update. This column is filled
    only if these prompts differ from the policy's."""
    taught: PerEpisode
    """[B] bool, false if the teacher has no prompt for the response, which then gets no teacher signal; filled only if
    ``teacher.prompt`` depends on responses."""
    values: PerResponseToken
    """[M] float32, the critic's values in units of reward; filled only with a critic."""

    # --- Filled by the algorithms ---
    rewards: PerEpisode
    """[B] float64, sum of ``token_rewards``."""
    token_rewards: PerResponseToken
    """[M] float64, rewards from which advantages are estimated: the verifier's and reward model's scores, the overlong
    penalty and Phi at the last token, minus the KL penalty at every token."""
    scores_with_phi: PerEpisode
    """[B] float64, ``rewards`` before the KL penalty is subtracted."""
    phi: PerEpisode
    """[B] float64, auxiliary signal for rank shaping; set only if rank shaping is enabled."""
    learn_mask: PerResponseToken
    """[M] bool, whether the token is included in the losses and their denominators."""
    unshaped_advantages: PerResponseToken
    """[M] float32, advantages before rank shaping."""
    advantages: PerResponseToken
    """[M] float32, advantages used in the policy loss."""
    returns: PerResponseToken
    """[M] float32, targets of the critic; filled only with a critic."""

    # --- Filled during the update ---
    teacher_loss: PerResponseToken
    """[M] float32, divergence of the policy's distribution from the teacher's; filled only for ``TeacherLoss``."""

    # --- Filled for transfer to and from a worker ---
    request: PerEpisode
    """[B] int64, index of the response's request; dropped when all requests have finished."""
    unit: PerEpisode
    """[B] int64, id shared by rows that must be in the same micro-batch, for a policy loss that needs whole groups."""
    states: EpisodeList
    """B tensors [n, L, D], hidden states that predict the n tokens of each response; dropped after measurement."""


KINDS = {
    name: next(note for note in hint.__metadata__ if note in (TOKEN, RESPONSE_TOKEN, EPISODE))
    for name, hint in get_type_hints(Columns, include_extras=True).items()
}
"""Kind of each declared column, by name."""

TOP_K = {name for name, hint in Columns.__annotations__.items() if hint is TopKPerResponseToken}
"""Names of declared columns with k values per response token."""


FAMILIES = {PREFIX: RESPONSE_TOKEN} | dict.fromkeys((RANK, TURN_RANK, TRAINER_RANK, TEACHER_RANK), EPISODE)
"""Maps each declared prefix to the kind of the columns whose names start with it."""


def declared_kind(name: str) -> str | None:
    """Return the kind of a column that is declared or has a declared prefix, or None for a custom column."""
    return KINDS.get(name) or next((kind for prefix, kind in FAMILIES.items() if name.startswith(prefix)), None)
