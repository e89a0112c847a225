"""Multi-turn conversations between the policy and an environment. Engines sample the policy's turns.

After each policy turn, the environment takes a step, and its messages are appended to the conversation. The engines
then receive a request to sample the next turn.

Legend: B = number of episodes (one per conversation).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.batch import POLICY, Batch
from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.data.responses import decode_responses
from verl.data.templates import find_template
from verl.rank.turns import expand_to_response
from verl.rollout.agents.pool import load_agent
from verl.rollout.environments.bridges import Bridges, ProgramBridges
from verl.rollout.environments.pool import COUNTS, Answer, EnvironmentStep, load_environments, role_of
from verl.rollout.environments.tools import Call, Turn, environment_name, tool_schemas, with_types
from verl.rollout.partial import PartialResponse, from_batch, to_batch
from verl.rollout.queue import RequestQueue
from verl.rollout.requests import ResponseRequests

PROGRAMS = "verl.rollout.programs:Programs"
"""Environment for prompt templates that run the policy's programs during sampling."""

ENABLED = "rollout.multi_turn.enable=True"
"""Option that enables multi-turn conversations, for use in error messages."""

DRIVER_COLUMNS = ("environment_states", "environment_rewards", "turns", "call_counts")
"""Batch columns that store the state of conversations and are not sent to the engines."""

CHARS_PER_TOKEN = 64
"""Maximum number of characters to tokenize for each token left in the budget. Few tokens are longer."""

THE_END = Turn("", [], [], False, ends=True)
"""Turn that tells the environment that the conversation has ended."""

CHECK_S = 1.0
"""Maximum number of seconds to wait for environments or agents before checking the run for failures."""

SPEAKERS = ("policy", "environment")
"""Names of token authors, indexed by a token's ``source``."""


@dataclass
class ConversationSetup:
    """Options, tokenizer and environment or agent processes shared by all conversations of a run."""

    options: MultiTurnConfig
    max_prompt_length: int
    """Maximum number of tokens in the first messages of an agent."""
    max_response_length: int
    """Maximum number of tokens of a conversation after its prompt."""
    tokenizer: PreTrainedTokenizerBase
    chat_arguments: Mapping[str, Any]
    """Chat template arguments, which are also used for prompts."""
    stop_strings: Sequence[str]
    pool: Any
    """Processes of the environments (:class:`EnvironmentPool`) or agents (:class:`AgentPool`)."""
    say: Callable[[str], None] = print
    template: str = "chat"
    """Name of the prompt template."""
    max_length: float = math.inf
    """Maximum sequence length of the engines, including the prompt."""

    def __post_init__(self) -> None:
        self.schemas = {
            environment: {schema["function"]["name"]: schema for schema in tool_schemas(self.options, environment)}
            for environment in self.options.environments
        }
        """Schemas of the custom environments' tools, by the names of environments and tools."""
        self.note = cache(self.say)
        """Function that prints a line unless the line has already been printed."""
        self._noted = set[str]()
        self._bridges: dict[str, Bridges | ProgramBridges] = {}

    def note_first(self, kind: str, line: str) -> None:
        """Print a line unless a line of this kind has already been printed."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.say(line)

    def bridges(self, tools: Sequence[Mapping[str, Any]] = ()) -> Bridges | ProgramBridges:
        """Return the bridges for conversations that use the ``tools`` of an agent or a custom environment."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._bridges:
            if find_template(self.template).python:
                self._bridges[key] = ProgramBridges(self.tokenizer)
            else:
                self._bridges[key] = Bridges(self.tokenizer, self.arguments(tools), self.pool.role, ENABLED)
        return self._bridges[key]

    def tools_of(self, record: PromptRecord) -> Mapping[str, Mapping[str, Any]]:
        """Return the schemas of the tools of a record's custom environment, by name."""
        return self.schemas.get(environment_name(record.extra_info, self.options), {})

    def arguments(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the chat template's arguments, including these ``tools``."""
        return dict(self.chat_arguments) | ({"tools": list(tools)} if tools else {})


def check_conversations(
    options: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase, template: str, chat_arguments: Mapping[str, Any]
) -> None:
    """Raise ``ConfigError`` if the environment or agent is unusable or the template cannot render its messages.

    Args:
        template: Name of the prompt template.
        chat_arguments: Arguments of the chat template, without tools.
    """
    form = find_template(template)
    if form.python == "output":
        if not options.enable or options.environment is None:
            raise ConfigError(
                f"template={template!r}: has programs that are run while a response is sampled; set "
                f"rollout.multi_turn.enable=true and rollout.multi_turn.environment={PROGRAMS}"
            )
        load_environments(options)
        return
    if not options.enable:
        return
    if not form.chat or tokenizer.chat_template is None:
        raise ConfigError(f"template={template!r}: {ENABLED} needs the tokenizer's chat template; set it to chat")
    if options.agent.enabled:
        load_agent(options.agent)
        roles = {"": "user"}
    else:
        roles = {name: role_of(environment) for name, environment in load_environments(options).items()}
    for name, role in roles.items():
        Bridges(tokenizer, with_tools(chat_arguments, options, name), role, ENABLED)


def with_tools(chat_arguments: Mapping[str, Any], options: MultiTurnConfig, name: str = "") -> dict[str, Any]:
    """Return the chat template's arguments, including the schemas of any tools.

    Args:
        name: Name of the environment, if the run has several. Without it, only tools of all conversations are included.
    """
    schemas = tool_schemas(options, name) if options.enable and name in (options.environments or [""]) else []
    return dict(chat_arguments) | ({"tools": schemas} if schemas else {})


@dataclass
class Conversation(PartialResponse):
    """Conversation in progress."""

    record: PromptRecord = field(kw_only=True)
    state: str = ""
    """State of the environment as JSON, or an empty string before its first step."""
    reward: float = 0.0
    """Sum of the environment's rewards."""
    turns: int = 0
    """Number of policy turns."""
    counts: list[int] = field(default_factory=lambda: [0] * len(COUNTS))
    """Values of the counters in :data:`COUNTS`."""
    truncated: bool = False


def new_conversations(records: Sequence[PromptRecord]) -> list[Conversation]:
    """Create a conversation without turns for each prompt record."""
    return [Conversation(record.input_ids, record=record, state=record.state) for record in records]


def to_rows(conversations: Sequence[Conversation]) -> Batch:
    """Convert conversations to a batch from which :func:`resumed` can restore them."""
    return to_batch(conversations).fill(
        environment_states=[conversation.state for conversation in conversations],
        environment_rewards=torch.tensor([conversation.reward for conversation in conversations], dtype=torch.float64),
        turns=torch.tensor([conversation.turns for conversation in conversations]),
        call_counts=torch.tensor([conversation.counts for conversation in conversations]),
    )


def resumed(records: Sequence[PromptRecord], rows: Batch) -> list[Conversation]:
    """Restore conversations from a batch created by :func:`to_rows` and from their prompt records."""
    columns = (getattr(rows, name) for name in DRIVER_COLUMNS)
    values = zip(*(column if isinstance(column, list) else column.tolist() for column in columns), strict=True)
    return [
        Conversation(**vars(response), record=record, state=state, reward=reward, turns=turns, counts=_counts(counts))
        for response, record, (state, reward, turns, counts) in zip(from_batch(rows), records, values, strict=True)
    ]


def _counts(saved: list[int]) -> list[int]:
    """Return the counters from a checkpoint, with zeros for any that the checkpoint's version lacks."""
    return [*saved[:-1], *[0] * (len(COUNTS) - len(saved)), saved[-1]]


class Conversations:
    """Conversations processed in one call to the engines, each identified by its index.

    An engine samples a turn, the environment replies, and a request for the next turn follows.
    """

    def __init__(self, setup: ConversationSetup, conversations: list[Conversation]) -> None:
        self.setup = setup
        self._all = dict(enumerate(conversations))
        """Conversations by index, until :meth:`over` returns them."""
        self._over: list[int] = []
        """Indices of the conversations that have ended since the last call to :meth:`over`."""
        self._answering: dict[Future[Answer], tuple[int, Turn]] = {}
        """Maps each pending environment reply to the index of its conversation and the turn."""

    @property
    def num_first(self) -> int:
        """Number of requests that are available at the start."""
        return len(self._all)

    @property
    def waiting(self) -> set[int]:
        """Indices of the conversations whose environment has not replied yet."""
        return {place for place, _ in self._answering.values()}

    def requests(self, requests: ResponseRequests, places: Sequence[int]) -> ResponseRequests:
        """Return requests for the next turns of the conversations at the indices ``places``."""
        chosen = requests.of(places)
        return replace(chosen, partial=to_batch([self._all[place] for place in places])) if places else chosen

    def measured(self, metrics: Batch | None) -> Batch | None:
        """Return ``metrics`` unchanged, because each conversation has the rank metrics of its requests."""
        return metrics

    def rows(self, places: Sequence[int]) -> Batch:
        """Return a batch from which the conversations at ``places`` can resume, with their indices in ``request``."""
        return to_rows([self._all[place] for place in places]).fill(request=torch.tensor(places))

    def update(self, part: Batch) -> list[int]:
        """Store the tokens that an engine has returned, and return the indices of their conversations."""
        places: list[int] = part.request.tolist()
        for place, response in zip(places, from_batch(part), strict=True):
            self._all[place].replace_tokens(response)
        return places

    def take(self, part: Batch) -> None:
        """Process finished turns, with ``calls`` parsed by the engine, and submit the environments' next steps."""
        turns: dict[int, Turn] = {}
        for place, truncated, calls in zip(self.update(part), part.truncated.tolist(), part.calls, strict=True):
            conversation, setup = self._all[place], self.setup
            conversation.truncated = truncated
            conversation.turns += 1
            conversation.counts[-1] += calls["prefilled"]
            if truncated and not setup.pool.settles(conversation.record):
                self._over.append(place)
                continue
            schemas = setup.tools_of(conversation.record)
            if truncated or not (schemas or setup.options.has_tools):
                # The engine parses calls if any environment of the run has tools.
                calls = {"calls": [], "malformed": False}
            turn = read_turn(conversation, calls, setup.tokenizer, setup.stop_strings, schemas)
            turns[place] = turn._replace(ends=truncated)
        self._ask(turns)

    def resume(self, queue: RequestQueue, deterministic: bool, wait: bool, check: Callable[[], None]) -> bool:
        """Resume the conversations whose environments have replied, and return whether any are still waiting.

        Args:
            queue: Queue to which the indices of resumed conversations are added.
            deterministic: Whether to wait for all replies instead of only one.
            wait: Whether to wait for replies.
            check: Called every second while waiting; it may raise.
        """
        continued: list[int] = []
        while self._answering and (wait or any(future.done() for future in self._answering)):
            done, _ = futures.wait(self._answering, timeout=CHECK_S, return_when=futures.FIRST_COMPLETED)
            check()
            for future in done:
                place, turn = self._answering.pop(future)
                if self._continues(self._all[place], turn, future.result()):
                    continued.append(place)
                elif self.setup.pool.settles(self._all[place].record) and not (future.result().done or turn.ends):
                    self._ask({place: THE_END})
                else:
                    self._over.append(place)
            if done and not deterministic:
                break
        # Sort, because in order of arrival, the assignment to engines would depend on timing.
        queue.resume(sorted(continued))
        return bool(self._answering)

    def over(self) -> Batch | None:
        """Return the conversations that have ended since the last call, or None if there are none."""
        places, self._over = self._over, []
        if not places:
            return None
        truncated = torch.tensor([self._all[place].truncated for place in places])
        rows = self.rows(places).without("environment_states").fill(truncated=truncated)
        for place in places:
            del self._all[place]
        return rows

    def _ask(self, turns: Mapping[int, Turn]) -> None:
        """Submit an environment step for each conversation index and turn in ``turns``."""
        steps = [
            EnvironmentStep(self._all[place].record, self._all[place].state, turn) for place, turn in turns.items()
        ]
        self._answering |= dict(zip(self.setup.pool.ask(steps), turns.items(), strict=True))

    def _continues(self, conversation: Conversation, turn: Turn, answer: Answer) -> bool:
        """Append the environment's reply and return whether the policy has another turn."""
        setup, options = self.setup, self.setup.options
        # 1. Record the environment's step.
        conversation.state = answer.state
        conversation.reward += answer.reward
        conversation.counts = [a + b for a, b in zip(conversation.counts, answer.counts, strict=True)]
        # 2. End the conversation if the environment or a turn limit requires it.
        most, answers = options.max_assistant_turns, options.max_user_turns
        at_limit = (most is not None and conversation.turns >= most) or (
            answers is not None and conversation.turns > answers
        )
        if answer.done or turn.ends or not answer.messages or at_limit:
            return False
        # 3. Append the messages, unless they leave no room for a turn.
        room = min(setup.max_response_length, setup.max_length - len(conversation.prompt_ids))
        most_chars = max(1, int(room)) * CHARS_PER_TOKEN
        messages = [message | {"content": message["content"][:most_chars]} for message in answer.messages]
        tools = setup.tools_of(conversation.record)
        bridge = setup.bridges(list(tools.values())).after(turn.tokens, messages)
        if len(conversation.tokens) + len(bridge) >= room:
            conversation.truncated = True
            return False
        conversation.append_bridge(bridge)
        return True


def read_turn(
    conversation: PartialResponse,
    calls: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    stop_strings: Sequence[str],
    schemas: Mapping[str, Mapping[str, Any]],
) -> Turn:
    """Return the policy's last turn, with the engine's parsed ``calls`` converted to the types in ``schemas``."""
    tokens = conversation.tokens[len(conversation.tokens) - conversation.open_tokens :]
    (text,) = decode_responses([tokens], tokenizer, stop_strings)
    read = [Call(*call) for call in calls["calls"]]
    for i, call in enumerate(read):
        if call.name in schemas and isinstance(call.arguments, dict):
            read[i] = call._replace(arguments=with_types(call.arguments, schemas[call.name]))
    return Turn(text, tokens, read, calls["malformed"])


def policy_turns(batch: Batch) -> list[list[list[int]]]:
    """Return the tokens of each policy turn in each response."""
    if "source" not in batch:
        return [[tokens.tolist()] for tokens in batch.response_tokens.split(batch.response_lengths.tolist())]
    return [[tokens for by, tokens in response.parts() if by == POLICY] for response in from_batch(batch)]


def policy_texts(batch: Batch, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]) -> list[str]:
    """Return the policy's text in each response, with turns separated by newlines."""
    turns = policy_turns(batch)
    texts = iter(decode_responses([turn for row in turns for turn in row], tokenizer, stop_strings))
    return ["\n".join(next(texts) for _ in row) for row in turns]


def conversation_parts(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[list[dict[str, str]]]:
    """Return a list of ``{"by": "policy" or "environment", "text": ...}`` per conversation, empty if single-turn."""
    if "source" not in batch:
        return [[] for _ in range(len(batch))]
    return [
        [{"by": SPEAKERS[by], "text": str(tokenizer.decode(tokens))} for by, tokens in response.parts()]
        for response in from_batch(batch)
    ]


def session_parts(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[list[dict[str, str]]]:
    """Return each conversation's parts. Agents' parts start with additional histories and include all prompts."""
    parts = conversation_parts(batch, tokenizer)
    if "further_rows" not in batch:
        return parts
    prompts = batch.tokens[~batch.in_response].split(batch.prompt_lengths.tolist())
    whole = []
    for row, others in enumerate(batch.further_rows):
        said = [part for other in others for part in history_parts(other, tokenizer)]
        whole.append([*said, {"by": "environment", "text": str(tokenizer.decode(prompts[row]))}, *parts[row]])
    return whole


def history_parts(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Return the prompt and the conversation parts of an additional history of an agent."""
    batch = Batch.of([row["prompt_ids"]], [row["tokens"]], source=torch.tensor(row["source"], dtype=torch.uint8))
    prompt = {"by": "environment", "text": str(tokenizer.decode(row["prompt_ids"]))}
    return [prompt, *conversation_parts(batch, tokenizer)[0]]


def add_rank_metrics(batch: Batch, measured: Batch | None) -> Batch:
    """Add the rank metrics of the policy's tokens to ``batch``, which must be sorted by ``request``.

    Args:
        measured: Episodes of only the policy's tokens, with ``request``, or None to add no metrics. May include
            requests that are not in ``batch``.
    """
    if measured is None:
        return batch
    measured = measured[torch.isin(measured.request, batch.request)]
    return expand_to_response(batch, measured[measured.request.argsort()].without("request"))
