import torch

from verl.single_controller import profiling
from verl.single_controller.profiling import PeakMemory, resident_bytes

SIZE = 256 << 20


def touch() -> None:
    torch.ones(SIZE, dtype=torch.uint8)


def test_a_peak_ends_with_a_reset():
    memory = PeakMemory("cpu")
    before = resident_bytes()
    memory.reset()
    touch()
    assert memory.read().used - before > SIZE * 0.9
    memory.reset()
    assert memory.read().used - before < SIZE * 0.5


def test_where_peaks_cannot_be_reset_what_is_resident_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(profiling, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    memory = PeakMemory("cpu")
    memory.reset()
    touch()
    used, reserved = memory.read()
    assert used == reserved and abs(used - resident_bytes()) < SIZE * 0.1
