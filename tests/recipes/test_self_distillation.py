"""Prompts with which a policy teaches itself."""

from dataclasses import replace

import pytest

from tests.kit import ppo_config
from tests.method.batches import RECORDS, batch_of
from verl.data.prompt_record import PromptRecord
from verl.recipes.self_distillation import with_answer, with_feedback
from verl.recipes.soft_bootstrapping import SoftBootstrapping, shown
from verl.verifiers.verdict import Verdict

CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is 1 + 2?"}]
RECORD = PromptRecord(0, [1], "arithmetic", "3", {}, CHAT, False)
RIGHT, WRONG = Verdict(True, True, "exact"), Verdict(False, True, "different")


def test_sdpo_shows_a_correct_sibling_and_feedback():
    corrected = Verdict(False, True, "custom", extras={"feedback": "Off by one."})
    better = replace(RIGHT, score=1.0)
    siblings = [("It is 5.", WRONG), (" ", better), ("3!", replace(RIGHT, score=0.5)), ("It is 3.", better)]
    system, question = with_feedback(RECORD, corrected, siblings)
    assert system == CHAT[0] and question["role"] == "user"
    first, second, third, fourth, fifth, last = question["content"].split("\n\n")
    assert (first, third, fifth) == ("What is 1 + 2?", "It is 3.", "Off by one.")
    assert second == "A correct solution:" and fourth == "Feedback on a wrong attempt:" and "correctly" in last
    (_, alone) = with_feedback(RECORD, WRONG, [("It is 3.", RIGHT)])
    assert "Feedback" not in alone["content"] and CHAT[1]["content"] == "What is 1 + 2?"


def test_sdpo_leaves_correct_and_hopeless_responses_alone():
    assert with_feedback(RECORD, RIGHT, [("It is 3.", RIGHT)]) is None
    assert with_feedback(RECORD, WRONG, [("It is 5.", WRONG)]) is None


def test_help_joins_the_users_last_message():
    told = replace(RECORD, messages=[*CHAT, {"role": "assistant", "content": "Let me think."}])
    system, question, answer = with_answer(told)
    assert question["content"].startswith("What is 1 + 2?\n\nThe reference") and answer["content"] == "Let me think."
    with pytest.raises(ValueError, match="prompt 0 has neither a solution nor a ground truth"):
        with_answer(replace(RECORD, ground_truth=None))


def test_answer_or_solution_in_the_prompt():
    assert "\n\n3\n\n" in with_answer(RECORD)[1]["content"]
    solved = PromptRecord(0, [1], "arithmetic", "3", {"solution": "1 + 2 = 3"}, CHAT, False)
    assert "\n\n1 + 2 = 3\n\n" in with_answer(solved)[1]["content"]


def test_soft_bootstrapping_learns_answers_to_the_question_alone():
    method = SoftBootstrapping()
    method.config, method.prompts = ppo_config("rollout.n=3", "data.max_prompt_length=999"), RECORDS
    method.edit_prompt = lambda record, prompt: replace(
        record, input_ids=[9, *prompt.encode()], messages=[{"role": "user", "content": prompt}]
    )
    batch = batch_of([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], uids=[0] * 3 + [1] * 3 + [2] * 3)
    edited = method.resample(batch, 1)
    # The second prompt has no wrong response, the third no correct one.
    assert [*edited] == [0] and method.resample(batch, 2) == {}
    (message,) = edited[0].messages
    assert message["content"].startswith(f"{RECORDS[0].messages[-1]['content']}\n\nA correct solution:\n\ntext 2\n\n")
    assert "A wrong solution:\n\ntext 0\n\n" in message["content"]
    hinted = batch.after([edited[0].input_ids] * 3 + [RECORDS[1].input_ids] * 3 + [RECORDS[2].input_ids] * 3)
    hinted = hinted.widened(batch.width).merge(batch.without("tokens"))
    learned = method.learn_from(hinted.fill(records=[edited[0]] * 3 + batch.records[3:]))
    assert learned.learned.tolist() == [False, False, True] + [False] * 6 and learned.tokens.equal(batch.tokens)
    assert {*learned.names} == {*batch.names} and learned.width == batch.width
    assert [shown(record, "") for record in learned.records] == [edited[0].messages] * 3 + [None] * 6
    assert shown(RECORDS[0], "") is None
