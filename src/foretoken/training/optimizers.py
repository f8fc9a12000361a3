"""Which rule updates which weight: Muon for hidden matrices, AdamW for embeddings, norms, biases
and output heads.
"""

from __future__ import annotations

from torch import nn, optim

from foretoken.errors import ConfigError


def split_optimizers(
    model: nn.Module,
    *,
    matrix_rate: float,
    vector_rate: float,
    embedding_rate: float,
    weight_decay: float,
) -> list[optim.Optimizer]:
    """Muon (Jordan et al., 2024: orthogonalised momentum) where a weight maps hidden to hidden.

    AdamW elsewhere, with a rate of its own for embedding tables.
    """
    tables = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    }
    matrices, embeddings, others = [], [], []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if id(weight) in tables:
            embeddings.append(weight)
        elif weight.ndim == 2 and "lm_head" not in name and matrix_rate > 0:
            matrices.append(weight)
        else:
            others.append(weight)
    found: list[optim.Optimizer] = []
    if matrices:
        check_muon(matrix_rate)
        found.append(optim.Muon(matrices, lr=matrix_rate, weight_decay=weight_decay))
    groups = [
        {"params": weights, "lr": rate}
        for weights, rate in ((embeddings, embedding_rate), (others, vector_rate))
        if weights
    ]
    if groups:
        found.append(optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0))
    return found


ADAM = "install a newer torch, or set matrix_rate=0 to train everything with AdamW"


def check_muon(rate: float, do: str = ADAM) -> None:
    """ConfigError for matrices at a rate of Muon where torch has none; asked before any work."""
    if rate > 0 and not hasattr(optim, "Muon"):
        raise ConfigError(
            asked=f"Muon at rate {rate}",
            possible="this torch has no Muon; 2.9 and later do",
            do=do,
        )
