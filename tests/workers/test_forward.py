import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.workers.forward import position_ids, token_logprobs, trim_columns


def test_trimming_cuts_what_is_padding_in_every_row():
    input_ids = torch.tensor([[0, 0, 1, 2, 3, 0, 0], [0, 4, 5, 6, 7, 8, 0]])
    attention_mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]])
    response_mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    ids, mask, response = trim_columns(input_ids, attention_mask, response_mask)
    assert ids.tolist() == [[0, 1, 2, 3, 0], [4, 5, 6, 7, 8]]
    assert mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert response.tolist() == [[1, 0], [1, 1]]


def test_trimming_leaves_full_rows_alone():
    ids, ones = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.int64)
    trimmed = trim_columns(ids, ones, ones[:, :1])
    assert [t.tolist() for t in trimmed] == [[[1, 2, 3]], [[1, 1, 1]], [[1]]]


def test_trimming_keeps_a_real_token_whose_id_is_that_of_padding():
    # What counts is the mask: many models pad with a token that also ends every turn.
    attention_mask = torch.tensor([[1, 1, 1]])
    ids, _, _ = trim_columns(torch.tensor([[0, 5, 0]]), attention_mask, torch.tensor([[1]]))
    assert ids.tolist() == [[0, 5, 0]]


def test_positions_count_real_tokens_alone():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 1, 2, 3, 4]]


@pytest.fixture(scope="module")
def model(tiny_model):
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    # Logits of a fresh model are so small that every distribution is nearly uniform; larger ones test more.
    with torch.no_grad():
        loaded.model.norm.weight.mul_(4.0)
    return loaded


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(7, 103, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_are_those_of_a_float64_softmax(model, tiny_model, tokens, temperature: float):
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    with torch.no_grad():
        reference.model.norm.weight.mul_(4.0)
        logprobs, entropy = token_logprobs(model, tokens, torch.ones_like(tokens), 4, temperature)
        # Logits at column s are of the token at s + 1: the last four tokens are 6..9.
        expected = (reference(tokens).logits[:, 5:9] / temperature).log_softmax(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    chosen = expected.gather(-1, tokens[:, 6:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)
    # The comparison means something only where the distributions are not all alike.
    assert chosen.std() > 0.1


def test_entropy_carries_no_gradient_and_logprobs_do(model, tokens):
    logprobs, entropy = token_logprobs(model, tokens, torch.ones_like(tokens), 2, 1.0)
    assert logprobs.requires_grad and not entropy.requires_grad


def test_entropy_carries_a_gradient_on_request(model, tokens):
    head = model.get_output_embeddings().weight
    _, entropy = token_logprobs(model, tokens, torch.ones_like(tokens), 2, 1.0, differentiable_entropy=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), head)
    before = entropy.sum().item()
    with torch.no_grad():
        head += 1e-3 * gradient / gradient.norm()
        _, moved = token_logprobs(model, tokens, torch.ones_like(tokens), 2, 1.0)
        head -= 1e-3 * gradient / gradient.norm()
    assert moved.sum().item() - before == pytest.approx(1e-3 * gradient.norm().item(), rel=0.1)


@torch.no_grad()
def test_padding_on_either_side_changes_nothing(model, tokens):
    plain, plain_entropy = token_logprobs(model, tokens, torch.ones_like(tokens), 4, 1.0)
    left, right = 3, 2
    shape = (2, left + 10 + right)
    # Padding with an ordinary token: it must be the mask alone that hides it.
    padded, mask = torch.full(shape, 50), torch.zeros(shape, dtype=torch.int64)
    padded[:, left : left + 10], mask[:, left : left + 10] = tokens, 1
    logprobs, entropy = token_logprobs(model, padded, mask, 4 + right, 1.0)
    torch.testing.assert_close(logprobs[:, :4], plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy[:, :4], plain_entropy, atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_of_unequal_length_do_not_feel_each_other(model, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    together, _ = token_logprobs(model, tokens, mask, 3, 1.0)
    alone, _ = token_logprobs(model, tokens[:1, 4:], torch.ones(1, 6, dtype=torch.int64), 3, 1.0)
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=0)
