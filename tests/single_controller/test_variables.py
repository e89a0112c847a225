import pytest

from verl.single_controller.variables import is_secret, passed_variables


def test_what_reaches_the_workers(monkeypatch: pytest.MonkeyPatch):
    for name in ("NCCL_DEBUG", "HF_TOKEN", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MY_CACHE", "MY_KEY", "OTHER"):
        monkeypatch.setenv(name, "x")
    ours = {"NCCL_DEBUG", "HF_TOKEN", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MY_CACHE", "MY_KEY", "OTHER"}
    assert set(passed_variables()) & ours == {"NCCL_DEBUG", "HF_TOKEN", "OMP_NUM_THREADS"}
    assert set(passed_variables(["MY_*"])) & ours == {"NCCL_DEBUG", "HF_TOKEN", "OMP_NUM_THREADS", "MY_CACHE", "MY_KEY"}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("MY_PASSWORD", True),
        ("DB_PASS", True),
        ("NCCL_DEBUG", False),
        ("HF_HOME", False),
    ],
)
def test_secrets_by_their_names(name: str, secret: bool):
    assert is_secret(name) == secret
