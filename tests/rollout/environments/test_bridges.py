"""Bridges between turns: what the chat template writes behind a turn of the policy."""

import re
from pathlib import Path

import pytest
import yaml
from tokenizers import AddedToken

from tests.vllm_patches import zoo
from verl.config.errors import ConfigError
from verl.data.templates import render_chat
from verl.rollout.environments.bridges import ANSWER, Bridges, ProgramBridges

TEMPLATES = yaml.safe_load(Path(__file__).with_name("chat_templates.yaml").read_text())

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


def test_half_of_a_surrogate_pair_is_a_question_mark(fresh_tokenizer):
    bridge = bridges(fresh_tokenizer, CHATML).between([{"role": "tool", "content": "a\ud800b"}])
    assert "tool\na?b<|im_end|>" in fresh_tokenizer.decode(bridge)


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
    refusal = f"rollout.multi_turn.enable=True: role 'tool': the tokenizer's chat template {reason}"
    with pytest.raises(ConfigError, match=refusal):
        bridges(fresh_tokenizer, template)


def test_role_that_the_template_drops_is_refused(fresh_tokenizer):
    made = bridges(fresh_tokenizer, DEAF, "user")
    made.between([{"role": "user", "content": "higher"}])
    with pytest.raises(ConfigError, match="role 'tool': the tokenizer's chat template leaves out the turns"):
        made.between([{"role": "user", "content": "higher"}, {"role": "tool", "content": "42"}])


def test_every_architecture_has_a_template():
    assert {name for names in TEMPLATES for name in names.split(", ")} == {*zoo.ARCHITECTURES}


@pytest.mark.parametrize("closed", [True, False], ids=["closed by the policy", "ended by a string"])
@pytest.mark.parametrize(
    ("names", "role", "kind"), [(n, role, kind) for n, row in TEMPLATES.items() for role, kind in row["roles"].items()]
)
def test_six_turns_are_what_the_template_appends(fresh_tokenizer, names: str, role: str, kind: str, closed: bool):
    template, end = TEMPLATES[names]["template"], TEMPLATES[names]["end"]
    end = end[role] if isinstance(end, dict) else end
    marks = re.findall(r"<[|\w/]+>|\[/?[A-Z_]+\]", template)
    fresh_tokenizer.add_tokens([AddedToken(mark, special=True) for mark in dict.fromkeys([*marks, end])])
    fresh_tokenizer.pad_token = fresh_tokenizer.eos_token = end
    if kind not in ("append", "drops thoughts"):
        with pytest.raises(ConfigError, match=f"role {role!r}: .*{kind}.*; give the model another chat template"):
            bridges(fresh_tokenizer, template, role)
        return
    made = bridges(fresh_tokenizer, template, role)
    messages = [{"role": "user", "content": "What is it?"}]
    tokens = render_chat(messages, fresh_tokenizer)
    for number in range(6):
        said = f"<think>\nperhaps {number}\n</think>\n\nI say {number}"
        heard = [{"role": role, "name": "look", "content": f"no, {number} {'<>&' * number}."}]
        if role == "tool":
            heard *= 1 + number % 2
        turn = fresh_tokenizer(said + end * closed).input_ids
        # What was there is never written again, and the policy's tokens are its own.
        tokens = [*tokens, *turn, *made.after(turn, heard)]
        messages += [{"role": "assistant", "content": said}, *heard]
        rendered = render_chat(messages, fresh_tokenizer)
        if kind == "append":
            assert tokens == rendered
            continue
        # Other models forget their thoughts; here they stay, as they were sampled.
        seen, written = (fresh_tokenizer.decode(ids) for ids in (tokens, rendered))
        assert seen != written
        assert re.sub(r"<think>.*?</think>\s*", "", seen, flags=re.DOTALL) == written.replace("<think></think>\n\n", "")


@pytest.fixture
def fresh_tokenizer():
    from tiny_tokenizer import make_tiny_tokenizer

    return make_tiny_tokenizer(tools=True)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("```", "\n```output\n42\n```\n"),
        ("```\n", "```output\n42\n```\n"),
        # Engines stop at ```output; the token may reach further, or be part of it.
        ("```\n```output", "\n42\n```\n"),
        ("```\n```output\n", "42\n```\n"),
        ("```<|im_end|>", "\n```output\n42\n```\n"),
    ],
)
def test_a_program_is_followed_by_its_output(tiny_tokenizer, end: str, expected: str):
    turn = tiny_tokenizer(f"print(42)\n{end}").input_ids
    bridge = ProgramBridges(tiny_tokenizer).after(turn, [{"role": "user", "content": "42"}])
    assert tiny_tokenizer.decode(bridge) == expected
