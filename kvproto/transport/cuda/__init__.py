"""Transport `cuda`: GPUs of one host that can map each other's memory; one gather-scatter kernel, no torch."""
