"""Policy whose rollout engines run in a pool on separate devices."""

from verl.config.ppo import PPOConfig
from verl.rollout.environments.conversations import ConversationSetup
from verl.single_controller.engine_pool import EnginePool
from verl.single_controller.roles import PolicyWorkers
from verl.single_controller.worker_group import Stored, WorkerGroup


class PooledPolicyWorkers(PolicyWorkers):
    """Policy workers with engines in a pool, which load the policy's weights when they next generate.

    Args:
        pool: Pool of :class:`verl.workers.rollout.RolloutWorker` engines.
        whole_groups, conversations: See :class:`PolicyWorkers`.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        config: PPOConfig,
        pool: EnginePool,
        whole_groups: bool = False,
        conversations: ConversationSetup | None = None,
    ) -> None:
        super().__init__(workers, config, whole_groups, conversations)
        self.pool = pool
        self.engines = pool
        self._dtype = pool.run("weight_dtype")[0]
        self._newest: Stored | None = None
        """Latest weights of the policy, or None before they are published."""
        self._weights: Stored | None = None
        """Weights with which to sample. ``_loaded`` is True if the engines have loaded them."""
        self._loaded = False
        self._held_version: int | None = None
        """Version of the weights that the engines keep until :meth:`release_weights`, or None to use the latest."""

    def finish_generation(self) -> None:
        """Do nothing, because the engines keep their memory."""

    def sync_weights(self, version: int) -> None:
        """Publish the policy's weights as ``version``. The engines load them when they next generate."""
        self.newest_version = version
        # Avoid holding two versions in memory when nothing samples with the older one.
        self._newest = None
        if self._held_version is None:
            self._weights = None
        self._newest = self.workers.run("publish_weights", self._dtype, version)[0]

    def hold_weights(self) -> None:
        """Keep sampling with the current weights, and ignore newer weights until :meth:`release_weights`."""
        self._take_newest()
        self._held_version = self.newest_version

    def release_weights(self) -> None:
        """Sample with the latest weights again."""
        self._held_version = None

    @property
    def _version(self) -> int:
        return self.newest_version if self._held_version is None else self._held_version

    def _load_engines(self) -> None:
        """Load the current weights into the engines that do not have them."""
        if self._held_version is None:
            self._take_newest()
        if self.pool.replace_lost() or not self._loaded:
            self.pool.run_living("load_weights", self._weights)
            self._loaded = True

    def _take_newest(self) -> None:
        if self._newest is None:
            self.sync_weights(self.newest_version)
        if self._weights is not self._newest:
            self._weights, self._loaded = self._newest, False
