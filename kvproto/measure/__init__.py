"""How `kvproto.probe` times each transport, a module each, loaded only where it is probed; `choice` is for movers."""
