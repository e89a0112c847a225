"""What a user may ask for, and how a wrong request is named before an engine starts."""

from dataclasses import dataclass

import pytest
import torch
import vllm
from torch import Tensor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from tests.tables import refusals
from vllm_patches import register
from vllm_patches.compat import is_supported, require
from vllm_patches.options import CaptureOptions


def means(states: list[Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """A reducer."""
    return {"mean": torch.stack([scale * response.mean(dim=0) for response in states])}


def parse(**options: object) -> CaptureOptions:
    parsed = CaptureOptions.parse({"hidden_states": options})
    assert parsed is not None
    return parsed


def test_silent_engines_are_left_alone():
    assert CaptureOptions.parse({}) is None
    assert CaptureOptions.parse(None) is None
    assert CaptureOptions.parse({"hidden_states": None, "other": 1}) is None


def test_dtype_is_the_models_unless_named():
    assert parse().resolve_dtype(torch.bfloat16) == torch.bfloat16
    assert parse(dtype="float32").resolve_dtype(torch.bfloat16) == torch.float32


def test_layers_count_from_either_end(refused):
    assert parse(layers=[-1, 0, 2, -3]).resolve_layers(6) == (5, 0, 2, 3)
    for layers, line in (
        ([6], "the model has 6 layers: from -6 to 5..."),
        ([-1, 5], "names one of the model's 6 layers twice..."),
    ):
        with refused(f"...['layers']={layers}: {line}", ValueError):
            parse(layers=layers).resolve_layers(6)


def test_a_reducer_is_loaded_with_its_options():
    reducer = parse(reducer=f"{__name__}:means", reducer_options={"scale": 2.0}).load_reducer()
    result = reducer([torch.ones(3, 1, 2)])
    assert result["mean"].tolist() == [[[2.0, 2.0]]]
    assert parse().load_reducer() is None


@pytest.mark.parametrize(("raw", "line"), refusals("vllm_patches/refusals.txt", "options"))
def test_option_that_cannot_be_served_is_refused(refused, raw: str, line: str):
    with refused(line, ValueError):
        CaptureOptions.parse({"hidden_states": eval(raw)})


def test_known_versions():
    known = ["0.24.0", "0.32.0+cpu", "0.33.1.dev3"]
    assert [is_supported(version) for version in known] == [True, True, True]
    assert not any(is_supported(version) for version in ["0.23.4", "0.34.0rc1", "1.0", "dev"])


@dataclass
class EngineConfig:
    additional_config: dict[str, object]


def test_other_vllm_versions_refuse_capture_only(monkeypatch: pytest.MonkeyPatch):
    started = []
    for engine_class in (LLMEngine, AsyncLLM):
        monkeypatch.setattr(engine_class, "__init__", lambda self, vllm_config: started.append(vllm_config))
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    register.__wrapped__()
    for engine_class in (LLMEngine, AsyncLLM):
        engine_class(EngineConfig({"something": "else"}))
        with pytest.raises(RuntimeError, match=r"vLLM 0.99.1: hidden states and sampling streams need vllm"):
            engine_class(vllm_config=EngineConfig({"hidden_states": {}}))
    assert len(started) == 2


def test_a_vllm_that_lacks_something_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LLMEngine, "__init__", lambda self, vllm_config: None)
    monkeypatch.setattr(AsyncLLM, "__init__", lambda self, vllm_config: None)
    monkeypatch.delattr(LLMEngine, "step")
    register.__wrapped__()
    LLMEngine(EngineConfig({}))
    with pytest.raises(RuntimeError, match="no hidden states and no sampling streams: .*LLMEngine has no step"):
        LLMEngine(EngineConfig({"hidden_states": {}}))


def test_what_a_version_lacks_is_named():
    require(str, "upper", "lower")
    with pytest.raises(RuntimeError, match=r"vLLM .*: str has no shout, which .* relies on; it supports vllm"):
        require(str, "upper", "shout")
    with pytest.raises(RuntimeError, match="int has no shout, whisper"):
        require(3, "shout", "whisper")
