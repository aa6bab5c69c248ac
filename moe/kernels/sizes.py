"""Sizes of grids and blocks. Its own file because Triton's `cdiv` and `next_power_of_2` cost microseconds a call on
the host.
"""


def ceil_div(size: int, block: int) -> int:
    """How many blocks of `block` cover `size`."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is not less than `size` (1 for 0)."""
    return 1 << max(0, size - 1).bit_length()
