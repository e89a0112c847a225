"""Methods that choose prompts, sample them otherwise or again, or compose the batch: literals by hand."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import changed

from tests.kit import ppo_config, stored
from tests.method.batches import RECORDS, batch_of
from verl.data.prompt_record import PromptRecord
from verl.method import Method, ReplayBuffer, StepOutcome
from verl.recipes.adaptive_dapo import AdaptiveBatches
from verl.recipes.common import hint
from verl.recipes.confucius3 import Recovering
from verl.recipes.drive import HardFocus
from verl.recipes.ead import Annealed
from verl.recipes.ghpo import GuidedHints
from verl.recipes.pcl import PromptCurriculum
from verl.recipes.rorecomp import ShortFirst, priority
from verl.recipes.seele import Sweet, fitted, next_share


def in_run(method: Method, step: int = 1, batch: int = 2, length: int = 16) -> Method:
    """The method as in a run of ``batch`` prompts a step, 2 responses each of at most ``length`` tokens."""
    data = {"train_batch_size": batch, "max_response_length": length, "max_prompt_length": 40}
    config = changed(ppo_config(), actor={"ppo_mini_batch_size": 1}, rollout={"n": 2}, data=data)
    method.config, method.prompts, method.step = config, RECORDS, step
    return method


def restored(method: Method, again: Method) -> Method:
    again.load_state_dict(stored(method.state_dict()))
    return again


def uids(records: list[PromptRecord]) -> list[int]:
    return [record.uid for record in records]


def test_pcl_takes_a_step_on_the_squared_error():
    curriculum, record = PromptCurriculum(lr=2.0, num_features=8), replace(RECORDS[0], input_ids=[3])
    assert curriculum.value(record) == 0.5 and curriculum.candidates_per_prompt == 4
    # d/dw (V - 1)^2 = 2 (V - 1) V (1 - V) = -1/4 for the token and for the constant, so both weights rise by 1/2.
    curriculum.after_step(StepOutcome(1, [0], [1.0], [1.0], {}, [record]))
    assert curriculum.weights.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0.5]
    assert curriculum.value(record) == pytest.approx(0.7310585786)  # sigmoid(1)
    again = restored(curriculum, PromptCurriculum(num_features=8))
    assert torch.equal(again.weights, curriculum.weights)
    in_run(curriculum).weights[:4] = torch.tensor([4.0, -1.0, 0.5, -3.0])
    curriculum.weights[-1] = 0.0
    records = [replace(record, uid=uid, input_ids=[uid]) for uid in range(4)]
    assert uids(curriculum.choose_prompts(records)) == [2, 1]


def test_drive_keeps_the_prompts_that_fail_most():
    focus, records = in_run(HardFocus(candidates=3), batch=3), RECORDS[:5]
    assert focus.candidates_per_prompt == 3 and uids(focus.choose_prompts(records)) == [0, 1, 2]
    focus.after_step(StepOutcome(1, [0, 1, 2, 4], [0.0] * 4, [0.5, 0.25, 0.75, 0.0], {}, records))
    # The fourth was never sampled, and counts as the mean, 0.375. A prompt is known by its uid, wherever it stands.
    assert uids(focus.choose_prompts(records)) == [4, 1, 3] == uids(focus.choose_prompts(records[::-1]))
    focus.after_step(StepOutcome(2, [4, 3], [0.0] * 2, [1.0, 0.25], {}, records))
    for either in (focus, in_run(restored(focus, HardFocus()), batch=3)):
        assert uids(either.choose_prompts(records)) == [1, 3, 0]


def test_ead_lets_the_temperature_fall_along_the_response():
    table = in_run(Annealed(), step=5, length=4000).sampling([])["temperatures"]
    assert table.shape == (4000,)
    # d = 25 + 5 * 5 = 50, and 20 d = 1000. The first ten tokens have 1; t is counted from the first all the same.
    assert table[:10].tolist() == [1.0] * 10
    assert table[10] == pytest.approx(2.2 - math.exp(0.01)) and table[500] == pytest.approx(2.2 - math.exp(0.5))
    assert table[1000] == 0.1 and table[3999] == 0.1  # 2.2 - e < 0
    # As the paper writes it: d at its limit of 40, at once annealed.
    table = in_run(Annealed(scale=1.0, first=0, d_max=40.0), step=5, length=4000).sampling([])["temperatures"]
    assert table[20] == pytest.approx(2.2 - math.exp(0.5)) and table[0] == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("experiment", "clip"),
    [("ead", (0.2, 0.28)), ("w_reinforce", (0.2, 0.2)), ("nsr", (0.2, 0.2)), ("psr", (0.2, 0.2))],
)
def test_recipes_without_a_kl_loss(experiment: str, clip: tuple[float, float]):
    """As their authors' scripts have it: EAD-RLVR's run_annealed_sampling.sh, RLVR-Decomposed's ..._psr_nsr.sh."""
    config = ppo_config(f"experiment={experiment}")
    assert (config.actor.use_kl_loss, config.algorithm.use_kl_in_reward) == (False, False)
    assert config.actor.clip_range == clip


@pytest.mark.parametrize(
    ("solution", "share", "expected"),
    [
        ("12345678", 0.25, "12"),
        ("12345678", 0.75, "123456"),
        ("one two three four", 0.5, "one two t"),
        ("12345", 0.5, "12"),  # round(2.5)
        ("one two three four", 1.0, "one two three four"),
        ("7", 0.25, ""),
    ],
)
def test_ghpo_hint(solution, share, expected):
    assert hint(solution, share) == expected


def test_ghpo_gives_unsolved_prompts_a_longer_hint_in_each_round():
    method = in_run(GuidedHints())
    method.config = changed(method.config, data={"max_prompt_length": 118})
    solutions = ["abcdefgh", "ABCDEFGH", "x" * 80]
    chat = [{"role": "user", "content": "Q?"}]
    records = [replace(RECORDS[i], extra_info={"solution": s}, messages=chat) for i, s in enumerate(solutions)]
    method.prompts = records
    method.edit_prompt = lambda record, prompt: replace(record, input_ids=list(prompt.encode()), messages=[])
    batch = batch_of([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], uids=[0, 0, 1, 1, 2, 2])

    def edits(round: int) -> dict[int, str]:
        return {place: bytes(record.input_ids).decode() for place, record in method.resample(batch, round).items()}

    # The first prompt is solved, and the third would not fit into 118 tokens. In the words of the authors' code.
    words = (
        "\n The following text is the beginning part of the answer, which you can refer to for solving the problem:\n"
    )
    assert edits(1) == {1: f"Q?{words}AB"}
    assert edits(2) == {1: f"Q?{words}ABCD"}
    assert edits(3) == {1: f"Q?{words}ABCDEF"}
    assert edits(4) == {}


def test_rorecomp_puts_short_correct_and_long_wrong_first():
    lengths = torch.tensor([5, 3, 9, 4, 8, 6, 2, 7])
    correct = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1]).bool()
    groups = torch.tensor([1, 1, 1, 1, 1, 1, 2, 2])
    # Group 1: correct 3, 5, 9 with median 5; incorrect 4, 6, 8 with median 6. Group 2: of 2 and 7 only the shorter.
    assert priority(correct, lengths, groups).tolist() == [True, True, False, False, True, True, True, False]


def test_rorecomp_learns_later_from_what_is_left():
    def sampled(step: int):
        """Two groups of two: lengths 1 to 4, the first three correct."""
        group = (step << 32) + torch.tensor([0, 0, 1, 1])
        return batch_of([1.0, 1.0, 1.0, 0.0], lengths=[1, 2, 3, 4], uids=[0, 0, 1, 1], step=step).fill(group=group)

    method = in_run(ShortFirst(period=2, buffer_size=8))
    method.buffer = ReplayBuffer(8, RECORDS)
    learned = method.learn_from(sampled(1))
    # All four, for the statistics of their groups; the longer correct one of the first group waits.
    assert learned.texts == ["text 0", "text 1", "text 2", "text 3"]
    assert learned.learned.tolist() == [True, False, True, True] and len(method.buffer) == 4
    method.step = 2
    learned = method.learn_from(sampled(2))
    assert learned.step.tolist() == [2] * 4 + [1] * 4
    assert learned.learned.tolist() == [True, False, True, True, False, True, False, False]
    # What was learned from is gone; what this step left waits.
    assert method.buffer.batch.step.tolist() == [2, 2, 2, 2]


def test_adaptive_dapo_asks_for_what_it_expects_to_need():
    method, records = in_run(AdaptiveBatches(), batch=3), RECORDS

    def asked() -> int:
        return len(method.choose_prompts(records))

    informative, solved, failed = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]
    assert asked() == 3
    method.resample(batch_of([*informative, *solved, *failed], uids=[0, 0, 1, 1, 2, 2]), 1)
    assert asked() == 6  # two are missing, of which one in three is informative
    method.resample(batch_of([*informative * 2, *solved], uids=[3, 3, 4, 4, 5, 5]), 1)
    method.after_step(StepOutcome(1, [], [], [], {}))
    # Three of six, for the whole step. The share of one batch of the next step is smaller, and forgotten after it.
    method = in_run(restored(method, AdaptiveBatches()), step=2, batch=3)
    assert method.ratio == 0.5 and asked() == 6
    method.resample(batch_of([*informative, *solved * 3], uids=[0, 0, 1, 1, 2, 2, 3, 3]), 1)
    assert asked() == 8  # two of one in four
    method.resample(batch_of(failed, uids=[4, 4]), 1)
    assert asked() == 8  # all there are
    method.after_step(StepOutcome(2, [], [], [], {}))
    assert (method.ratio, asked()) == (0.5, 6)  # a step that did not fill its batch says nothing


def test_confucius3_the_surplus_opens_the_next_batch():
    method = in_run(Recovering.__new__(Recovering), batch=2)
    method.__init__()

    def learned(step: int, scores: list[float]):
        """What is learned from after a generation batch, of which dynamic sampling keeps two groups."""
        method.step = step
        sampled = batch_of(scores, uids=[i // 2 for i in range(len(scores))], step=step)
        assert method.resample(sampled.without("step"), 1) == {}
        batch = method.learn_from(sampled[:4])
        assert batch.step.tolist() == [step] * len(batch) and not set(sampled.names) - set(batch.names)
        return batch

    # The first and the last two groups are informative; a step learns from two.
    batch = learned(1, [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    assert batch.texts == ["text 0", "text 1", "text 4", "text 5"]
    again = in_run(Recovering.__new__(Recovering), batch=2)
    again.__init__()
    for either in (method, restored(method, again)):
        method = either
        batch = learned(2, [1.0, 0.0, 1.0, 0.0])
        assert batch.texts == ["text 6", "text 7", "text 0", "text 1"] and batch.records[0].uid == 3
        assert len(batch.group.unique()) == 2
        assert learned(3, [1.0] * 4).texts == ["text 2", "text 3"]
        # Nothing is left: the batch of dynamic sampling, which only fills up.
        assert learned(4, [0.0] * 4).texts == ["text 0", "text 1", "text 2", "text 3"]


@pytest.mark.parametrize(
    ("shares", "accuracy", "expected"),
    [
        ([0.0], [0.75], 0.0),
        ([0.0], [0.25], 0.5),
        ([0.0, 0.5], [0.0, 1.0], 0.26),
        ([0.0, 0.5], [0.0, 0.0], 1.0),
        ([0.0, 0.5, 0.26], [0.0, 1.0, 0.5], 0.26),
        ([0.0, 0.0], [1.0, 1.0], 0.0),
    ],
)
def test_seele_the_next_hint(shares, accuracy, expected):
    assert next_share(shares, accuracy) == pytest.approx(expected)


def test_seele_fits_the_item_response_curve():
    # The curve through these points: a = 8, b = 0.5, c = 0.1, which is 0.5 at b + ln(0.4 / 0.5) / a.
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    accuracy = [0.1 + 0.9 / (1 + math.exp(-8 * (share - 0.5))) for share in shares]
    assert fitted(shares, accuracy) == pytest.approx((8.0, 0.5, 0.1))
    assert next_share(shares, accuracy) == pytest.approx(0.5 - 0.2231436 / 8)


def test_seele_joins_the_rounds_of_a_prompt():
    method = in_run(Sweet.__new__(Sweet), batch=4)
    method.__init__(rounds=2)
    method.prompts = [
        replace(record, extra_info={"solution": "abcdefgh"}, messages=[{"role": "user", "content": "Q"}])
        for record in RECORDS
    ]
    method.config = changed(method.config, data={"max_prompt_length": 200})
    method.edit_prompt = lambda record, prompt: replace(record, input_ids=list(prompt.encode()), messages=[])
    assert uids(method.choose_prompts(RECORDS[:4])) == [0, 1]
    first = batch_of([1.0, 0.0, 0.0, 0.0], uids=[0, 0, 1, 1])
    edited = method.resample(first, 1)
    # Half of the responses to the first prompt are right: no hint.
    assert edited[0] is method.prompts[0] and bytes(edited[1].input_ids).endswith(b"problem:\nabcd")
    second = batch_of([1.0, 1.0, 1.0, 0.0], uids=[0, 0, 1, 1])
    assert method.resample(second, 2) == {}
    learned = method.learn_from(second)
    assert learned.scores.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert learned.group.tolist() == [1 << 32] * 4 + [(1 << 32) + 1] * 4
