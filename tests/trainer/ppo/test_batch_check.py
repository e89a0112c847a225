"""The check of a batch before its update: each inconsistency is found, and a sound batch passes."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from verl.batch import ENVIRONMENT, Batch
from verl.cluster.failures import WorkerError
from verl.trainer.ppo.batch_check import FREQUENCY, check_batch, check_carried_over

QUESTIONS = ["What is 1 + 1?", "What is 2 + 2?"]
ANSWERS = ["2", "3 or so", "4", "It is 4"]


def sound(tokenizer) -> Batch:
    """Two responses to each of two prompts."""
    prompts = [tokenizer(question).input_ids for question in QUESTIONS for _ in range(2)]
    responses = [tokenizer(answer).input_ids for answer in ANSWERS]
    num_tokens = sum(map(len, responses))
    batch = Batch.of(prompts, responses, rollout_logprobs=-torch.ones(num_tokens))
    batch.fill(learn_mask=torch.ones(num_tokens, dtype=torch.bool), version=torch.full((num_tokens,), 2))
    records = [SimpleNamespace(input_ids=prompt) for prompt in prompts]
    return batch.fill(records=records, texts=list(ANSWERS), group=torch.tensor([7, 7, 9, 9]))


def check(batch: Batch, tokenizer, rows: torch.Tensor | None = None, **options) -> None:
    check_batch(batch, rows, 3, options.pop("group_size", 2), tokenizer, [], **options)


def first_of(batch: Batch, name: str, value: float) -> None:
    column = getattr(batch, name).clone()
    column[0] = value
    batch.fill(**{name: column})


def test_sound_batch_passes(tiny_tokenizer):
    batch, twice = sound(tiny_tokenizer), torch.tensor([0, 1, 1])
    check(batch, tiny_tokenizer)
    check(batch, tiny_tokenizer, twice, repeats=True)
    check(batch, tiny_tokenizer, max_staleness=0)
    first_of(batch, "version", 0)
    check(batch, tiny_tokenizer, max_staleness=2)
    # What is not learned from may lack what learning needs; a method's rows need no complete groups.
    first_of(batch, "rollout_logprobs", torch.nan)
    first_of(batch, "learn_mask", False)
    check(batch[:3], tiny_tokenizer, group_size=None)


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (lambda b: b.records.insert(0, b.records.pop()), "response 0 has another prompt than its record"),
        (lambda b: b.texts.reverse(), "the verifiers read 'It is 4' for response 0, whose tokens are '2'"),
        (lambda b: first_of(b, "rollout_logprobs", torch.nan), "tokens without an engine's log-probability would be"),
        (lambda b: first_of(b, "version", 3), "tokens were sampled with version 3 of the weights, which does not"),
        (lambda b: first_of(b, "version", 0), "tokens lag behind the weights by 2 versions, despite async"),
        (lambda b: first_of(b, "group", 8), "group 7 has 1 responses instead of rollout.n=2"),
        (lambda b: first_of(b, "group", 9), "group 9 has responses to different prompts"),
    ],
)
def test_inconsistent_batch_ends_the_run(tiny_tokenizer, refused, harm: Callable[[Batch], object], line: str):
    batch = sound(tiny_tokenizer)
    harm(batch)
    with refused(f"step 3: the batch is inconsistent, so nothing is learned from it: {line}...", WorkerError):
        check(batch, tiny_tokenizer)


def test_rows_are_learned_from_once(tiny_tokenizer, refused):
    with refused("...a response would be learned from twice...", WorkerError):
        check(sound(tiny_tokenizer), tiny_tokenizer, torch.tensor([0, 1, 1]))


def test_words_of_an_environment_are_not_learned_from(tiny_tokenizer, refused):
    batch = sound(tiny_tokenizer)
    source = torch.zeros(len(batch.learn_mask), dtype=torch.uint8)
    source[-1] = ENVIRONMENT
    batch.fill(source=source, turns=torch.ones(4, dtype=torch.int64))
    with refused("...tokens that the environment wrote would be learned from...", WorkerError):
        # The text is that of the policy's tokens alone.
        batch.texts[3] = tiny_tokenizer.decode(tiny_tokenizer(ANSWERS[3]).input_ids[:-1])
        check(batch, tiny_tokenizer)


def test_response_is_learned_from_in_one_step(tiny_tokenizer, refused):
    batch, learned = sound(tiny_tokenizer), dict[tuple[int, int], int]()
    batch.fill(step=torch.tensor([1, 1, 2, 2]), stream=torch.tensor([5, -6, 5, 7]))
    check_carried_over(batch[:3], learned, 3)
    check_carried_over(batch[3:], learned, 4)
    with refused("step 5: ...: a response of step 3 would be learned from again...", WorkerError):
        check_carried_over(batch[2:], learned, 5)
    # Only recent steps are remembered.
    check_carried_over(batch[:1].fill("episode", stream=torch.tensor([9])), learned, FREQUENCY + 4)
    assert list(learned) == [(2, 7), (1, 9)]
