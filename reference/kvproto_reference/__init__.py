"""Reference engines: GQA and MLA models over paged KV pools, with prefill and decode in separate processes."""

from kvproto.distributions import check_versions

check_versions("kvproto-reference")
