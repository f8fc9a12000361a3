"""What a server allows its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from string import whitespace

from foretoken.errors import ConfigError, check_values

LEAST_BODY = 1024  # bytes that any request may have


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Limits and names of a server; the number of rows decoded together is the session's."""

    model_name: str = "foretoken"  # what clients call the model
    queue: int = 256  # texts that may wait for a place in the batch
    max_tokens_limit: int | None = None  # most new tokens of a text; None: what the context holds
    max_body: int = 4 << 20  # bytes of a request
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everybody may ask
    prefix_cache: int = 512 << 20  # bytes of keys and values kept of texts that are over
    request_timeout: float | None = None  # seconds until a request is ended; None: never
    grace: float = 30.0  # seconds that running texts get once the server is to stop
    log_file: Path | None = None  # JSON lines, one per request; None: to logging alone
    metrics: bool = True  # answer /metrics

    def __post_init__(self) -> None:
        limit, timeout = self.max_tokens_limit, self.request_timeout
        check_values(
            self,
            ("model_name", bool(self.model_name.strip()), "a name"),
            ("queue", self.queue >= 0, "0 or more"),
            ("max_tokens_limit", limit is None or limit >= 1, "1 or more, or none"),
            ("max_body", self.max_body >= LEAST_BODY, f"{LEAST_BODY} bytes or more"),
            ("prefix_cache", self.prefix_cache >= 0, "0 (off) or more bytes"),
            ("request_timeout", timeout is None or timeout > 0, "above 0 seconds, or none"),
            ("grace", self.grace >= 0, "0 seconds or more"),
        )
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError(
                "an empty API key was passed.",
                "a key is a text that clients send; without keys everybody may ask.",
                "pass keys that are not empty, or none.",
            )
        # As the header's is read, or a key with a blank at its end would never be the right one.
        stripped = tuple(key.strip(whitespace) for key in self.api_keys)
        object.__setattr__(self, "api_keys", stripped)
