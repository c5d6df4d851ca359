"""Sources that a directory names."""
