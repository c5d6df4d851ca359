"""Statements of vLLM's caches, which `kvproto_vllm.engine` puts together for a rank.

* `caches`: rows of tokens, by the strides of their tensors or whole;
* `fused`: rows that one kernel computes, quantizes and stores;
* `states`: recurrent states.
"""
