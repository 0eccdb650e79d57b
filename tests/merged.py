"""Overrides of a test on top of those that its file shares; a key may be given once only."""


def merged(shared, *overrides):
    """The shared overrides but for those whose key is given again, then `overrides`."""
    given = {override.partition("=")[0] for override in overrides}
    return [override for override in shared if override.partition("=")[0] not in given] + list(overrides)
