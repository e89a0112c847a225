"""Defines the option group ``rollout`` of the main job: the engine that samples responses and its sampling options."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from verl.config.checks import (
    CountOrAll,
    Group,
    NotNegativeInt,
    PositiveInt,
    Probability,
    Seconds,
    Share,
    require,
    require_import_path,
    rule,
    within,
)
from verl.config.common import RepetitionPenalty, Temperature
from verl.config.rewards import summands

_INSIDE_WORKERS = "the engine runs inside the run's own workers"
_SAMPLING = "the run's own options decide how responses are sampled and where they end"
RESERVED_ENGINE_KWARGS = {
    "model": "set model.path",
    "tokenizer": "responses are read with the tokenizer of model.path",
    "skip_tokenizer_init": "stop strings are found by the engine's tokenizer",
    "trust_remote_code": "set trust_remote_code of the model or, in an evaluation, of rollout",
    "dtype": "set rollout.dtype",
    "tensor_parallel_size": "set rollout.tensor_parallel_size, which the workers are arranged by",
    "pipeline_parallel_size": _INSIDE_WORKERS,
    "data_parallel_size": _INSIDE_WORKERS,
    "distributed_executor_backend": _INSIDE_WORKERS,
    "worker_cls": _INSIDE_WORKERS,
    "enable_sleep_mode": "set rollout.free_cache_engine",
    "max_model_len": "the longest prompt and response set it",
    "seed": "set seed; the workers of one engine must draw alike",
    "logprobs_mode": "training needs the log-probabilities of the sampled distribution",
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
}
"""Forbidden ``vllm.LLM`` arguments in ``rollout.engine_kwargs``, mapped to the reason or an alternative."""

StopStrings = list[Annotated[str, rule(bool, "an empty string ends every response; leave it out")]]
StopTokenIds = list[Annotated[int, rule(lambda token: token >= 0, "tokens are numbered from 0")]]


@dataclass(frozen=True)
class EngineConfig(Group):
    """Options in the group ``rollout`` for the vLLM engine inside each worker."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Precision of vLLM's weights: ``auto`` (float32 on CPU, bfloat16 on GPU) or the name of a floating-point type."""
    enforce_eager: bool
    """Run without CUDA graphs and compilation. CPU engines always run eagerly, as compilation needs a C++ compiler."""
    gpu_memory_utilization: Annotated[float, within("(0, 1)")]
    """Fraction of GPU memory that vLLM may use, including weights. Ignored on a CPU."""
    kv_cache_memory_mb: NotNegativeInt
    """KV cache size per worker in MiB; 0 means the rest of ``gpu_memory_utilization`` on a GPU, or 512 MiB on a CPU."""
    max_num_seqs: PositiveInt
    """Maximum number of sequences that an engine decodes concurrently."""
    max_num_batched_tokens: int
    """Maximum number of tokens per engine step; must fit at least one whole sequence."""
    seeded: bool
    """Sample every response from its own random stream, which depends only on the seed, the prompt's position and the
    sample's index. ``false`` uses vLLM's sampling, which is not reproducible."""
    tensor_parallel_size: PositiveInt
    """Number of consecutive ranks that form one engine; must divide the number of workers per machine."""
    engine_kwargs: dict[str, Any]
    """Additional arguments of ``vllm.LLM``, such as ``block_size`` or ``enable_prefix_caching``, which override the
    options above. Arguments that the trainer sets itself are rejected."""

    def check(self) -> None:
        least = f"must be at least rollout.max_num_seqs={self.max_num_seqs}"
        self.require(self.max_num_batched_tokens >= self.max_num_seqs, "max_num_batched_tokens", least)
        kwargs = self.engine_kwargs
        for name, value in kwargs.items():
            reason = RESERVED_ENGINE_KWARGS.get(name, "")
            require(not reason, f"engine_kwargs.{name}", value, reason)
        fix = "engines get the policy's weights in training, and read the model's files in evaluation; leave it out"
        require(kwargs.get("load_format") != "dummy", "engine_kwargs.load_format", "dummy", fix)
        field, further = "engine_kwargs.additional_config", kwargs.get("additional_config", {})
        require(isinstance(further, dict), field, further, "must be a mapping, name: value")
        for name, option in {"hidden_states": "calculator.*", "sampling_streams": "rollout.seeded"}.items():
            require(name not in further, field, further, f"set {option} instead of {name}")


@dataclass(frozen=True)
class SamplingFilters(Group):
    """Sampling options, other than the temperature, that modify the token distribution."""

    top_p: Share
    """Probability mass for nucleus sampling, in (0, 1]; 1 keeps the whole distribution."""
    top_k: CountOrAll
    """Number of most likely tokens to keep, or -1 to keep all."""
    min_p: Probability
    """Minimum probability of a token relative to the most likely token, in [0, 1]; 0 keeps all tokens."""
    repetition_penalty: RepetitionPenalty
    """Penalty for tokens that are already in the prompt or the response: their positive logits are divided by it, and
    their negative logits are multiplied by it. The penalty must be above 0; 1 turns it off."""


@dataclass(frozen=True)
class SamplingConfig(SamplingFilters):
    """Number of responses per prompt, and options for sampling them."""

    n: PositiveInt
    """Number of responses per prompt."""
    temperature: Temperature
    """Softmax temperature; 0 decodes greedily and is allowed only in validation."""

    @property
    def trains(self) -> bool:
        """Whether the responses are used for training. If so, the temperature must be above 0."""
        return False

    def check(self) -> None:
        if self.trains:
            self.require(self.temperature > 0, "temperature", "training needs sampling; set it above 0")
        fix = "greedy decoding (temperature=0) gives one response; set n=1"
        self.require(self.temperature > 0 or self.n == 1, "n", fix)

    def __str__(self) -> str:
        return (
            f"{f'temperature {self.temperature:g}, top_p {self.top_p:g}' if self.temperature else 'greedy'}, n={self.n}"
        )


@dataclass(frozen=True)
class AgentConfig(Group):
    """Options for agents that call the policy through OpenAI's chat completions API (docs/agents.md)."""

    path: str | None
    """Function ``agent(record, base_url, api_key) -> reward or None``, such as ``my.py:agent``. ``async`` functions
    share the event loop of a process; other functions run in threads. At most one of ``path`` and ``command`` can be
    set; without an agent, both are null."""
    command: str | None
    """Command that runs an agent, such as ``python my_agent.py``, with the record as JSON on standard input and the
    endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``. The last output line may be ``{"reward": 1.0}``."""
    sandbox: bool
    """Run ``command`` in the sandbox (SECURITY.md), without network and environment variables. It reaches its session's
    address, and sees the folders of its program and of the files that it names, read-only."""
    address: str
    """Address on which the endpoint listens. Agents on other machines must be able to reach this address."""
    max_sessions: PositiveInt
    """Maximum number of concurrent sessions across all processes. Each process runs at least one session."""
    max_rows: PositiveInt
    """Maximum number of histories per session. A request that does not extend an earlier one starts a new history."""
    timeout_s: Seconds
    """Time limit in seconds from a reply to the agent's next request or exit, excluding sampling time. An agent that
    exceeds the limit is stopped, and its episode ends."""

    @property
    def enabled(self) -> bool:
        """Whether episodes are run by agents."""
        return self.path is not None or self.command is not None

    def check(self) -> None:
        self.require(self.path is None or self.command is None, "command", "path is set too; leave out one of them")
        fix = "only a command can run in the sandbox; set command, or set this to false"
        self.require(self.command is not None or not self.sandbox, "sandbox", fix)
        if self.path is not None:
            require_import_path("path", self.path)


@dataclass(frozen=True)
class MultiTurnConfig(Group):
    """Options for conversations, in which the policy and an environment take turns (docs/conversations.md)."""

    enable: bool
    """Sample multi-turn responses, using ``tools``, veRL's tools or ``environment``. With conversations,
    ``data.max_response_length`` limits the whole conversation, including the environment's messages."""
    environment: str | dict[str, str] | None
    """Custom class, such as ``my.py:Env``, with ``start(record) -> state`` and ``step(state, turn) -> (state, messages,
    done, reward)``, or null for the environment of ``tools``. The prompt describes the class's ``tools``, if any. Of
    several classes, ``{game: my.py:Game, shell: my.py:Shell}``, the column ``environment`` of each record names one."""
    tools: list[str]
    """Python functions, such as ``[my.py:calculator]``, whose annotations and Google-style docstrings tell the model
    how to call them; ``async`` functions run concurrently. The model receives return values as text."""
    tool_config_path: str | None
    """YAML file in veRL's format that lists subclasses of veRL's ``BaseTool``. Can be combined with ``tools``."""
    function_tool_path: str | None
    """Python file with additional tools, which are functions decorated with veRL's ``@function_tool``."""
    format: str
    """Name of the vLLM parser for the model's tool calls, such as ``hermes`` (Qwen) or ``llama3_json``."""
    max_assistant_turns: PositiveInt | None
    """Maximum number of policy turns, or null to continue until the environment ends or the token limit is reached."""
    max_user_turns: PositiveInt | None
    """Maximum number of environment turns, or null for no limit."""
    max_parallel_calls: PositiveInt
    """Maximum number of tool calls answered per turn, at least 1; further calls are ignored."""
    max_tool_response_length: PositiveInt
    """Maximum length of a tool message in characters, at least 1; longer messages are truncated."""
    tool_response_truncate_side: Literal["left", "middle", "right"]
    """Part of a long message to cut off, as in veRL 0.9: ``left`` (beginning), ``right`` (end) or ``middle``. Earlier
    versions of veRL instead kept the specified part."""
    reward: Literal["add", "only"]
    """Use of the sum of the environment's rewards over all turns. ``add`` adds the sum to the verifier's score.
    ``only`` uses the sum as the score, without a verifier; a conversation is correct if the sum is above 0."""
    reward_functions: list[str]
    """Reward functions with the parameter ``environments`` for classes with TRL's interface, such as ``[my.py:reached,
    0.5*my.py:short]``. Each is called once, at the end of a conversation, in the process of its object; the weighted
    sum is added to what ``get_reward`` returns."""
    num_workers: NotNegativeInt
    """Number of processes that run environments and tools; 0 uses one per free core, up to 32. All ``async`` steps
    share one process."""
    timeout_s: Seconds
    """Time limit in seconds for an environment step, or for each tool call if any tool is ``async``. On timeout, the
    step or call is stopped, and the policy receives a message instead."""
    memory_limit_mb: PositiveInt
    """Memory limit per step in MiB, on top of the process's memory after imports. Steps that exceed it are stopped."""
    agent: AgentConfig

    @property
    def environments(self) -> dict[str, str]:
        """Import paths of the custom environments by name. If there is only one class, its name is empty."""
        return {"": self.environment} if isinstance(self.environment, str) else self.environment or {}

    @property
    def has_tools(self) -> bool:
        """Whether conversations use tools or an agent rather than a custom environment."""
        return self.environment is None

    @property
    def replaces_verifiers(self) -> bool:
        """Whether environment rewards replace verifier scores, so that prompts need no verifier and no ground truth."""
        return self.enable and self.reward == "only"

    @property
    def names_tools(self) -> str:
        """Comma-separated names of the options that specify tools, or an empty string."""
        options = {"tools": self.tools, "tool_config_path": self.tool_config_path}
        options["function_tool_path"] = self.function_tool_path
        return ", ".join(name for name, value in options.items() if value)

    def check(self) -> None:
        if not self.enable:
            return
        tools = bool(self.names_tools)
        fix = "are called with the objects of environments; set environment, or leave them out"
        self.require(not self.reward_functions or self.environment is not None, "reward_functions", fix)
        if self.agent.enabled:
            others = self.names_tools or ("environment" if self.environment is not None else "")
            option = "agent.path" if self.agent.path is not None else "agent.command"
            self.require(not others, option, f"an agent has its own tools and environment; leave out {others}")
            return
        fix = "name tools, tool_config_path, environment or agent.path"
        self.require(tools or self.environment is not None, "enable", fix)
        fix = f"an environment calls tools itself: list them in its class as tools, and leave out {self.names_tools}"
        self.require(not (tools and self.environment is not None), "environment", fix)
        self.require(not tools or self.reward == "add", "reward", "tools give no rewards; set it to add")
        named = isinstance(self.environment, dict)
        fix = "every class needs a name, {game: my.py:Game, shell: my.py:Shell}"
        self.require(not named or (len(self.environments) > 0 and "" not in self.environments), "environment", fix)
        paths = {f"tools[{i}]": path for i, path in enumerate(self.tools)}
        paths |= {f"environment.{name}".removesuffix("."): path for name, path in self.environments.items()}
        for field, path in paths.items():
            require_import_path(field, path)
        for i, entry in enumerate(self.reward_functions):
            for _, path in summands(entry):
                require_import_path(f"reward_functions[{i}]", path)


@dataclass(frozen=True)
class RolloutConfig(SamplingConfig, EngineConfig):
    """Options for the engine inside each worker and for sampling in training.

    The trainer computes log-probabilities at ``temperature`` but ignores ``top_p``, ``top_k``, ``min_p`` and
    ``repetition_penalty``; the metric ``rollout/logprob_abs_diff`` shows their effect."""

    name: Literal["vllm", "hf"]
    """``vllm``, or ``hf`` to sample from the policy itself through ``transformers``, which is slower but also works for
    models that vLLM does not implement. ``hf`` computes in ``model.param_dtype``, gathers the whole policy on every
    worker, and decodes batches of ``max_num_seqs`` responses, each until its last response finishes."""
    free_cache_engine: bool
    """Free the engine's weights and KV cache during updates (vLLM's sleep mode, level 2); the next weight sync restores
    them. The option has no effect on a CPU."""
    check_weights: bool
    """Check before the first step that engines sample with the policy's weights. Noise is added to every weight, the
    engines sample, the policy scores the sampled tokens, and the weights are restored. Takes two weight syncs."""
    update_weights_bucket_megabytes: PositiveInt
    """Maximum size in MiB of a weight transfer message to the engine, at least 1; larger parameters are sent
    separately. A weight sync needs up to twice this memory. Affects speed, not results."""
    stop_token_ids: StopTokenIds
    """Tokens that end a response, in addition to the end tokens of the tokenizer and ``generation_config.json``."""
    stop: StopStrings
    """Strings that end a response, in training and validation. The policy is also trained on the tokens of the stop
    string, but the scored text ends before it. Responses that end with a stop string do not count as truncated."""
    val_kwargs: SamplingConfig
    """Sampling options for validation."""
    multi_turn: MultiTurnConfig
    nnodes: NotNegativeInt
    """Number of machines with dedicated engines, separate from the trainer (docs/async.md), or 0 to run the engines
    inside the trainer's workers. A machine with enough GPUs can host both engines and trainer workers."""
    n_gpus_per_node: NotNegativeInt
    """Number of dedicated engine workers per machine, each on a GPU or a CPU; must be 0 if ``nnodes`` is 0."""

    @property
    def has_pool(self) -> bool:
        """Whether the engines run in workers separate from the trainer."""
        return self.nnodes > 0

    @property
    def trains(self) -> bool:
        """Whether the responses are used for training, which is always the case for this class."""
        return True

    @property
    def train_kwargs(self) -> SamplingConfig:
        """Sampling options for training rollouts."""
        return SamplingConfig(**{field.name: getattr(self, field.name) for field in fields(SamplingConfig)})

    def check(self) -> None:
        for name, fix in {
            "hf_overrides": "set model.override_config, which the trained model obeys too",
            "speculative_config": "its log-probabilities are not those of the samples; leave it out",
        }.items():
            value = self.engine_kwargs.get(name)
            require(value is None, f"engine_kwargs.{name}", value, fix)
        hf = self.name == "hf"
        fix = "rollout.name=hf has no such arguments; leave it empty"
        self.require(not (hf and self.engine_kwargs), "engine_kwargs", fix)
        self.require(self.seeded or not hf, "seeded", "rollout.name=hf draws from streams alone; set it to true")
        fix = "engines of their own need machines and workers on each; set it and rollout.{} above 0, or both to 0"
        self.require(self.nnodes > 0 or not self.n_gpus_per_node, "nnodes", fix.format("n_gpus_per_node"))
        self.require(self.n_gpus_per_node > 0 or not self.nnodes, "n_gpus_per_node", fix.format("nnodes"))
        fix = "rollout.name=hf samples with the trainer's policy itself; set it to 0"
        self.require(not (hf and self.nnodes), "nnodes", fix)
        fix = "rollout.name=hf samples one turn; set rollout.name=vllm, or this to false"
        self.require(not (hf and self.multi_turn.enable), "multi_turn.enable", fix)


@dataclass(frozen=True)
class AsyncTrainingConfig(Group):
    """Options for responses that span several training steps (docs/async.md)."""

    max_staleness: Annotated[int, rule(lambda steps: steps >= 0, "must be 0 or more")]
    """Maximum number of weight versions between sampling a response and training on it. 0 trains on responses only in
    the step that samples them. Larger values need ``partial_rollout`` or separate engines (``rollout.nnodes``)."""
    partial_rollout: bool
    """Stop sampling as soon as enough groups are complete, and continue unfinished responses with newer weights.
    Partial rollouts require ``max_staleness`` of at least 1, or at least 2 with separate engines."""

    def check(self) -> None:
        fix = "responses that are carried over are behind; set async_training.max_staleness=1 or more"
        self.require(not self.partial_rollout or self.max_staleness > 0, "partial_rollout", fix)
