"""Nested arguments: walks over the containers that functions take and give."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any
from weakref import finalize

import torch

from ..chain.shell import Tensor


def wrapped_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Wrapped tensors among arguments, inside the containers that torch functions take.

    One by one: who asks for the holders of a value would find a list of them.
    """
    for item in values:
        if item.__class__ is Tensor:
            yield item
        elif isinstance(item, (tuple, list)):
            yield from wrapped_in(item)
        elif isinstance(item, dict):
            yield from wrapped_in(item.values())


def flattened(values: Iterable[Any]) -> list[Any]:
    """Everything in arguments, in one list."""
    flat = []
    for item in values:
        if id(item.__class__) in SIMPLE or item.__class__ is Tensor:
            flat.append(item)
        elif isinstance(item, (tuple, list)):
            flat += flattened(item)
        elif isinstance(item, dict):
            flat += flattened(item.values())
        else:
            flat.append(item)
    return flat


# classes of what no walk looks into
SIMPLE_CLASSES = (torch.Tensor, torch.nn.Parameter, int, float, bool, slice, type(None), str,
                  torch.dtype, type(...), torch.device, torch.Size,
                  torch.memory_format)  # fmt: skip
# sets of classes are kept by id: what its class equals, and how it hashes, a metaclass may say
SIMPLE = set(map(id, SIMPLE_CLASSES))
ATOMS = set(map(id, (int, float, bool, str, type(None), complex, bytes)))


def are_simple(values: Iterable[Any]) -> bool:
    """Whether there is nothing to look into among values and those in tuples: none is wrapped."""
    for value in values:
        cls = value.__class__
        if id(cls) not in SIMPLE and not (cls is tuple and are_simple(value)):
            if cls is not dict or value:  # as a checkpoint has it, of no keywords
                return False
    return True


def mapped(value: Any, leaf: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `leaf` applied to its tensors; the same object where nothing changed."""
    cls = type(value)
    if id(cls) in ATOMS:
        return value
    if cls is torch.Tensor or cls is Tensor or isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, (list, tuple)):
        return rebuilt(value, lambda item: mapped(item, leaf))
    if not is_container(value):
        return value
    items = items_of(value)
    changed = {key: mapped(item, leaf) for key, item in items}
    if all(changed[key] is item for key, item in items):
        return value
    if isinstance(value, dict):
        copied = value.copy()
        copied.update(changed)
        return copied
    copied = object.__new__(cls)
    for name, item in changed.items():
        object.__setattr__(copied, name, item)
    return copied


def is_container(value: Any) -> bool:
    """Whether it is a list, a dict or a dataclass, and neither a tensor nor a module."""
    cls = type(value)
    if cls is list or cls is dict or id(cls) in _names:
        return True
    if not (isinstance(value, (list, dict)) or hasattr(cls, "__dataclass_fields__")):
        return False
    return not isinstance(value, (torch.Tensor, torch.nn.Module))


_names: dict[int, tuple[str, ...]] = {}  # of the fields of a dataclass, by its id


def _names_of(cls: type) -> tuple[str, ...]:
    names = _names.get(id(cls))
    if names is None:  # 1 us
        names = _names[id(cls)] = tuple([field.name for field in dataclasses.fields(cls)])
        finalize(cls, _names.pop, id(cls), None).atexit = False
    return names


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """(key, item) of a list, dict or dataclass."""
    if isinstance(container, list):
        return list(enumerate(container))
    if isinstance(container, dict):
        return list(container.items())
    names = [name for name in _names_of(type(container)) if hasattr(container, name)]
    return [(name, getattr(container, name)) for name in names]


def values_of(container: Any) -> list[Any]:
    """The items of a list, dict or dataclass; None for those that it has not."""
    cls = type(container)
    if cls is list:
        return container
    if cls is dict:
        return list(container.values())  # others may add some
    names = _names.get(id(cls))
    if names is not None:
        return [getattr(container, name, None) for name in names]
    return [item for _, item in items_of(container)]


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors in values and their containers, also of those that contain themselves."""
    tensors: list[torch.Tensor] = []
    containers: dict[int, Any] = {}
    rest = [*values]
    for value in rest:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            rest += value
        elif id(value) not in containers and is_container(value):
            containers[id(value)] = value
            rest += values_of(value)
    return tensors


def exchange(container: Any, change: Callable[[Any], Any]) -> None:
    """Replace the items of a list, dict or dataclass, in place, where `change` gives another.

    It is not asked about what no walk looks into.
    """
    for item in values_of(container):
        if id(item.__class__) not in SIMPLE:
            break
    else:
        return
    for key, item in items_of(container):
        if id(item.__class__) in SIMPLE:
            continue
        new = change(item)
        if new is not item:
            if isinstance(container, (list, dict)):
                container[key] = new
            else:
                object.__setattr__(container, key, new)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A list or tuple, named and of torch.return_types too, with its items changed, or itself."""
    items = [change(item) for item in value]
    if all(map(operator.is_, items, value)):
        return value
    if isinstance(value, list):
        copied = copy(value)
        copied[:] = items
        return copied
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
