"""The built-in policies: eviction, admission, promotion. Imported as `tierkv.policies`, never as `policies`."""

if __name__ != "tierkv.policies":
    raise ImportError(f"{__name__!r} is not a package of its own: import 'tierkv.policies' instead")
