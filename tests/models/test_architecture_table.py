"""Architectures: the table in docs/models.md, and what vLLM cannot sample."""

from pathlib import Path

from transformers import LlamaConfig

from tests.kit import ROOT, changed
from tests.vllm_patches import zoo
from verl.rollout.engines import NOT_WITH_VLLM, check_engine_model, cpu_head_sizes


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the rows of the first table below a heading that begins so."""
    lines = page.read_text().split(heading, 1)[1].splitlines()[2:]
    rows = lines[: next(index for index, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


def test_documented_architectures_are_the_tested_ones():
    rows = table(ROOT / "docs" / "models.md", "| Architecture (`model_type`)")
    assert [name for name, *_ in rows] == sorted(zoo.ARCHITECTURES)
    for name, _, engine, layers in rows:
        assert engine == ("hf" if name in zoo.WITHOUT_NATIVE_CLASS | zoo.WITHOUT_WEIGHT_SYNC else "vllm"), name
        assert layers == ("last" if name in zoo.WITHOUT_INTERMEDIATE_LAYERS else "all"), name
    assert set(NOT_WITH_VLLM) == zoo.WITHOUT_WEIGHT_SYNC


def test_architecture_that_vllm_samples_wrongly_is_refused(small_config, refused, tmp_path):
    config = changed(small_config, model={"path": str(zoo.build("gpt_oss", tmp_path))})
    with refused("model.path='TMP...': gpt_oss samples with wrong experts ... rollout.name=hf"):
        check_engine_model(config, "cpu")
    check_engine_model(changed(config, rollout={"name": "hf"}), "cpu")


def test_head_size_without_cpu_attention_is_refused(small_config, refused, tmp_path):
    assert {32, 64, 128} <= {*cpu_head_sizes()} and 16 not in cpu_head_sizes()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaConfig(hidden_size=64, **heads).save_pretrained(tmp_path)
    config = changed(small_config, model={"path": str(tmp_path)})
    with refused("model.path='TMP': head_dim=16: ... heads of 32, 64, ...; set rollout.name=hf"):
        check_engine_model(config, "cpu")
    check_engine_model(config, "cuda")
    check_engine_model(changed(config, rollout={"name": "hf"}), "cpu")
    LlamaConfig(hidden_size=64, head_dim=32, **heads).save_pretrained(tmp_path)
    check_engine_model(changed(config, model={"path": f"{tmp_path}/"}), "cpu")
