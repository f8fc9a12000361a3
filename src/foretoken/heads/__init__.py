"""Trainable parts that read hidden layers: modules only, and how they are kept in folders."""
