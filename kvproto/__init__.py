"""The contract by which prefill and decode engines hand over the KV cache."""

__version__ = "0.1.0"
