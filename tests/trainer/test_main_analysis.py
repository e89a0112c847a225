"""The entry point of the analysis."""

import importlib.util

import pytest
from omegaconf import OmegaConf

from verl.config import ConfigError
from verl.trainer import main_analysis


def test_missing_packages_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(main_analysis, "parse_analysis_config", lambda tree: tree)
    assert main_analysis.parse(OmegaConf.create()) == {}
    find = importlib.util.find_spec
    missing = ("rouge_score", "openpyxl")
    monkeypatch.setattr(main_analysis, "find_spec", lambda name: None if name in missing else find(name))
    with pytest.raises(ConfigError) as caught:
        main_analysis.parse(OmegaConf.create())
    line = "the analysis needs rouge-score, openpyxl; install them with `pip install rouge-score openpyxl`, or "
    assert str(caught.value).startswith(line)
