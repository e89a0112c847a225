"""Memory that is held while vLLM profiles."""

import gc

import torch

from vllm_patches.worker import reserving


def test_the_reserved_bytes_are_held_during_the_profile_run():
    num_bytes, seen = 123_457, []

    def held():
        return any(type(found) is torch.Tensor and found.nbytes == num_bytes for found in gc.get_objects())

    reserving(lambda: seen.append(held()), torch.device("cpu"), num_bytes)()
    assert seen == [True] and not held()
