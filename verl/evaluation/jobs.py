"""Jobs of an evaluation: a model on a benchmark at a temperature, with its prompts and its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.config.evaluation import EvaluationConfig
from verl.data.demonstrations import DEMONSTRATIONS
from verl.data.templates import find_template, render_prompt, stop_token_ids, template_stops
from verl.evaluation.benchmarks import BENCHMARKS, Problem, load_benchmark
from verl.evaluation.results import result_folder
from verl.evaluation.store import SampleStore, model_digest
from verl.evaluation.targets import Target
from verl.models.tokenizer import load_tokenizer
from verl.rollout.requests import EngineModel, resolve_dtype


@dataclass(frozen=True)
class Job:
    """One model on one benchmark at one temperature."""

    target: Target
    benchmark: str
    temperature: float
    problems: list[Problem]
    prompts: list[list[int]]
    """Token ids for each problem."""
    folder: Path
    settings: dict[str, Any]
    """What the samples depend on besides the prompts."""

    @property
    def label(self) -> str:
        return f"{self.target.label} on {self.benchmark}"

    def open_store(self) -> SampleStore:
        """The job's samples, to read and to add to. Raises ``ConfigError`` as :class:`SampleStore`."""
        return SampleStore(self.folder, self.settings, self.prompts)


def load_problems(name: str, config: EvaluationConfig) -> list[Problem]:
    """The problems of a benchmark, as many as are wanted. Raises ``ConfigError`` as ``load_benchmark``."""
    folder = config.data.benchmark_dir
    problems = load_benchmark(name, Path(folder) if folder else None, config.data.fields.get(name))
    return problems if config.data.max_problems == -1 else problems[: config.data.max_problems]


def load_target_tokenizer(target: Target, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with which its template works. Raises ``ConfigError`` where it does not."""
    needs_chat_template = find_template(target.template).chat
    return load_tokenizer(target.path, trust_remote_code, needs_chat_template=needs_chat_template)


def make_jobs(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    benchmarks: Mapping[str, Sequence[Problem]],
    config: EvaluationConfig,
    folder: Path,
    device_type: str,
) -> list[Job]:
    """The target's jobs: its benchmarks, each at every temperature. Raises ``ConfigError`` if the model is gone."""
    jobs = []
    digest = model_digest(target.path)
    for name, problems in benchmarks.items():
        demonstrations = demonstrations_of(name) if config.data.few_shot else []
        prompts = [render_prompt(target.template, p.question, tokenizer, demonstrations) for p in problems]
        for temperature in config.temperatures:
            jobs.append(
                Job(
                    target=target,
                    benchmark=name,
                    temperature=temperature,
                    problems=list(problems),
                    prompts=prompts,
                    folder=result_folder(folder, target.run, target.step, name, temperature),
                    settings=_settings(target, tokenizer, temperature, digest, config, device_type),
                )
            )
    return jobs


def demonstrations_of(benchmark: str) -> list[tuple[str, str]]:
    """The worked examples that the community puts before this benchmark; none for most."""
    known = BENCHMARKS.get(benchmark)
    return list(DEMONSTRATIONS[known.demonstrations]) if known is not None and known.demonstrations else []


def engine_model(
    job: Job, prompts: Sequence[Sequence[int]], config: EvaluationConfig, limit: int | None
) -> EngineModel:
    """What the engines for a target's jobs load, of which ``job`` is one, for these prompts.

    ``limit`` is the model's longest sequence, if it has one.
    """
    target = job.target
    wanted = max(len(ids) for ids in prompts) + target.max_response_length
    return EngineModel(
        path=target.path,
        max_model_len=wanted if limit is None else min(wanted, limit),
        max_response_length=target.max_response_length,
        stop=job.settings["stop"],
        stop_token_ids=job.settings["stop_token_ids"],
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
    )


def check_prompts_fit(prompts: Sequence[Sequence[int]], limit: int | None) -> None:
    """Raise ``ConfigError`` naming the first problem whose prompt leaves no room for a response."""
    for index, ids in enumerate(prompts):
        if limit is not None and len(ids) >= limit:
            raise ConfigError(
                f"problem {index}: the prompt has {len(ids)} tokens, the model takes {limit}; leave the benchmark out"
            )


def _settings(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    digest: str,
    config: EvaluationConfig,
    device_type: str,
) -> dict[str, Any]:
    return {
        "model": digest,
        "template": target.template,
        "stop": template_stops(target.template),
        "stop_token_ids": stop_token_ids(target.template, tokenizer),
        "few_shot": config.data.few_shot,
        "max_response_length": target.max_response_length,
        "temperature": temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": config.seed,
        "dtype": resolve_dtype(config.rollout.dtype, device_type == "cpu"),
        "calculator": asdict(config.calculator) if config.calculator.enable else None,
    }
