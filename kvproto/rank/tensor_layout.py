"""The columns of Register from an engine's tensors: the meaning of each axis, the start of each layer and part.

The names of axes are `layer`, `part`, `page` (also `slot`), `token` (also `row`), `head` (also `lane`) and `dim`. NHD
pages are "page token head dim", HND pages "page head token dim", joint K and V "part page token head dim" or "page part
token head dim". Strides may leave any padding between elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.planning.geometry import Group, Owns, column_names
from kvproto.transport.tensors import ELEMENTS, TensorView, view_of
from kvproto.wire.enums import DType, ErrorCode, word

_SYNONYMS = {"slot": "page", "row": "token", "lane": "head"}
_WORDS = ("layer", "part", "page", "token", "head", "dim")


@attrs.frozen
class Column:
    """One layer and part of a group at one rank."""

    view: TensorView
    """The tensor that holds it."""
    address: int
    item_stride: int
    row_stride: int
    lane_stride: int
    path: str
    """The tensor's name in error messages."""


def columns_of(group: Group, share: Owns, tensors: Any, axes: str, path: str) -> tuple[int, list[Column]]:
    """The number of items, and the columns by layer, then part; raises LocalError(BAD_COLUMNS) for a tensor or axis."""
    names = column_names(group)
    if isinstance(tensors, Mapping):
        if sorted(tensors) != sorted(names):
            raise _bad(path, f"tensors of the parts {names}", f"of {sorted(map(str, tensors))}")
        by_part = [_by_layer(share, tensors[name], axes, f'{path}["{name}"]') for name in names]
        joint: list[tuple[int, ...]] = [(part,) for part in range(len(names))]
    else:
        by_part = [_by_layer(share, tensors, axes, path)] * len(names)
        joint = [tuple(range(len(names)))] * len(names)
    items: dict[int, str] = {}
    columns = []
    for layer in range(share.layers.size):
        for part in range(len(names)):
            view, offset, name = by_part[part][layer]
            column, number = _column(group, share, part, joint[part], view, offset, name, axes)
            items.setdefault(number, name)
            columns.append(column)
    if len(items) > 1:
        (count, tensor), (other_count, other) = list(items.items())[:2]
        advice = "give each tensor of a group as many pages"
        raise _bad(other, f"{count} pages, as {tensor} has", f"{other_count} pages", advice)
    return next(iter(items), 0), columns


_Placed = tuple[TensorView, int, str]
"""A tensor, the byte in it at which a layer begins, and its name in error messages."""


def _by_layer(share: Owns, tensors: Any, axes: str, path: str) -> list[_Placed]:
    """A tensor and an offset for each layer that the rank owns."""
    words, layers = _words(axes, path), share.layers.size
    if isinstance(tensors, Sequence):
        if len(tensors) != layers:
            raise _bad(path, f"{layers} tensors, one for each layer of this rank", str(len(tensors)))
        if "layer" in words:
            raise _bad(path, f'axes without "layer" for one tensor per layer, or one tensor with "{axes}"', "a list")
        return [(_shaped(tensor, words, f"{path}[{i}]"), 0, f"{path}[{i}]") for i, tensor in enumerate(tensors)]
    view = _shaped(tensors, words, path)
    if "layer" not in words:
        if layers != 1:
            advice = 'name the axis "layer" in `axes` if the tensor has one'
            raise _bad(path, f'{layers} tensors, or one with an axis "layer"', "one tensor", advice)
        return [(view, 0, path)]
    axis = words.index("layer")
    if view.shape[axis] != layers:
        raise _bad(f'{path} axis "layer"', f"{layers} layers of this rank", str(view.shape[axis]))
    return [(view, i * view.strides[axis], path) for i in range(layers)]


def _words(axes: str, path: str) -> list[str]:
    words = [_SYNONYMS.get(word, word) for word in axes.split()]
    if "page" not in words or len(set(words)) != len(words) or not set(words) <= set(_WORDS):
        raise _bad(f"{path} axes", f'"page" and others of {", ".join(_WORDS)}, each once', f'"{axes}"', _AXES)
    return words


def _shaped(tensor: Any, words: list[str], path: str) -> TensorView:
    view = view_of(tensor, path)
    if len(view.shape) != len(words):
        raise _bad(path, f"{len(words)} axes, {' '.join(words)}", f"shape {view.shape}", _AXES)
    return view


def _column(
    group: Group, share: Owns, part: int, joint: tuple[int, ...], view: TensorView, offset: int, path: str, axes: str
) -> tuple[Column, int]:
    """The column of one layer and part, and its number of items."""
    words = _words(axes, path)
    axis = {word: (n, s) for word, n, s in zip(words, view.shape, view.strides, strict=True)}
    lanes = sum(span.hi - span.lo for span in share.lanes if span.part == part)
    sizes = [group.parts[p].lane_bytes for p in joint]
    if "part" in axis and len(joint) == len(group.parts):
        _extent(axis, "part", len(group.parts), path)
        offset += part * axis["part"][1]
        sizes = [group.parts[part].lane_bytes]
    elif len(joint) > 1:  # the parts lie one after the other in each row
        offset += sum(sizes[: joint.index(part)])
    _order(axis, group.rows, lanes, words, path)
    _extent(axis, "token", group.rows, path)
    _extent(axis, "head", lanes, path)
    _element(group, joint if len(sizes) > 1 else (part,), view, path)
    width, step = axis.get("dim", (1, view.itemsize))
    if width * view.itemsize != sum(sizes):
        sum_of_sizes = " + ".join(str(size) for size in sizes)
        apart = ", ".join(f'"{name}": [...]' for name in column_names(group))
        advice = f"if each part is a tensor, pass {{{apart}}}" if len(sizes) > 1 else _AXES * ("dim" not in axis)
        raise _bad(f'{path} axis "dim"', f"{sum_of_sizes} bytes", f"{width} elements of {view.itemsize} bytes", advice)
    if width > 1 and step != view.itemsize:
        raise _bad(f'{path} axis "dim"', "elements without gaps", f"a stride of {step} bytes")
    _neighbours(axis, group.parts[part].lane_bytes, path)
    items, item_stride = axis["page"]
    # the stride of an axis of one element has no meaning: choose one that keeps runs long
    lane = axis["head"][1] if lanes > 1 else group.parts[part].lane_bytes
    row = axis["token"][1] if group.rows > 1 else min(item_stride, view.length)
    return Column(view, view.address + offset, min(item_stride, view.length), row, lane, path), items


_INTEGERS = {0, 1}
"""DLPack type codes of integers, which may hold the bits of any type; other type codes are compared."""


def _element(group: Group, parts: tuple[int, ...], view: TensorView, path: str) -> None:
    """Raise LocalError if the elements of a tensor are known to be of another type than the geometry states."""
    types = [group.parts[p].dtype for p in parts]
    if view.element[0] in _INTEGERS or any(view.element in ELEMENTS[dtype] for dtype in types if dtype in ELEMENTS):
        return
    code, bits = view.element
    name = next((word(DType, dtype) for dtype, known in ELEMENTS.items() if view.element in known), f"type code {code}")
    raise LocalError(
        ErrorCode.BAD_COLUMNS,
        path,
        f"elements of {word(DType, types[0])}, as the Cache says",
        f"{name}, {bits} bits",
        "state the tensor's type as the Cache's dtype, or pass a view of it as uint8",
    )


def _order(axis: Mapping[str, tuple[int, int]], rows: int, lanes: int, words: Sequence[str], path: str) -> None:
    """Raise LocalError if tokens and heads fit once they are named the other way round."""
    sizes = [axis.get(word, (1, 0))[0] for word in ("token", "head")]
    if sizes == [lanes, rows] != [rows, lanes]:
        other = {"token": "head", "head": "token"}
        turned = " ".join(other.get(word, word) for word in words)
        mine, yours = f"{rows} tokens and {lanes} heads", f"{sizes[0]} tokens and {sizes[1]} heads"
        raise _bad(f'{path} axis "token"', mine, yours, f'the tensor is "{turned}": pass that as `axes`')


def _extent(axis: Mapping[str, tuple[int, int]], word: str, wanted: int, path: str) -> None:
    size = axis.get(word, (1, 0))[0]
    if size != wanted:
        mine = f"{wanted}, {_STATED[word]}"
        if word not in axis:
            raise _bad(f'{path} axis "{word}"', mine, "no such axis", _AXES)
        raise _bad(f'{path} axis "{word}"', mine, str(size))


_STATED = {
    "part": "the parts of the Cache",
    "token": "the rows of an item of the Cache",
    "head": "the heads of this rank by the geometry",
}


def _neighbours(axis: Mapping[str, tuple[int, int]], size: int, path: str) -> None:
    """Raise LocalError if the strides of pages, tokens or heads make neighbours of `size` bytes overlap."""
    by_stride = sorted((axis[name][1], axis[name][0], name) for name in ("page", "token", "head") if name in axis)
    for stride, extent, name in by_stride:
        if extent > 1 and stride < size:
            wanted = f"a stride of at least {size} bytes, or neighbours overlap"
            raise _bad(f'{path} axis "{name}"', wanted, f"{stride} bytes", "pass a tensor whose elements lie apart")
        size += stride * (extent - 1) if extent > 1 else 0


_AXES = 'name each axis in `axes`, such as "page token head dim"'


def _bad(path: str, mine: str, yours: str, advice: str = "") -> LocalError:
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, advice)
