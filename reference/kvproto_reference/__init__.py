"""A small reference inference engine: two tiny model kinds over a paged KV pool."""
