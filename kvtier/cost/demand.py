"""What a service is asked for: the prompts of its sessions, and what of them comes again.

A session sends ``turns`` requests. Each begins with the whole of the one before, as a conversation does,
and the first begins with a prefix that all sessions share. The prompt of the last turn has ``prompt``
tokens; what is not shared grows evenly over the turns. With retrieval instead, a request has the shared
prefix and ``retrieved`` tokens chosen for it, so nothing but the prefix comes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.errors import ConfigError

#: Turns that stand for all of a session, evenly apart.
MOST_TURNS = 8


@dataclass(frozen=True)
class Turn:
    """One request: tokens of its prompt, of the prefix that all share, and of the turn before it (0 if
    none), prompt and answer. Fractions of tokens are the mean of many sessions."""

    prompt: float
    shared: float
    before: float


@dataclass(frozen=True)
class Demand:
    """A workload.

    Attributes:
        prompt: tokens of the longest prompt of a session, its last. shared: of the prefix that all begin
            with.
        sessions: that are alive together. requests: a minute, of all.
        turns: requests of a session. output: tokens of an answer.
        retrieved: tokens that retrieval puts in the place of all that is not shared.
    """

    prompt: int
    shared: int = 0
    sessions: int = 1
    requests: float = 1.0
    turns: int = 1
    output: int = 256
    retrieved: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("prompt", 1),
            ("shared", 0),
            ("sessions", 1),
            ("turns", 1),
            ("output", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; give {least} or more")
        if self.shared >= self.prompt:
            raise ConfigError(
                f"shared is {self.shared} of a prompt of {self.prompt} tokens; give less than the prompt"
            )
        if not 0 < self.requests < 1e9:
            raise ConfigError(f"requests is {self.requests}; give requests a minute above 0")
        if self.retrieved is not None and not 1 <= self.retrieved <= self.own:
            raise ConfigError(
                f"retrieved is {self.retrieved}; give 1 to {self.own} tokens, the part that is not shared"
            )

    @property
    def own(self) -> int:
        """Tokens of the longest prompt that are not shared."""
        return self.prompt - self.shared

    @property
    def short(self) -> int:
        """Tokens of a prompt with retrieval."""
        return self.shared + (self.retrieved or max(1, self.own // 4))

    def sample(self, retrieval: bool) -> list[Turn]:
        """Turns that stand for all, the last among them."""
        if retrieval:
            return [Turn(self.short, self.shared, 0)]
        return list(self._turns())

    def _turns(self) -> Iterator[Turn]:
        count = min(self.turns, MOST_TURNS)
        chosen = sorted({round(1 + k * (self.turns - 1) / max(1, count - 1)) for k in range(count)})
        for turn in chosen:
            prompt = self.shared + self.own * turn / self.turns
            before = self.shared + self.own * (turn - 1) / self.turns
            # The answer to the turn before is part of what was added, and its KV was made by decoding.
            known = min(before + self.output, prompt - 1) if turn > 1 else 0.0
            yield Turn(prompt, self.shared, max(known, 0.0))
