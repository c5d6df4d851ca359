"""Makes everything that follows from `spec/v1/registry`: `python -m kvproto.wire.make [--check]`."""
