"""The reference engine in JAX: models, attention and exchanges by shard_map, with all ranks in one process."""

import os

# Read when XLA and NCCL start. XLA would take most of a GPU, which pools, torch and other engines use too. Multicast
# (NVLS) needs rights that not every container has, and gains nothing for engines of this size.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
