"""`kvproto-router`: completions over HTTP from any number of prefill and decode engines."""
