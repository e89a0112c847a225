"""docs/data.md: its classes work, and its table has every template."""

import re
from pathlib import Path

from tiny_tokenizer import make_tiny_tokenizer

from tests.kit import ROOT, data_options, documented, user_code
from verl.config.data import CustomDatasetConfig, SamplerConfig
from verl.data.prompts import PromptDataset, train_loader
from verl.data.templates import TEMPLATES
from verl.method import StepOutcome

PAGE = (ROOT / "docs" / "data.md").read_text()


def test_examples_work(tmp_path: Path):
    prompts, order = (user_code(tmp_path, documented("data", name), name) for name in ("my_prompts.py", "my_order.py"))
    config = data_options(
        train_files=["4"],
        truncation="right",
        train_batch_size=2,
        custom_cls=CustomDatasetConfig(prompts, "Sums"),
        sampler=SamplerConfig(order, "HardestFirst"),
    )
    dataset = PromptDataset(config.train_files, make_tiny_tokenizer(), config)
    assert [record.ground_truth for record in dataset.records] == ["0", "2", "4", "6"]
    loader = train_loader(dataset, config, 0)
    assert [[record.uid for record in batch] for batch in loader] == [[0, 1], [2, 3]]
    loader.sampler.update(StepOutcome(1, [0, 1, 2, 3], [0.0] * 4, [1.0, 0.0, 0.5, 0.25], {}))
    assert [[record.uid for record in batch] for batch in loader] == [[1, 3], [2, 0]]


def test_every_template_is_described():
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    described = [name for row in rows for name in re.findall(r"`([\w-]+)`", row) if name in TEMPLATES]
    assert sorted(described) == sorted(TEMPLATES)
