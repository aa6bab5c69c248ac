"""Tensors inside the arguments and results of a step, by name.

A file of its own because wrappers and breaks both look into containers: tensors may stand in tuples, lists, mappings
and dataclasses, one inside another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors in `value` with the expressions that reach them from `name`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}")


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A copy of `value` with `function` of each of its tensors; other objects are shared with it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type) and any(True for _ in named_tensors(value, "")):
        return replace(
            value, **{f.name: map_tensors(getattr(value, f.name), function) for f in fields(value) if f.init}
        )
    return value
