"""Whether a model's weights are complete and those of its config, from the headers of its files alone."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from verl.config.errors import ConfigError, in_one_line
from verl.models.hub import local_folder
from verl.models.info import ModelInfo

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OLDER = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weight files whose header cannot be read separately."""


def check_weights(info: ModelInfo, where: str) -> None:
    """Raise ``ConfigError`` if the files of the weights are missing, cut short, or of other shapes than the config's.

    Args:
        where: the option that names the model, with its value.
    """
    folder = Path(local_folder(info.path))
    files = _files(folder, where)
    shapes: dict[str, list[int]] = {}
    expected = _expected(info)
    for file, names in files.items():
        found = _shapes(folder / file, where)
        # The index of some models also names tensors that nothing reads, such as a head that is the embedding.
        if lacking := sorted((names - found.keys()) & expected.keys()):
            raise ConfigError(f"{where}: {file} lacks {lacking[0]}, which {INDEX} names; fetch the model again")
        shapes |= found
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise ConfigError(
                f"{where}: {name} has shape {shapes[name]} in its files, and {shape} by its config.json "
                "(vocab_size, hidden_size, ...); restore that file, or name a complete model"
            )


def _files(folder: Path, where: str) -> dict[str, set[str]]:
    """The safetensors of the model -> the tensors that the index says they hold; none for weights in an older form."""
    if (folder / SINGLE).exists():
        return {SINGLE: set()}
    if (folder / INDEX).exists():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            files = {file: {name for name, of in weight_map.items() if of == file} for file in weight_map.values()}
        except Exception as error:  # the file may hold anything
            raise ConfigError(f"{where}: cannot read {INDEX}: {in_one_line(error)}; fetch the model again") from error
        outside = [file for file in files if not isinstance(file, str) or Path(file).name != file]
        if outside:
            raise ConfigError(f"{where}: {INDEX} names {outside[0]!r}, which is no file of the folder")
        return files
    if not any((folder / name).exists() for name in OLDER):
        raise ConfigError(f"{where}: there are no weights ({SINGLE}); name a folder saved by save_pretrained")
    return {}


def _shapes(file: Path, where: str) -> dict[str, list[int]]:
    """The shape of each tensor; the header says how long the file is, too."""
    fix = "fetch or copy the model again"
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        reason = "is missing" if not file.exists() else f"is broken or cut short ({in_one_line(error)})"
        raise ConfigError(f"{where}: {file.name} {reason}; {fix}") from error


def _expected(info: ModelInfo) -> dict[str, list[int]]:
    """Name -> shape of the parameters of the language model, as far as its files keep their names."""
    if type(info.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    # transformers joins the weights of experts, and may turn them.
    parameters = info.causal_model.named_parameters()
    return {name: list(parameter.shape) for name, parameter in parameters if ".experts." not in name}
