"""Linear layers by oneDNN against torch's own in float64."""

import pytest
import torch
from torch import Tensor, nn

from verl.models import onednn

pytestmark = pytest.mark.skipif(not onednn.available(), reason="oneDNN is for x86 processors here")


def results(layer: nn.Linear, states: Tensor, gradient: Tensor) -> list[Tensor]:
    """The layer's product, and the gradients of the states and of its parameters that learn."""
    states = states.clone().requires_grad_()
    layer.zero_grad()
    product = layer(states)
    product.backward(gradient)
    return [product.detach(), *(t.grad for t in (states, *layer.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("shape", [(64, 24), (5, 33, 24), (1, 63, 24), (3, 24)])
@pytest.mark.parametrize(("width", "bias"), [(40, True), (40, False), (16, True)])
def test_products_and_gradients_match_torch(shape: tuple[int, ...], width: int, bias: bool):
    torch.manual_seed(0)
    layer, exact = nn.Linear(24, width, bias=bias), nn.Linear(24, width, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    states, gradient = torch.randn(shape), torch.randn(*shape[:-1], width)
    onednn.multiply_by_onednn(layer)
    found, expected = (results(m, states.to(d), gradient.to(d)) for m, d in ((layer, None), (exact, torch.float64)))
    assert len(found) == len(expected) == 3 + bias
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)
    # Frozen weights have no gradient; states between two layers may lie in any order.
    layer.requires_grad_(False)
    turned = states.transpose(0, -1).contiguous().transpose(0, -1)
    product, of_states = results(layer, turned, gradient)
    torch.testing.assert_close([product, of_states], found[:2])
    with torch.no_grad():
        torch.testing.assert_close(layer(states), found[0])


def test_other_precisions_and_layers_are_left_to_torch():
    class Scaled(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            return 2 * super().forward(states)

    torch.manual_seed(0)
    states, model = torch.randn(100, 24), nn.Sequential(nn.Linear(24, 24), Scaled(24, 24))
    half = nn.Linear(24, 40).to(torch.bfloat16)
    expected, of_half = model(states), half(states.bfloat16())
    for each in (model, half):
        onednn.multiply_by_onednn(each)
    assert "forward" in vars(model[0]) and "forward" not in vars(model[1])
    torch.testing.assert_close(model(states), expected)
    assert torch.equal(half(states.bfloat16()), of_half)
