"""What a user may ask for, and how a wrong request is named before an engine starts."""

from dataclasses import dataclass

import pytest
import torch
import vllm
from torch import Tensor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

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


def test_defaults():
    options = parse()
    assert options == CaptureOptions()
    assert options.layers == (-1,) and options.keeps_responses and not options.keeps_prompts
    assert options.resolve_dtype(torch.bfloat16) == torch.bfloat16
    assert parse(dtype="float32").resolve_dtype(torch.bfloat16) == torch.float32
    both, prefill = parse(phase="both"), parse(phase="prefill")
    assert both.keeps_prompts and both.keeps_responses
    assert prefill.keeps_prompts and not prefill.keeps_responses


def test_layers_count_from_either_end():
    assert parse(layers=[-1, 0, 2, -3]).resolve_layers(6) == (5, 0, 2, 3)
    with pytest.raises(ValueError, match=r"\['layers'\]=\[6\]: the model has 6 layers: from -6 to 5"):
        parse(layers=[6]).resolve_layers(6)
    with pytest.raises(ValueError, match=r"\['layers'\]=\[-1, 5\]: names one of the model's 6 layers twice"):
        parse(layers=[-1, 5]).resolve_layers(6)


def test_a_reducer_is_loaded_with_its_options():
    reducer = parse(reducer=f"{__name__}:means", reducer_options={"scale": 2.0}).load_reducer()
    result = reducer([torch.ones(3, 1, 2)])
    assert result["mean"].tolist() == [[[2.0, 2.0]]]
    assert parse().load_reducer() is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (True, r"additional_config\['hidden_states'\]=True: must be a mapping such as"),
        ({"layer": [-1]}, r"unknown options \['layer'\]; known: \['layers', 'phase', 'dtype', 'device', 'max_bytes'"),
        ({"layers": -1}, r"\['layers'\]=-1: must be a list of whole numbers"),
        ({"layers": []}, r"\['layers'\]=\[\]: must be a list of whole numbers"),
        ({"layers": [True]}, r"\['layers'\]=\[True\]: must be a list of whole numbers"),
        ({"phase": "decoding"}, r"\['phase'\]='decoding': must be one of \['decode', 'prefill', 'both'\]"),
        ({"device": "cuda"}, r"\['device'\]='cuda': must be one of \['cpu', 'device'\]"),
        ({"dtype": "half"}, r"\['dtype'\]='half': must be one of"),
        ({"max_bytes": 0}, r"\['max_bytes'\]=0: must be a positive number of bytes"),
        ({"reducer": "nowhere:f"}, r"\['reducer'\]='nowhere:f': must be 'module:function' \(No module named 'nowhere'"),
        ({"reducer": "math:nothing"}, r"must be 'module:function' \(module 'math' has no attribute 'nothing'"),
        ({"reducer": "math"}, r"must be 'module:function'"),
        ({"reducer": "math:pi"}, r"\['reducer'\]='math:pi': must be 'module:function' \(3.14.* is not a callable"),
        (
            {"reducer": f"{__name__}:means", "reducer_options": {"size": 1}},
            r"test_options:means got an unexpected keyword",
        ),
        ({"reducer": "math:sqrt", "phase": "prefill"}, r"reduces the states of responses; phase='prefill' keeps none"),
        ({"reducer_options": {"a": 1}}, r"set reducer too, or leave the options out"),
        ({"reducer": "math:sqrt", "reducer_options": 3}, r"must be a mapping of keyword arguments"),
    ],
)
def test_options_that_cannot_be_served_are_named(raw: object, message: str):
    with pytest.raises(ValueError, match=message):
        CaptureOptions.parse({"hidden_states": raw})


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
