"""The engine around a model: prefill, sampling, speculative decode, and what it states to kvproto."""
