"""What runs are called, options in which they differ, and groups of runs that differ in their seed only."""

from collections.abc import Sequence

from verl_pages.run_folder import RunFolder

SEED_OPTIONS = ("seed", "trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Options that may differ between the seeds of one setting."""

MISSING = "–"


def seed_groups(runs: Sequence[RunFolder]) -> list[int]:
    """Return the group of each run, numbered from 0. Runs of a group differ in ``SEED_OPTIONS`` only."""
    numbers: dict[object, int] = {}
    groups = []
    for place, run in enumerate(runs):
        options = frozenset(item for item in run.options.items() if item[0] not in SEED_OPTIONS)
        # Nothing is known of a run without options.
        groups.append(numbers.setdefault(options if run.options else place, len(numbers)))
    return groups


def group_names(runs: Sequence[RunFolder], groups: Sequence[int]) -> list[str]:
    """Name each group after its first run, without the seed."""
    names = []
    for number in range(max(groups, default=-1) + 1):
        members = [run.name for run, group in zip(runs, groups, strict=True) if group == number]
        first = members[0].partition(", seed=")[0]
        names.append(f"{first} ({len(members)} runs)" if len(members) > 1 else members[0])
    return names


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Name runs after their experiment.

    If several have the same, the options in which they differ are added, or else their folder.
    """
    experiments = [(run.option("trainer.experiment_name") or "").strip() for run in runs]
    ways = [
        experiments,
        [", ".join([name, *parts[:2]]) for name, parts in zip(experiments, differences(runs), strict=True)],
        [
            run.name if run.name.startswith(name) else f"{name} {run.name}"
            for name, run in zip(experiments, runs, strict=True)
        ],
    ]
    names = []
    for place, experiment in enumerate(experiments):
        options = [way[place] for way in ways if way.count(way[place]) == 1 and len(way[place]) <= 60]
        names.append(options[0] if options and experiment else runs[place].name)
    return names


def differences(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Return the options of each run in which the runs differ, ``["optim.lr=0.001", "rollout.n=8"]``."""
    rows = [(name, values) for name, differs, values in option_rows(runs) if differs]
    # The seed last.
    rows = [row for row in rows if row[0] not in SEED_OPTIONS] + [row for row in rows if row[0] == "seed"]
    return [
        [f"{'.'.join(name.split('.')[-2:])}={_short(values[place])}" for name, values in rows]
        for place in range(len(runs))
    ]


def _short(value: str) -> str:
    text = value.strip('"')
    return text if len(text) <= 40 else f"…{text[-39:]}"


def option_rows(runs: Sequence[RunFolder]) -> list[tuple[str, int, list[str]]]:
    """Rows of name, whether the runs differ, and the values: a single one if they do not."""
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    rows: list[tuple[str, int, list[str]]] = []
    known = [run for run in runs if run.options]
    for name in names:
        values = [run.options.get(name, MISSING) for run in runs]
        differs = len({run.options.get(name, MISSING) for run in known}) > 1
        rows.append((name, int(differs), values if differs else [values[runs.index(known[0])]]))
    return rows
