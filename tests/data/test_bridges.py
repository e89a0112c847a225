"""Bridges between turns: what the chat template writes behind a turn of the policy."""

import pytest

from verl.config.errors import ConfigError
from verl.data.bridges import ANSWER, Bridges

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Mistral's way: what stands in front of the last question moves once another follows.
MOVING = (
    "{% for m in messages %}{% if loop.last %}[TOOLS]{% endif %}<|user|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEAF = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<|user|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def bridges(tokenizer, template: str | None = None, role: str = "tool") -> Bridges:
    if template is not None:
        tokenizer.chat_template = template
    return Bridges(tokenizer, {}, role, "rollout.multi_turn.enable=True")


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("<|im_end|>", "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        # A turn that a string ended has no closing token of its own: it is the environment's.
        ("</answer>", "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_bridge_has_what_the_turn_lacks(fresh_tokenizer, end: str, expected: str):
    made = bridges(fresh_tokenizer, CHATML)
    turn = fresh_tokenizer(f"an answer{end}").input_ids
    assert fresh_tokenizer.decode(made.after(turn, [{"role": "tool", "content": "42"}])) == expected


def test_a_bridge_is_the_difference_of_rendered_histories(fresh_tokenizer):
    made = bridges(fresh_tokenizer, CHATML)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "calling"}]
    said = [{"role": "tool", "content": "4"}, {"role": "tool", "content": f"2 {ANSWER}"}]
    whole = fresh_tokenizer.apply_chat_template([*chat, *said], add_generation_prompt=True, return_dict=False)
    turn = fresh_tokenizer("calling<|im_end|>").input_ids
    bridge = made.after(turn, said)
    assert whole[-len(bridge) :] == bridge
    assert whole[: -len(bridge)][-len(turn) :] == turn


@pytest.mark.parametrize(
    ("template", "reason"),
    [(MOVING, "writes earlier turns in another way once later ones follow"), (DEAF, "leaves out the turns")],
)
def test_a_template_without_the_prefix_property_is_refused(fresh_tokenizer, template: str, reason: str):
    with pytest.raises(ConfigError, match=f"rollout.multi_turn.enable=True: the tokenizer's chat template {reason}"):
        bridges(fresh_tokenizer, template)


@pytest.fixture
def fresh_tokenizer():
    from tiny_tokenizer import make_tiny_tokenizer

    return make_tiny_tokenizer(tools=True)
