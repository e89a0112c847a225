"""Attributes that the plugin and the rollout read exist in the installed vLLM, also in code that only GPUs run."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

READERS = [
    *sorted((ROOT / "vllm_patches").glob("*.py")),
    *(ROOT / "verl" / "rollout" / f"{name}.py" for name in ("sleep", "vllm_engine", "vllm_rollout", "vllm_sampler")),
    ROOT / "verl" / "rollout" / "weight_sync.py",
]
PARTS: tuple[str, ...] = (
    "v1",
    "config",
    "engine",
    "entrypoints",
    "distributed",
    "platforms",
    "model_executor/model_loader",
)
PARTS += ("model_executor/layers/fused_moe", "model_executor/models", "lora")
DECLARED = re.compile(r"(?:\.|\bdef |\bclass |^ *(?!async |def |class ))(\w+)", re.MULTILINE)
"""A name after a dot, of a function or class, or at the beginning of a line."""


def read_attributes(source: str) -> set[str]:
    """Names of the attributes that a module reads, strings of ``getattr`` and ``require`` included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "require"):
            strings = (part.value for part in node.args if isinstance(part, ast.Constant))
            names |= {name for name in strings if isinstance(name, str)}
    return names


def known_attributes() -> set[str]:
    """Names that vLLM, this project, or the types of Python, NumPy and torch declare."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    (vllm,) = spec.submodule_search_locations
    sources = [path for part in PARTS for path in Path(vllm, part).rglob("*.py")] + [*Path(vllm).glob("*.py")]
    sources += [path for room in ("verl", "vllm_patches") for path in (ROOT / room).rglob("*.py")]
    names = {name for path in sources for name in DECLARED.findall(path.read_text()) if path not in READERS}
    for path in READERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    kinds = (torch, torch.Tensor, torch.cuda, torch.device, torch.dtype, np, np.ndarray, str, list, dict, set, Version)
    return names.union(*map(dir, kinds))


def test_attributes_exist():
    known = known_attributes()
    assert {path.name: missing for path in READERS if (missing := read_attributes(path.read_text()) - known)} == {}
    assert read_attributes("getattr(runner.input_bach, 'req_ids')") - known == {"input_bach"}
