"""The prompt caches of hosted APIs: how much is cached, what it costs, and when it misses all the same.

A provider caches the longest prefix from a minimum on, in steps; reads are cheaper, writes may cost
more. Its caches belong to machines: where the requests on one prefix exceed what a machine takes, they go
to several, and the first on each of them finds nothing though the content is the same. That class of
misses is one of location, not of content. A machine that hears nothing for a while forgets.

Source of the defaults (read in November 2026): OpenAI's prompt caching guide and its cookbook "Prompt
Caching 201": prompts from 1,024 tokens on, in steps of 128; up to 90 % off; from GPT-5.6 on a write costs
1.25 times the input, before nothing; kept 5 to 10 minutes without use, at most an hour. About 15 requests
a minute on one prefix before others go elsewhere: confirmed by a post in the provider's forum alone. Every
number can be given instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError

MINIMUM = 1024
STEP = 128
SOURCE = "OpenAI prompt caching guide and cookbook, read in November 2026"


def cached_tokens(prompt_tokens: int, minimum: int = MINIMUM, step: int = STEP) -> int:
    """Most tokens of a prompt that can come from the cache.

    ``0`` below ``minimum``, else ``minimum + step * floor((prompt_tokens - minimum) / step)``.

    Raises:
        ConfigError: a number is negative, not whole, or ``step`` is 0.
    """
    for name, value, least in (
        ("prompt_tokens", prompt_tokens, 0),
        ("minimum", minimum, 0),
        ("step", step, 1),
    ):
        if isinstance(value, bool) or not math.isfinite(value) or value % 1 or value < least:
            raise ConfigError(f"{name} is {value}; give a whole number of at least {least}")
    if prompt_tokens < minimum:
        return 0
    return int(minimum + step * ((prompt_tokens - minimum) // step))


@dataclass(frozen=True)
class PromptCache:
    """The terms of a provider.

    Attributes:
        minimum, step: tokens from which on, and in steps of which, a prefix is cached.
        discount: share of the input price that a cached token saves.
        write_surcharge: share of the input price that writing a token costs on top.
        machine_rate: requests a minute on one prefix that a machine takes.
        idle_minutes: a machine forgets a prefix after so long without a request on it.
        keep_minutes: it forgets it after so long in any case.
    """

    minimum: int = MINIMUM
    step: int = STEP
    discount: float = 0.9
    write_surcharge: float = 0.25
    machine_rate: float = 15.0
    idle_minutes: float = 5.0
    keep_minutes: float = 60.0

    def __post_init__(self) -> None:
        cached_tokens(0, self.minimum, self.step)
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"discount is {self.discount}; give a share from 0 to 1, e.g. 0.9")
        if not 0 <= self.write_surcharge < math.inf:
            raise ConfigError(
                f"write_surcharge is {self.write_surcharge}; give a share of at least 0, e.g. 0.25"
            )
        for name in ("machine_rate", "idle_minutes", "keep_minutes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number above 0")

    def cached(self, prompt_tokens: int) -> int:
        """Most tokens of a prompt that can come from the cache."""
        return cached_tokens(prompt_tokens, self.minimum, self.step)

    @property
    def break_even_rereads(self) -> int | None:
        """Fewest reads after the write with which caching is cheaper than not caching; None if it never
        is. ``1 + surcharge + k (1 - discount) < 1 + k``, so the smallest ``k > surcharge / discount``.
        """
        if not self.discount:
            return None
        # In millionths, so that 0.27 / 0.9 is not a hair below 0.3.
        surcharge, discount = round(self.write_surcharge * 1e6), round(self.discount * 1e6)
        return None if not discount else surcharge // discount + 1

    def cost_ratio(self, hit_share: float) -> float:
        """Input cost against no cache, where ``hit_share`` of the tokens is read from it and nothing is
        paid for writing: ``1 - discount * hit_share``."""
        if not 0 <= hit_share <= 1:
            raise ConfigError(f"hit_share is {hit_share}; give a share from 0 to 1")
        return 1 - self.discount * hit_share

    def machines(self, requests_per_minute: float) -> int:
        """Machines that the requests on one prefix are spread over, at least:
        ``ceil(requests / machine_rate)``."""
        if not 0 <= requests_per_minute < math.inf:
            raise ConfigError(
                f"requests_per_minute is {requests_per_minute}; give a number of at least 0"
            )
        return max(1, math.ceil(requests_per_minute / self.machine_rate))

    def outlook(
        self,
        prompt_tokens: int,
        shared_tokens: int,
        requests_per_minute: float,
        prefixes: int = 1,
    ) -> HostedOutlook:
        """What a steady stream of requests finds in the cache.

        Args:
            prompt_tokens: of a request, ``shared_tokens`` of them (its beginning) on a prefix that
                returns.
            requests_per_minute: of all. prefixes: that they are spread over evenly.

        Raises:
            ConfigError: a number is out of range, or more is shared than there is.
        """
        if not 0 <= shared_tokens <= prompt_tokens:
            raise ConfigError(
                f"shared_tokens is {shared_tokens} of {prompt_tokens} prompt_tokens; give 0 up to all"
            )
        if prefixes < 1:
            raise ConfigError(f"prefixes is {prefixes}; give 1 or more")
        rate = requests_per_minute / prefixes
        machines = self.machines(rate)
        cached = self.cached(shared_tokens)
        requests = rate * self.keep_minutes
        idle = machines / rate if rate else math.inf
        # The first request on each machine writes; where a machine forgets in between, every one does.
        misses = 1.0 if idle > self.idle_minutes else min(1.0, machines / max(1.0, requests))
        written = cached * (1 + self.write_surcharge)
        read = cached * (1 - self.discount)
        rest = prompt_tokens - cached
        return HostedOutlook(
            cached_tokens=cached,
            machines=machines,
            miss_share=misses if cached else 1.0,
            hit_share=(1 - misses) * cached / prompt_tokens if prompt_tokens else 0.0,
            cost_tokens=rest + misses * written + (1 - misses) * read,
            cost_ratio=(
                (rest + misses * written + (1 - misses) * read) / prompt_tokens
                if prompt_tokens
                else 1.0
            ),
            idle=idle > self.idle_minutes,
        )


@dataclass(frozen=True)
class HostedOutlook:
    """What a stream of requests finds.

    Attributes:
        cached_tokens: of a prompt, if it hits. machines: that one prefix is spread over.
        miss_share: share of requests that find nothing, all of them misses of location or time.
        hit_share: share of prompt tokens that are read from the cache.
        cost_tokens: price of a prompt, in tokens at the input price. cost_ratio: against no cache.
        idle: requests on a machine are further apart than it remembers.
    """

    cached_tokens: int
    machines: int
    miss_share: float
    hit_share: float
    cost_tokens: float
    cost_ratio: float
    idle: bool

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))
