"""Converts rows in veRL's layout to tokenized prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig
from verl.config.errors import ConfigError
from verl.data.prompt_record import PromptRecord
from verl.data.records import parse_json, read_chat, read_tools
from verl.data.templates import (
    check_template,
    find_template,
    opens_thought,
    render_prompt,
    render_record,
    template_marker,
)
from verl.rewards.registry import GROUND_TRUTH, check_ground_truth

MEDIA = ("images", "videos")
"""Names of the media columns in veRL's multimodal records."""
ONE_TURN_AGENT = "single_turn_agent"
"""Value of ``agent_name`` in veRL's records for single-turn responses."""
TOOL_AGENT = "tool_agent"
"""Value of ``agent_name`` in veRL's records for responses with tool calls."""


NOTES = {
    "left_out": "left out {count} that are longer than data.max_prompt_length={config.max_prompt_length}, the longest "
    "with {longest} tokens (the first: {first})",
    "cut": "cut {count} to data.max_prompt_length={config.max_prompt_length} tokens with "
    "data.truncation={config.truncation}, the longest has {longest}",
    "marked": "{count} already hold a template, and data.template={config.template} is added to it (the first: "
    "{first}); data.template=raw takes prompts as they are",
    "instructed": "{count} already ask for an answer in a box, and data.template={config.template} asks again (the "
    "first: {first})",
    "answered": "{count} end with a message of the assistant, to which the policy's answer is another one (the first: "
    "{first}); remove the message if it is the answer to learn",
    "repeated": "{count} occur more than once (the first: {first})",
}
"""Maps each kind of note for the user to its text."""


class PromptReader:
    """Reader that converts data rows to prompt records and collects notes for the user."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, scored: bool = True) -> None:
        """Prepare a reader. ``scored`` indicates whether verifiers score the responses."""
        self.scored = scored
        check_template(config.template, tokenizer, "data.template")
        self.config = config
        self.tokenizer = tokenizer
        self.records: list[PromptRecord] = []
        self.num_read = 0
        self._noted: dict[str, list[str]] = {kind: [] for kind in NOTES}
        """Maps each kind of note to the names of the rows to which it applies."""
        self._too_long: list[int] = []
        """Lengths of prompts longer than ``max_prompt_length``."""
        self._first_at: dict[int, str] = {}

    def read(self, row: Mapping[str, Any], where: str) -> PromptRecord:
        """Convert a row to a numbered, not yet tokenized record. ``where`` describes the row in error messages.

        Raises ``ConfigError`` if the row is malformed or if responses to it cannot be scored.
        """
        config = self.config
        if self.scored:
            check_verifiable(row, where, config.reward_fn_key, config.answer_key or GROUND_TRUTH)
        self.num_read += 1
        return PromptRecord(
            uid=self.num_read - 1,
            input_ids=[],
            data_source=row[config.reward_fn_key],
            ground_truth=as_mapping(row["reward_model"]).get("ground_truth"),
            extra_info=read_extra_info(row.get("extra_info")),
            messages=read_messages(
                row, where, config.prompt_key, with_tools="tools" in config.apply_chat_template_kwargs
            ),
            opens_thought=False,
            tools=read_tools(row, where),
        )

    def add(self, record: PromptRecord, where: str) -> None:
        """Tokenize and add a record unless it is too long. Raise ``ConfigError`` if the template rejects the record."""
        config = self.config
        ids = self._render(record.messages, record.tools, where)
        if record.messages[-1]["role"] == "assistant":
            self._noted["answered"].append(where)
        if len(ids) > config.max_prompt_length:
            self._too_long.append(len(ids))
            self._noted["left_out" if config.filters else "cut"].append(where)
            if config.filters:
                return
            ids = truncate(ids, config.max_prompt_length, config.truncation, where)
        # Storing hashes instead of tokens saves memory; a collision would only affect a note.
        original = self._first_at.setdefault(hash(tuple(ids)), where)
        if original != where and self.scored:  # games differ in their extra_info
            self._noted["repeated"].append(f"{where} repeats {original}")
        thinks = opens_thought(ids, self.tokenizer)
        self.records.append(replace(record, uid=len(self.records), input_ids=ids, opens_thought=thinks))

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], where: str) -> list[int]:
        config = self.config
        text = "\n".join(message["content"] or "" for message in messages)
        marker, instruction = template_marker(text), find_template(config.template).instruction
        if config.template != "raw" and marker is not None:
            self._noted["marked"].append(f"{where} has {marker!r}")
        if instruction and instruction in text:
            self._noted["instructed"].append(where)
        try:
            return render(messages, config, self.tokenizer, tools)
        except ConfigError as error:
            raise ConfigError(f"{where}: {config.prompt_key}: {error}") from error

    def check_any_left(self, files: Sequence[str]) -> None:
        """Raise ``ConfigError`` if there are no prompts, or if all of them were dropped because they are too long."""
        if not self.num_read:
            raise ConfigError(f"{list(files)}: the files contain no prompts; add some")
        if not self.records:
            raise ConfigError(
                f"data.max_prompt_length={self.config.max_prompt_length}: all {self.num_read} prompts of {list(files)} "
                f"are longer, of {min(self._too_long)} to {max(self._too_long)} tokens; raise it"
            )

    def notes(self) -> list[str]:
        """Return the notes for the user, one line each."""
        longest = max(self._too_long, default=0)
        return [
            NOTES[kind].format(
                count=f"{len(rows)} of {self.num_read} prompts", config=self.config, longest=longest, first=rows[0]
            )
            for kind, rows in self._noted.items()
            if rows
        ]


def render(
    messages: list[dict[str, Any]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Render a chat as tokens with ``data.template``. Raises ``ConfigError`` if the template rejects the messages."""
    name, arguments = config.template, dict(config.apply_chat_template_kwargs)
    if name == "chat":
        return render_record(messages, tokenizer, tools, arguments)
    if tools or [message["role"] for message in messages] != ["user"]:
        roles = "tools" if tools else ", ".join(message["role"] for message in messages)
        raise ConfigError(f"data.template={name!r} takes one user message, not {roles}; set data.template=chat")
    return render_prompt(name, messages[0]["content"], tokenizer, chat_arguments=arguments)


def read_messages(row: Mapping[str, Any], where: str, key: str, with_tools: bool = False) -> list[dict[str, Any]]:
    """Return a row's prompt as a chat. Raises a ``ConfigError`` with ``where`` if the prompt is empty or malformed.

    ``with_tools`` indicates whether the run provides tools, which records of veRL may require.
    """
    prompt = row[key]
    for column in MEDIA:
        if row.get(column):
            raise ConfigError(f"{where}: has {column}; prompts with images or videos are not supported")
    agent = row.get("agent_name") or ONE_TURN_AGENT
    if with_tools and agent in (ONE_TURN_AGENT, TOOL_AGENT):
        agent, needs_tools = ONE_TURN_AGENT, False
    else:
        needs_tools = bool(read_extra_info(row.get("extra_info")).get("need_tools_kwargs"))
    if agent != ONE_TURN_AGENT or needs_tools:
        field = f"agent_name={agent!r}" if agent != ONE_TURN_AGENT else "extra_info.need_tools_kwargs=True"
        raise ConfigError(
            f"{where}: {field}: needs tools; set rollout.multi_turn.enable=true and name them with "
            "rollout.multi_turn.tools or tool_config_path, or use the data set without tools"
        )
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return read_chat(prompt, where, key, "data.prompt_key")


def check_verifiable(row: Mapping[str, Any], where: str, source_key: str, answer_field: str) -> None:
    """Raise a ``ConfigError`` that names ``where`` and a field if responses to this row cannot be scored."""
    source = row[source_key]
    if not isinstance(source, str):
        raise ConfigError(
            f"{where}: {source_key}={source!r:.80}: must name a verifier; data.reward_fn_key is its column"
        )
    reward_model = row["reward_model"]
    if reward_model is not None and not isinstance(parse_json(reward_model), dict):
        raise ConfigError(
            f"{where}: reward_model={reward_model!r:.80}: must be a mapping that holds ground_truth, or the JSON text "
            "of one"
        )
    try:
        truth = as_mapping(reward_model).get("ground_truth")
        check_ground_truth(source, truth, extra_info=read_extra_info(row.get("extra_info")), field=answer_field)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return ``value`` as a mapping, after parsing JSON text. Values of other types become an empty mapping."""
    value = parse_json(value)
    return value if isinstance(value, dict) else {}


def read_extra_info(value: Any) -> Mapping[str, Any]:
    """Return ``extra_info``, which can be a mapping or JSON text, as a mapping.

    Null becomes an empty mapping, and values of other types are stored under the key ``value``.
    """
    if value is None:
        return {}
    mapping = as_mapping(value)
    is_mapping = bool(mapping) or value in ({}, "", "{}")
    return mapping if is_mapping else {"value": value}


def truncate(ids: list[int], length: int, truncation: str, where: str) -> list[int]:
    """Cut ``ids`` to ``length`` as ``truncation`` specifies. Raises ``ConfigError`` if ``truncation`` is ``error``."""
    if truncation == "error":
        raise ConfigError(
            f"data.max_prompt_length={length}: the prompt in {where} has {len(ids)} tokens; raise it, or set "
            "data.truncation=filter, left, right or middle"
        )
    if truncation == "left":
        return ids[-length:]
    if truncation == "middle":
        head = length // 2
        return ids[:head] + ids[head - length :]
    return ids[:length]
