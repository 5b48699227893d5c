"""``kvtier run``: one prompt through a tiered cache, measured, explained and compared."""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.display import Display
from kvtier.cli.generate import Driver, Generation, chunk_calls, stop_tokens
from kvtier.cli.history import History, Run, Source
from kvtier.cli.offload import Estimate, card_of, estimate
from kvtier.cli.options import RunOptions
from kvtier.cli.report import LINKS, Report
from kvtier.cli.verify import compare, reference
from kvtier.demo.model import converted_model, demo_text, load_folder
from kvtier.errors import ConfigError, OffloadWarning
from kvtier.units import format_size

if TYPE_CHECKING:
    import torch

    from kvtier.layout import PageLayout

#: Time for the pages of a whole run to be acknowledged by a slow disk.
FLUSH_S = 300.0
#: The demo's disk limit in multiples of the KV: pages, B-tree, and room for copies on write.
DEMO_DISK_FACTOR = 4


@dataclass(frozen=True)
class Plan:
    """Sizes of a run, in bytes and tokens."""

    vram: int
    host: int
    disk: int
    chunk: int
    kv_bytes: int


def run(options: RunOptions) -> int:
    """Run and print; returns the exit status, 1 if a comparison failed.

    Raises:
        ConfigError: an option does not fit the model or the prompt.
    """
    from rich.console import Console

    console = Console(stderr=options.json)
    with warnings.catch_warnings(), Display(console, quiet=options.json) as display:
        warnings.simplefilter("always", OffloadWarning)
        # they are in the report; printed by Python they would tear the live view
        warnings.showwarning = lambda message, *_, **__: display.say(str(message), "yellow")
        report = _run(options, display)
    if options.json:
        print(report.as_json())
    else:
        report.render(console)
    sys.stdout.flush()
    return 1 if report.failed else 0


def _run(options: RunOptions, display: Display) -> Report:
    _need_transformers()
    from kvtier.devices import open_device
    from kvtier.integrations.transformers import TieredCache, layout_of
    from kvtier.store.store import TieredStore

    with ExitStack() as stack:
        device = open_device(options.device)
        stack.callback(device.close)
        model, tokenizer = _load(options, display)
        model.to(device.torch_device)
        ids = _prompt(options, tokenizer, model).to(device.torch_device)
        prompt_tokens = ids.shape[1]
        layout = layout_of(model, page_tokens=options.page_tokens)
        plan = plan_sizes(options, layout, prompt_tokens)
        planned = _planned(device, model, layout, plan, prompt_tokens + options.max_new_tokens)
        found: list[str] = []
        if planned is not None and (text := planned.warning(plan.kv_bytes)) is not None:
            found.append(text)
            warnings.warn(text, OffloadWarning, stacklevel=2)
        store = stack.enter_context(
            TieredStore(
                layout,
                device=device,
                vram=plan.vram,
                host=plan.host,
                disk=plan.disk,
                path=options.store,
                policy=options.policy,
            )
        )
        cache = TieredCache(model, store)
        stack.callback(cache.close)
        display.watch(store.stats)
        history = History(options.store) if options.store is not None and plan.disk else None

        since = time.perf_counter()
        restored = cache.load_prefix(ids)
        calls = chunk_calls(restored, prompt_tokens, plan.chunk)
        record = Run(
            identity=cache.identity.digest.hex(),
            numerics=numerics(model, device.name),
            tokens=ids[0].tolist(),
            prompt_tokens=prompt_tokens,
            calls=list(calls),
        )
        restorable = (prompt_tokens - 1) // options.page_tokens * options.page_tokens
        source = (
            history.begin(record, restored, restorable)
            if history is not None
            else Source([], [], True)
        )
        if restored:
            display.say(f"restored {restored:,} of {prompt_tokens:,} tokens from {options.store}")
        driver = Driver(model, cache)
        logits = driver.prefill(ids, calls, display.phase("prefill", prompt_tokens, restored))
        before = _link_bytes(store.stats())
        result = driver.decode(
            logits,
            count=options.max_new_tokens,
            stop_ids=stop_tokens(model),
            keep_logits=options.verify,
            since=since,
            done=display.phase("decode", options.max_new_tokens),
        )
        moved = {name: nbytes - before[name] for name, nbytes in _link_bytes(store.stats()).items()}
        steps = max(1, len(result.tokens) - 1)
        per_token = {name: nbytes / steps for name, nbytes in moved.items()}
        since = time.perf_counter()
        cache.seal()
        cache.flush(FLUSH_S)
        flush_s = time.perf_counter() - since
        if history is not None:
            history.finish(record, result.tokens, result.ttft_s, restored)
        stats = store.stats()
        report = Report(
            model=options.model or "SmolLM2-135M-Instruct",
            device=device.name,
            policy=options.policy,
            text=tokenizer.decode(result.tokens, skip_special_tokens=True),
            page_tokens=options.page_tokens,
            chunk_tokens=plan.chunk,
            kv_bytes=layout.sequence_bytes(prompt_tokens + len(result.tokens)),
            staging_bytes=cache.staging_bytes,
            prompt_tokens=prompt_tokens,
            restored_tokens=restored,
            generated_tokens=len(result.tokens),
            ttft_s=result.ttft_s,
            cold_ttft_s=record.cold_ttft_s,
            decode_tokens_per_s=result.decode_tokens_per_s,
            flush_s=flush_s,
            tiers=stats.tiers,
            links=stats.links,
            link_bytes_per_token=per_token,
            planned=planned,
            measured=_measured(
                device, model, layout, prompt_tokens + len(result.tokens), per_token
            ),
            warnings=[*found, *stats.warnings],
        )
    if options.verify:
        report.comparison = _verify(options, display, model, ids, source, restored, calls, result)
    return report


def plan_sizes(options: RunOptions, layout: PageLayout, prompt_tokens: int) -> Plan:
    """Tier sizes and chunk: what was asked for, and for the demo a third of the KV in VRAM and in
    host RAM.

    Raises:
        ConfigError: the VRAM tier holds less than two pages.
    """
    page = layout.page_bytes
    kv_bytes = layout.sequence_bytes(prompt_tokens + options.max_new_tokens)
    third = kv_bytes // 3 // page * page
    vram = third if options.vram is None else options.vram
    host = third if options.host is None else options.host
    disk = kv_bytes * DEMO_DISK_FACTOR if options.disk is None else options.disk
    least = 2 * page
    if vram < least:
        what = "a third of the prompt's KV" if options.vram is None else "--vram"
        raise ConfigError(
            f"{what} is {vram} bytes, but two pages of {options.page_tokens} tokens take {least} "
            f"bytes ({format_size(least)}); give --vram {-(-least // 1024)}KiB or more"
        )
    # the pages of one call stay in VRAM until it ends, beside those it evicts
    room = vram // page // 2 * options.page_tokens
    wanted = max(options.page_tokens, options.chunk // options.page_tokens * options.page_tokens)
    return Plan(vram, host, disk, min(wanted, room), kv_bytes)


def numerics(model: Any, device_name: str) -> str:
    """What may change the last bits of a logit without changing the model."""
    import torch
    import transformers

    attention = getattr(model.config, "_attn_implementation", None)
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, {device_name}, "
        f"{torch.get_num_threads()} threads, {model.dtype}, {attention}"
    )


def _need_transformers() -> None:
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed; run: pip install 'kvtier[transformers]'"
            )


def _load(options: RunOptions, display: Display) -> tuple[Any, Any]:
    if options.model is not None:
        display.say(f"loading {options.model}")
        return load_folder(options.model)
    folder = converted_model(progress=display.say)
    display.say("loading SmolLM2-135M-Instruct")
    return load_folder(folder, dtype="float32")


def _prompt(options: RunOptions, tokenizer: Any, model: Any) -> torch.Tensor:
    """Prompt ids ``[1, N]``, N >= 2."""
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompt-file {path} cannot be read: {error}; give a UTF-8 text file"
        ) from error


def _planned(
    device: Any, model: Any, layout: PageLayout, plan: Plan, tokens: int
) -> Estimate | None:
    card = card_of(device.name)
    if card is None:
        return None
    outside = max(0, layout.pages(tokens) * layout.page_bytes - plan.vram)
    return estimate(
        card,
        weight_bytes=_weights_read(model),
        kv_bytes=plan.kv_bytes,
        link_bytes=outside,
        disk_bytes=max(0, outside - plan.host),
        pinned=True,
    )


def _measured(
    device: Any, model: Any, layout: PageLayout, tokens: int, per_token: dict[str, float]
) -> Estimate | None:
    card = card_of(device.name)
    if card is None:
        return None
    return estimate(
        card,
        weight_bytes=_weights_read(model),
        kv_bytes=layout.sequence_bytes(tokens),
        link_bytes=per_token["host->vram"],
        disk_bytes=per_token["disk->host"],
        pinned=True,
    )


def _weights_read(model: Any) -> int:
    """Bytes of weights that a decode step reads: all but the rows of an untied input embedding."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    rows, head = model.get_input_embeddings(), model.get_output_embeddings()
    if rows is not None and head is not None and rows.weight is not head.weight:
        total -= rows.weight.numel() * rows.weight.element_size()
    return int(total)


def _link_bytes(stats: Any) -> dict[str, int]:
    return {name: stats.links[name].bytes if name in stats.links else 0 for name in LINKS}


def _verify(
    options: RunOptions,
    display: Display,
    model: Any,
    ids: torch.Tensor,
    source: Source,
    restored: int,
    calls: list[tuple[int, int]],
    result: Generation,
) -> Any:
    display.say("the same with transformers' DynamicCache")
    again = reference(
        model,
        ids,
        source=source,
        restored=restored,
        calls=calls,
        count=options.max_new_tokens,
        stop_ids=stop_tokens(model),
        done=display.phase("reference", ids.shape[1]),
    )
    return compare(result, again, exact_source=source.exact)
