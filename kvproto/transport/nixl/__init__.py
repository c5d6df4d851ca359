"""Transport `nixl`: between hosts, over UCX; short runs packed into staging slots, long ones written as they are.

The path of a write is `transport` > `direct`, or `kvproto.transport.staging` and a `backend` (a GPU's is in `device`),
which pack > `agent` > `binding`, which alone calls NIXL. `handle` is the format in which peers name memory.
"""
