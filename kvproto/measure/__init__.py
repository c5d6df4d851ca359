"""How `kvproto.probe` times each transport; a module a transport, loaded only where that transport is probed."""
