"""Conversations on their way through the engines.

After each turn of the policy the environment takes a step, and its messages become the beginning of a request for the
next turn.

Legend: B episodes, of which a conversation is one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.batch import ENVIRONMENT, Batch
from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.responses import decode_responses
from verl.data.templates import find_template
from verl.rank.turns import spread_measured, turn_lengths
from verl.rollout.environments.bridges import Bridges, ProgramBridges
from verl.rollout.environments.pool import COUNTS, Answer, EnvironmentPool, Step, load_environment
from verl.rollout.environments.tools import Call, Turn, tool_schemas
from verl.rollout.queue import RequestQueue

PROGRAMS = "verl.rollout.programs:Programs"
"""The environment for templates whose programs are run while a response is sampled."""

DRIVER_COLUMNS = ("environment_states", "environment_rewards", "turns", "call_counts")
"""Columns that the driver keeps of a conversation, beside what the engine returned of its last turn."""

SPEAKERS = ("policy", "environment")
"""Who wrote a token, by its ``source``."""


class ConversationSetup:
    """Setup of a run's conversations."""

    def __init__(
        self,
        options: MultiTurnConfig,
        max_response_length: int,
        tokenizer: PreTrainedTokenizerBase,
        chat_arguments: Mapping[str, Any],
        stop_strings: Sequence[str],
        pool: EnvironmentPool,
        template: str = "chat",
        max_length: int | None = None,
    ) -> None:
        """Prepare conversations.

        Args:
            max_response_length: tokens of a conversation after its prompt.
            template: of prompts, a name.
            chat_arguments: of the chat template, as prompts have them.
            max_length: tokens of the longest sequence that engines take, the prompt included; None: those of any.
        """
        self.max_length = math.inf if max_length is None else max_length
        self.options, self.max_response_length, self.pool = options, max_response_length, pool
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        if find_template(template).python:
            self.bridges: Bridges | ProgramBridges = ProgramBridges(tokenizer)
        else:
            self.bridges = Bridges(tokenizer, chat_arguments, pool.role, "rollout.multi_turn.enable=True")

    def begin(self, records: Sequence[PromptRecord], partial: Batch | None) -> "Conversations":
        """Conversations about these prompts, B; ``partial``: what there is of each, None where all are new."""
        return Conversations(self, records, new_conversations(records) if partial is None else partial)


def check_conversations(
    options: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase, template: str, chat_arguments: Mapping[str, Any]
) -> None:
    """Raise ``ConfigError`` for an environment that cannot be used, or a template that cannot write its messages.

    Args:
        template: of prompts, a name.
        chat_arguments: of the chat template, without tools.
    """
    form = find_template(template)
    if form.python == "output":
        if not options.enable or options.environment is None:
            raise ConfigError(
                f"template={template!r}: has programs that are run while a response is sampled; set "
                f"rollout.multi_turn.enable=true and rollout.multi_turn.environment={PROGRAMS}"
            )
        load_environment(options)
        return
    if not options.enable:
        return
    field = "rollout.multi_turn.enable=True"
    if not form.chat or tokenizer.chat_template is None:
        raise ConfigError(f"template={template!r}: {field} needs the tokenizer's chat template; set it to chat")
    load_environment(options)
    arguments = dict(chat_arguments) | ({"tools": tool_schemas(options)} if options.has_tools else {})
    Bridges(tokenizer, arguments, "tool" if options.has_tools else "user", field)


def new_conversations(records: Sequence[PromptRecord]) -> Batch:
    """B conversations in which nothing has been said yet."""
    num = len(records)
    return Batch.of(
        [record.input_ids for record in records],
        [[] for _ in records],
        rollout_logprobs=torch.zeros(0),
        source=torch.zeros(0, dtype=torch.uint8),
    ).fill(
        environment_states=[""] * num,
        environment_rewards=torch.zeros(num, dtype=torch.float64),
        turns=torch.zeros(num, dtype=torch.int64),
        call_counts=torch.zeros(num, len(COUNTS), dtype=torch.int64),
    )


class Conversations:
    """Conversations of one call of the engines, each known by its place."""

    def __init__(self, setup: ConversationSetup, records: Sequence[PromptRecord], partial: Batch) -> None:
        self.setup, self.records = setup, records
        self._partial = dict(enumerate(partial.split(1)))
        """Partial conversations, by place."""
        self._over: list[Batch] = []
        self._ended: list[tuple[int, Batch, Turn]] = []
        """Turns about which the environment has not been asked yet."""
        self._asked: dict[Future[Answer], tuple[int, Batch, Turn]] = {}

    @property
    def waiting(self) -> set[int]:
        """The places of those whose environment has not answered."""
        return {place for place, _, _ in (*self._ended, *self._asked.values())}

    def partial(self, places: Sequence[int]) -> Batch:
        """Return the partial conversations at ``places``."""
        return Batch.join([self._partial[place] for place in places])

    def take(self, part: Batch) -> None:
        """Take turns that have ended, with the engine's ``calls``, and submit the steps of the environments."""
        turns = part.calls
        for row, found in zip(part.without("calls").split(1), turns, strict=True):
            place = int(row.request)
            row.merge(self._partial[place].columns(*DRIVER_COLUMNS))
            row.fill(turns=row.turns + 1, call_counts=row.call_counts + torch.tensor([0, 0, 0, 0, found["prefilled"]]))
            if bool(row.truncated):
                self._end(place, row)
                continue
            self._ended.append((place, row, self._turn(row, found)))
        # Those that share processes are asked together, while the ones before are answered.
        if self.setup.pool.is_async or not self._asked:
            self._ask()

    def resume(self, queue: RequestQueue, ended: Callable[[], None], deterministic: bool, wait: bool) -> bool:
        """Have those go on whose environments have answered; whether any has not.

        Args:
            queue: gets their places.
            ended: called when some may be over.
            deterministic: wait, if at all, until no environment is asked; else for one answer.
            wait: whether to wait for answers.
        """
        if wait or any(future.done() for future in self._asked):
            queue.resume(self._answered(deterministic))
            ended()
        return bool(self.waiting)

    def _answered(self, wait_for_all: bool) -> list[int]:
        """Return the places of conversations that continue, after at least one answer."""
        going: list[int] = []
        while self._asked or self._ended:
            self._ask()
            done, _ = wait(self._asked, return_when=FIRST_COMPLETED)
            for future in done:
                place, row, turn = self._asked.pop(future)
                going += [place] if self._goes_on(place, row, turn, future.result()) else []
            if not wait_for_all:
                break
        self._ask()
        # In the order of their answers engines would depend on time.
        return sorted(going)

    def over(self) -> Batch | None:
        """Conversations that have ended since the last call; None if there are none."""
        over, self._over = self._over, []
        return Batch.join(over) if over else None

    def _ask(self) -> None:
        if self._ended:
            turns, self._ended = self._ended, []
            steps = [Step(self.records[place], row.environment_states[0], turn) for place, row, turn in turns]
            self._asked |= dict(zip(self.setup.pool.ask(steps), turns, strict=True))

    def _turn(self, row: Batch, found: Mapping[str, Any]) -> Turn:
        tokens = turns_of(row)[-1]
        (text,) = decode_responses([tokens], self.setup.tokenizer, self.setup.stop_strings)
        return Turn(text, tokens, [Call(*call) for call in found["calls"]], found["malformed"])

    def _goes_on(self, place: int, row: Batch, turn: Turn, answer: Answer) -> bool:
        """Note an answer; whether the policy has another turn."""
        options = self.setup.options
        row.fill(
            environment_states=[answer.state],
            environment_rewards=row.environment_rewards + answer.reward,
            call_counts=row.call_counts + torch.tensor([answer.counts]),
        )
        num = int(row.turns)
        limits = [most for most in (options.max_assistant_turns, _plus(options.max_user_turns, 1)) if most is not None]
        if answer.done or not answer.messages or any(num >= most for most in limits):
            self._end(place, row)
            return False
        bridge = self.setup.bridges.after(turn.tokens, answer.messages)
        room = min(self.setup.max_response_length, self.setup.max_length - int(row.prompt_lengths))
        if int(row.response_lengths) + len(bridge) >= room:
            self._end(place, row.fill(truncated=torch.ones(1, dtype=torch.bool)))
            return False
        self._partial[place] = extended(row, bridge)
        return True

    def _end(self, place: int, row: Batch) -> None:
        del self._partial[place]
        self._over.append(row.without("environment_states"))


def _plus(value: int | None, more: int) -> int | None:
    return None if value is None else value + more


def extended(row: Batch, bridge: Sequence[int]) -> Batch:
    """One conversation with the tokens of an environment behind it."""
    num = len(bridge)
    prompt = row.tokens[~row.in_response].tolist()
    longer = Batch.of([prompt], [row.response_tokens.tolist() + list(bridge)])
    columns = {name: getattr(row, name) for name in DRIVER_COLUMNS}
    columns["source"] = torch.cat([row.source, torch.full((num,), ENVIRONMENT, dtype=torch.uint8)])
    if "rollout_logprobs" in row:
        columns["rollout_logprobs"] = torch.cat([row.rollout_logprobs, torch.zeros(num)])
    if "version" in row:
        columns["version"] = torch.cat([row.version, row.version[-1:].expand(num)])
    return longer.fill(**columns)


def turns_of(row: Batch) -> list[list[int]]:
    """Return the tokens of each policy turn of one conversation."""
    return [turn.tolist() for turn in row.response_tokens[row.by_policy].split(turn_lengths(row.source))]


def policy_texts(batch: Batch, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]) -> list[str]:
    """Return the policy's text in each response, its turns on lines of their own."""
    if "source" not in batch:
        tokens = [ids.tolist() for ids in batch.response_tokens.split(batch.response_lengths.tolist())]
        return decode_responses(tokens, tokenizer, stop_strings)
    turns = [turns_of(row) for row in batch.split(1)]
    texts = iter(decode_responses([turn for row in turns for turn in row], tokenizer, stop_strings))
    return ["\n".join(next(texts) for _ in row) for row in turns]


def who_said_what(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[list[dict[str, str]]]:
    """Return each conversation's parts in turn, as ``{"by": "policy" or "environment", "text": ...}``.

    A response of one turn has none.
    """
    if "source" not in batch:
        return [[] for _ in range(len(batch))]
    said = []
    for row in batch.split(1):
        runs, sizes = row.source.unique_consecutive(return_counts=True)
        parts = zip(runs.tolist(), row.response_tokens.split(sizes.tolist()), strict=True)
        said.append([{"by": SPEAKERS[by], "text": str(tokenizer.decode(part.tolist()))} for by, part in parts])
    return said


def with_measured(batch: Batch, measured: Batch | None) -> Batch:
    """``batch``, in the order of its ``request``, with the rank metrics that are measured of the policy's tokens.

    Args:
        measured: episodes of the policy's tokens alone, by ``request``; it may have others too. None: none are.
    """
    if measured is None:
        return batch
    measured = measured[torch.isin(measured.request, batch.request)]
    return spread_measured(batch, measured[measured.request.argsort()].without("request"))
