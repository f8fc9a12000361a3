"""Static tree shapes: which ranks of children a node at a given path of ranks has."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.errors import ConfigError

Form = tuple[int, ...] | tuple[tuple[int, ...], ...]


class Template:
    """A shape from branching factors per depth, or from a list of rank paths (closed upwards)."""

    def __init__(self, template: Sequence[int] | Sequence[Sequence[int]]) -> None:
        self.by_depth: tuple[tuple[int, ...], ...] | None = None
        self.by_path: dict[tuple[int, ...], tuple[int, ...]] = {}
        if not template:
            raise self._refuse(template)
        if all(isinstance(item, int) for item in template):
            widths = [int(item) for item in template if isinstance(item, int)]
            if min(widths) < 1:
                raise self._refuse(template)
            self.by_depth = tuple(tuple(range(width)) for width in widths)
            self.width = max(widths)
            self.depth = len(widths)
            return
        ranks: dict[tuple[int, ...], set[int]] = {}
        for item in template:
            if isinstance(item, int) or not item or min(item) < 0:
                raise self._refuse(template)
            for at, rank in enumerate(item):  # missing parents are added
                ranks.setdefault(tuple(item[:at]), set()).add(rank)
        self.by_path = {path: tuple(sorted(children)) for path, children in ranks.items()}
        self.width = 1 + max(max(children) for children in self.by_path.values())
        self.depth = 1 + max(len(path) for path in self.by_path)

    def children(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks below the node that `path` leads to, best first; empty at a leaf."""
        if self.by_depth is not None:
            return self.by_depth[len(path)] if len(path) < self.depth else ()
        return self.by_path.get(path, ())

    def _refuse(self, template: object) -> ConfigError:
        return ConfigError(
            f"template={template!r} was asked for.",
            "a template is branching factors per depth, such as (3, 2, 1), or paths of ranks, "
            "such as ((0,), (1,), (0, 0)).",
            "pass one of these forms, or None to grow trees.",
        )


def level_order(template: Template) -> tuple[list[int], list[int]]:
    """Parents and ranks of a template's nodes, level by level, the root first."""
    parents, ranks = [-1], [-1]
    paths: list[tuple[int, ...]] = [()]
    for node, path in enumerate(paths):  # grows while it is walked
        for rank in template.children(path):
            parents.append(node)
            ranks.append(rank)
            paths.append((*path, rank))
    return parents, ranks


def paths_of_counts(*levels: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Rank paths of a template given by how many children each node has, level by level."""
    paths: list[tuple[int, ...]] = []
    above: list[tuple[int, ...]] = [()]
    for counts in levels:
        above = [
            (*path, rank)
            for path, count in zip(above, counts, strict=True)
            for rank in range(count)
        ]
        paths += above
    return tuple(paths)
