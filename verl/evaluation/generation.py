"""Generation: requests to the engines, and their responses into the stores."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from verl.batch import EPISODE, POLICY, Batch
from verl.config.evaluation import EvaluationConfig
from verl.data.prompt_rows import PromptRecord
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.store import SampleStore, StoredSample
from verl.evaluation.tasks import EvaluationTask, chat_arguments, engine_model
from verl.rollout import engine_environment
from verl.rollout.conversations import ConversationSetup, policy_texts
from verl.rollout.environments import EnvironmentPool
from verl.rollout.queue import EngineRoom, RequestQueue
from verl.rollout.requests import EngineModel, FinishedSample, FinishedSamples, SampleRequest, sample_stream
from verl.run.session import RaySession
from verl.single_controller.generation import Exchange, serve
from verl.single_controller.worker_group import WorkerGroup

STEPS_PER_CALL = 64
"""Engine steps between two replies of an engine: a second or two of decoding with a real model."""


def generate_target(
    title: str,
    stores: Mapping[EvaluationTask, SampleStore],
    config: EvaluationConfig,
    session: RaySession,
    display: EvaluationDisplay,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Generate the missing samples of one model, whose ``tokenizer`` is given, if there are any.

    Raises:
        WorkerError: an engine did not start or died; the samples it had returned are stored.
    """
    missing = {task: keys for task, store in stores.items() if (keys := store.missing(config.n_sampling))}
    if not missing:
        return
    num_samples = sum(map(len, missing.values()))
    total = sum(config.n_sampling * len(store.answered) for store in stores.values())
    if num_samples < total:
        display.say(f"{title}: {total - num_samples} of {total} samples already exist")
    display.start(title, sum(len({problem for problem, _ in keys}) for keys in missing.values()), num_samples)
    model, turns = engine_model(list(missing), config), config.rollout.multi_turn
    with ExitStack() as stack:
        setup = None
        if turns.enable:
            pool = stack.enter_context(EnvironmentPool(turns, session.busy_cores))
            arguments = chat_arguments(next(iter(missing)).target, turns)
            setup = ConversationSetup(turns, model.max_response_length, tokenizer, arguments, model.stop, pool)
        workers = start_engines(session, model, config)
        stack.callback(workers.close)
        display.running()
        copies = config.rollout.tensor_parallel_size
        rooms = workers.run("room")[::copies]
        engines, deterministic = Exchange(workers, "advance", copies), workers.device_type == "cpu"
        generate_missing(stores, config.n_sampling, config.seed, engines, rooms, deterministic, display, setup)


def start_engines(session: RaySession, model: EngineModel, config: EvaluationConfig) -> WorkerGroup:
    """Workers that hold ``model``, to be closed by the caller. Raises ``WorkerError`` if one cannot load it."""
    calculator = config.calculator if config.calculator.enable else None
    worker, environment = "verl.workers.evaluation:EvaluationWorker", engine_environment(session.device_type)
    return session.start_workers(worker, config.rollout, (model, calculator), environment, [model.path])


def generate_missing(
    stores: Mapping[EvaluationTask, SampleStore],
    n: int,
    seed: int,
    engines: Exchange,
    rooms: Sequence[EngineRoom],
    deterministic: bool,
    display: EvaluationDisplay,
    conversations: ConversationSetup | None = None,
) -> None:
    """Generate what is missing of the first ``n`` samples of every problem; each sample is stored as it arrives.

    All tasks form one stream, so that engines wait for the longest response once and not once per benchmark.

    Args:
        engines: those of :meth:`verl.workers.evaluation.EvaluationWorker.advance`.
        deterministic: see :func:`verl.single_controller.generation.serve`.
        conversations: how responses have several turns; None: each has one.
    """
    # A request's key is its place in this list.
    samples = [(task, problem, i) for task, store in stores.items() for problem, i in store.missing(n)]
    left_of_problem = Counter((task, problem) for task, problem, _ in samples)

    records = [_record(task, problem) for task, problem, _ in samples]
    talks = None if conversations is None else conversations.begin(records, None)

    def message(keys: Sequence[int]) -> tuple[list[SampleRequest], int]:
        requests = []
        for key in keys:
            task, problem, i = samples[key]
            stream = sample_stream(seed, task.benchmark, problem, i)
            prompt, begun = task.prompts[problem], list[int]()
            if talks is not None:
                begun = talks.begun([key]).response_tokens.tolist()
            requests.append(SampleRequest(key, prompt + begun, stream, task.temperature, len(begun)))
        return requests, STEPS_PER_CALL

    def store(finished: Sequence[FinishedSample]) -> None:
        problems_done = 0
        arrived: dict[EvaluationTask, list[StoredSample]] = defaultdict(list)
        for sample in finished:
            task, problem, i = samples[sample.key]
            left_of_problem[task, problem] -= 1
            problems_done += left_of_problem[task, problem] == 0
            text, length, cut = sample.response, sample.num_tokens, sample.truncated
            arrived[task].append(StoredSample(problem, i, text, length, cut, sample.metrics, sample.token_ids))
        for task, new in arrived.items():
            stores[task].append(new)
        display.generated(problems_done, len(finished), sum(sample.num_tokens for sample in finished))

    def store_ended() -> None:
        assert talks is not None
        store(_whole(talks.over(), conversations))

    def take(reply: FinishedSamples) -> tuple[int, int]:
        if talks is None:
            store(reply.samples)
        elif reply.samples:
            talks.take(Batch.join([_turn(sample, talks.begun([sample.key])) for sample in reply.samples]))
            store_ended()
        return reply.num_ended, reply.num_waiting

    queue = RequestQueue(len(samples), rooms)
    continued = None if talks is None else partial(talks.resume, queue, store_ended, deterministic)
    serve(queue, engines, message, take, deterministic, answered=continued)


def _record(task: EvaluationTask, place: int) -> PromptRecord:
    """A problem as environments see it."""
    problem = task.problems[place]
    asked = [{"role": "user", "content": problem.question}]
    facts = (problem.data_source, problem.answer, problem.extra_info)
    return PromptRecord(place, task.prompts[place], *facts, asked, task.opens_thought)


def _turn(sample: FinishedSample, begun: Batch) -> Batch:
    """A conversation with the turn ``sample``."""
    prompt, new = begun.tokens[~begun.in_response].tolist(), len(sample.token_ids)
    turn = Batch.of([prompt], [begun.response_tokens.tolist() + sample.token_ids])
    turn.fill(
        source=torch.cat([begun.source, torch.full((new,), POLICY, dtype=torch.uint8)]),
        rollout_logprobs=torch.cat([begun.rollout_logprobs, torch.zeros(new)]),
        truncated=torch.tensor([sample.truncated]),
    )
    return turn.fill(EPISODE, request=torch.tensor([sample.key]), calls=[sample.calls])


def _whole(over: Batch | None, setup: ConversationSetup | None) -> list[FinishedSample]:
    """Conversations that are over as samples: what the policy said, and how many tokens that took."""
    if over is None or setup is None:
        return []
    texts = policy_texts(over, setup.tokenizer, setup.stop_strings)
    rows = zip(over.request.tolist(), texts, over.policy_lengths.tolist(), over.truncated.tolist(), strict=True)
    return [FinishedSample(*row, metrics={}) for row in rows]
