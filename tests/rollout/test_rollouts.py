"""Rollout engines in the hybrid worker: tensor parallel and sleeping vLLM, and the policy through transformers."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.device_communicators import cpu_communicator
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import changed
from tests.evaluation.example_tasks import evaluation_config
from tests.single_controller.rounds import in_rounds
from tests.workers.groups import all_prompts, policy_batch, sample, scored, start_group
from verl.batch import Batch
from verl.cluster.failures import WorkerError
from verl.config import ConfigError, PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout import shared_memory
from verl.rollout.engines import engine_environment
from verl.rollout.requests import EngineModel, ResponseRequests
from verl.rollout.shared_memory import private_shared_memory
from verl.rollout.sleep import EngineSleep
from verl.rollout.vllm_engine import engine_options, naming_own_metrics
from verl.single_controller import generation
from verl.single_controller.worker_group import WorkerGroup
from verl.utils.distributed import WorkerPlace

pytestmark = pytest.mark.slow

FAST = {"optim": {"lr": 1e-3, "lr_warmup_steps": 0}}
"""An actor that moves far in a few updates."""

GREEDY = SamplingConfig(n=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)

STOP = "7"
"""Ends a response besides the tokenizer's own end of sequence."""

MISLEADING = {"do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.5, "repetition_penalty": 3.0}
"""What a model's maker recommends for chats, and training must not sample with."""


@pytest.fixture(scope="module")
def config(small_config: PPOConfig, tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    """The small config with a model whose generation_config.json names two tokens that end a response."""
    folder = tmp_path_factory.mktemp("two_ends") / "model"
    shutil.copytree(small_config.model.path, folder)
    ends = [tiny_tokenizer.eos_token_id, tiny_tokenizer.convert_tokens_to_ids(STOP)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends} | MISLEADING))
    return changed(small_config, model={"path": str(folder)}, actor=FAST)


def started(config: PPOConfig, world_size: int, **rollout: object) -> Iterator[WorkerGroup]:
    config = changed(config, trainer={"n_gpus_per_node": world_size}, rollout=rollout)
    group = start_group(config, world_size)
    yield group
    group.close()


@pytest.fixture(scope="module")
def alone(config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    """One worker with vLLM."""
    yield from started(config, 1)


@pytest.fixture(scope="module")
def together(config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    """Two workers that share one vLLM engine."""
    yield from started(config, 2, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def through_transformers(config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    """Two workers without vLLM."""
    yield from started(config, 2, name="hf")


@pytest.fixture(scope="module")
def prompts(config: PPOConfig, tiny_tokenizer) -> list[PromptRecord]:
    return all_prompts(config, tiny_tokenizer)


def generate(group: WorkerGroup, prompts: list[PromptRecord], sampling: SamplingConfig, seed: int, copies=1):
    return sample(group, prompts, sampling, seed, copies)


def same_rollout(one: Batch, two: Batch) -> None:
    assert one.response_lengths.equal(two.response_lengths) and one.tokens.equal(two.tokens)
    assert one.truncated.equal(two.truncated)
    torch.testing.assert_close(one.rollout_logprobs, two.rollout_logprobs, rtol=0, atol=1e-5)
    assert list(one.rank_metrics) == list(two.rank_metrics) and len(one.rank_metrics) >= 3
    torch.testing.assert_close(one.rank_metrics, two.rank_metrics, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.mean_states, two.mean_states, rtol=0, atol=1e-5)


def agree(group: WorkerGroup, rollout: Batch, tolerance: float) -> None:
    """The engine's log-probabilities are the trainer's."""
    assert (rollout.rollout_logprobs - scored(group, rollout).logprobs).abs().max() < tolerance


def learn(group: WorkerGroup, rollout: Batch) -> None:
    """Updates that change the policy far beyond any tolerance."""
    logprobs = scored(group, rollout).logprobs
    for _ in range(3):
        group.run_split("actor.update", policy_batch(rollout, logprobs), len(logprobs), len(rollout))
    assert (scored(group, rollout).logprobs - logprobs).abs().max() > 0.1


def test_an_engine_that_fails_to_start_leaves_no_shared_memory(tmp_path, monkeypatch):
    class Memory:
        """vLLM's, whose workers find each other by a file."""

        def __init__(self) -> None:
            self.group_name = self.make_group_name("tp:0")
            self._init_cpu_shm()

        @staticmethod
        def make_group_name(unique_name: str) -> str:
            return f"/ident-{unique_name}-[0-1]-cpushm"

        def _init_cpu_shm(self) -> int:
            (tmp_path / f"{self.group_name}_0").touch()
            raise RuntimeError("a worker was killed")

    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(cpu_communicator, "_CPUSHMDistributed", Memory)
    of_another = tmp_path / "verl-2-ident-tp:0-[0-1]-cpushm_0"
    of_another.touch()
    place = WorkerPlace(0, 2, "127.0.0.1", 1, "cpu", cpu_threads=1)
    with pytest.raises(RuntimeError, match="a worker was killed"), private_shared_memory(place):
        cpu_communicator._CPUSHMDistributed()
    assert Memory.make_group_name("tp:0") == "/ident-tp:0-[0-1]-cpushm"
    assert [*tmp_path.iterdir()] == [of_another]


def test_all_engines_sample_alike(alone, together, through_transformers, prompts, config):
    one = generate(alone, prompts, GREEDY, 5)
    same_rollout(one, generate(together, prompts, GREEDY, 5, copies=2))
    same_rollout(one, generate(through_transformers, prompts, GREEDY, 5))
    assert not any(through_transformers.run("loaded", "vllm"))
    sampling = config.rollout.train_kwargs
    drawn = generate(together, prompts, sampling, 5, copies=2)
    assert torch.equal(drawn.tokens, generate(alone, prompts, sampling, 5).tokens)
    agree(together, drawn, 1e-4)
    # Also what is drawn: one number of one stream decides a token, whatever the engine.
    for group in (alone, through_transformers):
        assert torch.equal(generate(group, prompts, sampling, 5).tokens, drawn.tokens)
    # As many engines as workers, and one of them without a prompt of its own.
    shared = sample(through_transformers, prompts[:1], GREEDY, 5)
    same_rollout(one[: GREEDY.n], shared)


@pytest.mark.parametrize("engine", ["alone", "through_transformers"])
def test_a_response_ends_at_every_token_that_the_model_names(engine, prompts, config, tiny_tokenizer, request):
    group = request.getfixturevalue(engine)
    # Enough of them that an untrained model draws each end now and then.
    rollout = generate(group, prompts, replace(config.rollout.train_kwargs, n=16), 3)
    ends = {tiny_tokenizer.eos_token_id, tiny_tokenizer.convert_tokens_to_ids(STOP)}
    lengths, found = rollout.response_lengths.tolist(), set()
    responses = rollout.padded("response_tokens").tolist()
    for row, length, cut in zip(responses, lengths, rollout.truncated.tolist(), strict=True):
        assert not ends & set(row[: length - 1])
        assert cut == (row[length - 1] not in ends) and (not cut or length == config.data.max_response_length)
        found |= ends & {row[length - 1]}
    assert found == ends
    # Temperature, top-k and penalties of the model's file would show here.
    agree(group, rollout, 1e-4)


STRINGS = ["a", "b", "#3"]


def test_response_ends_at_a_stop_string(alone, through_transformers, prompts, config, tiny_tokenizer):
    # Greedy responses of both engines are the same, up to and including what ends them.
    greedy = {}
    for group in (alone, through_transformers):
        group.run("stop_at", STRINGS)
        greedy[group] = generate(group, prompts, GREEDY, 5)
    same_rollout(*greedy.values())
    for group in (alone, through_transformers):
        # Log-probabilities and hidden states of every token are there: those of the trainer.
        rollout = generate(group, prompts, replace(config.rollout.train_kwargs, n=8), 3)
        agree(group, rollout, 1e-4)
        assert_measured(group, rollout, config)
        group.run("stop_at", [])
        endings = set()
        responses = rollout.response_tokens.split(rollout.response_lengths.tolist())
        for tokens, truncated in zip(responses, rollout.truncated.tolist(), strict=True):
            text = tiny_tokenizer.decode(tokens, skip_special_tokens=True)
            without_last = tiny_tokenizer.decode(tokens[:-1], skip_special_tokens=True)
            assert not any(string in without_last for string in STRINGS)
            ending = [string for string in STRINGS if string in text]
            assert not (ending and truncated) and all(text.endswith(string) for string in ending)
            endings |= set(ending)
        assert {"a", "b"} <= endings


def test_a_response_in_pieces_is_the_response_in_one(alone, prompts, config, monkeypatch):
    # All that counts from the start of a response: its length, stop strings, penalties, temperatures by position.
    monkeypatch.setattr(generation, "STEPS_PER_CALL", 3)
    alone.run("stop_at", STRINGS)
    sampling = replace(config.rollout.train_kwargs, n=4, repetition_penalty=1.2)
    table = np.linspace(0.5, 1.5, 7, dtype=np.float32)
    whole = sample(alone, prompts, sampling, 3, settings={"temperatures": table})
    pieces = in_rounds(alone, prompts, sampling, 3, temperatures=table).widened(12)
    alone.run("stop_at", [])
    same_rollout(whole, pieces)
    assert len(whole.response_lengths.unique()) > 3 and whole.truncated.any() and not whole.truncated.all()
    # Each token has the version of the round that sampled it, in which there were three at most.
    for versions in pieces.version.split(pieces.response_lengths.tolist()):
        assert versions.sort().values.equal(versions) and versions.unique(return_counts=True)[1].max() <= 3


def assert_measured(group: WorkerGroup, rollout: Batch, config: PPOConfig) -> None:
    """The engine's rank metrics are those of the states that the trainer computes."""
    group.run("measure_states", config.calculator)
    expected = scored(group, rollout)
    group.run("measure_states", None)
    torch.testing.assert_close(rollout.rank_metrics, expected.rank_metrics, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rollout.mean_states, expected.mean_states, rtol=0, atol=1e-4)


def test_min_p_and_repetition_penalty_change_both_engines_alike(alone, through_transformers, prompts, config):
    penalised = replace(GREEDY, repetition_penalty=1.5)
    one = generate(alone, prompts, penalised, 5)
    same_rollout(one, generate(through_transformers, prompts, penalised, 5))
    plain = generate(alone, prompts, GREEDY, 5)
    assert one.tokens.tolist() != plain.tokens.tolist()
    # A token is kept only if it is as likely as the most likely one: greedy, with nothing left to chance.
    narrow = replace(config.rollout.train_kwargs, n=1, min_p=1.0)
    for group in (alone, through_transformers):
        drawn = generate(group, prompts, narrow, 5)
        assert torch.equal(drawn.tokens, plain.tokens)
        assert drawn.rollout_logprobs.abs().max() == 0


def test_settings_by_response_and_position_are_obeyed_alike(alone, together, through_transformers, prompts, config):
    # More responses than the engine decodes at once: each is at a position of its own.
    sampling, num = replace(config.rollout.train_kwargs, n=4), 4 * len(prompts)
    table = (0.2 + 0.3 * np.arange(6) % 2).astype(np.float32)
    kinds = [replace(sampling, temperature=0.5, top_k=5), replace(sampling, top_p=0.7), sampling]
    overrides = [kinds[row % 3] for row in range(num)]
    for settings in (
        {"overrides": overrides},
        {"temperatures": table},
        {"overrides": overrides, "temperatures": table},
    ):
        one = sample(alone, prompts, sampling, 5, settings=settings)
        same_rollout(one, sample(through_transformers, prompts, sampling, 5, settings=settings))
        assert torch.equal(one.tokens, sample(together, prompts, sampling, 5, 2, settings=settings).tokens)
        # Whatever else is in the batch.
        few = {name: value[:4] if name == "overrides" else value for name, value in settings.items()}
        assert torch.equal(one[:4].tokens, sample(alone, prompts[:1], sampling, 5, settings=few).tokens)
    # A table of one value is that temperature, also behind its end.
    for value in (0.5, 2.0):
        constant = {"temperatures": np.full(3, value, dtype=np.float32)}
        same_rollout(
            sample(alone, prompts, sampling, 5, settings=constant),
            sample(alone, prompts, replace(sampling, temperature=value), 5),
        )
    falling = {"temperatures": np.array([2.0, 0.5], dtype=np.float32)}
    drawn, hot = (
        sample(alone, prompts, replace(sampling, temperature=2.0), 5, settings=settings).padded("response_tokens")
        for settings in (falling, None)
    )
    assert torch.equal(drawn[:, 0], hot[:, 0]) and drawn.tolist() != hot.tolist()


def test_generation_begins_without_cached_prompts(alone, prompts):
    """Otherwise a step after a validation differs from the same step of a resumed run in its last bits."""
    blocks = "rollout.engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool"
    generate(alone, prompts, GREEDY, seed=1)
    cached = alone.run(f"{blocks}.cached_block_hash_to_block.__len__")
    alone.run("start_generation")
    assert cached[0] > 0 == alone.run(f"{blocks}.cached_block_hash_to_block.__len__")[0]


@pytest.mark.nightly
def test_engine_takes_engine_kwargs_and_override_config(config, alone, prompts, ray_session):
    engine = {"block_size": 64, "additional_config": {"mine": 1}}
    model = replace(config.model, override_config={"rope_theta": 20.0})
    told = replace(config, model=model, rollout=replace(config.rollout, engine_kwargs=engine))
    for group in started(told, 1):
        ((block_size, rope),) = group.run("engine_config")
        assert (block_size, rope["rope_theta"]) == (64, 20.0)
        rollout = generate(group, prompts, config.rollout.train_kwargs, 3)
        agree(group, rollout, 1e-4)
        assert_measured(group, rollout, config)
    # To the model as it was these responses are others.
    plain = scored(alone, rollout).logprobs
    assert (rollout.rollout_logprobs - plain).abs().max() > 0.01


def test_an_evaluation_ends_there_too(config, prompts, ray_session):
    engine = replace(evaluation_config().rollout, kv_cache_memory_mb=32, max_num_seqs=16, max_num_batched_tokens=64)
    path = config.model.path
    model = EngineModel(path, max_model_len=60, max_response_length=12, stop=[], stop_token_ids=[], seed=0)
    worker = "verl.workers.evaluation:EvaluationWorker"
    group = WorkerGroup(worker, engine, (model, None), 1, 1, "cpu", engine_environment("cpu"))
    sampling = SamplingConfig(top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, n=1, temperature=1.0)
    requests = ResponseRequests(range(60), [prompts[0].input_ids] * 60, [*range(60)], sampling)
    ((batch, _),) = group.run("rollout.advance", requests, 1000)
    group.close()
    assert len(batch) == 60 and 0 < batch.truncated.sum() < 60
    # An untrained model: nothing else ends so many, and the maker's top-k would leave two to begin with.
    assert (batch.response_lengths[~batch.truncated] < 12).any()
    assert len(set(batch.response_tokens[batch.response_lengths.cumsum(0) - batch.response_lengths].tolist())) > 5


@pytest.mark.nightly
def test_draws_that_are_left_to_vllm_are_others_each_time(config, prompts, ray_session):
    for group in started(config, 1, seeded=False):
        drawn = [generate(group, prompts, config.rollout.train_kwargs, 5) for _ in range(2)]
        assert drawn[0].tokens.tolist() != drawn[1].tokens.tolist()
        agree(group, drawn[0], 1e-4)


def test_hf_draws_depend_on_seed_prompt_and_place(through_transformers, prompts, config):
    sampling = config.rollout.train_kwargs
    shared = generate(through_transformers, prompts, sampling, 7)
    through_transformers.run("set_batch_size", 5)
    in_fives = generate(through_transformers, prompts, sampling, 7)
    through_transformers.run("set_batch_size", config.rollout.max_num_seqs)
    assert torch.equal(shared.tokens, in_fives.tokens)
    assert shared.tokens.tolist() != generate(through_transformers, prompts, sampling, 8).tokens.tolist()
    assert len({tuple(row.tokens.tolist()) for row in shared[: sampling.n].split(1)}) == sampling.n


def test_transformers_needs_no_weights(through_transformers, prompts, config):
    rollout = generate(through_transformers, prompts, config.rollout.train_kwargs, 1)
    learn(through_transformers, rollout)
    through_transformers.run("sync_weights", 0)
    ids = [record.input_ids for record in prompts]
    expected = through_transformers.run("trainer_greedy", ids, 1)[0]
    # One worker has more rows than the other.
    assert torch.equal(
        sample(through_transformers, prompts[:3], GREEDY, 2).padded("response_tokens")[:, :1], expected[:3]
    )
    agree(through_transformers, generate(through_transformers, prompts, config.rollout.train_kwargs, 2), 1e-4)


def test_an_engine_wakes_before_it_samples(alone, prompts, config):
    before = generate(alone, prompts, GREEDY, 1)
    alone.run("note_engine_calls")

    def calls() -> list[str]:
        return alone.run("engine_calls")[0]

    def generates() -> None:
        assert torch.equal(generate(alone, prompts, GREEDY, 1).tokens, before.tokens)

    woken = ["wake_up ['weights']", "reload_weights", "wake_up ['kv_cache']"]
    # Several batches of one step, then the models' turn.
    generates()
    generates()
    alone.run("finish_generation")
    assert calls() == ["advance", "advance", "sleep 2"]
    assert alone.run("engine_sleeps") == [True]
    # The end of a step, and validation after it.
    alone.run("sync_weights", 0)
    generates()
    assert calls() == [*woken, "advance"]
    assert alone.run("engine_sleeps") == [False]
    # Another step, in which something is generated between the models' turns, which come twice.
    alone.run("finish_generation")
    generates()
    alone.run("finish_generation")
    alone.run("finish_generation")
    assert calls() == ["sleep 2", *woken, "advance", "sleep 2"]
    # Weights for an engine that is awake.
    alone.run("sync_weights", 0)
    alone.run("sync_weights", 0)
    generates()
    assert calls() == [*woken, "reload_weights", "advance"]


def test_a_parameter_that_the_engine_was_not_given_is_named(alone):
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(WorkerError, match=rf"was not given {name}: it would sample with old"):
        alone.run("sync_all_but", name)


@pytest.mark.parametrize(("engine", "copies"), [("together", 2), ("alone", 1)])
def test_an_engine_follows_the_policy(engine, copies, prompts, config, request):
    group = request.getfixturevalue(engine)
    rollout = generate(group, prompts, config.rollout.train_kwargs, 1, copies)
    agree(group, rollout, 1e-3)
    learn(group, rollout)
    group.run("sync_weights", 0)
    # Stale weights anywhere in the engine, its output head included, would show.
    agree(group, generate(group, prompts, config.rollout.train_kwargs, 2, copies), 1e-3)
    ids = [record.input_ids for record in prompts]
    expected = group.run("trainer_greedy", ids, 8)[0].tolist()
    assert all(tokens == expected for tokens in group.run("engine_greedy", ids, 8))


KV_CACHE_MB = 2048


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_generating_and_learning_take_turns_on_a_gpu(name, ray_session, small_config, tiny_tokenizer):
    """Sleeping frees memory, and an engine that wakes has the policy's weights."""
    prompts = all_prompts(small_config, tiny_tokenizer)
    memory = {"gpu_memory_utilization": 0.3, "kv_cache_memory_mb": KV_CACHE_MB}
    config = changed(small_config, rollout={"name": name, "dtype": "float32"} | memory, actor=FAST)
    group, sampling = start_group(config, 1, "cuda"), config.rollout.train_kwargs
    # Attention kernels of a GPU round differently.
    tolerance = 2e-2
    rollout = generate(group, prompts, sampling, 1)
    agree(group, rollout, tolerance)

    (awake,) = group.run("free_gpu_memory")
    group.run("finish_generation")
    (asleep,) = group.run("free_gpu_memory")
    if name == "vllm":
        # All of the KV cache, but for what torch has taken in between.
        assert asleep - awake > 0.9 * (KV_CACHE_MB << 20)

    learn(group, rollout)
    # Without weights being given, as for validation by itself: the worker sees to it.
    agree(group, generate(group, prompts, sampling, 2), tolerance)
    assert group.run("free_gpu_memory")[0] - awake < 0.1 * (KV_CACHE_MB << 20)

    group.run("finish_generation")
    learn(group, rollout)
    group.run("sync_weights", 0)
    agree(group, generate(group, prompts, sampling, 3), tolerance)
    group.close()


def test_sleep_waits_for_the_gpu(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    memory = EngineSleep(SimpleNamespace(sleep=lambda level: calls.append(f"sleep {level}")), enabled=True)
    memory.sleep()
    memory.sleep()
    assert calls == ["synchronize", "sleep 2"]


def test_tensor_parallel_workers_use_no_peer_access(config):
    together = replace(config.rollout, tensor_parallel_size=2)
    options = engine_options(together, 64, False, "cpu", 0, None)
    assert options["disable_custom_all_reduce"] is True
    assert not EngineArgs(model=config.model.path, **options).compilation_config.pass_config.fuse_allreduce_rms
    assert "compilation_config" not in engine_options(config.rollout, 64, False, "cpu", 0, None)
    # Whose machine allows it can say so.
    own = replace(together, engine_kwargs={"compilation_config": {"mode": 0}, "disable_custom_all_reduce": False})
    options = engine_options(own, 64, False, "cpu", 0, None)
    assert options["compilation_config"] == {"mode": 0} and options["disable_custom_all_reduce"] is False


def test_an_error_in_the_engine_is_told_by_its_option():
    said = "calculator.own_metrics='my.py:metric': raised IndexError: 3 (my.py, line 4)"
    with pytest.raises(ConfigError) as raised, naming_own_metrics():
        raise RuntimeError(f"hidden states of 16 responses: ValueError: layer 1: {said}")
    assert str(raised.value) == said
    with pytest.raises(RuntimeError, match="out of blocks"), naming_own_metrics():
        raise RuntimeError("out of blocks")
