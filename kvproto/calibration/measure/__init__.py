"""How `kvproto.calibration.probe` times each transport: a module each, loaded only where it is probed."""
