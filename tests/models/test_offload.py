"""Offloading in one process, without a device."""

import torch

from verl.models.offload import Offloaded, is_offloaded, piece_sizes

MIB = 1 << 20


def test_page_locked_memory_is_asked_for_in_powers_of_two():
    # A shard of a 7B model's gate_proj over 8 workers: in one piece torch would take 64 MiB for these 32.4.
    sizes = piece_sizes(18944 * 3584 * 4 // 8)
    assert sizes == [32 * MIB, 18944 * 3584 * 4 // 8 - 32 * MIB]
    for num_bytes in (1, MIB - 1, MIB, 3 * MIB, 7 * MIB + 5, 4 * 152064 * 3584):
        sizes = piece_sizes(num_bytes)
        assert sum(sizes) == num_bytes and all(sizes)
        rounded = [1 << (size - 1).bit_length() for size in sizes]
        assert rounded[:-1] == sizes[:-1] and sum(rounded) - num_bytes < MIB


def test_tensors_of_several_pieces_come_back_as_they_were():
    tensors = [torch.randn(size) for size in (5, MIB // 4, 3 * MIB // 4 + 1)]
    expected = [tensor.clone() for tensor in tensors]
    offloaded = Offloaded(lambda: tensors, enabled=True)
    assert [len(pieces) for _, pieces in offloaded._on_host] == [1, 1, 3]
    assert all(map(is_offloaded, tensors))
    for _ in range(2):
        with offloaded.loaded():
            assert all(map(torch.equal, tensors, expected))
        assert all(map(is_offloaded, tensors))
