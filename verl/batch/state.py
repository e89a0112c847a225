"""Conversion of batches to and from checkpoint state.

Each record is saved as an index into the training data plus its edited fields.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl.batch.batch import Batch
from verl.config.errors import ConfigError
from verl.verifiers.verdict import Verdict

EDITED = ("input_ids", "messages", "opens_thought")
"""Fields of a record that ``Method.resample`` may edit."""

VERDICTS = {"verdicts", "first_verdicts"}
"""Columns that contain verdicts."""


def batch_state(batch: Batch, prompts: Sequence[Any]) -> dict[str, Any]:
    """Convert a batch to tensors and JSON values. ``prompts`` is the training data, indexed by ``uid``."""
    columns = {name: getattr(batch, name) for name in batch.names}
    columns["records"] = [saved_record(record, prompts) for record in batch.records]
    columns |= {name: [verdict.as_dict() for verdict in columns[name]] for name in VERDICTS & columns.keys()}
    return {
        "prompt_lengths": batch.prompt_lengths,
        "response_lengths": batch.response_lengths,
        "width": batch.width,
        "columns": columns,
        "kinds": {name: batch.kind_of(name) for name in batch.names},
    }


def batch_from_state(state: dict[str, Any], prompts: Sequence[Any]) -> Batch:
    """Invert :func:`batch_state`. Raises ``ConfigError`` if ``prompts`` is not the training data of the saved batch."""
    columns = dict(state["columns"])
    columns["records"] = [restored_record(saved, prompts) for saved in columns["records"]]
    columns |= {name: [*map(Verdict.from_dict, columns[name])] for name in VERDICTS & columns.keys()}
    batch = Batch(state["prompt_lengths"], state["response_lengths"], state["width"])
    for name, values in columns.items():
        batch.fill(state["kinds"][name], **{name: values})
    prompts_held = batch.tokens[~batch.in_response].split(batch.prompt_lengths.tolist())
    for record, held in zip(batch.records, prompts_held, strict=True):
        # Agents write the prompts of their finished sessions.
        if record.input_ids != held.tolist() and "further_rows" not in batch:
            raise ConfigError(
                f"data.train_files: prompt {record.uid} is not the one whose response the checkpoint holds; restore "
                "the data, data.template and model.path of that run"
            )
    return batch


def saved_record(record: Any, prompts: Sequence[Any]) -> dict[str, Any]:
    """Return a record's index in the training data and its edited fields."""
    edited = record is not prompts[record.uid]
    return {"uid": record.uid} | ({name: getattr(record, name) for name in EDITED} if edited else {})


def restored_record(saved: dict[str, Any], prompts: Sequence[Any]) -> Any:
    """Restore a record from :func:`saved_record`. Raises ``ConfigError`` if the saved index is out of range."""
    uid, num = saved["uid"], len(prompts)
    if not 0 <= uid < num:
        raise ConfigError(
            f"data.train_files: the checkpoint has responses to prompts that are not among these {num}; restore the "
            "files of that run"
        )
    edits = {name: value for name, value in saved.items() if name != "uid"}
    record = prompts[uid]
    return replace(record, **edits) if edits else record
