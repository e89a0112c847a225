"""How the options of runs differ, and which runs are seeds of one."""

from collections.abc import Sequence

from verl_pages.run_folder import RunFolder

OWN_OPTIONS = ("seed", "trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Options in which the seeds of one setting may differ."""

MISSING = "–"


def seed_groups(runs: Sequence[RunFolder]) -> list[int]:
    """For each run the number of its group, from 0: runs whose options differ in ``OWN_OPTIONS`` alone are one."""
    numbers: dict[object, int] = {}
    groups = []
    for place, run in enumerate(runs):
        options = frozenset(item for item in run.options.items() if item[0] not in OWN_OPTIONS)
        # Nothing is known of a run without options.
        groups.append(numbers.setdefault(options if run.options else place, len(numbers)))
    return groups


def group_names(runs: Sequence[RunFolder], groups: Sequence[int]) -> list[str]:
    """A name for each group: what its runs' names have in common, or that of the first."""
    names = []
    for number in range(max(groups, default=-1) + 1):
        own = [run.name for run, group in zip(runs, groups, strict=True) if group == number]
        common = own[0]
        while not all(name.startswith(common) for name in own):
            common = common[:-1]
        stem = common.rstrip("_-./ 0123456789") if len(own) > 1 else common
        names.append(f"{stem if len(stem) > 2 else own[0]} ({len(own)} runs)" if len(own) > 1 else own[0])
    return names


def option_rows(runs: Sequence[RunFolder]) -> list[list[object]]:
    """Each option as its name, whether the runs differ in it, and its values: one if they are the same."""
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    rows: list[list[object]] = []
    known = [run for run in runs if run.options]
    for name in names:
        values = [run.options.get(name, MISSING) for run in runs]
        differs = len({run.options.get(name, MISSING) for run in known}) > 1
        rows.append([name, int(differs), values if differs else [values[runs.index(known[0])]]])
    return rows
