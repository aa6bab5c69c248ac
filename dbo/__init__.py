"""Overlap only: agreement, splitting, ubatches that take turns, SM partition. Knows tensors, streams, ranks; no model.

In the order of a step: `Agreement` turns every rank's `Vote` into one `BatchPlan`; `make_slices` and `split_batch` cut
a `Batch` by it; `UBatchRunner` runs the ubatches; inside them a backend makes `Work` on its `Comm`, and the model calls
`Work.result()`. `examples/embed.py` is all of it on one page.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dbo.public import *  # noqa: F403  # `__all__` says which
else:

    def __getattr__(name: str) -> object:
        """Bind all names at the first use of one: `import dbo` alone loads nothing."""
        if name == "__all__" or not name.startswith("_"):
            public = import_module("dbo.public")
            globals().update({known: getattr(public, known) for known in public.__all__}, __all__=public.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("dbo.public").__all__})
