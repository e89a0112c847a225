"""Looks up benchmarks by name in user-provided files and ``published.yaml``, and loads their problems."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR
from verl.data.files import read_csv, read_json_lines, read_rows
from verl.data.prompt_rows import as_mapping, read_extra_info, read_messages
from verl.data.prompts import PromptLayout
from verl.evaluation.benchmarks.rows import Benchmark, Problem, Row, read_problem, recognise_fields
from verl.rewards.registry import GROUND_TRUTH, custom_columns

SUFFIXES = (".jsonl", ".csv", ".parquet")
"""Suffixes of benchmark files, in order of precedence."""

EMBEDDED = {
    name: CONFIG_DIR.parent / "data" / name / "test.parquet"
    for name in ("arithmetic", "arithmetic_tools", "word_problems")
}
"""Test sets that are included in the repository."""

RELEASE = "https://github.com/hf618/VERL/tree/main/examples/simplelr_math_eval/data"
"""Data folder of the paper's release, which contains every benchmark in ``FULL_PASS1`` as ``<name>/test.jsonl``."""

PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())

BENCHMARKS = {
    name: Benchmark(name, **entry | ({"home": RELEASE} if entry.get("home") == "release" else {}))
    for name, entry in PUBLISHED.items()
}
"""Published benchmarks, keyed by the names used in ``benchmarks=...``."""


def load_benchmark(
    name: str,
    folder: Path | None,
    fields: Mapping[str, str] | None = None,
    data_source: str | None = None,
    scored: bool = True,
    whole_rows: bool = False,
) -> list[Problem]:
    """Return the problems of the benchmark ``name`` in their original order.

    A file in ``folder`` (see :func:`local_file`) takes precedence over the hub and is required for names that are not
    in ``BENCHMARKS``. ``fields`` maps names in ``verl.evaluation.benchmarks.rows.FIELD_NAMES`` to the file's field
    names. All other fields are recognised by name. ``data_source`` selects the verifier for rows without one, and None
    chooses it automatically. Columns that match parameters of a custom reward function are added to ``extra_info``.
    Training files, whose prompts are in chat format, are read as they are during training. For ``whole_rows``, see
    :class:`PromptLayout`. If ``scored`` is False, answers may be missing. Raises ``ConfigError`` if the benchmark
    is unknown or has no problems, a download failed, a line is malformed, the fields are not recognised, or a row
    has no question or answer. The error message is a single line.
    """
    path = local_file(name, folder)
    if path is None and name not in BENCHMARKS:
        raise ConfigError(_unknown(name, folder))
    benchmark = BENCHMARKS.get(name, Benchmark(name))
    numbered: Sequence[tuple[int, Row]]
    if path is not None:
        where, numbered = str(path), _read_file(path)
    elif name in EMBEDDED:
        where, numbered = str(EMBEDDED[name]), _read_embedded(EMBEDDED[name])
    else:
        where, numbered = f"benchmark {name} from {benchmark.hub}", _read_hub(benchmark)
    if not numbered:
        raise ConfigError(f"{where}: holds no problem at all")
    if path is not None and not fields and isinstance(numbered[0][1].get("prompt"), list):
        return load_prompts(where, None, PromptLayout(data_source=data_source, whole_rows=whole_rows), scored)
    columns = recognise_fields([row for _, row in numbered], fields or benchmark.fields, name, where, scored)
    problems = []
    answer_field = " or ".join(columns["answer"] or columns["solution"])
    for index, (number, row) in enumerate(numbered):
        try:
            problem = read_problem(row, index, columns, benchmark, scored)
        except ValueError as error:
            raise ConfigError(f"{where}, line {number}: {error}") from error
        if data_source is not None and not columns["verifier"]:
            problem = replace(problem, data_source=data_source)
        info = {**custom_columns(problem.data_source, row), **problem.extra_info}
        problems.append(replace(problem, extra_info=info, place=f"{where}, line {number}", answer_field=answer_field))
    return problems


def load_prompts(path: str, limit: int | None, layout: PromptLayout, scored: bool = True) -> list[Problem]:
    """Return the first ``limit`` prompts of a training file or a hub dataset."""
    problems = []
    for index, row in enumerate(layout.read(path, scored)[:limit]):
        messages = read_messages(row, f"{path}, row {index}", layout.prompt_key)
        question = "\n\n".join(str(message["content"]) for message in messages)
        truth: Any = as_mapping(row["reward_model"]).get("ground_truth")
        truth = "" if truth is None else truth
        chat = () if [message["role"] for message in messages] == ["user"] else messages
        facts = (truth, row[layout.reward_fn_key], read_extra_info(row.get("extra_info")), None)
        place = (f"{path}, row {index}", layout.answer_key or GROUND_TRUTH)
        problems.append(Problem(index, question, *facts, *place, chat))
    if not problems:
        raise ConfigError(f"{path}: holds no prompt at all")
    return problems


def local_file(name: str, folder: Path | None) -> Path | None:
    """Return the first file ``<folder>/<name>/test<suffix>`` or ``<folder>/<name><suffix>``, by order of suffixes."""
    # A name with a path separator could refer to a file outside the folder.
    if folder is None or Path(name).name != name:
        return None
    candidates = [place for end in SUFFIXES for place in (folder / name / f"test{end}", folder / f"{name}{end}")]
    # Accept anything with a matching name, even a broken link, so that reading it reports the problem.
    return next((path for path in candidates if os.path.lexists(path)), None)


def _unknown(name: str, folder: Path | None) -> str:
    local: list[str] = []
    if folder is not None:
        for end in SUFFIXES:
            local += [path.stem for path in folder.glob(f"*{end}")]
            local += [path.parent.name for path in folder.glob(f"*/test{end}")]
    known = [*BENCHMARKS, *sorted(set(local) - BENCHMARKS.keys())]
    # Compare in lower case, since wrong case is the most common mistake and get_close_matches is case-sensitive.
    near = {known_name.lower(): known_name for known_name in known}
    matches = get_close_matches(name.lower(), list(near), n=1)
    hint = f"did you mean {near[matches[0]]!r}?" if matches else f"known are {', '.join(known)}."
    place = f"{folder}/{name}/test.jsonl" if folder else "data.benchmark_dir"
    return f"benchmarks={name!r}: no such benchmark; {hint} One of your own goes into {place}"


def _read_file(path: Path) -> Sequence[tuple[int, Row]]:
    """Return each row with its 1-based number, which is the line number in JSON Lines files."""
    if path.suffix == ".jsonl":
        return read_json_lines(path)
    return list(enumerate(read_csv(path) if path.suffix == ".csv" else read_rows(str(path)), start=1))


def _read_embedded(path: Path) -> list[tuple[int, Row]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; restore it with `git checkout data`")
    rows = read_rows(str(path), ["reward_model", "extra_info"])
    problems = [row["extra_info"] | {"answer": row["reward_model"]["ground_truth"]} for row in rows]
    return [
        (number, {name: problem[name] for name in ("question", "answer", "solution")})
        for number, problem in enumerate(problems, start=1)
    ]


def _read_hub(benchmark: Benchmark) -> list[tuple[int, Row]]:
    """Return each row with its 1-based number."""
    fix = f"put it into data.benchmark_dir as {benchmark.name}/test.jsonl"
    if not benchmark.hub:
        raise ConfigError(
            f"benchmark {benchmark.name}: no copy on the hub is known; get {benchmark.name}/test.jsonl from "
            f"{benchmark.home} and {fix}"
        )
    try:
        return list(enumerate(read_rows(benchmark.hub), start=1))
    except ConfigError as error:
        raise ConfigError(f"benchmark {benchmark.name}: {error}; or {fix}") from error
