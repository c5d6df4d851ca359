"""The engine around a model: prefill, sampling, speculative decode, and what it tells kvproto of itself."""
