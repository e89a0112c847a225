"""Which state a layer's number stands for."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Qwen2Config

from tests.models.conftest import TINY
from verl.models.hidden_states import record_states
from verl.models.output_head import Scoring, ScoringTargets, chunk_output_head


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(**TINY)).eval()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [0, 2])
def test_layers_are_those_of_transformers_hidden_states(model, chunk: int):
    ids = torch.arange(10).view(2, 5)
    expected = model(ids, output_hidden_states=True).hidden_states[1:]
    given = {}
    if chunk:
        chunk_output_head(model, chunk)
        given["targets"] = ScoringTargets(torch.arange(10), torch.arange(10), Scoring(1.0))
    for layers in ([-1], [2, 0], [-3, 1, -1]):
        with record_states(model, layers) as states:
            model(ids, use_cache=False, **given)
        for layer, found in zip(layers, states, strict=True):
            assert torch.equal(found, expected[layer])


def test_nothing_is_kept_afterwards(model):
    with record_states(model, [0, -1]) as states:
        model(torch.arange(3)[None])
    model(torch.arange(3)[None])
    assert len(states) == 2 and not any(module._forward_hooks for module in model.modules())
    # Without layers nothing is asked of the model, whatever it is.
    with record_states(torch.nn.Linear(1, 1), ()) as states:
        pass
    assert states == []


@torch.no_grad()
def test_layers_are_those_of_the_text_model_of_one_that_sees_images():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=sizes | {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 50, "head_dim": 8},
        # As many layers as the text model has.
        vision_config=sizes | {"num_hidden_layers": 2, "image_size": 28, "patch_size": 14},
        **{"mm_tokens_per_image": 4, "image_token_index": 49, "boi_token_index": 48, "eoi_token_index": 47},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(10).view(2, 5)
    expected = model(ids, output_hidden_states=True).hidden_states[1:]
    with record_states(model, [0, -1]) as states:
        model(ids, use_cache=False)
    assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3], r"^calculator.layers=\[3\]: the model has 3 layers, from -3 to 2$"),
        ([-4], r"the model has 3 layers"),
        ([-1, 2], r"^calculator.layers=\[-1, 2\]: names a layer of the model's 3 twice$"),
    ],
)
def test_layers_that_do_not_exist_are_named(model, layers: list[int], message: str):
    with pytest.raises(ValueError, match=message), record_states(model, layers):
        pass
