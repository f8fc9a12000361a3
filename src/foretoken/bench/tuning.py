"""Peers with a setting: a few are tried in a short run before, and the fastest is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.bench.own import Outcome
from foretoken.bench.rows import RowSpec
from foretoken.errors import ConfigError, meant
from foretoken.types import SamplingParams


class TunedRow:
    """A peer under the bench's clock; `settings` are those tried, the last holds the defaults."""

    settings: tuple[dict[str, Any], ...] = ()
    short: Mapping[str, str] = {}  # names of settings as notes write them

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self.setting: dict[str, Any] = {}
        self.note = ""

    @classmethod
    def check_options(cls, spec: RowSpec) -> None:
        """Refuse an option that this peer does not take."""
        known = {key for setting in cls.settings for key in setting}
        for key in spec.options:
            if key not in known:
                raise ConfigError(
                    f"the row {spec.label} was asked for.",
                    f"{spec.method} takes {', '.join(sorted(known)) or 'no options'}.",
                    meant(key, known) if known else "leave the options out.",
                )

    def tune(
        self,
        asked: Sequence[Sequence[Sequence[int]]],
        params: SamplingParams,
        known: Mapping[str, Any] | None = None,
        step: Callable[[str], None] = lambda text: None,
        failures: tuple[type[Exception], ...] = (),
    ) -> dict[str, Any]:
        """Choose the setting: the one asked for, the one `known` from before, or the fastest.

        asked: prompts, those of one list written at once. A setting that ends in one of the
        `failures` is left out; the last one's is raised where none is left.
        """
        if not self.settings:
            return {}
        tried: dict[str, float] = {}
        if self.spec.options:
            chosen = {**self.settings[-1], **self.spec.options}
        elif known:
            chosen, tried = dict(known["setting"]), dict(known.get("tried", {}))
        else:
            chosen = self.fastest(asked, params, tried, step, failures)
        self.apply(chosen)
        among = f", the fastest of {len(tried)} tried" if tried else ""
        self.note = f"{self.text(chosen)}{among}"
        return {"setting": chosen, "tried": tried}

    def fastest(
        self,
        asked: Sequence[Sequence[Sequence[int]]],
        params: SamplingParams,
        tried: dict[str, float],
        step: Callable[[str], None],
        failures: tuple[type[Exception], ...],
    ) -> dict[str, Any]:
        """The setting that writes fastest; the tokens per second of each go to `tried`."""
        speeds, warm, last = [], False, None
        for setting in self.settings:
            step(self.text(setting))
            try:
                if not warm:  # so that the first setting is not the slowest
                    self.apply(setting)
                    self._written(asked[0], params)
                    warm = True
                speeds.append((self._rate(setting, asked, params), setting))
            except failures as problem:
                last = problem
                self.stop()
            else:
                tried[self.text(setting)] = round(speeds[-1][0], 3)
        if not speeds:
            assert last is not None
            raise last
        return dict(max(speeds, key=lambda one: one[0])[1])

    def _rate(
        self,
        setting: dict[str, Any],
        asked: Sequence[Sequence[Sequence[int]]],
        params: SamplingParams,
    ) -> float:
        tokens, seconds = 0, 0.0
        for prompts in asked:
            self.apply(setting)  # anew: some settings of transformers drift with use
            outcome = self._written(prompts, params)
            tokens, seconds = tokens + len(outcome.tokens), seconds + outcome.seconds
        return tokens / seconds

    def _written(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Outcome:
        if len(prompts) == 1:
            return self.write(prompts[0], params)
        return self.write_together(prompts, [params] * len(prompts))

    def stop(self) -> None:
        """Let go of what a setting that failed has left running."""

    def apply(self, setting: Mapping[str, Any]) -> None:
        self.setting = dict(setting)

    def text(self, setting: Mapping[str, Any]) -> str:
        return " ".join(f"{self.short.get(key, key)}={value}" for key, value in setting.items())

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        raise NotImplementedError

    def write_together(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Outcome:
        """Texts of several prompts at once, by peers that can."""
        raise NotImplementedError
