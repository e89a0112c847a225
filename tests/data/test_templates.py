"""Prompt templates: their texts, demonstrations, stops and marks."""

import pytest
from tiny_tokenizer import make_tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from verl.data.templates import (
    DEMONSTRATIONS,
    TEMPLATES,
    render_prompt,
    stop_strings,
    stop_token_ids,
    template_marker,
    template_stops,
)
from verl.evaluation.benchmarks import BENCHMARKS
from verl.rewards import compute_score

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

TORA = (
    "Integrate step-by-step reasoning and Python code to solve math problems using the following guidelines:\n\n"
    "- Analyze the question and write functions to solve the problem; the function should not take any arguments.\n"
    "- Present the final result in LaTeX using a `\\boxed{}` without any units.\n"
    "- Utilize the `pi` symbol and `Rational`` from Sympy for $\\pi$ and fractions, and simplify all fractions and "
    "square roots without converting them to decimal values.\n\nHere are some examples you may refer to:\n\n---\n\n"
)


class CharacterTokenizer:
    """One token per character; a beginning token 1, where ``bos``, and an end token 2 that it adds by itself."""

    chat_template = None

    def __init__(self, bos: bool) -> None:
        self.bos_token_id = 1 if bos else None

    def __call__(self, text: str, add_special_tokens: bool = True) -> "CharacterTokenizer":
        start = [1] if self.bos_token_id and add_special_tokens else []
        self.input_ids = [*start, *map(ord, text), *([2] if add_special_tokens else [])]
        return self


def rendered(template: str, question: str, demonstrations: list[tuple[str, str]] | None = None) -> str:
    return "".join(map(chr, render_prompt(template, question, CharacterTokenizer(bos=False), demonstrations or [])))


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("plain", "What is {1}?\n"),
        ("raw", "What is {1}?"),
        (
            "qwen-boxed",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\nWhat is {{1}}?\n{BOXED}<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("deepseek-r1", f"<｜User｜>What is {{1}}?\n{BOXED}<｜Assistant｜><think>\n"),
        ("o1_cot", f"[Round 0] USER:\nWhat is {{1}}?\n{BOXED} ASSISTANT:\n"),
        ("wizard_zs", "### Instruction:\nWhat is {1}?\n\n### Response: Let's think step by step."),
        ("numina", "### Problem: What is {1}?\n### Solution:"),
        ("mistral", f"[INST] What is {{1}}?\n{BOXED} [/INST]"),
        ("pal", "Question: What is {1}?\n\n"),
        ("jiuzhang_tora", "## Question\nWhat is {1}?\n\n## Code Solution\n"),
        ("tora", f"{TORA}<|user|>\nWhat is {{1}}?\n<|assistant|>\n"),
        ("tool-integrated", f"{TORA}Question: What is {{1}}?\n\nSolution:\n"),
        (
            "qwen25-math-tir",
            "<|im_start|>system\nPlease integrate natural language reasoning with programs to solve the problem above, "
            "and put your final answer within \\boxed{}.<|im_end|>\n<|im_start|>user\nWhat is {1}?<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)
def test_rendered_prompts(template: str, prompt: str):
    assert rendered(template, "What is {1}?") == prompt


def test_demonstrations_come_first():
    shown = [("1+1?", "It is \\boxed{2}."), ("2+2?", "It is \\boxed{4}.")]
    assert rendered("question-answer", "3+3?", shown) == (
        "Question: 1+1?\nAnswer: It is \\boxed{2}.\n\nQuestion: 2+2?\nAnswer: It is \\boxed{4}.\n\n"
        "Question: 3+3?\nAnswer:"
    )
    assert rendered("qwen", "3+3?", shown[:1]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nIt is \\boxed{2}.<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_beginning_token_comes_first_alone_and_once():
    assert render_prompt("plain", "a", CharacterTokenizer(bos=True)) == [1, 97, 10]
    assert render_prompt("plain", "a", CharacterTokenizer(bos=False)) == [97, 10]
    assert render_prompt("raw", "\x01a", CharacterTokenizer(bos=True)) == [1, 97]
    assert render_prompt("raw", "a\n ", CharacterTokenizer(bos=True)) == [1, 97, 10, 32]


@pytest.mark.parametrize(
    ("template", "shown", "contents"),
    [
        ("chat", [], ["3 + 4?"]),
        ("chat", [("1 + 1?", "2")], ["1 + 1?", "2", "3 + 4?"]),
        ("chat-boxed", [], [f"3 + 4?\n{BOXED}"]),
    ],
)
def test_chat_is_rendered_by_the_tokenizer(tiny_tokenizer, template: str, shown: list, contents: list[str]):
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    expected = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert render_prompt(template, "3 + 4?", tiny_tokenizer, shown) == expected


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.chat])
def test_every_template_holds_the_question_once(name: str):
    text = rendered(name, "What is 3 + 4?", [("What is 1 + 1?", "2")])
    assert text.count("What is 3 + 4?") == text.count("What is 1 + 1?") == 1
    assert text.index("1 + 1") < text.index("3 + 4")
    assert "{" not in text.replace("boxed{}", "")
    # Texts of our own templates are recognised, but for a question with an instruction and nothing more.
    bare = name in ("raw", "plain", "plain-boxed", "mathstral", "pal")
    assert (template_marker(rendered(name, "What is 3 + 4?")) is None) == bare


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("[INST] 1? [/INST]", "[INST]"),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1?", "<|start_header_id|>"),
        ("Question:\n1?\nAnswer:\nLet's think step by step.\n", "Question: ... Answer:"),
        ("User: 1?\nBox it.\n\nAssistant:", "User: ... Assistant:"),
        ("A conversation between User and Assistant. The user asks", "A conversation between User and Assistant."),
        ("What is the answer to this question: 1 + 1?", None),
        ("Question: how many are left?", None),
        ("What is [1, 2] + [3, 4]?\nAnswer: in a box.", None),
    ],
)
def test_template_marker(text: str, marker: str | None):
    assert template_marker(text) == marker


def test_stop_token_ids(tiny_tokenizer: PreTrainedTokenizerBase):
    assert stop_token_ids("qwen-boxed", tiny_tokenizer) == [tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert stop_token_ids("llama", tiny_tokenizer) == stop_token_ids("chat", tiny_tokenizer) == []


def test_stop_strings_are_not_tokens():
    tokenizer = make_tiny_tokenizer()
    assert stop_strings("abel", tokenizer) == ["\nQuestion:", "<|endoftext|>", "</s>"]
    tokenizer.add_tokens(["User:"])  # an ordinary token, which other tokens may spell too
    assert stop_strings("r1-zero", tokenizer) == ["User:", "Assistant:"]


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("qwen_boxed", "no such template; did you mean 'qwen-boxed'?"),
        ("zzz", "no such template; must be one of chat, chat-boxed, raw, plain, ..."),
    ],
)
def test_unknown_template_is_refused(refused, template: str, line: str):
    for use in (template_stops, lambda name: rendered(name, "1?")):
        with refused(f"template={template!r}: {line}"):
            use(template)


def test_demonstrations_are_right():
    answers = {
        "words": ["93", "79", "5", "40"],
        "formulas": ["7", r"\frac{1}{6}", r"(-\infty, 1) \cup (1, 5]", r"2\sqrt{2}"],
        "choices": ["C", "B", "D"],
        "chinese": ["51", "40", r"\frac{3}{2}"],
        "output": ["384", "4.302775637731995"],
    }
    # tests/rollout/test_programs.py runs the others.
    assert answers.keys() == DEMONSTRATIONS.keys() - {"solution"}
    for name in answers:
        shown = DEMONSTRATIONS[name]
        found = [compute_score("math", answer, truth) for (_, answer), truth in zip(shown, answers[name], strict=True)]
        assert [score["score"] for score in found] == [1.0] * len(shown)
    used = {benchmark.demonstrations for benchmark in BENCHMARKS.values()}
    assert used | {template.python or None for template in TEMPLATES.values()} == {*DEMONSTRATIONS, None}
