"""The files of docs/multinode.md that no test can run: their commands fit the schema, and what they name exists."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from verl.cluster.environment import REQUEUE
from verl.cluster.launch import make_token
from verl.cluster.probe import ROOM
from verl.config import PPOConfig, load_config

PAGE = (ROOT / "docs" / "multinode.md").read_text()


def test_the_manifest_asks_for_what_the_run_needs():
    job = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster, (workers,) = job["spec"]["rayClusterSpec"], job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    before, _, options = job["spec"]["entrypoint"].partition(" && bash train.sh ")
    assert before == "cd /verl"
    config = load_config(PPOConfig, "ppo_trainer", shlex.split(options))
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] == config.trainer.nnodes == 3
    assert container["resources"]["limits"]["nvidia.com/gpu"] == config.trainer.n_gpus_per_node == 8
    # The head has no GPU, so the driver cannot tell by its own machine.
    assert config.device == "cuda" and cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["authOptions"] == {"mode": "token"}
    shared = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/shared" in shared and config.trainer.default_local_dir.startswith("/shared/")


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_dockerfiles_install_what_setup_does(kind: str):
    text = (ROOT / "docker" / f"Dockerfile.{kind}").read_text().replace("\\\n", " ")
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    for files in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in files.split()), files
    installed = re.findall(r"-r (requirements/\S+)", text)
    expected = {"cpu": ["requirements/cpu.txt", "requirements/cpu-no-deps.txt"], "gpu": ["requirements/gpu.txt"]}
    assert installed == expected[kind] and all(f"-r {name}" in setup for name in installed)
    # cpu.txt's torch would be CUDA's: its CPU build must be there first.
    first = re.search(r"pip install.*", text)
    assert first is not None and ("torch==$torch+cpu" in first[0]) == (kind == "cpu")
    assert re.search(r"FROM python:3\.1[12]-slim\n", text) and "scripts/check_environment.py" in text
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".venv", "outputs"} <= set(ignored)


def test_the_page_has_every_variable_of_the_script():
    files = ("scripts/cluster.sh", "scripts/environment.sh", "verl/cluster/launch.py")
    scripts = "".join((ROOT / name).read_text() for name in files)
    read = set(re.findall(r"(?:\$\{?|\")((?:VERL|MASTER|NODE|NNODES)[A-Z_]*)", scripts)) - {"VERL_HOSTS"}
    needed = "NNODES NODE_RANK MASTER_ADDR MASTER_PORT VERL_CLUSTER_DIR VERL_REMOTE_DIR VERL_JOIN_TIMEOUT"
    assert read >= set(needed.split())
    assert {name for name in read if f"`{name}" not in PAGE} == set()
    assert f"exit code {REQUEUE}:" in PAGE and f"{ROOM >> 30} GiB free" in PAGE


def test_the_commands_of_the_page_fit_the_schema():
    lines = [line.partition("  #")[0] for line in PAGE.replace("\\\n", " ").splitlines() if ".sh" in line]
    commands = [line for line in lines if re.match(r"([A-Z_]+=\S+ )*bash train\.sh", line)]
    assert len(commands) >= 6
    for command in commands:
        options = shlex.split(command.partition("train.sh")[2])
        kept = [word for word in options if "=" in word and not word.startswith(("-", "hydra", "seed"))]
        load_config(PPOConfig, "ppo_trainer", kept)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "requeued"), [(0, ""), (1, ""), (75, "requeue 41")])
def test_slurm_is_asked_to_requeue(tmp_path: Path, code: int, requeued: str):
    for name, text in {"srun": f"exit {code}", "scontrol": f'echo "$@" >{tmp_path}/asked'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "41"}
    ended = subprocess.run(["bash", ROOT / "scripts" / "slurm" / "train.sbatch"], env=os.environ | slurm)
    asked = tmp_path / "asked"
    assert (ended.returncode, asked.read_text().strip() if asked.exists() else "") == (code, requeued)


def test_a_link_under_the_tokens_name_does_not_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    theirs = tmp_path / "theirs"
    theirs.touch(mode=0o666)
    token = tmp_path / "token"
    token.symlink_to(theirs)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")
    make_token(tmp_path)
    assert theirs.read_text() == "" and not token.is_symlink()
    assert (len(token.read_text()), token.stat().st_mode & 0o777) == (64, 0o600)
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token)
