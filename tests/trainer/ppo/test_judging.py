"""A judge that waits for sampling: pairs within a group, and a model in the run, whose answers come from a function."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import ppo_config, scoring, user_code
from tests.rewards.test_judge import ATTACKS
from verl.batch import Batch
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.data.templates import render_untrusted
from verl.rewards.custom import CustomFunctionError
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import use_custom_functions
from verl.run.setup import try_reward_functions
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
        self.temperatures: set[float] = set()

    def generate(self, records, sampling, seed, max_response_length):
        assert (seed, max_response_length) == (0, 64)
        self.prompts += [self.tokenizer.decode(record.input_ids) for record in records]
        self.uids |= {record.uid for record in records}
        self.temperatures.add(sampling.temperature)
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
    functions: Sequence[str] = (),
    columns: Mapping[str, Any] = {},
    unfinished: Collection[int] = (),
    **options: Any,
) -> tuple[list[Verdict], Engine]:
    """Return the verdicts on finished responses to one prompt, whose answer is 7, and the engine that was asked."""
    model = type(config.reward_score.judge.model)(**LONG, path="policy", max_prompt_length=2000)
    judge = replace(config.reward_score.judge, enable=True, max_tokens=64, **{"model": model} | options)
    val = replace(config.rollout.val_kwargs, n=4, temperature=1.0)
    config = replace(config, rollout=replace(config.rollout, val_kwargs=val))
    config = replace(config, reward_score=replace(config.reward_score, judge=judge, on_function_error=on_error))
    scores = replace(config.reward_score, custom_functions=[*functions])
    use_custom_functions(scores.paths_of_custom_functions(), scores.function_kwargs)
    record = PromptRecord(0, [5], source, "7", {"prompt": "What is 3 + 4?", **columns}, [], False)
    engine: Any = Engine(tokenizer, answer)
    try:
        with VerifierPool(scores) as pool:
            judging = Judging(config, pool, engine, tokenizer, None)
            records = [record] * len(texts)
            verification = Verification(records, tokenizer, [], pool, judging=judging, group_size=len(texts))
            for row, text in reversed([*enumerate(texts)]):
                if row in unfinished:
                    continue
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
def test_model_in_the_run_is_added_to_the_verifier(small_config, tiny_tokenizer, caplog):
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
    found, _ = judged(small_config, tiny_tokenizer, answer, ["7"], on_error="fail", model=model)
    assert [(v.score, v.reason, v.extras) for v in found] == [(0.0, "error", {"judge_failed": True})]
    assert "more than reward_score.judge.model.max_prompt_length=50 tokens" in caplog.text


@pytest.mark.slow
def test_rubric_votes_and_temperature_reach_the_model(small_config, tiny_tokenizer, tmp_path: Path):
    """Each criterion of the file is asked for by itself, all votes count, and unfinished responses are not judged."""
    asked = Counter[str]()

    def answer(prompt: str) -> str:
        (criterion,) = [name for name in ("names a number", "is short") if f"1. {name}" in prompt]
        assert "2. " not in prompt and "insults" not in prompt
        asked[prompt] += 1
        return json.dumps({"reason": criterion, "met": [criterion == "names a number" or asked[prompt] == 1]})

    rubric = tmp_path / "rubric.yaml"
    rubric.write_text("- names a number\n- {criterion: is short, weight: 3}\n")
    options: dict[str, Any] = {"rubric": str(rubric), "criteria": "one_by_one", "votes": 2, "temperature": 0.5}
    options |= {"rule_weight": 0.0, "columns": {"rubric": ["insults"], "other_response": "9"}, "unfinished": [2]}
    found, engine = judged(small_config, tiny_tokenizer, answer, ["7", "8", "late"], **options)
    # The shares of weight that the first and the second vote find.
    assert [(v.score, v.extras["reason"]) for v in found] == [((1 + 1 / 4) / 2, "names a number\nis short")] * 2
    assert len(engine.prompts) == 4 and engine.temperatures == {0.5}


@pytest.mark.slow
@pytest.mark.parametrize("rubric", [[{"weight": 1}], [{"criterion": "x", "weight": "much"}], 5])
def test_malformed_rubric_is_a_failure_of_its_record(rubric: Any, small_config, tiny_tokenizer):
    options: dict[str, Any] = {"columns": {"rubric": rubric}}
    found, engine = judged(small_config, tiny_tokenizer, str, ["7"], **options)
    assert [(v.score, v.reason) for v in found] == [(0.0, "error")] and not engine.prompts
    line = "^reward_score.judge on data_source='arithmetic': no prompt can be made of the record and its rubric: "
    with pytest.raises(CustomFunctionError, match=line):
        judged(small_config, tiny_tokenizer, str, ["7"], on_error="fail", **options)


@pytest.mark.slow
def test_failure_of_a_function_is_not_made_up_by_the_judge(small_config, tiny_tokenizer, tmp_path: Path):
    """Neither beside a verifier nor alone, while a verifier's own failure counts as a wrong answer."""
    file = user_code(tmp_path, "def big(**_):\n    raise MemoryError\n")
    best = json.dumps({"score": 1})
    for functions in ([f"arithmetic=verl.rewards.registry:verifier+{file}:big"], [f"arithmetic={file}:big"]):
        found, _ = judged(small_config, tiny_tokenizer, lambda _: best, ["7"], functions=functions)
        assert [(v.score, v.correct, v.reason) for v in found] == [(0.0, False, "memory")]


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
    assert [verdict.correct for verdict in found] == [False, True, True, False, True]
    assert [verdict.extras.get("comparisons") for verdict in found] == [2, 2, 1, None, 1]
    assert found[0].extras["orders_agree"] == 1.0 and len(engine.prompts) == 9
    # Whether a response has a box is not its neighbour's.
    replies: list[Callable[[str], str]] = [lambda _: '{"better": "tie"}', lambda _: "no"]
    for reply in replies:
        boxes, _ = judged(small_config, tiny_tokenizer, reply, ["1", "\\boxed{2}", "3"], **pairs)
        assert [verdict.boxed for verdict in boxes] == [False, True, False]
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


@pytest.mark.slow
def test_dead_judge_of_pairs_is_found_at_the_start():
    model = replace(scoring().judge.model, name="m")
    judge = replace(scoring().judge, enable=True, base_url="http://127.0.0.1:9/v1", model=model, pairs=True)
    calls = replace(scoring().async_functions, max_retries=0)
    record = PromptRecord(0, [5], "arithmetic", "7", {"prompt": "What is 3 + 4?"}, [], False)
    with pytest.raises(CustomFunctionError, match="judge.* on data_source='arithmetic'.*127.0.0.1:9"):
        try_reward_functions(scoring(judge=judge, async_functions=calls), [record])


def test_cache_of_a_frozen_judge_is_not_the_policys():
    config = ppo_config("rollout.kv_cache_memory_mb=4096 reward_score.judge.model.gpu_memory_utilization=0.25")
    engines = {kind: config.judge_engine(kind) for kind in ("cuda", "cpu")}
    assert {kind: engine.kv_cache_memory_mb for kind, engine in engines.items()} == {"cuda": 0, "cpu": 4096}
    assert {engine.gpu_memory_utilization for engine in engines.values()} == {0.25}
