"""Transport `nixl`: between hosts, over UCX; short runs packed into staging slots, long ones written as they are."""
