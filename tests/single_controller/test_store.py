"""The shared memory of a run's own Ray cluster."""

from collections import namedtuple

from verl.single_controller import cluster

Usage = namedtuple("Usage", "total used free")


def test_the_store_holds_two_batches_but_not_more_than_there_is(monkeypatch):
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda _: Usage(64 << 30, 0, 64 << 30))
    assert cluster.store_megabytes(0, 0) == 256
    # 128 prompts x 8 responses of 1k + 8k tokens: 144 MiB each way.
    assert cluster.store_megabytes(1024, 9216) == 288
    assert cluster.store_megabytes(4096, 33792) == 4224
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda _: Usage(4 << 30, 0, 2000 << 20))
    assert cluster.store_megabytes(4096, 33792) == 1600
