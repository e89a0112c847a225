"""Write the tables of TRAINING_CONFIG.md: every option with its meaning, the release's flags, the shipped configs.

python scripts/make_training_config.py [--check]

Meanings are the docstrings of the fields in verl/config/, defaults are those of the composed configs/. With --check
nothing is written, and exit code 1 means that the file is stale.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl.cli.dialects import MARKS
from verl.cli.rules import FLAGS
from verl.cli.rules import RELEASE as RELEASE_OPTIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "TRAINING_CONFIG.md"
CONFIGS = ROOT / "configs"

JOBS = {
    "ppo_trainer": ("PPOConfig", "Options of the main job", "`bash train.sh`, or `python -m verl.trainer.main_ppo`"),
    "sft": ("SFTConfig", "Options of supervised fine-tuning", "`python -m verl.trainer.main_sft`"),
    "evaluation": (
        "EvaluationConfig",
        "Options of evaluation",
        "`bash eval.sh`, or `python -m verl.trainer.main_eval`",
    ),
    "analysis": ("AnalysisConfig", "Options of the paper's analysis", "`python -m verl.trainer.main_analysis`"),
}
"""File of configs/ -> its dataclass, the section's title, and the command."""

GROUPS = ["experiment", "preset", "model", "data", "trainer", "algorithm", "reward_manager", "evaluation"]
"""Groups of configs/ whose files users choose from."""

RELEASE_COMMAND = """\
The script calls `python -m verl.trainer.main_ppo` with Hydra options, and that command runs here too. An option that
only the release has (the first table), or `rollout.name=hidden_vllm`, marks it; what it leaves out comes from
`preset=paper`. Options that veRL has as well are read as [docs/from_verl.md](docs/from_verl.md) says, except for those
of the second table.
"""

BEGIN = """\
<!-- Written by scripts/make_training_config.py from here on; change the docstrings in verl/config/ or the files in
configs/, then run it again. -->
"""
"""What is above it in the page is written by hand."""


@dataclass(frozen=True)
class Field:
    """One field of a config dataclass, read from the source."""

    name: str
    type: str
    doc: str


@dataclass(frozen=True)
class Schema:
    """One config dataclass, read from the source."""

    doc: str
    fields: list[Field]


def read_schemas(folder: Path) -> dict[str, Schema]:
    """Every dataclass of the modules in ``folder`` by name; fields of base classes come first."""
    nodes = {
        node.name: node
        for path in sorted(folder.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    }
    return {name: Schema(ast.get_docstring(node) or "", list(_fields(node, nodes))) for name, node in nodes.items()}


def _fields(node: ast.ClassDef, nodes: dict[str, ast.ClassDef]) -> Iterator[Field]:
    for base in node.bases:
        if ast.unparse(base) in nodes:
            yield from _fields(nodes[ast.unparse(base)], nodes)
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            value = following.value if isinstance(following, ast.Expr) else None
            doc = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
            yield Field(ast.unparse(statement.target), ast.unparse(statement.annotation), doc)


def markdown(doc: str) -> str:
    """A docstring as the text of one table cell."""
    parts = " ".join(doc.split()).replace("``", "`").replace("|", "\\|").split("`")
    # Outside code, "<name>" would be an HTML tag, which browsers do not show.
    parts[::2] = [text.replace("<", "\\<") for text in parts[::2]]
    return "`".join(parts)


def shown(value: Any) -> str:
    """A default as the command line would take it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(shown(element) for element in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(element)}" for key, element in value.items()) + "}"
    return str(value)


def option_rows(schema: Schema, schemas: dict[str, Schema], values: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    """(option, default, meaning) of every option in ``schema``; an option that the YAML does not set has no default."""
    for field in schema.fields:
        name, value = f"{prefix}{field.name}", values.get(field.name) if isinstance(values, dict) else None
        if field.type in schemas:
            yield from option_rows(schemas[field.type], schemas, value, f"{name}.")
        else:
            known = isinstance(values, dict) and field.name in values
            default = f"`{shown(value)}`".replace("|", "\\|") if known and shown(value) else "–"
            yield f"`{name}`", default, markdown(field.doc)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def job_sections(name: str, schemas: dict[str, Schema]) -> Iterator[str]:
    """The sections of one job: options without a group, then one table per group."""
    schema_name, title, command = JOBS[name]
    schema = schemas[schema_name]
    # Unresolved, so that the page shows which option follows another.
    values: Any = OmegaConf.to_container(compose(name), resolve=False)
    yield f"## {title}\n\n{command}: `configs/{name}.yaml`, read into `{schema_name}`.\n"
    alone = Schema("", [field for field in schema.fields if field.type not in schemas])
    head = ["Option", "Default", "Meaning"]
    yield table(head, list(option_rows(alone, schemas, values, "")))
    for field in schema.fields:
        if field.type in schemas:
            group, doc = schemas[field.type], field.doc or schemas[field.type].doc
            rows = list(option_rows(group, schemas, values.get(field.name), f"{field.name}."))
            yield f"### {field.name}\n\n{markdown(doc)}\n\n{table(head, rows)}"


def flags_section() -> str:
    flags = [(f"`--{name}`", markdown(flag.describe())) for name, flag in FLAGS.items()]
    options = [(f"`{name}`", markdown(option.describe())) for name, option in RELEASE_OPTIONS.items()]
    marks, others = (
        table(["Option of the release", "Becomes"], [row for row in options if (row[0].strip("`") in MARKS) is marking])
        for marking in (True, False)
    )
    return "\n".join([table(["Flag", "Becomes"], flags), RELEASE_COMMAND, marks, others])


def first_comment(path: Path) -> str:
    """The first sentence of a YAML file's first comment."""
    lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line for line in lines if not line.startswith("@package"))
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def files_section() -> str:
    """The files of each group of configs/."""
    link = "[configs/README.md](configs/README.md)"
    parts = [f"## Shipped configurations\n\nChoose one with `group=file`; {link} explains how to combine them.\n"]
    for group in GROUPS:
        files = sorted((CONFIGS / group).glob("*.yaml"))
        rows = [(f"`{group}={path.stem}`", markdown(first_comment(path))) for path in files]
        parts.append(table([group, "What it is"], rows))
    return "\n".join(parts)


def page() -> str:
    """The whole file."""
    schemas = read_schemas(ROOT / "verl" / "config")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        jobs = [section for name in JOBS for section in job_sections(name, schemas)]
    head = PAGE.read_text().partition(BEGIN)[0]
    return "\n".join([f"{head}{BEGIN}", flags_section(), files_section(), *jobs])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or check it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    check = parser.parse_args(argv).check
    text = page()
    if not check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print("TRAINING_CONFIG.md is stale; run: python scripts/make_training_config.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
