"""Playing a CachedLM like an engine would, with random trees, and the truth to compare with."""

from __future__ import annotations

import random
from typing import Any

import torch

from foretoken.coins import SeededCoins
from foretoken.trees.build import chain
from foretoken.types import DecodeState, Draft, Draw, SamplingParams, TokenTree

VOCAB = 97


def row_of(tokens: list[int], room: int = 4096) -> DecodeState:
    params = SamplingParams(max_new_tokens=room)
    return DecodeState(list(tokens), len(tokens), params, SeededCoins(0), None)


def random_tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(count)]


def random_tree(dice: random.Random, root: int, nodes: int) -> TokenTree:
    """Any tree: parents are drawn uniformly, so columns and depths disagree everywhere."""
    parents = [-1, *(dice.randrange(i) for i in range(1, nodes))]
    return TokenTree((root, *random_tokens(dice, nodes - 1)), tuple(parents))


def random_chain(dice: random.Random, root: int, nodes: int) -> TokenTree:
    return chain(root, random_tokens(dice, nodes - 1))


def random_path(dice: random.Random, tree: TokenTree) -> list[int]:
    return tree.path(dice.randrange(len(tree)))


@torch.no_grad()
def fresh(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [S, V] of a forward without a cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.no_grad()
def fresh_tree(model: Any, committed: list[int], tree: TokenTree) -> torch.Tensor:
    """Logits [N, V] of every node: the path of each leaf, without a cache, padded on the right."""
    leaves = sorted(set(range(len(tree))) - set(tree.parents))
    paths = [[0, *tree.path(leaf)] for leaf in leaves]
    texts = [committed[:-1] + [tree.tokens[node] for node in path] for path in paths]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    scored = model(input_ids=ids, use_cache=False).logits.float()
    rows: dict[int, torch.Tensor] = {}
    for path, row in zip(paths, scored, strict=True):
        rows.update(zip(path, row[len(committed) - 1 :], strict=False))
    return torch.stack([rows[node] for node in range(len(tree))])


def each_node(model: Any, committed: list[int], tree: TokenTree) -> torch.Tensor:
    """As `fresh_tree` with one forward per node, for scalings that follow the last position."""
    rows = []
    for node in range(len(tree)):
        path = [tree.tokens[step] for step in tree.path(node)]
        rows.append(fresh(model, committed + path)[-1])
    return torch.stack(rows)


def closeness(logits: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((logits.float() - right).abs().max() / right.abs().max())


def point(tree: TokenTree) -> Draft:
    return Draft(tree, Draw.POINT)


def change_weight(layer: Any, how: str) -> None:
    """Changes one weight of a llama layer: in place, its data, the parameter, or a norm's."""
    with torch.no_grad():
        if how == "in place":
            layer.self_attn.k_proj.weight.add_(0.3)
        elif how == "data":
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 1.7
        elif how == "parameter":
            layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight * 0.2)
        else:
            layer.input_layernorm.weight.mul_(3.0)
