"""The model and the prompt of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.display import Display
from kvtier.cli.options import RunOptions
from kvtier.demo.model import converted_model, demo_text, load_folder
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    import torch


def need_transformers() -> None:
    """Raises ConfigError with the command to install what is missing."""
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed; run: pip install 'kvtier[transformers]'"
            )


def load_model(options: RunOptions, display: Display) -> tuple[Any, Any]:
    """``(model, tokenizer)`` that ``--model`` or ``--demo`` names."""
    if options.model is not None:
        display.say(f"loading {options.model}")
        return load_folder(options.model)
    folder = converted_model(progress=display.say)
    display.say("loading SmolLM2-135M-Instruct")
    return load_folder(folder, dtype="float32")


def prompt_ids(options: RunOptions, tokenizer: Any, model: Any) -> torch.Tensor:
    """Ids of the prompt, int64 ``[1, N]``, N >= 2.

    Raises:
        ConfigError: no readable text, too short, or longer than the model reads.
    """
    if options.prompt_file is None:
        text, name = demo_text(), "the demo text"
    else:
        text, name = _read(options.prompt_file), f"--prompt-file {options.prompt_file}"
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    if options.prompt_tokens is not None:
        if ids.shape[1] < options.prompt_tokens:
            raise ConfigError(
                f"--prompt-tokens is {options.prompt_tokens}, but {name} has only {ids.shape[1]}"
            )
        ids = ids[:, : options.prompt_tokens]
    if ids.shape[1] < 2:
        raise ConfigError(f"{name} has {ids.shape[1]} tokens; give a prompt of at least 2")
    limit = getattr(model.config, "max_position_embeddings", None)
    total = ids.shape[1] + options.max_new_tokens
    if limit is not None and total > limit:
        raise ConfigError(
            f"{name} has {ids.shape[1]} tokens and --max-new-tokens is {options.max_new_tokens}, "
            f"but the model reads {limit} in all; cut the prompt with --prompt-tokens "
            f"{max(2, limit - options.max_new_tokens)}"
        )
    return ids


def numerics(model: Any, device_name: str) -> str:
    """What may change the last bits of a logit without changing the model."""
    import torch
    import transformers

    attention = getattr(model.config, "_attn_implementation", None)
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, {device_name}, "
        f"{torch.get_num_threads()} threads, {model.dtype}, {attention}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompt-file {path} cannot be read: {error}; give a UTF-8 text file"
        ) from error
