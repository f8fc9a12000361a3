"""Training texts: made by the target itself or read from files, in shards on disk."""
