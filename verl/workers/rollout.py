"""Worker that runs an engine on a separate device, and the base class of all workers with an engine."""

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch.serialization import PackedWeight
from verl.config.ppo import PPOConfig
from verl.models.fsdp import WeightDtype
from verl.models.policy import Policy
from verl.models.tokenizer import load_tokenizer
from verl.rollout.base import Rollout, RolloutSetup
from verl.rollout.engines import end_tokens, make_rollout
from verl.rollout.queue import EngineCapacity
from verl.utils.distributed import WorkerPlace, join_world, seed_everything
from verl.utils.process import set_stage


class EngineWorker:
    """Worker that runs an engine or one rank of an engine."""

    rollout: Rollout
    version = 0
    """Version of the engine's weights."""

    def start_engine(
        self,
        config: PPOConfig,
        place: WorkerPlace,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: list[str],
        policy: Policy | None = None,
    ) -> None:
        """Create the engine, without weights. ``policy`` is the policy trained by this worker, if there is one."""
        set_stage(f"starting {config.rollout.name}")
        ends = end_tokens(config, tokenizer)
        setup = RolloutSetup(config, place, tokenizer.pad_token_id, ends, tokenizer, stop_strings)
        self.rollout = make_rollout(setup, policy)

    def start_generation(self) -> EngineCapacity:
        """Prepare the engine, and return the number of responses that it can sample at once."""
        self.rollout.begin()
        return self.rollout.capacity._replace(version=self.version)

    def finish_generation(self) -> None:
        """Free the engine's memory until it receives new weights."""
        self.rollout.sleep()


class RolloutWorker(EngineWorker):
    """One of the processes in a pool of engines. Engines receive the policy's weights through Ray's object store."""

    def __init__(self, config: PPOConfig, place: WorkerPlace, stop_strings: list[str]) -> None:
        """Start the engine. ``stop_strings`` are the strings that end a response in training and validation."""
        seed_everything(config.seed)
        join_world(place)
        path, trust = config.model.path, config.model.trust_remote_code
        self.start_engine(config, place, load_tokenizer(path, trust, needs_chat_template=False), stop_strings)

    def weight_dtype(self) -> WeightDtype:
        """Return a function that maps a parameter to the dtype in which the engine accepts it."""
        return self.rollout.weight_dtype

    def load_weights(self, buckets: Iterable[list[PackedWeight]]) -> None:
        """Load the weights yielded by :meth:`verl.workers.hybrid.HybridWorker.publish_weights` into the engine."""
        versions = set()

        def weights() -> Iterator[tuple[str, Tensor]]:
            for weight in chain.from_iterable(buckets):
                versions.add(weight.version)
                yield weight.name, weight.restore()

        self.rollout.load_weights(weights())
        (self.version,) = versions
