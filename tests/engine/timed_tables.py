"""Tables whose forwards take time, and a clock that only they move."""

from foretoken.lm.table import TableLM


class Clock:
    """Time that only forwards move."""

    now = 0.0

    def __call__(self):
        return self.now


class Timed(TableLM):
    """A table whose forward takes `base` seconds, and `node` more for each node."""

    def prepare(self, clock, base, node):
        self.clock, self.base, self.node = clock, base, node
        return self

    def grow(self, rows, tokens, parents, taps=()):
        self.clock.now += self.base + self.node * sum(len(row) for row in tokens)
        return super().grow(rows, tokens, parents, taps)


def set_in(monkeypatch, *modules):
    """A clock in the place of that of some modules."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def timed_pair(clock, base=1e-3, node=1e-4, draft_node=0.0):
    """A target, and a draft whose forwards take 0.2 ms."""
    target = Timed.random(vocab=12, seed=0).prepare(clock, base, node)
    return target, Timed.random(vocab=12, seed=1).prepare(clock, 2e-4, draft_node)
