"""How an ``OffloadWarning`` is raised: always as a Python warning and as a structured log event.

The log event goes to the logger ``kvtier`` at level WARNING, with the record as the attribute
``offload`` of the ``LogRecord``: the same mapping that every ``--json`` lists under ``warnings``
and that ``OffloadWarning.record`` holds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from kvtier.errors import OffloadWarning

LOGGER = "kvtier"

# Without a handler of any kind, logging would print each event beside the Python warning.
logging.getLogger(LOGGER).addHandler(logging.NullHandler())


def plain_record(text: str) -> dict[str, Any]:
    """The record of a warning that has no prediction, such as memory that could not be pinned."""
    return {
        "kind": "event",
        "level": "warning",
        "cause": text,
        "link": None,
        "before_tps": None,
        "after_tps": None,
        "after_low_tps": None,
        "after_high_tps": None,
        "before_ttft_s": None,
        "after_ttft_s": None,
        "remedies": [],
        "text": text,
    }


def announce(text: str, record: Mapping[str, Any] | None = None, *, stacklevel: int = 1) -> None:
    """Log the warning, then raise it as a Python warning.

    Args:
        text: for people.
        record: for programs; default ``plain_record(text)``.
        stacklevel: of the caller, as for ``warnings.warn``.

    Raises:
        OffloadWarning: if a warning filter turns it into an error; it was logged.
    """
    full = dict(record) if record is not None else plain_record(text)
    logging.getLogger(LOGGER).warning(text, extra={"offload": full}, stacklevel=stacklevel + 1)
    warnings.warn(OffloadWarning(text, full), stacklevel=stacklevel + 1)
