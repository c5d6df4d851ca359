"""Programs that use an installed distribution as its user does, in an environment that has no checkout.

Each is named after its distribution, with _ in place of -, and ends with status 0 if all is well.
"""
