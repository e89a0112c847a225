"""The gradients of a step have the same bits in every repetition, also with several threads on a busy machine."""

import hashlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from verl.algorithms.losses import BatchSize
from verl.batch import Batch
from verl.models.learner import deterministic_operations

REPETITIONS = 20


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Compute with two threads, beside two processes that take all the time they can get."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    torch.set_num_threads(before)
    for process in busy:
        with process:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [0, 512])
def test_gradients_have_the_same_bits(busy_threads, chunk_size: int, model_config, make_actor):
    model = replace(model_config, use_remove_padding=True, share_prompts=True, logits_chunk_size=chunk_size)
    actor = make_actor(model, max_response_length=40, micro_batch_size_per_gpu=64)
    # Many responses to few prompts, enough tokens for several threads to work on one gather.
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(7, 100, (2, 24), generator=generator).tolist()
    responses = torch.randint(7, 100, (32, 40), generator=generator).tolist()
    batch = Batch.of([prompts[i % 2] for i in range(32)], responses)
    num_tokens = len(batch.response_tokens)
    old, advantages = torch.randn(2, num_tokens, generator=generator)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    batch.fill(learn_mask=mask, old_logprobs=old - 4, advantages=advantages)

    def gradient() -> str:
        loss, _ = actor._loss(batch, BatchSize(num_tokens, 32, 40))
        loss.backward()
        hashed = hashlib.sha256()
        for parameter in actor.learner.model.parameters():
            hashed.update(parameter.grad.full_tensor().numpy().tobytes())
        actor.learner.optimizer.zero_grad()
        return hashed.hexdigest()

    assert len({gradient() for _ in range(REPETITIONS)}) == 1


@pytest.mark.slow
def test_torch_names_what_has_no_deterministic_form(busy_threads):
    states, missing = torch.randn(300, 64, requires_grad=True), set[str]()
    index = torch.randint(0, 300, (6000,), generator=torch.Generator().manual_seed(0))
    found = set()
    with pytest.warns(UserWarning, match="of our own"), deterministic_operations(missing):
        for _ in range(REPETITIONS):
            # Without the switch, almost every repetition gives other bits.
            (gradient,) = torch.autograd.grad((states[index] * torch.arange(64)).sum(), states)
            found.add(gradient.numpy().tobytes())
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        warnings.warn("of our own", stacklevel=1)
    assert len(found) == 1 and missing == {"put_"}
    assert not torch.are_deterministic_algorithms_enabled()
