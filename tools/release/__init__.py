"""`make release`: sdists and wheels of all distributions, built alike twice, with what proves them, and tried."""
