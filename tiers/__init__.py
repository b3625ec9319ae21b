"""The built-in tiers: host, nvme, valkey, hbm. Imported as `tierkv.tiers`, never as `tiers`."""

if __name__ != "tierkv.tiers":
    raise ImportError(f"{__name__!r} is not a package of its own: import 'tierkv.tiers' instead")
