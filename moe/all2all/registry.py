"""The transports by name.

Its own file so that the backends do not know each other and are imported when chosen: `deep_ep`, say, is not
there on a laptop.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from dbo.errors import ConfigError
from moe.all2all.base import All2All, ExpertShape

BACKENDS = {
    "local": "moe.all2all.local:LocalAll2All",
    "torch": "moe.all2all.torch_dist:TorchAll2All",
    "deepep": "moe.all2all.deepep_phases:DeepEPByPhase",
    "deepep_ht": "moe.all2all.deepep_ht:DeepEPHighThroughput",
    "deepep_ll": "moe.all2all.deepep_ll:DeepEPLowLatency",
}


def make_all2all(
    name: str,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    config: ExpertShape,
    max_tokens_per_rank: int,
    check: Callable[[], None] | None = None,
    batch_invariant: bool = False,
) -> All2All:
    """Make the backend `name` for the ranks of `group`: "auto", a key of `BACKENDS`, or "module:Class" of your own.

    `max_tokens_per_rank`: rows of the largest batch of any rank, the same on all; `check` is called while the
    host waits and raises to abandon the wait. "auto" is local for one rank, deepep where it is installed and takes the
    model, else torch; rank 0 logs which and why. With `batch_invariant` it is deepep_ht in deepep's place, which takes
    other kernels, that add up in another order, for a small batch. Raises ConfigError for a name that does not exist,
    and for deepep with `batch_invariant`.
    """
    if batch_invariant and name == "deepep":
        allowed = "a transport with the same kernels for every batch size (--batch-invariant)"
        raise ConfigError("all2all", name, allowed, "use deepep_ht, or deepep_ll for small batches")
    if name == "auto":
        name, why = _choose(group, device, config)
        name = "deepep_ht" if batch_invariant and name == "deepep" else name
        if group is None or group.rank() == 0:
            logging.getLogger(__name__).info("all2all: %s (%s)", name, why)
    backend = _load(BACKENDS.get(name, name))
    made: All2All = backend(
        group=group, device=device, config=config, max_tokens_per_rank=max_tokens_per_rank, check=check
    )
    return made


def _choose(group: dist.ProcessGroup | None, device: torch.device, config: ExpertShape) -> tuple[str, str]:
    """The transport that "auto" means here, and why; the same on all ranks of a host image."""
    if group is None or group.size() == 1:
        return "local", "one rank"
    if device.type != "cuda":
        return "torch", "no GPU"
    if importlib.util.find_spec("deep_ep") is None:
        return "torch", "deep_ep is not installed"
    if (
        config.dtype != torch.bfloat16
        or config.num_experts % group.size()
        or config.num_topk > 11
        or config.hidden > 8192
    ):
        return "torch", "DeepEP takes bfloat16, experts that divide by the ranks, top 11 and hidden 8192 at most"
    return "deepep", "deep_ep is installed"


def _load(path: str) -> Callable[..., All2All]:
    module, colon, attribute = path.partition(":")
    allowed = f"auto, {', '.join(BACKENDS)} or module:Class"
    if not colon:
        close = difflib.get_close_matches(path, ["auto", *BACKENDS], n=1)
        raise ConfigError("all2all", path, allowed, f"did you mean {close[0]}?" if close else "use auto")
    try:
        backend: Callable[..., All2All] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError("all2all", path, allowed, f"it cannot be imported: {error}") from error
    return backend
