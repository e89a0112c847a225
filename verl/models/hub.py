"""Downloads models from the Hugging Face hub, once per machine."""

import hashlib
import json
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from verl.config.errors import ConfigError

FILES = ["*.json", "*.jinja", "*.model", "*.py", "*.safetensors", "*.tiktoken", "*.txt"]
"""Patterns of the model files that ``transformers`` and vLLM read."""
OLDER_WEIGHTS = ["*.bin"]
"""Patterns of weight files in models without safetensors."""
COPIES = ["consolidated*", "original/*", "onnx/*"]
"""Patterns of files that duplicate the weights in other formats."""

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
DIGESTED_CONFIGS = {"config.json", "generation_config.json"}
"""Config files included in a model digest. The generation config can add end-of-sequence tokens."""

DIGESTED_PIECES = 64
DIGESTED_BYTES = 1 << 16
"""Number and size in bytes of the evenly spaced pieces of a weight file to hash. Hashing only the ends of a file would
not be enough, because short training can leave the embeddings and bfloat16 norms stored there unchanged."""


def fetch_model(path: str, field: str) -> None:
    """Download the latest version of a hub model into this machine's cache; do nothing for a local folder.

    Raises ``ConfigError`` if the model does not exist or is not accessible, or the hub cannot be reached. The error
    message names the option ``field``.
    """
    if not is_local(path):
        _download(path, field)


def local_folder(path: str) -> str:
    """Return the model's local folder: ``path`` itself or the cached hub snapshot, downloaded if missing.

    Raises ``ConfigError`` if the download fails; see :func:`fetch_model`.
    """
    if is_local(path):
        return path
    try:
        folder = huggingface_hub.snapshot_download(
            path, allow_patterns=FILES, ignore_patterns=COPIES, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return _download(path, "model.path")
    return folder if is_complete(Path(folder)) else _download(path, "model.path")


def is_local(path: str) -> bool:
    """Return whether ``path`` is a folder rather than a hub id."""
    return Path(path).is_absolute() or Path(path).is_dir()


def is_complete(folder: Path) -> bool:
    """Return whether the folder contains the model's config and all of its weight files."""
    if not (folder / "config.json").is_file():
        return False
    # Follow the order in which transformers looks for weights.
    if (folder / "model.safetensors").is_file():
        return True
    for index, weights in (
        ("model.safetensors.index.json", "*.safetensors"),
        ("pytorch_model.bin.index.json", "*.bin"),
    ):
        if (folder / index).is_file():
            try:
                names = set(json.loads((folder / index).read_text())["weight_map"].values())
                # Reject file names that point outside the folder.
                return all(name == Path(name).name and (folder / name).is_file() for name in names)
            except Exception:  # The file may contain anything.
                return False
        if any(folder.glob(weights)):
            return True
    return False


def _download(path: str, field: str) -> str:
    name = f"{field}={path!r}"
    try:
        folder = huggingface_hub.snapshot_download(path, allow_patterns=FILES, ignore_patterns=COPIES)
        if not is_complete(Path(folder)):
            further = FILES + OLDER_WEIGHTS
            folder = huggingface_hub.snapshot_download(path, allow_patterns=further, ignore_patterns=COPIES)
    except HFValidationError as error:
        raise ConfigError(f"{name}: neither a folder nor the name of a model of the hub") from error
    except GatedRepoError as error:
        state = "the token in use has no access" if huggingface_hub.get_token() else "HF_TOKEN is not set"
        raise ConfigError(
            f"{name}: the model is gated and {state}; accept its terms at {constants.ENDPOINT}/{path}, and set "
            "HF_TOKEN to a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name}: the hub has no such model, or a private one; check the name, or set HF_TOKEN to a token that may "
            "read it"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{name}: {_reason(error)}; {_fix(path)}") from error
    if not is_complete(Path(folder)):
        raise ConfigError(f"{name}: {folder} lacks config.json or files of its weights; {_fix(path)}")
    return folder


def _reason(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache has no complete copy of the model"
    cause = error.__cause__ or error
    return f"the hub could not be read ({' '.join(str(cause).split())[:160]}), and the cache has no complete copy"


def _fix(path: str) -> str:
    online = " (HF_HUB_OFFLINE unset)" if constants.HF_HUB_OFFLINE else ""
    return f"fetch it where there is a network{online}, by `hf download {path}`, or name a folder that holds it"


def model_digest(path: str) -> str:
    """Return a path-independent digest of the weights and configs in a local folder, or return a hub id unchanged.

    Raises ``ConfigError`` if the folder does not exist or disappears while it is read.
    """
    folder = Path(path)
    if not folder.is_absolute() and not folder.is_dir():
        return path
    digest = hashlib.blake2b(digest_size=8)
    try:
        for file in sorted(folder.iterdir()):
            if file.suffix in WEIGHT_SUFFIXES or file.name in DIGESTED_CONFIGS:
                _add_file(digest, file)
    except OSError as error:
        raise ConfigError(f"{path}: the model cannot be read: {error.strerror}; was it removed?") from error
    return digest.hexdigest()


def _add_file(digest: "hashlib.blake2b", file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}/{size}/".encode())
    with file.open("rb") as content:
        if size <= DIGESTED_PIECES * DIGESTED_BYTES:
            digest.update(content.read())
            return
        for piece in range(DIGESTED_PIECES):
            content.seek((size - DIGESTED_BYTES) * piece // (DIGESTED_PIECES - 1))
            digest.update(content.read(DIGESTED_BYTES))
