"""The rollout worker: an engine on a device of its own, and what every worker with an engine does."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.batch.serialization import PackedWeight
from verl.config.ppo import PPOConfig
from verl.models.fsdp import WeightDtype
from verl.models.policy import Policy
from verl.models.tokenizer import load_tokenizer
from verl.rollout import end_tokens, make_rollout
from verl.rollout.base import EngineReply, Rollout, RolloutSetup
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import ResponseRequests
from verl.utils.distributed import WorkerPlace, join_world, seed_everything
from verl.utils.process import set_stage


class Generating:
    """A worker that holds an engine, or its share of one."""

    rollout: Rollout

    def start_engine(
        self,
        config: PPOConfig,
        place: WorkerPlace,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: list[str],
        policy: Policy | None = None,
    ) -> None:
        """Make the engine, which has no weights yet; ``policy`` is the one that this worker trains, if it does."""
        set_stage(f"starting {config.rollout.name}")
        ends = end_tokens(config, tokenizer)
        setup = RolloutSetup(config, place, tokenizer.pad_token_id, ends, tokenizer, stop_strings)
        self.rollout = make_rollout(setup, policy)

    def start_generation(self) -> EngineRoom:
        """How much the engine can sample at once."""
        return self.rollout.room

    def advance(self, requests: ResponseRequests, max_steps: int) -> EngineReply:
        """See :meth:`verl.rollout.base.Rollout.advance`; the workers of one engine get the same requests."""
        return self.rollout.advance(requests, max_steps)

    def cut(self) -> Batch | None:
        """See :meth:`verl.rollout.base.Rollout.cut`."""
        return self.rollout.cut()

    def measured(self) -> Batch | None:
        """See :meth:`verl.rollout.base.Rollout.measured`."""
        return self.rollout.measured()

    def finish_generation(self) -> None:
        """Free the engine's memory until it gets weights again."""
        self.rollout.sleep()


class RolloutWorker(Generating):
    """One of the processes of a pool of engines, which get the policy's weights through Ray's object store."""

    def __init__(self, config: PPOConfig, place: WorkerPlace, stop_strings: list[str]) -> None:
        """``stop_strings``: what ends a response in training and validation, besides tokens."""
        seed_everything(config.seed)
        join_world(place)
        path, trust = config.model.path, config.model.trust_remote_code
        self.start_engine(config, place, load_tokenizer(path, trust, needs_chat_template=False), stop_strings)

    def weight_dtype(self) -> WeightDtype:
        """Return the precision in which the engine takes each parameter."""
        return self.rollout.weight_dtype

    def load_weights(self, buckets: Iterable[list[PackedWeight]]) -> None:
        """Give the engine what :meth:`verl.workers.hybrid.HybridWorker.publish_weights` yielded."""
        self.rollout.load_weights((weight.name, weight.restore()) for bucket in buckets for weight in bucket)
