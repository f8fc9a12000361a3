"""The six task families, one file each; every module offers ``make(rng) -> Example``."""
