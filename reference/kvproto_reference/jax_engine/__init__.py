"""The same engine in JAX: models, attention and exchanges by shard_map; all ranks of an engine in one process."""
