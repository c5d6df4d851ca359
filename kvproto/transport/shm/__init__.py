"""Transport `shm`: shared memory of one host."""
