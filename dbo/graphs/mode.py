"""Which parts of which steps run from graphs.

A file of its own because everybody names modes: options, votes, the dispatcher, wrappers. Invariant: a *runtime* mode
(NONE, PIECEWISE, FULL) is what one step runs in, and is ordered by how much of the step it captures; the combined modes
are only ever options.
"""

from __future__ import annotations

from enum import Enum

from dbo.errors import ConfigError


class CUDAGraphMode(Enum):
    """A pair of runtime levels: of uniform decode steps, and of all others ("mixed")."""

    NONE = (0, 0)
    PIECEWISE = (1, 1)
    FULL = (2, 2)
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    @classmethod
    def parse(cls, text: str) -> CUDAGraphMode:
        """`full_and_piecewise`, in any case and with dashes too. Raises `ConfigError`."""
        name = text.upper().replace("-", "_")
        if name not in cls.__members__:
            raise ConfigError("cudagraph_mode", text, ", ".join(mode.name.lower() for mode in cls))
        return cls[name]

    @classmethod
    def of_level(cls, level: int) -> CUDAGraphMode:
        """The runtime mode that captures so much."""
        return cls((level, level))

    @property
    def decode_mode(self) -> CUDAGraphMode:
        """The runtime mode of a uniform decode step."""
        return CUDAGraphMode.of_level(self.value[0])

    @property
    def mixed_mode(self) -> CUDAGraphMode:
        """The runtime mode of any other step."""
        return CUDAGraphMode.of_level(self.value[1])

    @property
    def is_runtime(self) -> bool:
        """Whether a step can run in this mode."""
        return self.value[0] == self.value[1]

    @property
    def level(self) -> int:
        """How much is captured: 0 is nothing, 1 segments, 2 whole steps; of a combined mode the most."""
        return max(self.value)

    @property
    def has_full_cudagraphs(self) -> bool:
        """Whether some steps run from one graph each."""
        return 2 in self.value

    @property
    def has_piecewise_cudagraphs(self) -> bool:
        """Whether some steps run from segments."""
        return 1 in self.value

    @property
    def separate_routines(self) -> bool:
        """Whether uniform decode has graphs of its own, beside those of mixed steps: it is cheaper to know one new
        token for each request."""
        return self.decode_mode is CUDAGraphMode.FULL
