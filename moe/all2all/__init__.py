"""all2all backends: one file each, behind the protocol in base.py."""
