"""Statements of SGLang's pools, which `kvproto_sglang.engine` puts together for a rank.

* `classes`: what is stated, by the very class of a pool, and how;
* `compressed`, `states`: pools of DeepSeek V4, and of recurrent states;
* `refusals`: classes that are not stated, with what they hold;
* `stated`: a group that is stated, its owner, and where its page tables come from.
"""
