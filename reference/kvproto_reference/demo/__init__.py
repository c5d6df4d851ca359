"""The main job: a router, a prefill engine and a decode engine, three processes that meet only through kvproto."""
