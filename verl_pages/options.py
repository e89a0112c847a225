"""Options in which runs differ, and groups of runs that differ in their seed only."""

from collections.abc import Sequence

from verl_pages.run_folder import RunFolder

SEED_OPTIONS = ("seed", "trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Options that may differ between the seeds of one setting."""

MISSING = "–"


def seed_groups(runs: Sequence[RunFolder]) -> list[int]:
    """The group of each run, numbered from 0. Runs of a group differ in ``SEED_OPTIONS`` only."""
    numbers: dict[object, int] = {}
    groups = []
    for place, run in enumerate(runs):
        options = frozenset(item for item in run.options.items() if item[0] not in SEED_OPTIONS)
        # Nothing is known of a run without options.
        groups.append(numbers.setdefault(options if run.options else place, len(numbers)))
    return groups


def group_names(runs: Sequence[RunFolder], groups: Sequence[int]) -> list[str]:
    """A name for each group: the common prefix of its runs' names, or the name of its first run."""
    names = []
    for number in range(max(groups, default=-1) + 1):
        members = [run.name for run, group in zip(runs, groups, strict=True) if group == number]
        common = members[0]
        while not all(name.startswith(common) for name in members):
            common = common[:-1]
        stem = common.rstrip("_-./ 0123456789") if len(members) > 1 else common
        names.append(
            f"{stem if len(stem) > 2 else members[0]} ({len(members)} runs)" if len(members) > 1 else members[0]
        )
    return names


def option_rows(runs: Sequence[RunFolder]) -> list[list[object]]:
    """Rows of name, whether the runs differ, and the values: a single one if they do not."""
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    rows: list[list[object]] = []
    known = [run for run in runs if run.options]
    for name in names:
        values = [run.options.get(name, MISSING) for run in runs]
        differs = len({run.options.get(name, MISSING) for run in known}) > 1
        rows.append([name, int(differs), values if differs else [values[runs.index(known[0])]]])
    return rows
