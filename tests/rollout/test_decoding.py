"""Decoding by one's own loop against whole forward passes of the same model, without workers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.config.rollout import SamplingConfig
from verl.models.packing import position_ids
from verl.rollout.decoding import decode

STEPS = 7


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 5, 2 and 4 tokens, padded on the left."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 2, 4])
    mask = (torch.arange(5) >= 5 - lengths[:, None]).long()
    return torch.randint(3, 20, (3, 5)) * mask, mask


def draws(seed: int) -> torch.Tensor:
    return torch.rand(3, STEPS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model, batch, token_ids: torch.Tensor):
    """Logits [B, STEPS, V] and the hidden states [B, STEPS, L, D] that each token was predicted from."""
    input_ids, prompt_mask = batch
    ids = torch.cat([input_ids, token_ids], dim=1)
    mask = torch.cat([prompt_mask, torch.ones_like(token_ids)], dim=1)
    output = model(ids, attention_mask=mask, position_ids=position_ids(mask), output_hidden_states=True)
    first = input_ids.shape[1] - 1
    states = torch.stack([output.hidden_states[1], output.hidden_states[-1]], dim=2)
    return output.logits[:, first:-1], states[:, first:-1]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.0, 1.0, -1), (1.0, 1.0, -1), (0.7, 1.0, 3), (1.3, 0.6, -1), (0.5, 0.9, 8)]
)
def test_tokens_come_from_the_distribution_that_is_recorded(model, batch, temperature, top_p, top_k):
    sampling = SamplingConfig(top_p, top_k, 0.0, 1.0, n=1, temperature=temperature)
    decoded = decode(model, *batch, draws(1), sampling, [], [0, -1])
    logits, states = forward(model, batch, decoded.token_ids)
    torch.testing.assert_close(decoded.states, states, rtol=0, atol=1e-5)
    assert not decoded.ended.any() and (decoded.lengths == STEPS).all()
    if temperature == 0:
        assert torch.equal(decoded.token_ids, logits.argmax(dim=-1))
        temperature = 1.0
    probabilities = (logits.double() / temperature).softmax(dim=-1)
    ordered, order = probabilities.sort(dim=-1, descending=True)
    if top_k > 0:
        ordered[..., top_k:] = 0
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    # A token is in the nucleus if those before it do not fill it.
    ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0
    kept = torch.zeros_like(ordered).scatter(-1, order, ordered / ordered.sum(dim=-1, keepdim=True))
    expected = kept.gather(-1, decoded.token_ids[..., None])[..., 0]
    assert (expected > 0).all()
    torch.testing.assert_close(decoded.logprobs.double(), expected.log(), rtol=0, atol=1e-5)
