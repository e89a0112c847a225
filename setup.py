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


def read_requirements(name: str) -> list[str]:
    """The packages that ``requirements/<name>`` lists."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


class BuildWithConfigs(build_py):
    """Copies ``configs/`` into the package, where ``verl.config.load.CONFIG_DIR`` finds it outside a checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "configs", Path(self.build_lib, "verl", "configs"), dirs_exist_ok=True)


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
        "verl.evaluation.report": ["*.mplstyle"],
        "verl.rewards": ["*.toml"],
        "verl_pages": ["assets/*", "assets/katex/*", "assets/katex/fonts/*"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    # What CPU and GPU share; torch and vLLM are installed beforehand, in the build that fits.
    install_requires=read_requirements("common.txt"),
    extras_require={name: read_requirements(f"{name}.txt") for name in ("analysis", "flash-attn")},
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
