"""The same engine in JAX: models, attention and exchanges by shard_map; all ranks of an engine in one process."""

import os

# Read when XLA and NCCL start. XLA would take most of a GPU, on which pools, torch and other engines are too; multicast
# (NVLS) needs rights that not every container has, and engines of this size gain nothing by it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
