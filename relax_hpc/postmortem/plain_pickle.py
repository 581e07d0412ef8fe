"""Read a pickle of plain data without executing anything, and as far as a cut-off file goes.

`pickle.loads` runs whatever a file asks for; a dump comes from a job of somebody else. This
interpreter knows only containers, numbers and strings: no import, no call, no object. The names of
opcodes are those of pickletools; every protocol from 0 to 5 is read.

Whole files go through the unpickler of the standard library (10 times faster), which here refuses
every import and runs under a memory limit; what it cannot read goes through the interpreter.
"""

import contextlib
import gc
import io
import pickle
import resource
import struct
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_DEPTH = 64
"""Marks open at the same time; a flight-recorder dump needs 7."""
Value = object


class UnsafePickleError(ValueError):
    """The file wants to import or call something; nothing was executed."""


class BrokenPickleError(ValueError):
    """Not a pickle, or damaged."""


class _EndError(Exception):
    """The bytes end in mid-pickle."""


class _Reader:
    """The pickle machine: a stack, marks into it, and a memo."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, Value] = {}

    def take(self, count: int) -> bytes:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise _EndError
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise _EndError
        piece = self.data[self.position : end]
        self.position = end + 1
        return piece

    def pop_to_mark(self) -> list[Value]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def run(self) -> Value:
        data, handlers = self.data, _HANDLERS
        while True:
            if self.position >= len(data):
                raise _EndError
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                return self.stack[-1]
            handlers[code](self)


_STOP = ord(".")


def _unknown(reader: _Reader) -> None:
    code = reader.data[reader.position - 1 : reader.position]
    raise BrokenPickleError(f"no pickle opcode {code!r} at byte {reader.position - 1}")


def _global(reader: _Reader) -> None:
    module, name = reader.line()[:80], reader.line()[:80]
    raise UnsafePickleError(f"wants to import {_ascii(module)}.{_ascii(name)}")


def _stack_global(reader: _Reader) -> None:
    module, name = reader.stack[-2], reader.stack[-1]
    raise UnsafePickleError(f"wants to import {str(module)[:80]}.{str(name)[:80]}")


def _refuse(reader: _Reader) -> None:
    code = reader.data[reader.position - 1 : reader.position]
    raise UnsafePickleError(f"wants to build an object (opcode {code!r})")


def _ascii(raw: bytes) -> str:
    return raw.decode("ascii", "backslashreplace")


def _constant(value: Value) -> Callable[[_Reader], None]:
    def push(reader: _Reader) -> None:
        reader.stack.append(value)

    return push


def _fixed(layout: str) -> Callable[[_Reader], None]:
    unpacker = struct.Struct(layout)

    def push(reader: _Reader) -> None:
        reader.stack.append(unpacker.unpack(reader.take(unpacker.size))[0])

    return push


def _sized(layout: str, convert: Callable[[bytes], Value]) -> Callable[[_Reader], None]:
    unpacker = struct.Struct(layout)

    def push(reader: _Reader) -> None:
        size = unpacker.unpack(reader.take(unpacker.size))[0]
        reader.stack.append(convert(reader.take(size)))

    return push


def _text_line(convert: Callable[[bytes], Value]) -> Callable[[_Reader], None]:
    def push(reader: _Reader) -> None:
        reader.stack.append(convert(reader.line()))

    return push


def _integer_line(raw: bytes) -> Value:
    if raw in (b"00", b"01"):  # protocol 0 writes booleans so
        return raw == b"01"
    return int(raw[:400].rstrip(b"L"))


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _escaped(raw: bytes) -> str:
    return raw.decode("raw_unicode_escape", "replace")


def _long(raw: bytes) -> int:
    return int.from_bytes(raw[:64], "little", signed=True)


def _quoted(raw: bytes) -> str:
    return raw.strip().strip(b"'\"").decode("utf-8", "replace")


def _skip(count: int) -> Callable[[_Reader], None]:
    def skip(reader: _Reader) -> None:
        reader.take(count)

    return skip


def _mark(reader: _Reader) -> None:
    if len(reader.marks) >= MAX_DEPTH:
        raise BrokenPickleError(f"nested deeper than {MAX_DEPTH}")
    reader.marks.append(len(reader.stack))


def _pop(reader: _Reader) -> None:
    reader.stack.pop()


def _pop_mark(reader: _Reader) -> None:
    reader.pop_to_mark()


def _dup(reader: _Reader) -> None:
    reader.stack.append(reader.stack[-1])


def _new_list(reader: _Reader) -> None:
    reader.stack.append([])


def _new_dict(reader: _Reader) -> None:
    reader.stack.append({})


def _new_set(reader: _Reader) -> None:
    reader.stack.append([])  # nothing that we read needs a set's meaning


def _list_of_mark(reader: _Reader) -> None:
    reader.stack.append(reader.pop_to_mark())


def _dict_of_mark(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    reader.stack.append({})
    _store(reader.stack[-1], items)


def _tuple_of_mark(reader: _Reader) -> None:
    reader.stack.append(tuple(reader.pop_to_mark()))


def _tuple_of(count: int) -> Callable[[_Reader], None]:
    def build(reader: _Reader) -> None:
        items = tuple(reader.stack[-count:])
        if len(items) < count:
            raise BrokenPickleError("tuple of fewer items than it says")
        del reader.stack[-count:]
        reader.stack.append(items)

    return build


def _append(reader: _Reader) -> None:
    item = reader.stack.pop()
    _extend(reader.stack[-1], [item])


def _appends(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    _extend(reader.stack[-1], items)


def _extend(target: Value, items: list[Value]) -> None:
    if not isinstance(target, list):
        raise BrokenPickleError("append to something that is no list")
    target.extend(items)


def _setitem(reader: _Reader) -> None:
    value = reader.stack.pop()
    key = reader.stack.pop()
    _store(reader.stack[-1], [key, value])


def _setitems(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    _store(reader.stack[-1], items)


def _store(target: Value, items: list[Value]) -> None:
    if not isinstance(target, dict):
        raise BrokenPickleError("item of something that is no dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key] = value


def _put(layout: str) -> Callable[[_Reader], None]:
    unpacker = struct.Struct(layout)

    def put(reader: _Reader) -> None:
        reader.put(unpacker.unpack(reader.take(unpacker.size))[0])

    return put


def _get(layout: str) -> Callable[[_Reader], None]:
    unpacker = struct.Struct(layout)

    def get(reader: _Reader) -> None:
        reader.stack.append(reader.memo[unpacker.unpack(reader.take(unpacker.size))[0]])

    return get


def _put_line(reader: _Reader) -> None:
    reader.put(int(reader.line()[:20]))


def _get_line(reader: _Reader) -> None:
    reader.stack.append(reader.memo[int(reader.line()[:20])])


def _memoize(reader: _Reader) -> None:
    reader.put(len(reader.memo))


_OPCODES: dict[str, Callable[[_Reader], None]] = {
    "(": _mark,
    "0": _pop,
    "1": _pop_mark,
    "2": _dup,
    "N": _constant(None),
    "\x88": _constant(True),
    "\x89": _constant(False),
    "I": _text_line(_integer_line),
    "L": _text_line(_integer_line),
    "F": _text_line(float),
    "S": _text_line(_quoted),
    "V": _text_line(_escaped),
    "J": _fixed("<i"),
    "K": _fixed("<B"),
    "M": _fixed("<H"),
    "G": _fixed(">d"),
    "\x8a": _sized("<B", _long),
    "\x8b": _sized("<i", _long),
    "T": _sized("<i", _utf8),
    "U": _sized("<B", _utf8),
    "X": _sized("<I", _utf8),
    "\x8c": _sized("<B", _utf8),
    "\x8d": _sized("<Q", _utf8),
    "B": _sized("<I", bytes),
    "C": _sized("<B", bytes),
    "\x8e": _sized("<Q", bytes),
    "\x96": _sized("<Q", bytes),
    "]": _new_list,
    "}": _new_dict,
    "\x8f": _new_set,
    "l": _list_of_mark,
    "d": _dict_of_mark,
    "t": _tuple_of_mark,
    "\x91": _list_of_mark,
    "\x90": _appends,
    ")": _constant(()),
    "\x85": _tuple_of(1),
    "\x86": _tuple_of(2),
    "\x87": _tuple_of(3),
    "a": _append,
    "e": _appends,
    "s": _setitem,
    "u": _setitems,
    "p": _put_line,
    "q": _put("<B"),
    "r": _put("<I"),
    "g": _get_line,
    "h": _get("<B"),
    "j": _get("<I"),
    "\x94": _memoize,
    "\x80": _skip(1),
    "\x95": _skip(8),
    "c": _global,
    "\x93": _stack_global,
    **dict.fromkeys("Rbio\x81\x92\x82\x83\x84PQ\x97\x98", _refuse),
}
_HANDLERS: list[Callable[[_Reader], None]] = [
    _OPCODES.get(chr(code), _unknown) for code in range(256)
]


class _ImportlessUnpickler(pickle.Unpickler):
    """The unpickler of the standard library, without the one thing that makes it dangerous."""

    def find_class(self, module: str, name: str, /) -> typing.NoReturn:
        raise UnsafePickleError(f"wants to import {module[:80]!r}.{name[:80]!r}")

    def persistent_load(self, pid: typing.Any) -> typing.NoReturn:
        raise UnsafePickleError("wants to load an object by a persistent id")


@contextlib.contextmanager
def _limited_memory(extra_bytes: int) -> Iterator[None]:
    """Bound what the process may allocate: a 10-byte pickle can ask for a memo of 64 GB."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + extra_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    was_collecting = gc.isenabled()
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    gc.disable()  # a million small containers, none of them garbage
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if was_collecting:
            gc.enable()


_FAILURES = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What the standard unpickler raises for damaged input."""


def read_pickle(data: bytes) -> tuple[Value, bool]:
    """The plain value in `data`, and whether the file was whole.

    A cut-off file gives what was built before the cut: pickles are written from the outside in, so
    the outer containers are there, and their last ones may lack items.

    Raises:
        UnsafePickleError: the file wants to import or call something.
        BrokenPickleError: no pickle, or damaged.
    """
    try:
        with _limited_memory(64 * len(data) + (256 << 20)):
            return _ImportlessUnpickler(io.BytesIO(data)).load(), True
    except UnsafePickleError:
        raise
    except _FAILURES:
        return interpret(data)


def interpret(data: bytes) -> tuple[Value, bool]:
    """Do what `read_pickle` does, opcode by opcode."""
    reader = _Reader(data)
    try:
        return reader.run(), True
    except _EndError:
        return _assemble(reader), False
    except (IndexError, KeyError, TypeError, ValueError, RecursionError, OverflowError) as err:
        if isinstance(err, (UnsafePickleError, BrokenPickleError)):
            raise
        raise BrokenPickleError(f"damaged at byte {reader.position}: {err!r}") from err


def _assemble(reader: _Reader) -> Value:
    """Put what lies on the stack into its container, from the innermost mark outwards."""
    while reader.marks:
        items = reader.pop_to_mark()
        if not reader.stack:
            return items
        target = reader.stack[-1]
        if isinstance(target, dict):
            _store_hashable(target, items[: len(items) // 2 * 2])
        elif isinstance(target, list):
            target.extend(items)
    return reader.stack[0] if reader.stack else None


def _store_hashable(target: dict[Value, Value], items: list[Value]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(key, (str, int)):
            target[key] = value
