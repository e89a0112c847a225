"""Real engines on CPU: every response's states are those that transformers computes for the same tokens."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from tests.kit import edit_json, matches
from tests.tables import refusals
from tests.vllm_patches import engines, zoo
from tests.vllm_patches.conftest import IN_PROCESS, Run, on_two_ranks, process

IN_EVERY_ROUND = {"gemma2", "mixtral", "olmo2"}
"""Sliding windows and soft caps, experts, and a model that runs through transformers; the others are nightly."""

TOLERANCE = 1e-4


def error(answers: list[engines.Answer], model: PreTrainedModel, layers: list[int]) -> float:
    """Largest difference of any state, of responses and prompts, from what transformers computes."""
    worst = 0.0
    for answer in answers:
        for response in answer.responses:
            expected = zoo.reference_states(model, answer.prompt + response.tokens, layers)
            last = len(answer.prompt) - 1
            assert (
                response.states.shape
                == expected[last:-1].shape
                == (len(response.tokens), len(layers), model.config.hidden_size)
            )
            worst = max(worst, (response.states - expected[last:-1]).abs().max().item())
            if answer.prompt_states is not None:
                assert answer.prompt_states.shape == expected[: last + 1].shape
                worst = max(worst, (answer.prompt_states - expected[: last + 1]).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_EVERY_ROUND else pytest.mark.nightly) for n in zoo.ARCHITECTURES]
)
def test_every_architecture(name: str, inside: Run, build: Callable[[str], Path], prompts: list[list[int]]):
    path = build(name)
    model = zoo.load(path)
    layers = [-1] if name in zoo.WITHOUT_INTERMEDIATE_LAYERS else [2, 0, -1]
    capture = {"layers": layers, "phase": "both", "max_bytes": 40_000}
    outcome = inside(engines.in_tight_quarters, path, capture, prompts)
    assert error(outcome.answers, model, layers) < TOLERANCE
    assert all(len(answer.responses) == 4 for answer in outcome.answers)
    # The conditions were as tight as they should be: prompts in chunks, read from the cache, computed again.
    assert outcome.facts["preempted"] > 0
    assert max(answer.num_cached for answer in outcome.answers) > 0
    assert outcome.facts["num_rows"] == outcome.facts["device_bytes"] == outcome.facts["host_bytes"] == 0
    assert outcome.facts["peak_device_bytes"] <= 40_000 < outcome.facts["peak_host_bytes"]


@pytest.mark.nightly
def test_a_pretrained_model(inside: Run, smollm2: Path, prompts: list[list[int]]):
    """In units of each state's own size: a pretrained model's reach hundreds."""
    model, layers, worst = zoo.load(smollm2), [-1, 0, 15], 0.0
    for answer in inside(engines.in_tight_quarters, smollm2, {"layers": layers}, prompts[:3]).answers:
        for response in answer.responses:
            expected = zoo.reference_states(model, answer.prompt + response.tokens, layers)[len(answer.prompt) - 1 : -1]
            difference = (response.states - expected).norm(dim=-1) / expected.norm(dim=-1)
            worst = max(worst, difference.max().item())
    assert 0 < worst < TOLERANCE


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="vLLM compiles with a C++ compiler on CPU")
def test_a_compiled_engine(qwen: Path, reference: PreTrainedModel, prompts: list[list[int]]):
    capture = {"layers": [2, 0, -1], "phase": "both"}
    with process(IN_PROCESS | {"TORCHDYNAMO_DISABLE": "0"}) as pool:
        outcome = pool.submit(engines.in_tight_quarters, qwen, capture, prompts, enforce_eager=False).result()
    assert outcome.facts["compiled"] and outcome.facts["preempted"] > 0
    assert error(outcome.answers, reference, [2, 0, -1]) < TOLERANCE


def test_tokens_do_not_depend_on_capture(inside: Run, qwen: Path, prompts: list[list[int]]):
    """Sampled ones, preemptions and all."""
    off = inside(engines.in_tight_quarters, qwen, None, prompts)
    on = inside(engines.in_tight_quarters, qwen, {"layers": [0, 1, 2, 3], "phase": "both"}, prompts)
    assert off.facts["preempted"] > 0 and off.answers[0].responses[0].states is None
    tokens = [[[response.tokens for response in a.responses] for a in outcome.answers] for outcome in (off, on)]
    assert tokens[0] == tokens[1]
    assert len({tuple(response) for group in tokens[0] for response in group}) == 4 * len(prompts)


def test_rows_that_the_prefix_cache_spared_are_nan(
    inside: Run, qwen: Path, reference: PreTrainedModel, prompts: list[list[int]]
):
    capture = {"layers": [0, -1], "phase": "both"}
    first, again, unread = inside(engines.twice, qwen, capture, prompts)
    assert error(first, reference, [0, -1]) < TOLERANCE
    assert error(unread, reference, [0, -1]) < TOLERANCE
    assert max(answer.num_cached for answer in again) > 0
    for answer, complete in zip(again, first, strict=True):
        assert answer.prompt_states[: answer.num_cached].isnan().all()
        computed = slice(answer.num_cached, None)
        torch.testing.assert_close(answer.prompt_states[computed], complete.prompt_states[computed], atol=1e-4, rtol=0)
        answer.prompt_states = None
    assert error(again, reference, [0, -1]) < TOLERANCE


def test_weights_that_change_between_generations(inside: Run, qwen: Path, tmp_path: Path):
    model = zoo.load(qwen)
    weights = {name: 1.1 * value for name, value in model.state_dict().items()}
    outcome = inside(engines.with_new_weights, qwen, weights, {"layers": [1, -1]}, [5, 6, 7])
    before, after = outcome.answers
    assert outcome.facts["in_process"]
    assert error([before], model, [1, -1]) < TOLERANCE
    model.load_state_dict(weights)
    assert error([after], model, [1, -1]) < 1.1 * TOLERANCE * after.responses[0].states.abs().max()


def test_step_prepared_before_last_tokens(qwen: Path, reference: PreTrainedModel, prompts: list[list[int]]):
    """Asynchronous scheduling, CUDA's default: states, streams, and weights that change are as without it."""
    capture = {"layers": [1, -1], "phase": "both", "max_bytes": 40_000}
    asked = [(prompt, {"temperature": 1.0, "n": 4, "extra_args": {"stream": i}}) for i, prompt in enumerate(prompts)]
    weights = {name: 1.1 * value for name, value in reference.state_dict().items()}
    with process(IN_PROCESS | {"VLLM_USE_V2_MODEL_RUNNER": "0"}) as pool:

        def ahead(*arguments: Any, **options: Any) -> engines.Outcome:
            outcome = pool.submit(engines.scheduled_ahead, *arguments, **options).result()
            assert outcome.facts["scheduled_ahead"] > 0
            return outcome

        captured = ahead(engines.in_tight_quarters, qwen, capture, prompts)
        assert error(captured.answers, reference, [1, -1]) < TOLERANCE and captured.facts["preempted"] > 0
        alone = pool.submit(engines.from_streams, qwen, asked).result()
        tight = ahead(engines.from_streams, qwen, asked, **engines.TIGHT)
        drawn = [[response.tokens for answer in o.answers for response in answer.responses] for o in (alone, tight)]
        assert drawn[0] == drawn[1] and tight.facts["preempted"] > 0
        before, after = ahead(engines.with_new_weights, qwen, weights, {"layers": [1, -1]}, [5, 6, 7]).answers
        assert error([before], reference, [1, -1]) < TOLERANCE
    model = zoo.load(qwen)
    model.load_state_dict(weights)
    assert error([after], model, [1, -1]) < 1.1 * TOLERANCE * after.responses[0].states.abs().max()


def test_an_engine_driven_by_hand(inside: Run, qwen: Path, reference: PreTrainedModel, prompts: list[list[int]]):
    outcome = inside(engines.step_by_step, qwen, {"layers": [-1]}, prompts)
    assert [len(answer.responses[0].tokens) for answer in outcome.answers] == [12, 18, 24, 30, 36]
    assert error(outcome.answers, reference, [-1]) < TOLERANCE
    # The aborted request's rows are gone at once, with those of groups of which one sample had ended at the end.
    assert outcome.facts["rows_after_abort"] > 0 and outcome.facts["num_rows"] == 0
    assert outcome.facts["requests_after_warm_up"] == 0


@pytest.mark.parametrize(("name", "config", "options", "line"), refusals("vllm_patches/refusals.txt", "engines"))
def test_engine_without_capture_or_streams_is_refused(
    inside: Run, build: Callable[[str], Path], name: str, config: str, options: str, line: str
):
    path = build(name.removesuffix(", hidden"))
    if name.endswith(", hidden"):  # a model whose class hides its last state
        edit_json(path / "config.json", architectures=["MiMoForCausalLM"])
    options = {"additional_config": eval(config), "skip_tokenizer_init": True} | eval(f"dict({options})")
    refused = inside(engines.refusal, path, None, **options)
    assert matches(line, refused), refused


def test_a_reducer_that_raises_leaves_the_engine_in_order(inside: Run, qwen: Path, prompts: list[list[int]]):
    outcome = inside(engines.with_a_failing_reducer, qwen, prompts)
    assert outcome.facts["error"] == "hidden states of 64 responses: ValueError: five is too many"
    assert [answer.prompt for answer in outcome.answers] == prompts
    assert all(answer.responses[0].states == {"length": torch.tensor([4])} for answer in outcome.answers)
    assert outcome.facts["num_rows"] == 0


def test_states_come_in_batches_while_a_user_steps(inside: Run, qwen: Path, prompts: list[list[int]]):
    facts = inside(engines.stepped_by_the_user, qwen, prompts).facts
    assert sorted(facts["together"]) == [26] * 26 + [64] * 64
    assert facts["num_tokens"] == [(3 + index % 26, 3 + index % 26) for index in range(90)]
    assert facts["difference"] < 1e-5
    # The buffer, states copied out of it twice, and what the reducer asks for.
    assert facts["reserved_bytes"] == 2**30 + 2 * 2**28 + 1000 * 128
    assert facts["num_rows"] == 0


@pytest.mark.nightly
def test_a_reducer_that_raises_leaves_two_workers_in_order(outside: Run, qwen: Path, prompts: list[list[int]]):
    outcome = outside(engines.with_a_failing_reducer, qwen, prompts, tensor_parallel_size=2)
    assert "ValueError: five is too many" in outcome.facts["error"]
    assert [answer.prompt for answer in outcome.answers] == prompts
    assert outcome.facts["tasks"] == [["generate"], ["generate"]]


def test_a_model_whose_last_state_has_a_width_of_its_own(inside: Run, tmp_path: Path):
    config = OPTConfig(
        vocab_size=128,
        hidden_size=64,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        do_layer_norm_before=False,
        init_std=0.2,
    )
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(tmp_path)
    model = OPTForCausalLM.from_pretrained(tmp_path)
    outcome = inside(engines.with_new_weights, tmp_path, model.state_dict(), {}, [5, 6, 7])
    for answer in outcome.answers:
        with torch.no_grad():
            expected = model.model(torch.tensor([answer.prompt + answer.responses[0].tokens])).last_hidden_state[0]
        torch.testing.assert_close(answer.responses[0].states[:, 0], expected[2:-1], atol=TOLERANCE, rtol=0)


@pytest.mark.nightly
def test_an_engine_in_another_process(outside: Run, tiny_model: Path, prompts: list[list[int]]):
    prompts = [[token % 20 for token in prompt] for prompt in prompts]
    outcome = outside(engines.in_another_process, tiny_model, {"layers": [0, -1], "phase": "both"}, prompts)
    assert outcome.facts["client"] == "SyncMPClient"
    model = zoo.load(tiny_model)
    assert error(outcome.answers, model, [0, -1]) < TOLERANCE
    assert error(outcome.facts["stopped"], model, [0, -1]) < TOLERANCE
    reasons = {response.finish_reason for answer in outcome.facts["stopped"] for response in answer.responses}
    lengths = {len(response.tokens) for answer in outcome.facts["stopped"] for response in answer.responses}
    assert "stop" in reasons and len(lengths) > 1
    assert outcome.facts["num_rows"] == 0


@pytest.mark.nightly
def test_two_tensor_parallel_workers(outside: Run, qwen: Path, reference: PreTrainedModel, prompts: list[list[int]]):
    capture = {"layers": [1, -1], "phase": "both"}
    parallel = {"tensor_parallel_size": 2, "skip_tokenizer_init": True}
    outcome = outside(engines.in_another_process, qwen, capture, prompts, **parallel)
    assert error(outcome.answers, reference, [1, -1]) < TOLERANCE
    assert outcome.facts["num_rows"] == 0


@pytest.mark.nightly
def test_two_tensor_parallel_engines(qwen: Path, reference: PreTrainedModel, prompts: list[list[int]]):
    outcomes = on_two_ranks(engines.generate_twice, qwen, {"layers": [1, -1]}, prompts)
    first, second = [outcome.answers for outcome in outcomes]
    assert error(first, reference, [1, -1]) < TOLERANCE
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.responses, b.responses, strict=True):
            assert x.tokens == y.tokens
            assert torch.equal(x.states, y.states)


def test_streams(outside: Run, qwen: Path, reference: PreTrainedModel):
    result = outside(engines.streamed, qwen, {"layers": [1, -1], "phase": "both"}, [1, 2, 3])

    def whole(outputs: list[engines.Answer], count: int) -> engines.Answer:
        """The pieces of ``count`` streamed responses put together, with the states that came with their ends."""
        pieces = [piece for output in outputs for piece in output.responses]
        assert all(piece.states is None for piece in pieces if piece.finish_reason is None)
        ends = [piece for piece in pieces if piece.finish_reason is not None]
        assert len(ends) == count
        return engines.Answer([1, 2, 3], outputs[-1].prompt_states, None, ends)

    slow = whole(result["slow"], 2)
    # A slow reader finds several tokens in one output, and its responses in one or in two.
    assert len(result["slow"]) < 80 and all(len(r.states) == 40 for r in slow.responses)
    aborted = whole(result["aborted"], 1)
    received = [token for output in result["aborted"] for token in output.responses[0].tokens]
    assert aborted.responses[0].finish_reason == "abort" and 3 <= len(received) < 100
    aborted.responses[0].tokens = received
    plain = whole(result["plain"], 1)
    assert error([aborted, plain], reference, [1, -1]) < TOLERANCE
    # One request was given up by its reader, who never asked for its states.
    assert result["held"]["num_rows"] == 0


@pytest.fixture(scope="module")
def siblings() -> list[tuple[list[int], int]]:
    """Prompts and streams: two responses to each prompt, one of them twice; two prompts fill their blocks exactly."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(128, (length,), generator=generator).tolist() for length in (32, 9, 64, 45)]
    return [(prompt, stream) for prompt in prompts for stream in (1, 2, 2)]


def teacher_forced(model: PreTrainedModel, answer: engines.Continued) -> torch.Tensor:
    """The log-probability of each token of a response, [T]."""
    with torch.no_grad():
        logits = model(torch.tensor([answer.prompt + answer.tokens])).logits[0, len(answer.prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]


@pytest.mark.parametrize(
    "name",
    ["qwen2", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("llama", "gemma2", "mixtral", "phi3", "qwen3"))],
)
def test_responses_that_are_cut_and_continued(
    name: str, inside: Run, build: Callable[[str], Path], siblings: list[tuple[list[int], int]], tmp_path: Path
):
    """With chunked prompts, prefix caches and preemptions."""
    path = build(name)
    models = [zoo.load(path) for _ in range(3)]
    for scale, model in zip((1.0, 1.05, 1.1), models, strict=True):
        model.load_state_dict({key: scale * value for key, value in model.state_dict().items()})
    weights = []
    for number, model in enumerate(models[1:]):
        # By the names of files, which a mixture's experts have in memory no longer.
        model.save_pretrained(tmp_path / str(number))
        weights.append(load_file(tmp_path / str(number) / "model.safetensors"))
    params = {"repetition_penalty": 1.3, "stop_token_ids": list(range(0, 128, 8))}
    plans = [
        *(engines.Cuts(after, [], settings) for settings in ({}, params) for after in ([], [1] * 24)),
        engines.Cuts([9, 8], weights),
    ]
    layers = [-1] if name in zoo.WITHOUT_INTERMEDIATE_LAYERS else [0, -1]
    answers, num_preempted = inside(engines.cut_and_continued, path, siblings, plans, layers, **engines.TIGHT)
    assert num_preempted > 0
    # 1. Under the same weights, cut at every token: the response that was not cut, with all its states.
    whole, cut, whole_and_ended, cut_and_ended, renewed = answers
    assert {len(answer.tokens) for answer in whole} == {24}
    assert len({len(answer.tokens) for answer in whole_and_ended}) > 4
    for before, after in zip(whole + whole_and_ended, cut + cut_and_ended, strict=True):
        assert (after.prompt, after.tokens) == (before.prompt, before.tokens)
        torch.testing.assert_close(after.logprobs, before.logprobs, atol=1e-5, rtol=0)
        expected = zoo.reference_states(models[0], after.prompt + after.tokens, layers)
        torch.testing.assert_close(after.states, expected[len(after.prompt) - 1 : -1], atol=TOLERANCE, rtol=0)
    # 2. Under new weights: all states are of the last, and each log-probability of the weights that sampled the token.
    for answer in renewed:
        expected = zoo.reference_states(models[-1], answer.prompt + answer.tokens, layers)
        torch.testing.assert_close(answer.states, expected[len(answer.prompt) - 1 : -1], atol=3 * TOLERANCE, rtol=0)
        forced = torch.stack([teacher_forced(model, answer) for model in models])
        nearest = (forced - torch.tensor(answer.logprobs)).abs().min(dim=0)
        assert nearest.values.max() < 1e-4
        # Versions only rise along a response.
        assert (nearest.indices.diff() >= 0).all() and int(nearest.indices[-1]) == 2
