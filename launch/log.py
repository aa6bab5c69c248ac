"""Logs that name the rank. Its own file because every command sets them up the same way, once."""

from __future__ import annotations

import logging
import sys


def set_up_logging(level: str, rank: int) -> None:
    """Send messages of `level` and above to standard error as `[rank r] text`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
