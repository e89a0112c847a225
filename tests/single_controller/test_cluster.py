import pytest
import torch

from verl.config import ConfigError
from verl.single_controller.cluster import resolve_device


@pytest.mark.parametrize(
    ("device", "gpu", "expected"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda"), ("cuda", False, "")],
)
def test_the_device(monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, expected: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if expected:
        assert resolve_device(device) == expected
    else:
        with pytest.raises(ConfigError, match="^device='cuda': torch sees no GPU; set device=auto or cpu$"):
            resolve_device(device)
