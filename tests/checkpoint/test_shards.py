"""Saving and loading sharded learners, over worlds of one, two and three workers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.kit import changed
from verl.checkpoint.attempts import Attempt
from verl.checkpoint.export import export_checkpoint
from verl.checkpoint.folders import checkpoints, read_state, verify_checkpoint
from verl.checkpoint.saver import CheckpointSaver
from verl.checkpoint.shards import file_numbers
from verl.config import PPOConfig
from verl.config.errors import ConfigError
from verl.single_controller.supervision import Supervision
from verl.single_controller.worker_group import WorkerGroup
from verl.utils.files import file_record

pytestmark = pytest.mark.slow

BOTH = ["actor", "critic"]


def start(config: PPOConfig, world_size: int) -> WorkerGroup:
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    supervision = Supervision(collective_timeout_s=300)
    worker = "checkpoint_probes:LearningWorker"
    return WorkerGroup(worker, config, (), 1, world_size, "cpu", environment, supervision=supervision)


@pytest.fixture(scope="module")
def two(small_config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    group = start(small_config, 2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def half(small_config: PPOConfig) -> PPOConfig:
    """Config whose models learn in float32 and are exported in bfloat16."""
    return changed(small_config, model={"override_config": {"dtype": "bfloat16"}})


@pytest.fixture(scope="module")
def one(half: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    group = start(half, 1)
    yield group
    group.close()


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    return torch.randint(4, 20, (6, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def trained(two: WorkerGroup, batch: torch.Tensor, tmp_path_factory: pytest.TempPathFactory):
    """Two workers after three steps: the checkpoint's folder, the next three steps, and the state at saving."""
    root = tmp_path_factory.mktemp("run")
    two.run("learn", batch, 3, BOTH)
    CheckpointSaver(Attempt(root, 0), two, background=False, huggingface=True, newest=0).save(3, {"step": 3}, {})
    state, draws = two.run("whole_state")[0], two.run("draw")
    curve = two.run("learn", batch, 3, BOTH)[0]
    return root / "global_step_3", state, curve, draws


def content(path: Path) -> object:
    """What a file says; the order of what a safetensors header says varies, and so do the file's bytes."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with safe_open(path, "pt") as file:
        pieces = json.loads(file.metadata().get("DCP_SHARDING_INFO", "{}"))
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}, pieces


def assert_close(curve: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for record, other in zip(curve, expected, strict=True):
        assert record == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_same_workers_resume_to_the_bit(two, batch, trained):
    folder, state, curve, draws = trained
    two.run("load", folder, 3)
    restored = two.run("whole_state")[0]
    assert restored.keys() == state.keys()
    assert {"actor.optimizer.model.embed_tokens.weight.step", "critic.model.score.weight"} <= state.keys()
    for name, value in state.items():
        assert torch.equal(restored[name], value), name
    assert two.run("draw") == draws
    assert two.run("learn", batch, 3, BOTH)[0] == curve
    assert curve[0]["actor/loss"] != curve[2]["actor/loss"] and curve[0]["actor/lr"] > curve[2]["actor/lr"]


@pytest.mark.parametrize(
    "three", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["to one", "to three and one"]
)
def test_checkpoint_moves_between_numbers_of_workers(three, small_config, one, two, batch, trained, tmp_path):
    folder, state, curve, _ = trained
    others = [start(small_config, 3)] if three else []
    for group in (*others, one):
        group.run("load", folder, 3)
        restored = group.run("whole_state")[0]
        assert all(torch.equal(restored[name], value) for name, value in state.items())
        # Seeded by the run's seed and the step: the same whenever it is loaded.
        draws = group.run("draw")
        group.run("load", folder, 3)
        assert draws == group.run("draw")
        assert_close(group.run("learn", batch, 3, BOTH)[0], curve)
    for group in others:
        group.close()
    CheckpointSaver(Attempt(tmp_path, 0), one, background=False, huggingface=False, newest=0).save(4, {}, {})
    state, curve = one.run("whole_state")[0], one.run("learn", batch, 3, BOTH)[0]
    two.run("load", tmp_path / "global_step_4", 4)
    assert all(torch.equal(value, state[name]) for name, value in two.run("whole_state")[0].items())
    assert_close(two.run("learn", batch, 3, BOTH)[0], curve)


def test_optimizer_before_its_first_step_is_saved(one, batch, trained, tmp_path):
    fresh = tmp_path / "fresh" / "global_step_1"
    one.run("load", trained[0], 3)
    one.run("learn", batch, 1, ["actor"])
    # As with critic_warmup: here the critic's moments are there already, so they are first loaded away.
    saver = CheckpointSaver(Attempt(tmp_path / "fresh", 0), one, background=False, huggingface=False, newest=0)
    saver.save(1, {}, {})
    for file in (fresh / "critic" / "shards").iterdir():
        weights = {name: value for name, value in load_file(file).items() if name.startswith("model.")}
        with safe_open(file, "pt") as opened:
            offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
        save_file(weights, file, {"DCP_SHARDING_INFO": json.dumps({name: offsets[name] for name in weights})})
    one.run("load", fresh, 1)
    state = one.run("whole_state")[0]
    assert not [name for name in state if name.startswith("critic.optimizer")]
    assert [name for name in state if name.startswith("actor.optimizer")]
    # Saving makes no state either.
    saver.save(2, {}, {})
    assert one.run("whole_state")[0].keys() == state.keys()


def test_background_saving_writes_the_same_files(two, batch, trained, tmp_path):
    folder, _, curve, _ = trained
    two.run("load", folder, 3)
    saver = CheckpointSaver(Attempt(tmp_path, 0), two, background=True, huggingface=True, newest=0)
    saver.save(3, {"step": 3}, {})
    # Training changes every parameter while the workers write.
    assert two.run("learn", batch, 3, BOTH)[0] == curve
    assert checkpoints(tmp_path) == {}
    saver.finish()
    again = tmp_path / "global_step_3"
    verify_checkpoint(again)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    for path in files:
        # Of generators the draws above lie between; the manifest holds their checksums.
        if path.parts[0] not in ("generators", "manifest.json"):
            assert content(folder / path) == content(again / path), path
    saver.save(4, {"step": 4}, {})
    saver.save(5, {"step": 5}, {})  # completes the one before
    assert list(checkpoints(tmp_path)) == [3, 4]
    while 5 not in checkpoints(tmp_path):
        saver.poll()
    assert read_state(tmp_path / "global_step_5") == {"step": 5}


def test_export_is_the_model_in_the_checkpoint(trained, tmp_path):
    folder, state, _, _ = trained
    for part, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForTokenClassification)):
        out = export_checkpoint(folder, tmp_path / part, part, trust_remote_code=False)
        written = {path.name: file_record(path) for path in (folder / part / "huggingface").iterdir()}
        assert {path.name: file_record(path) for path in out.iterdir()} == written
        model = kind.from_pretrained(out)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, state[f"{part}.model.{name}"]), name
    # The tied head is the embedding, and no second copy in the file.
    assert "lm_head.weight" not in load_file(tmp_path / "actor" / "model.safetensors")
    # Nothing in a checkpoint is a pickle.
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors", ".jinja"}


def test_every_worker_exports_its_share_in_the_dtype(half, one, trained, tmp_path):
    folder, state, _, _ = trained
    exports, two_halves = {}, start(half, 2)
    for world_size, group in ((2, two_halves), (1, one)):
        group.run("load", folder, 3)
        group.run("export_in_files_of", 200_000)
        unfinished = tmp_path / f"{world_size}"
        (unfinished / ".global_step_3.attempt_0.x.unfinished").mkdir(parents=True)
        unfinished = next(unfinished.iterdir())
        group.run("save", unfinished, False, True)
        records = group.run("finish_save", True)
        # Checksums that were taken while writing; those of all workers together cover every file once.
        found = {p.relative_to(unfinished).as_posix(): file_record(p) for p in unfinished.rglob("*") if p.is_file()}
        assert {name: record for share in records for name, record in share.items()} == found
        assert sum(map(len, records)) == len(found)
        exports[world_size] = {name: record for name, record in found.items() if "/huggingface/" in name}
        weights = [{n: r for n, r in share.items() if "/huggingface/model" in n} for share in records]
        sizes = [sum(record.size for name, record in share.items() if "-of-" in name) for share in weights]
        assert max(sizes) < sum(sizes) / world_size + 200_000 and sum(sizes) > 1_000_000
    two_halves.close()
    # The same bytes, whoever writes them.
    assert exports[1] == exports[2]
    for part, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForTokenClassification)):
        model = kind.from_pretrained(unfinished / part / "huggingface")
        assert model.dtype == torch.bfloat16
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, state[f"{part}.model.{name}"].bfloat16()), name


def test_another_architecture_is_refused(refused, one, trained, tmp_path):
    (tmp_path / "actor").symlink_to(trained[0] / "critic")
    with refused("...: another architecture: score.bias has shape [1] there and is missing in the run's model"):
        one.run("load", tmp_path, 3)


def test_background_error_is_raised(one, tmp_path):
    saver = CheckpointSaver(Attempt(tmp_path, 0), one, background=True, huggingface=False, newest=0)
    saver.save(1, {}, {})
    saver.finish()
    one.run("stop_writing")  # for good: no test follows
    saver.save(2, {}, {})
    with pytest.raises(ConfigError, match="No space left on device"):
        saver.finish()
    assert sorted(path.name for path in tmp_path.glob("*global*")) == ["global_step_1"]


def test_shard_file_ends_once_it_is_full():
    tensors = {name: torch.zeros(size) for name, size in {"a": 3, "b": 1, "c": 5, "d": 0, "e": 1}.items()}
    assert file_numbers(tensors, 16) == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 3}
