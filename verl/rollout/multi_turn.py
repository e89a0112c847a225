"""Creates conversations with environments and tools, or sessions of agents."""

from collections.abc import Sequence
from pathlib import Path

from verl.batch import Batch
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.agents.pool import AgentPool
from verl.rollout.agents.sessions import Sessions
from verl.rollout.environments.conversations import Conversations, ConversationSetup, new_conversations, resumed
from verl.rollout.environments.pool import EnvironmentPool


def conversation_pool(
    options: MultiTurnConfig, busy_cores: int = 1, log: Path | None = None
) -> EnvironmentPool | AgentPool:
    """Return a pool of environment or agent processes, which are started by a ``with`` block."""
    return AgentPool(options, busy_cores, log) if options.agent.enabled else EnvironmentPool(options, busy_cores, log)


def begin_conversations(
    setup: ConversationSetup, records: Sequence[PromptRecord], partial: Batch | None = None
) -> Conversations | Sessions:
    """Start B conversations with these prompts, or resume the conversations in ``partial``."""
    if setup.options.agent.enabled:
        return Sessions(setup, records, partial)
    return Conversations(setup, new_conversations(records) if partial is None else resumed(records, partial))
