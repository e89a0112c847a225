"""Log-probabilities of one process: the same from every way through the model, and what memory they need; and which
state a layer's number stands for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from tests.kit import TINY, shipped_config
from verl.batch import Batch
from verl.config.common import ModelConfig
from verl.models.attention import attention_name
from verl.models.forward import LogprobForward, ValueForward, record_states
from verl.models.output_head import STATISTICS, Scoring, ScoringTargets, chunk_output_head, logprobs_and_entropy
from verl.models.packing import position_ids

ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama, tied head": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**TINY),
    # What stands in its config.json for other models has no effect on it.
    "llama, a window that it does not use": transformers.LlamaConfig(
        **TINY, sliding_window=3, use_sliding_window=False
    ),
    "mistral, sliding window": transformers.MistralConfig(**TINY, sliding_window=3),
    # Soft caps on scores and on logits, and every other layer with a sliding window.
    "gemma2": transformers.Gemma2Config(
        **TINY, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=4
    ),
    # Its head asks the decoder for more than states.
    "mixtral, experts": transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    # Their windows are in the mask alone: of all layers, and of every other one.
    "phimoe, sliding window": transformers.PhimoeConfig(**TINY, sliding_window=3, num_local_experts=2),
    "qwen2_moe, sliding window": transformers.Qwen2MoeConfig(
        **TINY,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "granite, scaled logits": transformers.GraniteConfig(**TINY, logits_scaling=4.0, attention_multiplier=0.5),
    "cohere, scaled logits": transformers.CohereConfig(**TINY, logit_scale=0.25),
}

WAYS = {
    "whole": {"logits_chunk_size": 0},
    "chunks of 5, the last of 2": {"logits_chunk_size": 5},
    "packed": {"logits_chunk_size": 0, "use_remove_padding": True},
    "packed, one chunk": {"logits_chunk_size": 1000, "use_remove_padding": True},
    "packed, prompts once": {"logits_chunk_size": 0, "use_remove_padding": True, "share_prompts": True},
    "packed, prompts once, chunks of 3": {"logits_chunk_size": 3, "use_remove_padding": True, "share_prompts": True},
}

PROMPTS, RESPONSES = (
    [ids.tolist() for ids in torch.arange(1, 101).roll(shift).split([4, 6, 1, 5, 7, 77])] for shift in (0, 37)
)
EPISODES = Batch.of([PROMPTS[i] for i in (0, 1, 0, 2, 1)], [RESPONSES[0], RESPONSES[1], RESPONSES[2], [], RESPONSES[3]])
"""Two groups whose rows alternate, and a prompt without a response; padded on both sides, on none and on each."""
WANTED = torch.arange(16) < 11
"""Nothing is wanted of the last row."""


def config(**changes: object) -> ModelConfig:
    own = {"path": "tiny", "param_dtype": "float32", "use_remove_padding": False, "share_prompts": False}
    return replace(shipped_config().model, **own | changes)


def build(architecture: PreTrainedConfig, way: ModelConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    options = {"attn_implementation": attention_name(way), "dtype": dtype}
    return AutoModelForCausalLM.from_config(architecture, **options).eval()


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    loss.backward()
    return torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])


def scores_and_gradient(architecture: PreTrainedConfig, way: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    model = build(architecture, way)
    scored = LogprobForward(model, way, "cpu").logprobs(EPISODES, Scoring(0.7, True), WANTED)
    weights = torch.randn(2, *WANTED.shape, generator=torch.Generator().manual_seed(1))
    loss = (scored.logprobs * weights[0]).sum() + (scored.entropy * weights[1]).sum()
    return scored.logprobs.detach(), scored.entropy.detach(), gradient(model, loss)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_gradients_are_the_same_in_every_layout(name: str):
    expected = scores_and_gradient(ARCHITECTURES[name], config(attn_implementation="eager", logits_chunk_size=0))
    assert expected[0][WANTED].std() > 0.1 and not expected[0][~WANTED].any()
    for changes in WAYS.values():
        # The fused kernel does not know gemma2's soft cap, in transformers neither.
        way = config(attn_implementation="eager" if name == "gemma2" else "sdpa", **changes)
        found = scores_and_gradient(ARCHITECTURES[name], way)
        for values, reference in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(values, reference, atol=1e-5, rtol=0)
        assert (found[2] - expected[2]).norm() < 1e-5 * expected[2].norm(), changes


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
def test_empty_micro_batch_reaches_every_weight(changes: dict[str, object]):
    way = config(**changes)
    model = build(ARCHITECTURES["qwen2"], way)
    logprobs = LogprobForward(model, way, "cpu").logprobs(EPISODES, Scoring(1.0), WANTED & False).logprobs
    assert not logprobs.any()
    assert not gradient(model, logprobs.sum()).any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_match_a_float64_softmax(tiny_model: Path, temperature: float):
    models = [AutoModelForCausalLM.from_pretrained(tiny_model, dtype=d).eval() for d in (torch.float32, torch.float64)]
    ids = torch.randint(7, 103, (2, 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for model in models:
            # Logits of a fresh model are so small that every distribution is nearly uniform; larger ones test more.
            model.model.norm.weight.mul_(4.0)
        forward = LogprobForward(models[0], config(logits_chunk_size=3), "cpu")
        batch = Batch.of(ids[:, :6].tolist(), ids[:, 6:].tolist())
        scored = forward.logprobs(batch, Scoring(temperature, statistics=("sum_pi_squared",)))
        logprobs, entropy, squares = map(scored.padded, ("logprobs", "entropy", "sum_pi_squared"))
        # Logits at column s are of the token at s + 1: the last four tokens are 6..9.
        expected = (models[1](ids).logits[:, 5:9] / temperature).log_softmax(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    chosen = expected.gather(-1, ids[:, 6:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(squares.double(), expected.exp().square().sum(-1), atol=1e-6, rtol=0)
    # The comparison means something only where the distributions are not all alike.
    assert chosen.std() > 0.1


class Altered(type(AutoModelForCausalLM.from_config(ARCHITECTURES["qwen2"]))):
    """A language model whose logits depend on what a head in pieces cannot know."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: object):
        output = super().forward(input_ids=input_ids, **kwargs)
        if input_ids is not None:
            output.logits = 1.5 * output.logits
        return output


MAMBA = transformers.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=4)
MAMBA.initializer_range = 0.2
IN_PIECES = {"logits_chunk_size": 4}
JOINED = {"logits_chunk_size": 0, "use_remove_padding": True}
OWN_HEAD = "model.path='tiny': qwen2 gives other results...set model.logits_chunk_size=0"
MIXES_ROWS = "model.path='tiny': mamba gives other results...set model.use_remove_padding=false..."
SOFT_CAP = "model.attn_implementation='sdpa': packed rows do not support softcap..."


@pytest.mark.parametrize(
    ("kind", "architecture", "changes", "dtype", "line"),
    [
        (Altered._from_config, ARCHITECTURES["qwen2"], IN_PIECES, "float32", OWN_HEAD),
        (AutoModelForCausalLM.from_config, MAMBA, JOINED, "float32", MIXES_ROWS),
        # In half precision less than the second row's difference would be noise.
        (AutoModelForCausalLM.from_config, MAMBA, JOINED, "bfloat16", MIXES_ROWS),
        (AutoModelForCausalLM.from_config, ARCHITECTURES["gemma2"], JOINED, "float32", SOFT_CAP),
    ],
)
def test_model_that_a_layout_would_change_is_refused(refused, kind, architecture, changes, dtype, line):
    torch.manual_seed(0)
    way = config(attn_implementation="sdpa", param_dtype=dtype, **changes)
    options = {} if architecture is MAMBA else {"attn_implementation": attention_name(way)}
    model = kind(architecture, dtype=getattr(torch, dtype), **options).eval()
    with refused(line):
        LogprobForward(model, way, "cpu")


NUM_TOKENS, VOCABULARY, CHUNK = 64, 500, 8


class LargestResult(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types: object, args: tuple = (), kwargs: dict | None = None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def largest_tensor(chunk: int) -> int:
    """Elements of the largest tensor while a head of 500 words learns from 64 tokens."""
    torch.manual_seed(0)
    # Narrow, so that nothing but logits is large: the head itself has 500 x 8 weights.
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()
    ids = torch.randint(VOCABULARY, (1, NUM_TOKENS))
    targets = ScoringTargets(torch.arange(NUM_TOKENS), ids[0].roll(-1), Scoring(0.5, True, tuple(STATISTICS), top_k=3))
    with LargestResult() as largest:
        if chunk:
            chunk_output_head(model, chunk)
            found = model(ids, use_cache=False, targets=targets)
        else:
            found = logprobs_and_entropy(model(ids, use_cache=False).logits[0], *targets[1:])
        torch.stack(found).sum().backward()
    return largest.elements


def test_chunked_head_never_holds_all_logits():
    assert largest_tensor(0) == NUM_TOKENS * VOCABULARY
    # The head's weights and their gradient have the size of a chunk of 8 here.
    assert largest_tensor(CHUNK) == largest_tensor(7) == CHUNK * VOCABULARY


@pytest.mark.parametrize("logits_chunk_size", [0, 5])
def test_float32_logits_of_a_bfloat16_model(logits_chunk_size):
    ids, mask = EPISODES.rows()
    errors = {}
    for dtype in ("auto", "float32"):
        way = config(logits_dtype=dtype, param_dtype="bfloat16", logits_chunk_size=logits_chunk_size)
        model = build(ARCHITECTURES["qwen2"], way, torch.bfloat16)
        found = LogprobForward(model, way, "cpu").logprobs(EPISODES, Scoring(1.0)).logprobs
        states = model.model(ids, attention_mask=mask, position_ids=position_ids(mask)).last_hidden_state
        logits = states.double() @ model.lm_head.weight.double().T
        expected = logits[:, :-1].log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -6:]
        errors[dtype] = (found - expected[EPISODES.mask]).abs().max().item()
        loss = LogprobForward(model, way, "cpu").logprobs(EPISODES, Scoring(1.0)).logprobs.sum()
        assert gradient(model, loss).isfinite().all()
    # The product itself is exact; in bfloat16 it has 8 bits.
    assert errors["float32"] < 1e-5 < 1e-3 < errors["auto"]


def test_statistics_of_bfloat16_logits_are_float32():
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(9, 300, generator=generator)).bfloat16()
    tokens = torch.randint(300, (9,), generator=generator)
    statistics = ("logsumexp", "mean_logprob", "sum_pi_squared")
    found = logprobs_and_entropy(logits, tokens, Scoring(0.7, statistics=statistics))
    scaled = logits.double() / 0.7
    exact = scaled.log_softmax(-1)
    of_token = exact.gather(-1, tokens[:, None])[:, 0]
    expected = of_token, -(exact.exp() * exact).sum(-1), scaled.logsumexp(-1), exact.mean(-1), (2 * exact).exp().sum(-1)
    for values, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(values, reference.float(), atol=1e-5, rtol=1e-6)


def test_critic_reads_token_ids_beyond_its_vocabulary(model_config):
    config = transformers.Qwen2Config(**TINY, num_labels=1)
    torch.manual_seed(0)
    values = ValueForward(AutoModelForTokenClassification.from_config(config).eval(), model_config, "cpu").values
    last = config.vocab_size - 1
    first, second = values(Batch.of([[1, 2, last], [1, 2, last + 5]], [[3], [3]])).view(2, 4)
    assert torch.equal(first, second)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(**TINY)).eval()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [0, 2])
def test_recorded_layers_match_hidden_states(model, chunk: int):
    ids = torch.arange(10).view(2, 5)
    expected = model(ids, output_hidden_states=True).hidden_states[1:]
    given = {}
    if chunk:
        chunk_output_head(model, chunk)
        given["targets"] = ScoringTargets(torch.arange(10), torch.arange(10), Scoring(1.0))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    for layers in ([-1], [2, 0], [-3, 1, -1]):
        with record_states(model, layers) as states:
            model(ids, use_cache=False, **given)
        for layer, found in zip(layers, states, strict=True):
            assert torch.equal(found, expected[layer])
    # No hook of ours is left.
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


@torch.no_grad()
def test_recorded_layers_are_those_of_the_text_model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=sizes | {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 50, "head_dim": 8},
        # As many layers as the text model has.
        vision_config=sizes | {"num_hidden_layers": 2, "image_size": 28, "patch_size": 14},
        **{"mm_tokens_per_image": 4, "image_token_index": 49, "boi_token_index": 48, "eoi_token_index": 47},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(10).view(2, 5)
    expected = model(ids, output_hidden_states=True).hidden_states[1:]
    with record_states(model, [0, -1]) as states:
        model(ids, use_cache=False)
    assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        ([3], "calculator.layers=[3]: the model has 3 layers, from -3 to 2"),
        ([-4], "calculator.layers=[-4]: the model has 3 layers, from -3 to 2"),
        ([-1, 2], "calculator.layers=[-1, 2]: names a layer of the model's 3 twice"),
    ],
)
def test_missing_or_repeated_layer_is_refused(model, refused, layers: list[int], line: str):
    with refused(line), record_states(model, layers):
        pass
