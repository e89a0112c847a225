"""Config group ``teacher``: on-policy distillation from a frozen model or from the policy itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    split_source,
)
from verl.config.common import ModelConfig

EXACT = ("reverse_kl", "forward_kl", "jsd")
"""Losses that compare the whole distributions of student and teacher."""

NO_MODEL, POLICY = "none", "policy"
"""Special values of ``teacher.model.path``: ``none`` loads no model, and ``policy`` uses the policy as the teacher."""

HTTP = ("http://", "https://")
"""Beginnings of an address."""


@dataclass(frozen=True)
class TeacherServerConfig(Group):
    """A teacher on a separate server, for models that are too large to share the policy's devices.

    The server scores sampled tokens and, with ``teacher.top_k``, returns its most likely tokens, at temperature 1. The
    API key is read from ``OPENAI_API_KEY``.
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
        self.require(self.address is None or self.address.startswith(HTTP), "address", fix)
        _require_no_secret("address", self.address or "")


def _require_no_secret(field: str, address: str) -> None:
    # The address appears in files and messages, and requests append to it.
    fix = "must have no user, password or query; set OPENAI_API_KEY"
    require(not any(mark in address for mark in "@?#"), field, "...", fix)


_BY_SOURCE = "teacher.by_source["


def path_option(prefix: str) -> str:
    """Return the option that names the path of the model ``prefix``, a key of ``PPOConfig.models``."""
    return prefix if prefix.startswith(_BY_SOURCE) else f"{prefix}.path"


def options_of(prefix: str) -> str:
    """Return the group with the model's other options, which all teachers share."""
    return "teacher.model" if prefix.startswith(_BY_SOURCE) else prefix


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
    by_source: list[str]
    """Teachers of single data sources, each as ``data_source=path`` or ``data_source=address``, where ``=`` in the name
    of a data source is written ``==``. They use the other options of ``model`` or ``server``. Prompts of other sources
    have the teacher ``model`` or ``server``; if that is none, they are refused before the run. With
    ``model.fsdp.param_offload``, only one teacher is loaded at a time."""
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
    """Number of the teacher's top tokens that ``reverse_kl``, ``forward_kl`` and ``jsd`` compare individually.
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
        return self.model.path != NO_MODEL or self.is_server or bool(self.by_source)

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Prefix of the option that names it -> model, for all teachers to load."""
        return {} if self.is_server else {name: replace(self.model, path=path) for path, name in self._places.items()}

    @property
    def servers(self) -> dict[str, TeacherServerConfig]:
        """Option that names it -> server, for all teachers at addresses."""
        places = self._places if self.is_server else {}
        return {name: replace(self.server, address=address) for address, name in places.items()}

    @property
    def is_server(self) -> bool:
        """Whether the teachers run on servers."""
        return self.server.address is not None or any(place.startswith(HTTP) for place in self.sources.values())

    @property
    def sources(self) -> dict[str, str]:
        """Data source -> path or address of its teacher, from ``by_source``."""
        return dict(map(split_source, self.by_source))

    def index_of(self, source: str) -> int | None:
        """Return the index of a data source's teacher in ``models`` or ``servers``, or None if it has no teacher."""
        place = self.sources.get(source, self._default)
        return None if place is None else list(self._places).index(place)

    def indices_of(self, sources: Sequence[str]) -> list[int]:
        """Return :meth:`index_of` each source. Raise ``ConfigError`` if one has no teacher."""
        known = {source: self.index_of(source) for source in set(sources)}
        for source, index in known.items():
            fix = f"the data_source {source!r} has no teacher; name one for it, or for all other sources"
            self.require(index is not None, "by_source", fix)
        return [int(known[source] or 0) for source in sources]

    @property
    def _default(self) -> str | None:
        """Path or address of the teacher of data sources that ``by_source`` does not name."""
        return self.server.address or (None if self.model.path in (NO_MODEL, POLICY) else self.model.path)

    @property
    def _places(self) -> dict[str, str]:
        """Path or address -> option that names it first, for all frozen teachers, the default one first."""
        default, name = self._default, "teacher.model" if self.server.address is None else "teacher.server.address"
        places = {} if default is None else {default: name}
        for source, place in self.sources.items():
            places.setdefault(place, f"{_BY_SOURCE}{source}]")
        return places

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
        """Whether the loss compares whole distributions, or a server's most likely tokens."""
        return self.loss in EXACT

    @property
    def runs_in_update(self) -> bool:
        """Whether the teachers run in the workers during the update."""
        return self.enabled and self.is_exact and not self.is_server

    @property
    def in_advantage(self) -> bool:
        """Whether the teacher's signal is added to the advantage."""
        return self.enabled and self.loss is None

    @property
    def scores_samples(self) -> bool:
        """Whether the teacher's log-probabilities of the sampled tokens are needed before the update."""
        return self.enabled and (not self.runs_in_update or self.rank_metrics)

    def check(self) -> None:
        self.require(
            0 < self.beta < 1, "beta", "must be above 0 and below 1; for the ends, set loss to a KL divergence"
        )
        if not self.enabled:
            return
        self._check_sources()
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

    def _check_sources(self) -> None:
        seen = set[str]()
        for entry in self.by_source:
            source, place = split_source(entry)
            # A data source's name may contain the marks, unless the entry was split within an address.
            _require_no_secret("by_source", "".join(part for part in (source, place) if "://" in part))
            form = "must have the form data_source=path or data_source=http://..."
            require(bool(source.strip() and place.strip()), "by_source", entry, form)
            fix = "has two places to end the data source; write = in its name as ==, and a folder as ./a=b"
            require("=" not in place.partition("/")[0], "by_source", entry, fix)
            require(source not in seen, "by_source", entry, f"{source} already has a teacher; leave out one of them")
            fix = "a data source's teacher is a frozen model or a server; name one of these"
            require(place not in (NO_MODEL, POLICY), "by_source", entry, fix)
            seen.add(source)
        fix = "frozen teachers by data source are not combined with the policy as a teacher; leave out either"
        self.require(not (self.by_source and self.is_policy), "model.path", fix)
        kinds = {place.startswith(HTTP) for place in self._places}
        fix = "some teachers are models and some are at addresses; serve all, or name models alone"
        self.require(len(kinds) < 2, "by_source", fix)

    def _check_server(self) -> None:
        fix = "the teachers are at addresses; set it to none, or leave out the addresses"
        self.require(self.model.path == NO_MODEL, "model.path", fix)
        fix = "a server returns only its most likely tokens; set it to 1 or more (vllm serve returns up to 20 of them)"
        self.require(not self.is_exact or self.top_k > 0, "top_k", fix)
        fix = "a server reads at temperature 1; set it to 1"
        self.require(not self.is_exact or self.temperature == 1, "temperature", fix)
        self.require(not self.rank_metrics, "rank_metrics", "a server returns no hidden states; set it to false")
