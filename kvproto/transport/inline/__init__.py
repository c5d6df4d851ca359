"""Transport `inline`: packed bytes as messages of the session itself, between any two hosts."""
