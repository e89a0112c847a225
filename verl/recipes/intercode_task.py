"""Small task for :mod:`verl.recipes.intercode`; ``python -m verl.recipes.intercode_task FOLDER`` writes its files."""

import random
from itertools import permutations
from typing import Any

from verl.recipes.common import task_row, write_task

FILES = [f"{name}{i}" for name in ("ann", "ben", "cat", "dog", "eel", "fox", "gnu", "hen") for i in range(5)]
COMMANDS = {
    "How many lines has {0}?": "wc -l < {0}",
    "Print the last line of {0}.": "tail -n 1 {0}",
    "Delete {0}.": "rm {0}",
    "Copy {0} to {1}.": "cp {0} {1}",
    "Append the word {1} to {0}.": "echo {1} >> {0}",
}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Generate ``count`` distinct tasks about files with 2 to 9 lines; at most 3240 are possible."""
    generator = random.Random(seed)
    questions = {text.format(*pair): (text, pair) for text in COMMANDS for pair in permutations(FILES, 2)}
    made = []
    for question, (text, pair) in generator.sample(sorted(questions.items()), count):
        prompt = f"{question} Reply with a command, then with submit."
        setup = f"seq {generator.randint(2, 9)} > {pair[0]}"
        # The data source is required but unused, because no verifier runs with reward=only.
        made.append(task_row("open_answer", prompt, COMMANDS[text].format(*pair), setup=setup))
    return made


if __name__ == "__main__":
    write_task("Write a task of InterCode's shell", rows)
