"""The house rules of CONTRIBUTING.md, checked on the source text: nothing is imported except where a test says so."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests.tiers import needs_vllm

ROOT = Path(__file__).resolve().parents[1]

STOREYS = [
    "config spectral algorithms verifiers rewards batch utils",
    "cli rank data models",
    "rollout",
    "checkpoint method",
    "workers cluster recipes",
    "single_controller",
    "run",
    "trainer evaluation",
    "analysis",
    "api",
]
"""The packages (or modules) of verl, from the base up. Imports point down; siblings do not import each other. Entry
points (trainer/main_*.py) stand on top."""

FLOORS = {unit: floor for floor, units in enumerate(STOREYS) for unit in units.split()}

BASE_IMPORTS = {
    "cli": {"config"},
    "config": set(),
    "spectral": {"utils"},
    "algorithms": set(),
    "verifiers": {"config"},
    "rewards": {"config", "utils", "verifiers"},
    "batch": {"config", "utils", "verifiers"},
    "utils": {"config"},
}
"""Packages of the base floor, and ``cli`` -> the other packages of verl that each may import."""

HEAVY = {"torch", "vllm", "ray", "transformers"}
"""Packages that take seconds to import."""

LATE_IMPORTS_ALLOWED = {
    "verl.run.tracker_backends": "TensorBoard's writer is loaded only by runs that ask for it",
    "verl.rollout.environments.tools": "processes of environments start in a tenth of the time without transformers",
    "verl.utils.json_state": "processes of environments start in a tenth of the time without torch",
}
"""Modules, besides entry points, with a heavy import inside a function: module name -> why it must be so."""

MODULES_BY_NAME = {
    "verl": "public names are loaded when they are first used",
    "verl.api": "names the entry points, which run in processes of their own",
    "verl.rollout.engines": "the table of engines: each is imported only where it runs",
    "verl.rollout.environments.verl_tools": "stands in for modules that tool classes written for veRL import",
    "verl.config.judge": "names the function that asks the judge",
    "verl.config.rewards": "names the verifiers as a part of sums",
    "verl.rewards.code": "a script that the sandbox runs imports what programs may use",
    "verl.rewards.registry": "the table of verifiers: a run imports only those that its data needs",
    "verl.trainer.main_ppo": "becomes the analysis where flags of the paper's release ask for it",
    "verl.trainer.ppo.run": "names the worker role of PPO: only Ray's processes import it",
    "verl.trainer.sft_trainer": "names the worker role of supervised fine-tuning",
    "verl.evaluation.generation": "names the worker role of evaluation",
    "verl.evaluation.reranking": "names the worker role of reward models",
    "verl.rollout.environments.conversations": "names the environment that some templates need",
    "verl.analysis.analyse": "names the worker role of the analysis",
    "verl.single_controller.worker_group": "imports the worker role that it is given",
    "verl.rank.calculator": "names the function that reduces hidden states: vLLM's options are JSON",
    "vllm_patches.options": "imports the function that vLLM's options name",
    "verl.utils.user_code": "imports a user's code: functions, methods, data sets, ...",
    "verl.run.page": "starts verl-report as a process",
}
"""Modules that name a module in a string, which no other rule here sees, or import one by its name -> why."""

RELEASE_PATHS = {
    "verl.trainer.metrics_calculator": "RepresentationMetricsCalculator",
    "verl.trainer.metrics_utils": "velocity",
    "verl.trainer.reward_manager_versions": "RewardManager",
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
    "verl.trainer.main_ppo": "main",
    "verl.workers.fsdp_workers": "ActorRolloutRefWorker",
}
"""Where readers of the paper's release look -> what they find there."""

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 90

BUDGETS = {
    "algorithms": 1836,
    "analysis": 1382,
    "api": 186,
    "batch": 838,
    "checkpoint": 1317,
    "cli": 1352,
    "cluster": 1527,
    "config": 3952,
    "data": 2013,
    "evaluation": 2788,
    "method": 535,
    "models": 3815,
    "rank": 1223,
    "recipes": 1909,
    "rewards": 1821,
    "rollout": 5774,
    "run": 2625,
    "single_controller": 1642,
    "spectral": 1650,
    "trainer": 4067,
    "utils": 1725,
    "verifiers": 3142,
    "verl": 57,
    "vllm_patches": 1906,
    "workers": 1193,
}
"""Raw lines that each room of ``verl/``, and the plugin, may have. A change that needs more raises its room here, and
its commit message names the idea that the lines pay for."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name, absolute, and where it is imported."""

    target: str
    """Dotted name; of ``from a import b`` it is ``a.b``, whether b is a module or not."""
    line: int
    late: bool
    """Inside a function, thus executed when the function is called."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    source: str

    @property
    def unit(self) -> str:
        """The part of verl that the module belongs to, named in ``STOREYS``; empty for ``verl`` itself."""
        return unit_of(self.name)

    @property
    def is_entry_point(self) -> bool:
        return self.name.startswith("verl.trainer.main_")

    @property
    def where(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> list[Import]:
        return list(find_imports(self.tree))


def unit_of(name: str) -> str:
    """``data`` for ``verl.data.records``; empty outside verl's packages."""
    parts = name.split(".")
    return parts[1] if parts[0] == "verl" and len(parts) > 1 else ""


def top_level(name: str) -> str:
    return name.partition(".")[0]


def find_imports(node: ast.AST, late: bool = False) -> Iterator[Import]:
    """Every import below ``node``; ruff refuses relative ones."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, late)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}".removesuffix(".*"), child.lineno, late)
        else:
            yield from find_imports(child, late or isinstance(child, FunctionNode | ast.Lambda))


@cache
def modules(*trees: str) -> tuple[Module, ...]:
    """The source files under the given folders of the repository."""
    found = []
    for tree in trees:
        paths = sorted((ROOT / tree).rglob("*.py"))
        assert paths, f"{tree}/: no Python files, so nothing was checked"
        for path in paths:
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, path.read_text()))
    return tuple(found)


EVERYTHING = modules("verl", "verl_pages", "vllm_patches")


def num_lines(function: FunctionNode) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def check(violations: list[str], rule: str) -> None:
    assert not violations, "\n  ".join([rule, *violations])


def check_imports(found: Iterable[Module], wrong: Callable[[Module, Import], bool], rule: str) -> None:
    """Fail with every import of these modules that is ``wrong``."""
    check([f"{m.where}:{i.line} imports {i.target}" for m in found for i in m.imports if wrong(m, i)], rule)


def test_every_package_has_a_floor():
    unknown = {module.unit for module in modules("verl")} - FLOORS.keys() - {""}
    assert not unknown, f"packages of verl without a floor, add them to STOREYS: {sorted(unknown)}"


def test_imports_point_down():
    def wrong(module: Module, imported: Import) -> bool:
        unit = unit_of(imported.target)
        if unit not in FLOORS or unit == module.unit or module.unit in BASE_IMPORTS or module.is_entry_point:
            return False
        return module.unit == "" or FLOORS[unit] >= FLOORS[module.unit]

    check_imports(modules("verl"), wrong, "imports go down the floors only (CONTRIBUTING.md, tour):")


def test_base_floor_imports_only_what_it_may():
    base = [module for module in modules("verl") if module.unit in BASE_IMPORTS]

    def wrong(module: Module, imported: Import) -> bool:
        allowed = BASE_IMPORTS[module.unit] | {module.unit}
        return top_level(imported.target) == "verl" and unit_of(imported.target) not in allowed

    check_imports(base, wrong, f"these packages may import only {BASE_IMPORTS}:")


PLUGIN_NEEDS = {"vllm_patches", "vllm", "torch", "numpy", "packaging", "safetensors"}
"""The last three are vLLM's own dependencies."""


@pytest.mark.parametrize(
    ("tree", "allowed"),
    [
        ("verl/spectral", {"torch", "verl"}),
        ("verl/algorithms", {"numpy", "torch", "verl"}),
        ("vllm_patches", PLUGIN_NEEDS),
    ],
)
def test_packages_that_stand_alone(tree: str, allowed: set[str]):
    known = allowed | sys.stdlib_module_names
    rule = f"besides the standard library, {tree} imports {sorted(allowed)} alone:"
    check_imports(modules(tree), lambda _, i: top_level(i.target) not in known, rule)


@pytest.mark.parametrize(
    ("target", "importers", "rule"),
    [
        ("verl.trainer.main_", (), "entry points stand on top; move what is shared below them:"),
        ("vllm_patches", ("verl.rollout", "vllm_patches"), "vllm_patches is imported in verl/rollout alone:"),
        ("verl.recipes.", "verl.recipes", "verl.recipes is named by import path in configs/experiment, not imported:"),
    ],
)
def test_restricted_imports(target: str, importers: str | tuple[str, ...], rule: str):
    def wrong(module: Module, imported: Import) -> bool:
        return imported.target.startswith(target) and not imported.target.startswith(module.name)

    check_imports([module for module in EVERYTHING if not module.name.startswith(importers)], wrong, rule)


PAGES_MAY_IMPORT = ("verl.config.errors", "verl.config.run_file", "verl.utils.files", "verl.utils.portable")


def test_pages_read_folders():
    def wrong(_: Module, imported: Import) -> bool:
        return top_level(imported.target) == "verl" and not imported.target.startswith(PAGES_MAY_IMPORT)

    check_imports(modules("verl_pages"), wrong, f"of verl, verl_pages imports {PAGES_MAY_IMPORT} alone:")


def test_heavy_imports_stand_at_the_top():
    def late(_: Module, imported: Import) -> bool:
        return imported.late and top_level(imported.target) in HEAVY | {"verl"}

    found = [m for m in modules("verl") if not m.is_entry_point and m.name not in LATE_IMPORTS_ALLOWED]
    check_imports(found, late, f"only entry points import {sorted(HEAVY)} and verl itself late:")
    needed = {module.name for module in modules("verl") if any(late(module, i) for i in module.imports)}
    assert LATE_IMPORTS_ALLOWED.keys() <= needed, "remove from LATE_IMPORTS_ALLOWED what needs no exception"


MODULE_NAME = re.compile(
    r"""["'](verl|verl_pages|vllm_patches)\.[\w.{}]*["':]|\{__name__\}"""
    r"""|\b(import_module|__import__|resolve_name|__module__)\b"""
)


def test_modules_are_named_in_strings_only_where_they_must():
    naming = {module.name for module in EVERYTHING if MODULE_NAME.search(module.source)}
    assert naming == MODULES_BY_NAME.keys(), "import it, or say in MODULES_BY_NAME why a string has to name it"


@pytest.mark.parametrize(("name", "public"), RELEASE_PATHS.items())
def test_release_import_paths_work(name: str, public: str):
    assert hasattr(importlib.import_module(name), public)
    (module,) = (module for module in modules("verl") if module.name == name)
    code = [line for line in module.source.splitlines() if line.strip()]
    # The trainer and the entry point live at their paths; the others are re-exports.
    assert len(code) <= 15 or module.name in ("verl.trainer.ppo.ray_trainer", "verl.trainer.main_ppo")


def test_no_circular_imports():
    names = {module.name for module in EVERYTHING}
    graph = {}
    for module in EVERYTHING:
        # "from a import b" points at the module a.b where there is one, and at a where b is a name in it.
        targets = {i.target if i.target in names else i.target.rpartition(".")[0] for i in module.imports}
        graph[module.name] = (targets & names) - {module.name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("circular import: " + " <- ".join(error.args[1]))


def test_modules_and_functions_are_small():
    everything = modules("verl", "verl_pages", "vllm_patches", "scripts", "benchmarks")
    lengths = {module.where: module.source.count("\n") for module in everything}
    long = [f"{where}: {lines} lines" for where, lines in lengths.items() if lines > MAX_MODULE_LINES]
    check(long, f"modules have at most {MAX_MODULE_LINES} lines; ask what second room each one holds:")
    long = [
        f"{module.where}:{function.lineno} {function.name}: {num_lines(function)} lines"
        for module in everything
        for function in ast.walk(module.tree)
        if isinstance(function, FunctionNode) and num_lines(function) > MAX_FUNCTION_LINES
    ]
    check(long, f"functions have at most {MAX_FUNCTION_LINES} lines:")


def test_rooms_stay_within_their_budgets():
    lines = Counter[str]()
    for module in modules("verl", "vllm_patches"):
        lines[module.unit or top_level(module.name)] += module.source.count("\n")
    check([f"{room} has no budget" for room in lines.keys() - BUDGETS.keys()], "every room has a row in BUDGETS:")
    over = [f"{room}: {lines[room]} lines, budget {budget}" for room, budget in BUDGETS.items() if lines[room] > budget]
    check(over, "a room grew past its budget; delete something, or raise BUDGETS and say what the lines pay for:")


def test_quick_tests_import_no_vllm():
    known = {module.name: module for module in (*EVERYTHING, *modules("tests"))}

    def imported(name: str) -> Iterator[str]:
        """The names that importing ``name`` imports; a name in a module counts as the module."""
        yield from [name.rpartition(".")[0]] * ("." in name)
        yield from (i.target for i in known[name].imports if not i.late) if name in known else ()

    def reaches_vllm(name: str) -> bool:
        seen, queue = {name}, [name]
        while queue:
            new = set(imported(queue.pop())) - seen
            seen |= new
            queue += new
        return "vllm" in seen

    quick = [m for m in modules("tests") if m.path.name.startswith("test_") and not needs_vllm(m.path)]
    assert len(quick) > 200
    check([m.where for m in quick if reaches_vllm(m.name)], "tests import vLLM: list them in tests.tiers.NEED_VLLM")


def test_training_loop_fits_on_a_page():
    (module,) = (module for module in modules("verl") if module.name == "verl.trainer.ppo.ray_trainer")
    (trainer,) = (n for n in module.tree.body if isinstance(n, ast.ClassDef) and n.name == "RayPPOTrainer")
    (loop,) = (node for node in trainer.body if isinstance(node, FunctionNode) and node.name == "_train")
    assert 20 < num_lines(loop) < 50, "RayPPOTrainer._train reads like the list of a step's phases, under 50 lines"


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["verl.config", "verl.rollout.environments.pool", "verl.rewards.pool"])
def test_config_and_pools_import_nothing_heavy(prefix: str):
    names = [module.name for module in modules("verl") if f"{module.name}.".startswith(f"{prefix}.")]
    code = f"import sys, {', '.join(names)}; print(*({HEAVY | {'sympy', 'math_verify'}!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [], f"importing {prefix} loads {result.stdout.strip()}"


HEADLESS = re.compile(r"\s*(What|Those|Where|That|Whoever)\b")
"""Beginning of a docstring that has no head; one begins with a verb or with a noun."""

MAX_HEADLESS = {
    "verl/rank": 2,
    "verl/rollout": 1,
    "verl/single_controller": 5,
    "verl/spectral": 1,
    "verl_pages/curves.py": 1,
    "verl_pages/html.py": 1,
    "verl_pages/names.py": 1,
    "verl_pages/options.py": 1,
    "verl_pages/run_folder.py": 2,
    "verl_pages/timeline.py": 1,
    "vllm_patches/options.py": 1,
    "vllm_patches/sampler.py": 1,
}
"""Folder -> headless docstrings that are left. These numbers only shrink."""

MAX_TEST_NAME = 60


def test_docstrings_begin_with_a_verb_or_noun():
    found = Counter[str]()
    for module in EVERYTHING:
        texts = (node.value for node in ast.walk(module.tree) if isinstance(node, ast.Expr))
        constants = [text.value for text in texts if isinstance(text, ast.Constant)]
        folder = "/".join(module.path.relative_to(ROOT).parts[:2])
        found[folder] += sum(isinstance(text, str) and bool(HEADLESS.match(text)) for text in constants)
    more = [f"{folder}: {n}" for folder, n in found.items() if n > MAX_HEADLESS.get(folder, 0)]
    check(more, "docstrings that begin with What, Those, Where, That or Whoever:")


def test_names_of_tests_are_short():
    names = [
        f"{module.where}: {name}"
        for module in modules("tests")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", module.source, re.MULTILINE)
        if len(name) > MAX_TEST_NAME
    ]
    check(names, f"names of tests have at most {MAX_TEST_NAME} characters, the thing and what it does:")
