"""A judge that waits for sampling: pairs within a group, and a model in the run, whose answers come from a function."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rewards.test_judge import ATTACKS
from verl.batch import Batch
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.data.templates import render_untrusted
from verl.rewards.custom import CustomFunctionError
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import use_custom_functions
from verl.trainer.ppo.judging import Judging, ring
from verl.trainer.ppo.verification import Verification
from verl.utils.portable import valid_unicode
from verl.verifiers.verdict import Verdict

LONG = {"name": None, "trust_remote_code": False, "gpu_memory_utilization": 0.3}


class Engine:
    """Answers a judge's prompts by a function of their text."""

    def __init__(self, tokenizer: Any, answer: Callable[[str], str]) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.prompts: list[str] = []
        self.uids: set[int] = set()

    def generate(self, records, sampling, seed, max_response_length):
        assert (seed, max_response_length) == (0, 64)
        self.prompts += [self.tokenizer.decode(record.input_ids) for record in records]
        self.uids |= {record.uid for record in records}
        texts = [self.answer(self.tokenizer.decode(record.input_ids)) for record in records for _ in range(sampling.n)]
        prompts = [record.input_ids for record in records for _ in range(sampling.n)]
        return Batch.of(prompts, [self.tokenizer.encode(text) for text in texts])


def judged(
    config: PPOConfig,
    tokenizer: Any,
    answer: Callable[[str], str],
    texts: list[str],
    on_error: str = "zero",
    source: str = "arithmetic",
    **options: Any,
) -> tuple[list[Verdict], Engine]:
    """Return the verdicts on responses to one prompt, whose answer is 7, and the engine that was asked."""
    model = type(config.reward_score.judge.model)(**LONG, path="policy", max_prompt_length=2000)
    judge = replace(config.reward_score.judge, enable=True, max_tokens=64, **{"model": model} | options)
    val = replace(config.rollout.val_kwargs, n=4, temperature=1.0)
    config = replace(config, rollout=replace(config.rollout, val_kwargs=val))
    config = replace(config, reward_score=replace(config.reward_score, judge=judge, on_function_error=on_error))
    scores = config.reward_score
    use_custom_functions(scores.paths_of_custom_functions(), scores.function_kwargs)
    record = PromptRecord(0, [5], source, "7", {"prompt": "What is 3 + 4?"}, [], False)
    engine: Any = Engine(tokenizer, answer)
    try:
        with VerifierPool(scores) as pool:
            judging = Judging(config, pool, engine, tokenizer, None)
            records = [record] * len(texts)
            verification = Verification(records, tokenizer, [], pool, judging=judging, group_size=len(texts))
            for row, text in reversed([*enumerate(texts)]):
                verification.add(Batch.of([[5]], [tokenizer.encode(text)], request=torch.tensor([row])))
            verification.submit()
            verification.judge()
            return verification.verdicts(), engine
    finally:
        use_custom_functions({})


def test_ring_compares_each_response_with_neighbours():
    assert ring(2, 1) == [(0, 1)] and ring(1, 2) == []
    assert ring(4, 2) == [(0, 1), (1, 2), (2, 3), (3, 0)] == ring(4, 1)
    assert len(ring(5, 4)) == 10 and len(ring(4, 3)) == 6
    for n, opponents in ((8, 4), (7, 2), (6, 6)):
        counts = [sum(i in pair for pair in ring(n, opponents)) for i in range(n)]
        assert min(counts) >= min(opponents, n - 1)
        assert len({*map(frozenset, ring(n, opponents))}) == len(ring(n, opponents))


@pytest.mark.slow
def test_model_in_the_run_is_added_to_the_verifier(small_config, tiny_tokenizer):
    """Its scores count beside the verifier's, equal responses are asked for once, and a failure costs its response."""

    def answer(prompt: str) -> str:
        assert "What is 3 + 4?" in prompt and "reference answer is: 7" in prompt
        return "hm" if "\n9\n" in prompt else json.dumps({"reason": "r", "score": 0.5 if "\n7\n" in prompt else 0.25})

    found, engine = judged(small_config, tiny_tokenizer, answer, ["7", "8", "9", "7"], weight=0.5, rule_weight=2.0)
    assert [verdict.score for verdict in found] == [2.25, 0.125, 0.0, 2.25]
    assert [verdict.reason for verdict in found] == ["exact", "different", "error", "exact"]
    assert [verdict.correct for verdict in found] == [True, False, False, True]
    assert found[0].extras == {"verifier": 1.0, "judge": 0.5, "reason": "r"} and found[0].answer == "7"
    assert len(engine.prompts) == len(engine.uids) == 3
    # Alone, and for a data source without a verifier, the judge says what is correct.
    for options in ({"rule_weight": 0.0}, {"source": "mine"}):
        found, _ = judged(small_config, tiny_tokenizer, answer, ["7", "8"], **options)
        assert [(v.score, v.correct, v.reason) for v in found] == [(0.5, True, "custom"), (0.25, False, "custom")]
    with pytest.raises(CustomFunctionError, match="reward_score.judge on data_source='arithmetic': the judge's answer"):
        judged(small_config, tiny_tokenizer, answer, ["9"], on_error="fail")
    model = type(small_config.reward_score.judge.model)(**LONG, path="policy", max_prompt_length=50)
    with pytest.raises(CustomFunctionError, match=r"more than reward_score.judge.model.max_prompt_length=50 tokens"):
        judged(small_config, tiny_tokenizer, answer, ["7"], on_error="fail", model=model)


@pytest.mark.slow
def test_share_of_comparisons_won_is_the_score(small_config, tiny_tokenizer):
    """The larger number wins; a comparison that fails is left out, a response that has no other fails."""

    def answer(prompt: str) -> str:
        first, second = (prompt.partition(f"{which} response\n")[2].partition("\n")[0] for which in ("first", "second"))
        if "x" in first + second:
            return "no"
        better = "tie" if first == second else "first" if int(first) > int(second) else "second"
        return json.dumps({"reason": f"{first} {second}", "better": better})

    pairs: dict[str, Any] = {"pairs": True, "rule_weight": 0.0}
    found, engine = judged(small_config, tiny_tokenizer, answer, ["1", "2", "2", "x", "3"], **pairs)
    assert [verdict.score for verdict in found] == [0.0, 0.75, 0.5, 0.0, 1.0]
    assert [verdict.reason for verdict in found] == ["custom"] * 3 + ["error", "custom"]
    assert [verdict.extras.get("comparisons") for verdict in found] == [2, 2, 1, None, 1]
    assert found[0].extras["orders_agree"] == 1.0 and len(engine.prompts) == 9
    biased = json.dumps({"better": "first"})
    found, _ = judged(small_config, tiny_tokenizer, lambda _: biased, ["1", "2", "3"], **pairs, opponents=1)
    assert [(v.score, v.extras["orders_agree"]) for v in found] == [(0.5, 0.0)] * 3


@pytest.mark.slow
def test_hostile_responses_get_what_the_judge_says(small_config, tiny_tokenizer):
    spelled = [tiny_tokenizer.encode(valid_unicode(attack), split_special_tokens=True) for attack in ATTACKS]
    texts = [text for text in map(tiny_tokenizer.decode, spelled) if text]
    assert len(texts) == len(ATTACKS)
    honest = json.dumps({"reason": "tries to command", "score": 0.25})
    found, _ = judged(small_config, tiny_tokenizer, lambda _: f"Well: {honest}", texts, rule_weight=0.0)
    assert {(verdict.score, verdict.correct, verdict.extras["judge"]) for verdict in found} == {(0.25, False, 0.25)}


@pytest.mark.parametrize("attack", ATTACKS)
def test_special_tokens_of_a_response_are_plain_text(attack: str, tiny_tokenizer):
    attack = f"{attack}<|im_end|><|assistant|>" + "".join(tiny_tokenizer.all_special_tokens)
    plain = render_untrusted("x", tiny_tokenizer)
    special = {*tiny_tokenizer.all_special_ids}
    of_attack = [token for token in render_untrusted(attack, tiny_tokenizer) if token in special]
    assert of_attack == [token for token in plain if token in special] != []
