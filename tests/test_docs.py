"""The pages of docs/ say what the code says: formulas, options, messages, links."""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

import verl
from tests.kit import shipped_config
from verl.cli.translate import translate
from verl.config import PPOConfig, load_config
from verl.config.load import option_names
from verl.data.records import RL_SCHEMA, rl_record, write_parquet

DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def blocks(name: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[str]:
    """The lines of a page's shell blocks, continued ones as one."""
    return [line for block in blocks(name, "bash") for line in block.replace("\\\n", " ").splitlines()]


def cells(name: str) -> list[list[str]]:
    """The rows of a page's tables but for their headings."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page(name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not set(row[0]) <= set("-: ")]


def test_example_of_the_method_is_computed_again():
    (code,), (expected,) = blocks("method", "python"), blocks("method", "text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == expected


def test_method_names_functions_that_there_are():
    sources = [ROOT / f"verl/rank/{name}.py" for name in ("calculator", "dynamics", "reward_manager", "shaping")]
    trees = [ast.parse(path.read_text()) for path in sources]
    kinds = (ast.FunctionDef, ast.ClassDef)
    known = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}
    in_text = [
        part for line in re.findall(r"\*Code:\*(.*?)\n\n", page("method"), re.DOTALL) for part in line.split("`")
    ]
    named = [name for name in in_text if re.fullmatch(r"[A-Za-z_]+(\.[a-z_]+)?", name)]
    assert len(named) >= 12
    assert {part for name in named for part in name.split(".")} <= known


def test_rank_metrics_of_any_model_in_a_few_lines(tiny_model: Path):
    code = next(block for block in blocks("python", "python") if "AutoModel" in block)
    names: dict[str, object] = {"path": tiny_model, "question": "What is 3 + 4?", "answer": "3 + 4 = 7"}
    exec(code, names)
    metrics = names["metrics"]
    assert isinstance(metrics, dict) and metrics["Effective Rank"].shape == (1,)
    assert 1 < float(metrics["Effective Rank"]) < 9  # of nine tokens


def test_commands_of_the_judge_are_valid():
    """Each command of the section says who judges, and gives the judge the weights that the text says."""
    found = []
    for line in commands("rewards"):
        words = [word for word in shlex.split(line) if word != "..."]
        if words[:2] == ["bash", "train.sh"] and "judge" in line:
            scores = load_config(PPOConfig, "ppo_trainer", words[2:]).reward_score
            found.append((scores.paths_of_custom_functions()["*"], scores.judge.enable and scores.judge.description))
    verified, judge = "verl.rewards.registry:verifier", "verl.rewards.judge:judge"
    both = f"1.0*{verified}+1.0*{judge}"
    assert found == [
        (both, "Qwen/Qwen2.5-7B-Instruct at http://127.0.0.1:8000/v1"),
        (both, "Qwen/Qwen2.5-3B-Instruct, frozen"),
        (f"1.0*{judge}", "the policy itself, with the weights that sampled the responses"),
        (f"{verified}+0.5*{judge}", False),
    ]


def test_every_trl_option_has_a_row():
    listed = (ROOT / "tests/cli/trl_options.txt").read_text().splitlines()
    own = [name for line in listed if not line.startswith("#") for name in line.split()]
    _, _, further = page("from_trl").partition("## Options of GRPOConfig")
    table, _, _ = further.partition("Of transformers'")
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    theirs = [name for names, _ in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(theirs) == sorted(own)
    known = {*option_names(PPOConfig, ""), "experiment", "reward_manager"}
    for text in re.findall(r"`([^`]+)`", further):
        for option in re.findall(r"(?:^|\s)([a-z_]+\.[a-z_.]+)(?==|$)", text):
            assert option in known, option
    values = re.findall(r"`((?:actor|algorithm|rollout|trainer|model|experiment)[\w.]*=[\w.+-]+)(?: |`)", table)
    assert len(values) > 10
    for value in values:
        load_config(PPOConfig, "ppo_trainer", [value])


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """Every text in the code; of one with placeholders, the parts between them."""
    files = [path for folder in ("verl", "scripts") for path in (ROOT / folder).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return (*texts, *(path.read_text() for path in (ROOT / "scripts").glob("*.sh")))


def test_messages_of_troubleshooting_are_those_of_the_code():
    # Before the last table, which has what is seen instead.
    rows = [row for row in cells("troubleshooting") if "/" not in row[0]]
    messages = [m for message, _ in rows for m in re.findall(r"`([^`]{16,})`", message) if " " in m]
    assert len(messages) > 20
    for message in messages:
        for part in filter(None, map(str.strip, message.removeprefix("warning: ").split("..."))):
            assert any(part in text for text in texts_of_the_code()), part


def test_readme_links_every_page_and_the_site_has_it():
    pages = {f"docs/{path.name}" for kind in ("*.md", "*.ipynb") for path in DOCS.glob(kind)}
    table = (ROOT / "README.md").read_text().partition("## Pages")[2]
    linked = [link for link in LINK.findall(table) if link.startswith("docs/")]
    assert sorted(linked) == sorted(pages)  # each once
    navigation = re.findall(r": (docs/\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(page.replace(".ipynb", ".md") for page in pages)


TRAININGS = [
    pytest.param(line, id=path.stem)
    for path in DOCS.glob("*.md")
    for line in commands(path.stem)
    # Those of docs/paper.md, in functions of the shell, are read by tests/e2e/test_paper_page.py.
    if line.startswith("bash train.sh ") and path.stem != "paper" and " -m" not in line and "$'" not in line
]


@pytest.mark.parametrize("line", TRAININGS)
def test_training_commands_of_pages_compose(line: str):
    assert len(TRAININGS) > 20
    overrides = [word for word in translate(shlex.split(line, comments=True)[2:]) if "=" in word]
    assert load_config(PPOConfig, "ppo_trainer", overrides) != shipped_config()


@pytest.mark.slow
@pytest.mark.nightly
def test_tutorial_with_the_embedded_model(tiny_model: Path, tmp_path: Path):
    code, question = blocks("tutorial", "python")
    (tmp_path / "my_data.py").write_text(code)
    subprocess.run([sys.executable, "my_data.py"], cwd=tmp_path, check=True)
    printed = subprocess.run([sys.executable, "-c", question], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "'score': 1.0" in printed.stdout
    (command,) = (line for line in commands("tutorial") if "outputs/try" in line)
    overrides = shlex.split(command.replace("$MODEL", str(tiny_model)))[2:]
    small = ["trainer.n_gpus_per_node=1", "data.max_response_length=16", "rollout.kv_cache_memory_mb=32", "device=cpu"]
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *small], cwd=tmp_path, check=True)
    run = verl.Run(tmp_path / "outputs" / "try")
    assert run.page.is_file() and "boxed{}" in run.samples["prompt"].iloc[0]


@pytest.mark.slow
@pytest.mark.nightly
def test_fine_tuning_then_grpo_of_the_tutorial(tiny_model: Path, tmp_path: Path):
    (row,) = blocks("tutorial", "json")
    data = tmp_path / "my_data"
    data.mkdir()
    (data / "sft.jsonl").write_text((json.dumps(json.loads(row)) + "\n") * 8)
    facts = [{"question": f"{i} + 1", "ground_truth": str(i + 1), "index": i} for i in range(8)]
    for split in ("train", "test"):
        records = [rl_record(data_source="math", split=split, **fact) for fact in facts]
        write_parquet(data / f"{split}.parquet", records, RL_SCHEMA)
    small = ["trainer.n_gpus_per_node=1", "device=cpu"]
    sizes = {
        "verl.trainer.main_sft": ["data.train_batch_size=8", "data.micro_batch_size_per_gpu=8", "data.max_length=128"],
        "verl.trainer.main_ppo": ["trainer.total_training_steps=1", "data.max_response_length=16"],
    }
    sizes["verl.trainer.main_ppo"] += ["rollout.kv_cache_memory_mb=32", "data.max_prompt_length=64"]
    lines = [line for line in commands("tutorial") if "outputs/sft" in line]
    for (module, size), line in zip(sizes.items(), lines, strict=True):
        options = [word for word in shlex.split(line.replace("$MODEL", str(tiny_model))) if "=" in word]
        subprocess.run([sys.executable, "-m", module, *options, *small, *size], cwd=tmp_path, check=True)
    run = yaml.safe_load((tmp_path / "outputs" / "sft_grpo" / "config.yaml").read_text())
    assert run["model"]["path"] == f"{tmp_path}/outputs/sft/global_step_2/actor/huggingface"


def test_notebook_has_its_outputs():
    text = (DOCS / "first_steps.ipynb").read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    without = [cell["source"][0] for cell in cells if not cell["outputs"]]
    assert len(without) == 1 and without[0].startswith("import")
    # As on any machine: no folder of the one that ran it, no moves of a cursor.
    assert not re.search(r"/(tmp|home|root|Users)/|\\u001b", text)


@pytest.mark.slow
@pytest.mark.nightly
def test_notebook(tmp_path: Path):
    cells = json.loads((DOCS / "first_steps.ipynb").read_text())["cells"]
    *body, last = ast.parse("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")).body
    program = f"{ast.unparse(ast.Module(body, []))}\nprint({ast.unparse(last)})\nassert plt.gca().lines\n"
    environment = os.environ | {"MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    (folder,) = (tmp_path / "outputs" / "verl" / "verl_grpo").iterdir()
    assert json.loads((folder / "summary.json").read_text())["steps"] == 5
    assert "'score': 1.0" in ran.stdout.splitlines()[-1]
