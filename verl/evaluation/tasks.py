"""Preparation of an evaluation or analysis job and its tasks.

A task evaluates one model on one benchmark at one temperature, and has separate prompts and a separate folder.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.checkpoint.digests import code_files
from verl.cluster.start import gpus_per_machine, resolve_device
from verl.config.data import GENERATOR
from verl.config.errors import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.config.paths import find_path
from verl.config.rollout import MultiTurnConfig
from verl.config.run_file import RUN_CONFIG, read_run_config, run_option
from verl.data.prompts import PromptLayout
from verl.data.templates import (
    DEMONSTRATIONS,
    check_template,
    find_template,
    opens_thought,
    render_chat,
    render_prompt,
    stop_token_ids,
    template_stops,
)
from verl.evaluation.benchmarks import BENCHMARKS, Problem, load_benchmark, load_prompts
from verl.evaluation.results import PROMPT_TOO_LONG, result_folder
from verl.evaluation.store import SampleStore
from verl.evaluation.targets import Target, select_targets
from verl.models.hub import fetch_model, model_digest
from verl.models.info import ModelInfo, check_weights
from verl.models.tokenizer import load_tokenizer
from verl.rewards import check_ground_truth, use_custom_functions
from verl.rollout.engines import check_head_size
from verl.rollout.environments.conversations import check_conversations, with_tools
from verl.rollout.environments.pool import beginning
from verl.rollout.environments.tools import environment_name
from verl.rollout.requests import EngineModel, resolve_dtype
from verl.run.display import RunDisplay
from verl.run.session import RaySession
from verl.run.tracker_backends import check_trackers
from verl.utils.json_state import digest
from verl.utils.sandbox import require_sandbox

OMITTED_IF_UNSET = ("function_tool_path", "reward_functions")
"""Options of conversations that earlier versions did not have, so that their samples remain usable."""

AGENT_PROMPT_TOKENS = 4096
"""Number of tokens that engines reserve for an agent's first messages."""

CPU_WORKERS = 2
"""Default number of worker processes on a CPU, limited by the number of cores."""


@dataclass(frozen=True, eq=False)
class EvaluationTask:
    """Evaluation of one model on one benchmark at one temperature. Instances are hashable and compare by identity."""

    target: Target
    benchmark: str
    temperature: float
    problems: list[Problem]
    prompts: list[list[int]]
    """Prompt token ids of each problem."""
    opens_thought: bool
    """Whether the prompts end with ``<think>``."""
    folder: Path
    settings: dict[str, Any]
    """Everything that the samples depend on, except the prompts."""
    unanswered: Mapping[int, int]
    """Lengths of prompts that are too long and therefore not sampled, keyed by problem index."""

    @property
    def label(self) -> str:
        return f"{self.target.label} on {self.benchmark}"

    def open_store(self) -> SampleStore:
        return SampleStore(self.folder, self.settings, self.prompts, self.unanswered)


@dataclass(frozen=True)
class Job:
    """Evaluation or analysis job, whose inputs are loaded and validated before any engine starts."""

    config: EvaluationConfig
    """Config that determines how responses are sampled."""
    display: RunDisplay
    folder: Path
    """Output folder for the results."""
    session: RaySession
    benchmarks: Mapping[str, list[Problem]]
    tokenizers: Mapping[Target, PreTrainedTokenizerBase]
    """Tokenizer for each target."""

    def tasks_of(self, target: Target) -> list[EvaluationTask]:
        """Return the target's tasks, one for every benchmark and temperature.

        Benchmarks with questions that the model's template rejects are skipped, and prompts that are too long are not
        sampled. Both are reported on ``display``. Raises ``ConfigError`` if the model no longer exists.
        """
        config, tokenizer = self.config, self.tokenizers[target]
        tasks: list[EvaluationTask] = []
        turns = config.rollout.multi_turn
        settings = _settings(target, tokenizer, config, self.session.device_type)
        limit = ModelInfo.read(target.path, config.rollout.trust_remote_code).max_length
        for name, problems in self.benchmarks.items():
            examples = few_shot_examples(name, target.template) if config.data.few_shot else []
            prompts: list[list[int]] = []
            with self.display.recorded(f"{target.label} on {name}"):
                prompts = [_prompt(problem, target, tokenizer, examples, turns) for problem in problems]
            if not prompts:
                continue
            if not tasks and next(other for other in self.tokenizers if other.run == target.run) is target:
                shown = f"{tokenizer.decode(prompts[0])!r:.500}"
                self.display.say(f"{target.run}: the first of {len(prompts)} prompts of {name}: {shown}")
            unanswered = {i: len(ids) for i, ids in enumerate(prompts) if limit is not None and len(ids) >= limit}
            if unanswered:
                first = min(unanswered)
                self.display.say(
                    f"warning: {target.label} on {name}: {len(unanswered)} of {len(prompts)} prompts are longer than "
                    f"the model takes, {limit} tokens with the response (the first: problem {problems[first].index}, "
                    f"{unanswered[first]} tokens; the longest: {max(unanswered.values())}); they count as unanswered, "
                    f"{PROMPT_TOO_LONG}"
                )
            tasks += [
                EvaluationTask(
                    target=target,
                    benchmark=name,
                    temperature=temperature,
                    problems=problems,
                    prompts=prompts,
                    opens_thought=opens_thought(prompts[0], tokenizer),
                    folder=result_folder(self.folder, target.run, target.step, name, temperature),
                    settings=settings | {"temperature": temperature},
                    unanswered=unanswered,
                )
                for temperature in config.temperatures
            ]
        return tasks

    def open_stores(self, tasks: Sequence[EvaluationTask], stack: ExitStack) -> dict[EvaluationTask, SampleStore]:
        """Open the sample store of each task, skipping tasks whose folders contain incompatible samples."""
        stores = {}
        for task in tasks:
            with self.display.recorded(task.label):
                stores[task] = stack.enter_context(task.open_store())
        return stores


def prepare(
    config: EvaluationConfig,
    kind: str,
    display: RunDisplay,
    more_benchmarks: Mapping[str, list[Problem]] | None = None,
) -> Job | None:
    """Load and validate all inputs before engines start. Return None if there is nothing to evaluate.

    Args:
        kind: ``evaluation`` or ``analysis``, the name of the folder under ``runs_dir``.
        more_benchmarks: Benchmarks to add to those named in the config.
    """
    trainer, rewards = config.trainer, config.reward_score
    check_trackers(trainer.logger)
    use_custom_functions(rewards.paths_of_custom_functions(), rewards.function_kwargs)
    machines = (trainer.nnodes, trainer.n_gpus_per_node or 1, trainer.machines_timeout_s)
    device_type = resolve_device(config.device, *machines)
    workers_per_node = count_workers(config, device_type)
    targets, folder_name = select_targets(config, display)
    benchmarks: dict[str, list[Problem]] = {}
    for name in config.benchmarks:
        with display.recorded():
            benchmarks[name] = load_problems(name, config)
    if missing := [name for name in config.benchmarks if name not in benchmarks]:
        display.say(f"without {', '.join(missing)}; docs/evaluation.md says where benchmarks come from")
    benchmarks |= more_benchmarks or {}
    if not config.names_prompts:
        with display.recorded():
            benchmarks = validation_problems(targets, config)
    with display.recorded():
        benchmarks, loaded = {}, benchmarks
        benchmarks = observed_problems(loaded, config.rollout.multi_turn)
    tokenizers = {}
    for target in targets:
        with display.recorded(target.label):
            tokenizers[target] = load_target_tokenizer(target, config.rollout.trust_remote_code)
            info = ModelInfo.read(target.path, config.rollout.trust_remote_code)
            check_head_size(info, device_type, "evaluate it on a GPU")
            check_conversations(config.rollout.multi_turn, tokenizers[target], target.template, target.chat_arguments)
    if not benchmarks or not tokenizers:
        return None
    default = Path(config.runs_dir, kind, trainer.experiment_name, folder_name)
    folder = Path(trainer.default_local_dir or default).resolve()
    display.say(
        f"{', '.join(target.label for target in tokenizers)} on {', '.join(benchmarks)}: {config.n_sampling} samples "
        f"for each of {sum(map(len, benchmarks.values()))} problems, into {folder}"
    )
    session = RaySession(trainer.nnodes, workers_per_node, device_type, trainer, folder)
    return Job(config, display, folder, session, benchmarks, tokenizers)


def count_workers(config: EvaluationConfig, device_type: str) -> int:
    """Return the number of workers per machine, by default enough for the maximum number of engines.

    Raises ``ConfigError`` if an engine needs more GPUs than this machine has.
    """
    if config.trainer.n_gpus_per_node is not None:
        return config.trainer.n_gpus_per_node
    size = config.rollout.tensor_parallel_size
    if device_type == "cpu":
        return max(size, min(CPU_WORKERS, os.cpu_count() or 1) // size * size)
    available = gpus_per_machine()
    if available < size:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}: this machine has {available} GPUs; lower it, or for engines that "
            "span machines set trainer.n_gpus_per_node and trainer.nnodes"
        )
    return available // size * size


def has_environment(config: EvaluationConfig) -> bool:
    """Return whether a custom environment receives the complete rows of data files."""
    return config.rollout.multi_turn.enable and config.rollout.multi_turn.environment is not None


def load_problems(name: str, config: EvaluationConfig) -> list[Problem]:
    """Return the first ``data.max_problems`` problems of a benchmark."""
    data = config.data
    if name in data.generated:
        problems = load_prompts(GENERATOR + name, data.limit, PromptLayout(generated=data.generated), config.scored)
        check_answers(problems, config)
        return problems
    keys, data_source = ({}, None) if name in BENCHMARKS else (data.keys, data.data_source)
    folder, fields = Path(find_path(data.benchmark_dir)) if data.benchmark_dir else None, data.fields.get(name, {})
    reading = (data_source, config.scored, has_environment(config))
    problems = load_benchmark(name, folder, {**keys, **fields}, *reading)[: data.limit]
    check_answers(problems, config)
    return problems


def validation_problems(targets: Sequence[Target], config: EvaluationConfig) -> dict[str, list[Problem]]:
    """Return the validation prompts of the targets' runs, keyed by the folder and name of the file.

    Raises ``ConfigError`` if a target's run has no validation prompts, or a file cannot be read.
    """
    found: dict[str, list[Problem]] = {}
    for folder in dict.fromkeys(target.folder for target in targets):
        run = read_run_config(Path(folder, RUN_CONFIG)) if folder else {}
        names = ("val_files", *PromptLayout._fields[:4])
        files, *keys = (run_option(run, "data", name) for name in names)
        generated = run_option(run, "data", "generated")
        generated = generated if isinstance(generated, dict) else {}
        named = [*files, *keys[:2], *(key for key in keys[2:] if key is not None)] if isinstance(files, list) else []
        usable = files and all(isinstance(name, str) for name in named)
        if not usable or run_option(run["data"], "custom_cls", "path") is not None:
            raise ConfigError(
                f"benchmarks=[]: {folder or 'a model that is not from a run'} has no files of validation prompts; name "
                "benchmarks, or choose a set, such as evaluation=embedded"
            )
        for path in map(find_path, files):
            name = "_".join([*Path(path).absolute().parts[-2:-1], Path(path).stem])
            name = path.replace(":", "_") if path.startswith(GENERATOR) else name
            layout = PromptLayout(*keys)._replace(generated=generated, whole_rows=has_environment(config))
            found[name] = load_prompts(path, config.data.limit, layout, config.scored)
            try:
                check_answers(found[name], config)
            except ConfigError as error:
                functions = run_option(run, "reward_score", "custom_functions")
                if not functions or config.reward_score.custom_functions:
                    raise
                fix = f"give it too, since code that a run's folder names is never run: {functions!r:.300}"
                raise ConfigError(f"{error}; the run has reward_score.custom_functions; {fix}") from None
    return found


def observed_problems(benchmarks: Mapping[str, list[Problem]], options: MultiTurnConfig) -> dict[str, list[Problem]]:
    """Add the environment's first observations, if any, to the problems."""
    found = dict(benchmarks)
    with beginning(options) as begin:
        if begin is None:
            return found
        for name, problems in found.items():
            records = [problem.record(number) for number, problem in enumerate(problems)]
            records = begin(records, [problem.place for problem in problems])
            pairs = zip(problems, records, strict=True)
            found[name] = [replace(p, messages=record.messages, state=record.state) for p, record in pairs]
    return found


def check_answers(problems: Sequence[Problem], config: EvaluationConfig) -> None:
    """Raise ``ConfigError`` if a verifier rejects an answer or a data source has no verifier."""
    custom = config.reward_score.paths_of_custom_functions()
    for problem in problems if config.scored else ():
        try:
            source, answer, info = problem.data_source, problem.answer, problem.extra_info
            check_ground_truth(source, answer, custom, info, problem.answer_field)
        except ConfigError as error:
            raise ConfigError(f"{problem.place}: {error}") from error


def load_target_tokenizer(target: Target, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer, or raise ``ConfigError`` if it is missing or does not support the template."""
    fetch_model(target.path, "model.path")
    if find_template(target.template).python == "solution":
        require_sandbox()
    tokenizer = load_tokenizer(target.path, trust_remote_code, needs_chat_template=False)
    check_template(target.template, tokenizer, "template")
    info = ModelInfo.read(target.path, trust_remote_code)
    check_weights(info, f"model.path={target.path!r}")
    info.end_tokens(tokenizer)  # raises if a token is not in the model's vocabulary
    return tokenizer


def _settings(
    target: Target, tokenizer: PreTrainedTokenizerBase, config: EvaluationConfig, device_type: str
) -> dict[str, Any]:
    """Return everything that the samples depend on, except the prompts and the temperature."""
    settings: dict[str, Any] = {
        "model": model_digest(target.path),
        "template": target.template,
        "stop": [*template_stops(target.template), *target.stop],
        "stop_token_ids": [*stop_token_ids(target.template, tokenizer), *target.stop_token_ids],
        # None matches the folders of earlier versions, which had no such option.
        "apply_chat_template_kwargs": dict(target.chat_arguments) or None,
        "few_shot": config.data.few_shot,
        "max_response_length": target.max_response_length,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": config.seed,
        "dtype": resolve_dtype(config.rollout.dtype, device_type == "cpu"),
        "calculator": asdict(config.calculator) if config.calculator.enable else None,
    }
    # Neutral values are omitted so that samples from versions without these options remain usable.
    if config.min_p > 0:
        settings["min_p"] = config.min_p
    if config.repetition_penalty != 1:
        settings["repetition_penalty"] = config.repetition_penalty
    if config.rollout.engine_kwargs:
        settings["engine_kwargs"] = config.rollout.engine_kwargs
    if config.rollout.multi_turn.enable:
        # The number of processes and the use of rewards do not affect the samples.
        turns = asdict(config.rollout.multi_turn) | {"num_workers": 0, "reward": "add"}
        agent = turns.pop("agent")
        if config.rollout.multi_turn.agent.enabled:
            turns["agent"] = {name: agent[name] for name in ("path", "command", "max_rows")}
            turns["agent"] |= {"sandbox": True} if agent["sandbox"] else {}
            turns["agent"]["files"] = [digest([file.read_text(errors="replace")]) for _, file in code_files(agent)]
        settings["multi_turn"] = {k: v for k, v in turns.items() if v or k not in OMITTED_IF_UNSET}
    return settings


def _prompt(
    problem: Problem,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[tuple[str, str]],
    options: MultiTurnConfig,
) -> list[int]:
    try:
        name = environment_name(problem.extra_info, options)
        arguments = with_tools(target.chat_arguments, options, name)
        if problem.messages and target.template != "chat":
            raise ConfigError(f"has several messages, which template={target.template!r} does not take; set chat")
        if problem.messages:
            return render_chat(problem.messages, tokenizer, arguments)
        return render_prompt(target.template, problem.question, tokenizer, examples, arguments)
    except ConfigError as error:
        raise ConfigError(f"problem {problem.index}: its question: {error}") from error


def few_shot_examples(benchmark: str, template: str) -> list[tuple[str, str]]:
    """Return the benchmark's few-shot examples, or examples with programs if the template asks for programs."""
    known = BENCHMARKS.get(benchmark)
    name = find_template(template).python or (known.demonstrations if known is not None else None)
    return list(DEMONSTRATIONS[name]) if name else []


def engine_model(tasks: Sequence[EvaluationTask], config: EvaluationConfig) -> EngineModel:
    """Return the engine's model settings for ``tasks``, which must have the same target."""
    target, settings = tasks[0].target, tasks[0].settings
    limit = ModelInfo.read(target.path, config.rollout.trust_remote_code).max_length
    prompts = [ids for task in tasks for i, ids in enumerate(task.prompts) if i not in task.unanswered]
    longest = max(map(len, prompts)) + target.max_response_length
    if config.rollout.multi_turn.agent.enabled:  # agents write prompts of their own
        longest = max(longest, AGENT_PROMPT_TOKENS + target.max_response_length)
    return EngineModel(
        path=target.path,
        max_model_len=longest if limit is None else min(longest, limit),
        max_response_length=target.max_response_length,
        stop=settings["stop"],
        stop_token_ids=settings["stop_token_ids"],
        seed=config.seed,
    )
