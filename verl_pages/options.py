"""Assigns names to runs, compares their options, and groups runs that differ only in the seed."""

from collections.abc import Sequence

from verl_pages.run_folder import RunFolder

SEED_OPTIONS = ("seed", "trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Options that may differ between the runs in a seed group."""

MISSING = "–"


def seed_groups(runs: Sequence[RunFolder]) -> list[int]:
    """Return the 0-based group number of each run. Runs in the same group differ only in ``SEED_OPTIONS``."""
    numbers: dict[object, int] = {}
    groups = []
    for place, run in enumerate(runs):
        options = frozenset(item for item in run.options.items() if item[0] not in SEED_OPTIONS)
        # A run with unknown options forms a group of its own.
        groups.append(numbers.setdefault(options if run.options else place, len(numbers)))
    return groups


def group_names(runs: Sequence[RunFolder], groups: Sequence[int]) -> list[str]:
    """Name each group after its first run. Groups of several runs omit the seed and add the number of runs."""
    names = []
    for number in range(max(groups, default=-1) + 1):
        members = [run.name for run, group in zip(runs, groups, strict=True) if group == number]
        first = members[0].partition(", seed=")[0]
        names.append(f"{first} ({len(members)} runs)" if len(members) > 1 else members[0])
    return names


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return a name for each run, based on its experiment's name.

    Duplicate names are extended by up to two differing options or, if necessary, by the name of the run's folder.
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
    """Return the options of each run that differ between runs, such as ``["optim.lr=0.001", "rollout.n=8"]``."""
    rows = [(name, values) for name, differs, values, _ in option_rows(runs) if differs]
    rows = [row for row in rows if row[0] == "seed" or row[0] not in SEED_OPTIONS]

    def of(place: int) -> list[str]:
        # Values that few other runs have come first, in the order of the options, and the seed comes last.
        rare = sorted(rows, key=lambda row: (row[0] == "seed", row[1].count(row[1][place])))
        return [f"{'.'.join(name.split('.')[-2:])}={_short(values[place])}" for name, values in rare]

    return [of(place) for place in range(len(runs))]


def _short(value: str) -> str:
    text = value.strip('"')
    return text if len(text) <= 40 else f"…{text[-39:]}"


def option_rows(runs: Sequence[RunFolder]) -> list[tuple[str, int, list[str], int]]:
    """Return each option's name, whether it differs between runs, its values, and whether it was set by a command.

    Options that do not differ have only one value. Options set by a command come first.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    given = {word.lstrip("+~").partition("=")[0] for run in runs for word in run.overrides}
    rows: list[tuple[str, int, list[str], int]] = []
    known = [run for run in runs if run.options]
    for name in names:
        values = [run.options.get(name, MISSING) for run in runs]
        differs = len({run.options.get(name, MISSING) for run in known}) > 1
        is_set = any(name == option or name.startswith(f"{option}.") for option in given)
        rows.append((name, int(differs), values if differs else [values[runs.index(known[0])]], int(is_set)))
    return sorted(rows, key=lambda row: not row[3])
