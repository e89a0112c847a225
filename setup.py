"""Packaging of VERL. Install from a checkout with ``pip install --no-deps --no-build-isolation -e .``."""

import ast
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def read_version() -> str:
    """``__version__`` of ``verl/__init__.py``, read without importing the package."""
    for node in ast.parse((ROOT / "verl" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ValueError('verl/__init__.py: no line __version__ = "..."')


def read_requirements(name: str, extra: str = "") -> list[str]:
    """The packages that ``requirements/<name>`` lists above its first heading, or below headings of ``extra``."""
    found, extras = [], [""]
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith("# == "):
            extras = line.strip("# =:").split()
        elif line and not line.startswith(("#", "-r")) and extra in extras:
            found.append(line.strip())
    return found


class BuildWithShippedFiles(build_py):
    """Copies ``configs/`` and the embedded task's data into the package, where ``verl.config.paths.SHIPPED`` is."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            models = ("data/tiny_model", "data/tiny_tool_model", "data/tiny_teacher")
            for name in ("configs", "data/arithmetic", "data/arithmetic_tools", "data/word_problems", *models):
                target = Path(self.build_lib, "verl", "shipped", name)
                shutil.copytree(ROOT / name, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    name="verl-rank",
    version=read_version(),
    description="Reinforcement learning with verifiable rewards, shaped by the effective rank of hidden states",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["verl", "verl.*", "verl_pages", "vllm_patches", "vllm_patches.*"]),
    # Naming the root explicitly makes an editable installation a plain path entry: packages that are added later
    # are found without installing again.
    package_dir={"": "."},
    package_data={
        "verl.cli": ["*.yaml"],
        "verl.data": ["*.yaml"],
        "verl.evaluation.benchmarks": ["*.yaml"],
        "verl.analysis": ["*.mplstyle"],
        "verl.verifiers": ["*.toml"],
        "verl_pages": ["assets/*", "assets/katex/*", "assets/katex/fonts/*"],
    },
    cmdclass={"build_py": BuildWithShippedFiles},
    # What pages, scores and rank metrics need. Extras add what CPU and GPU share; torch and vLLM are installed
    # beforehand, in the build that fits.
    install_requires=read_requirements("common.txt"),
    extras_require={
        "train": read_requirements("common.txt", "train"),
        "eval": read_requirements("common.txt", "eval"),
        "analysis": read_requirements("common.txt", "analysis") + read_requirements("analysis.txt"),
        "cpu": read_requirements("cpu.txt"),
        "flash-attn": read_requirements("flash-attn.txt"),
    },
    entry_points={
        "console_scripts": [
            "verl-train = verl.trainer.main_ppo:main",
            "verl-sft = verl.trainer.main_sft:main",
            "verl-export = verl.trainer.main_export:main",
            "verl-eval = verl.trainer.main_eval:main",
            "verl-report = verl_pages.command:main",
            "verl-analysis = verl.trainer.main_analysis:main",
        ],
        "vllm.general_plugins": ["verl_hidden_states = vllm_patches:register"],
    },
)
