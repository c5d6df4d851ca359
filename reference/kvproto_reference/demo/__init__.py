"""The demo: a router, a prefill engine and a decode engine, which hand over KV caches through kvproto alone."""
