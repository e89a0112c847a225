"""Packaging of VERL. Install from a checkout with ``pip install --no-deps --no-build-isolation -e .``."""

import ast
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """``__version__`` of ``verl/__init__.py``, read without importing the package."""
    for node in ast.parse((ROOT / "verl" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ValueError('verl/__init__.py: no line __version__ = "..."')


def read_requirements() -> list[str]:
    """The dependencies that CPU and GPU share; torch and vLLM are installed beforehand, in the build that fits."""
    lines = (ROOT / "requirements" / "common.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


setup(
    name="verl-rank",
    version=read_version(),
    description="Reinforcement learning with verifiable rewards, shaped by the effective rank of hidden states",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["verl", "verl.*", "vllm_patches", "vllm_patches.*"]),
    # Naming the root explicitly makes an editable installation a plain path entry: packages that are added later
    # are found without installing again.
    package_dir={"": "."},
    install_requires=read_requirements(),
    entry_points={
        "console_scripts": [
            "verl-train = verl.trainer.main_ppo:main",
            "verl-sft = verl.trainer.main_sft:main",
            "verl-export = verl.trainer.main_export:main",
        ],
        "vllm.general_plugins": ["verl_hidden_states = vllm_patches:register"],
    },
)
