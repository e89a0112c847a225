"""Files of prompts in veRL's layout, as problems like a benchmark's."""

from pathlib import Path
from typing import Any

from verl.config.errors import ConfigError
from verl.data.files import read_rows
from verl.data.prompt_rows import as_mapping, read_extra_info, read_messages
from verl.evaluation.benchmarks import Problem
from verl.rewards import check_ground_truth

COLUMNS = ["data_source", "prompt", "reward_model"]


def read_prompt_file(path: str, max_problems: int, custom_functions: dict[str, str]) -> tuple[str, list[Problem]]:
    """Name and first ``max_problems`` prompts (-1: all) of a parquet, jsonl or json file, or of a set of the hub.

    Raises:
        ConfigError: it cannot be read, a prompt is more than one user turn, or no verifier can score it.
    """
    rows = read_rows(path, COLUMNS)
    rows = rows if max_problems == -1 else rows[:max_problems]
    problems = [_problem(row, index, f"{path}, row {index}", custom_functions) for index, row in enumerate(rows)]
    if not problems:
        raise ConfigError(f"{path}: holds no prompt at all")
    return Path(path).stem, problems


def _problem(row: Any, index: int, where: str, custom_functions: dict[str, str]) -> Problem:
    messages = read_messages(row, where, "prompt")
    if [message["role"] for message in messages] != ["user"]:
        raise ConfigError(
            f"{where}: prompt: must be a single user turn for an analysis; it has {len(messages)} messages"
        )
    truth, extra_info = as_mapping(row["reward_model"]).get("ground_truth"), read_extra_info(row.get("extra_info"))
    try:
        check_ground_truth(row["data_source"], truth, custom_functions, extra_info)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    answer: Any = truth
    return Problem(index, messages[0]["content"], answer, row["data_source"], extra_info, None)
