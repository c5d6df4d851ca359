"""Makes everything that follows from `spec/v1/registry`: `python -m tools.specgen [--check]`."""
