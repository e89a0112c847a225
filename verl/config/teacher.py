"""Config group ``teacher``: on-policy distillation from a frozen model or from the policy itself."""

from dataclasses import dataclass
from typing import Literal

from verl.config.checks import (
    Group,
    NotNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Share,
    require,
    require_import_path,
)
from verl.config.common import ModelConfig

EXACT = ("reverse_kl", "forward_kl", "jsd")
"""Losses that compare the whole distributions of student and teacher."""

NO_MODEL, POLICY = "none", "policy"
"""Special values of ``teacher.model.path``: ``none`` loads no model, and ``policy`` uses the policy as the teacher."""


@dataclass(frozen=True)
class TeacherServerConfig(Group):
    """A teacher on a separate server, for models that are too large to share the policy's devices.

    The server scores sampled tokens at temperature 1. The API key is read from ``OPENAI_API_KEY``.
    """

    address: str | None
    """Address of a server with vLLM's completions API and ``prompt_logprobs``, such as ``http://teacher:8000/v1`` for
    ``vllm serve``, or null for no server."""
    model: str | None
    """Name of the model on the server, or null if the server has only one model."""
    max_in_flight: PositiveInt
    """Maximum number of concurrent requests, each of which contains one response."""
    timeout_s: Seconds
    """Time limit per request in seconds."""
    max_retries: NotNegativeInt
    """Maximum number of retries of a failed request. The delay doubles after each retry. If all retries fail, the run
    ends or restarts from the latest checkpoint (``trainer.max_restarts``)."""

    def check(self) -> None:
        fix = "must begin with http:// or https://, as in http://teacher:8000/v1"
        self.require(self.address is None or self.address.startswith(("http://", "https://")), "address", fix)
        # The address appears in files and messages.
        require("@" not in (self.address or ""), "address", "...", "must have no user and password; set OPENAI_API_KEY")


@dataclass(frozen=True)
class TeacherConfig(Group):
    """A frozen model that provides a training signal for the responses that the policy sampled.

    Without ``loss``, ``coef`` times log q - log p is added to the advantage of each sampled token, where p is the
    policy before the update and q the teacher. With ``loss``, a divergence of p and q is added to the policy loss.
    """

    model: ModelConfig
    """Teacher model, which must have the policy's tokenizer. ``path=none`` means no teacher. ``path=policy`` means the
    policy itself with another ``prompt``, or a moving average of it (``update_rate``). If the output heads differ in
    size, only the tokenizer's tokens are compared."""
    server: TeacherServerConfig
    prompt: str | None
    """Function, ``module:function`` or ``file.py:function``, that returns the teacher's prompt for a record, as text or
    messages, such as the question with its solution. If it has parameters named ``response``, ``verdict`` and
    ``siblings``, it receives the response, its verdict, and the prompt's other responses with their verdicts. With such
    parameters, the function may return None to provide no signal. Null uses the policy's prompts."""
    update_rate: Share
    """Weight of the current policy in the moving average that serves as the teacher if ``path=policy``, in (0, 1]."""
    update_freq: PositiveInt
    """Number of training steps between updates of the moving average, which is a float32 copy of the policy. If
    ``update_freq`` and ``update_rate`` are both 1, the teacher is the policy itself, without a copy."""
    loss: Literal["reverse_kl", "forward_kl", "jsd", "abs", "mse", "k2", "low_var_kl", "k3"] | None
    """Divergence to minimise, or null to add the teacher's signal to the advantage. ``reverse_kl``, ``forward_kl`` and
    ``jsd`` (generalised Jensen-Shannon, arXiv 2306.13649) compare the distributions over the whole vocabulary; other
    values are estimators that use only the sampled token, as in ``actor.kl_loss_type``."""
    coef: PositiveFloat
    """Weight of the teacher's signal in the advantage or in the loss."""
    use_task_rewards: bool
    """Also learn from rewards. If false, the teacher is the only training signal, and rewards are only logged."""
    beta: float
    """Weight of the teacher in the mixture of ``loss=jsd``, above 0 and below 1."""
    top_k: NotNegativeInt
    """Number of the teacher's most likely tokens that ``reverse_kl``, ``forward_kl`` and ``jsd`` compare individually.
    All other tokens are combined and compared as a single event. 0 compares the distributions over the whole
    vocabulary, at little additional cost."""
    temperature: PositiveFloat
    """Softmax temperature of policy and teacher in ``reverse_kl``, ``forward_kl`` and ``jsd``. Log-probabilities of
    sampled tokens use ``rollout.temperature``."""
    loss_max_clamp: PositiveFloat | None
    """Limit in nats on each token's term in the advantage or loss, or null. A loss has no gradient beyond the limit."""
    rank_metrics: bool
    """Measure the teacher's hidden states on the policy's responses, and log the teacher's rank metrics."""

    @property
    def enabled(self) -> bool:
        """Whether there is a teacher."""
        return self.model.path != NO_MODEL or self.is_server

    @property
    def loads_model(self) -> bool:
        """Whether a separate teacher model must be loaded."""
        return self.model.path not in (NO_MODEL, POLICY)

    @property
    def is_server(self) -> bool:
        """Whether the teacher runs on a server."""
        return self.server.address is not None

    @property
    def is_policy(self) -> bool:
        """Whether the policy is its own teacher."""
        return self.model.path == POLICY

    @property
    def is_average(self) -> bool:
        """Whether the teacher is a moving average of the policy."""
        return self.is_policy and (self.update_rate < 1 or self.update_freq > 1)

    @property
    def is_exact(self) -> bool:
        """Whether the loss compares whole distributions; if so, the teacher must run during the update."""
        return self.loss in EXACT

    @property
    def in_advantage(self) -> bool:
        """Whether the teacher's signal is added to the advantage."""
        return self.enabled and self.loss is None

    @property
    def scores_samples(self) -> bool:
        """Whether the teacher's log-probabilities of the sampled tokens are needed before the update."""
        return self.enabled and (not self.is_exact or self.rank_metrics)

    def check(self) -> None:
        self.require(
            0 < self.beta < 1, "beta", "must be above 0 and below 1; for the ends, set loss to a KL divergence"
        )
        if not self.enabled:
            return
        if self.is_server:
            self._check_server()
        fix = "names the policy, which learns nothing from itself under its own prompt; set teacher.prompt"
        self.require(not self.is_policy or self.is_average or self.prompt is not None, "model.path", fix)
        own = self.is_policy or (self.update_rate == 1 and self.update_freq == 1)
        fix = "is for teacher.model.path=policy; leave it out"
        self.require(own, "update_rate" if self.update_rate < 1 else "update_freq", fix)
        if self.prompt is not None:
            require_import_path("prompt", self.prompt)
        fix = "is for loss=reverse_kl, forward_kl and jsd; set one of these, or 0"
        self.require(self.top_k == 0 or self.is_exact, "top_k", fix)
        chunks = self.model.logits_chunk_size > 0 or not self.is_exact
        fix = f"loss={self.loss} reads the output head in chunks; set model.logits_chunk_size=1024 and this to the same"
        self.require(chunks, "model.logits_chunk_size", fix)
        self.require(self.model.lora.rank == 0, "model.lora.rank", "a teacher is not trained; set it to 0")

    def _check_server(self) -> None:
        fix = "there is one teacher; set it to none, or teacher.server.address to null"
        self.require(self.model.path == NO_MODEL, "model.path", fix)
        fix = f"a server scores sampled tokens, and loss={self.loss} compares whole distributions; "
        self.require(not self.is_exact, "loss", f"{fix}set it to null, k2 or k3")
        self.require(not self.rank_metrics, "rank_metrics", "a server returns no hidden states; set it to false")
