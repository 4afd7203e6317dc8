"""From the object file of one function to plain bytes that run wherever they lie: the few steps of a linker it takes.

Only what LLVM writes for position-independent x86-64 functions without calls is understood (System V ABI, AMD64
supplement, section 4.4: https://gitlab.com/x86-psABIs/x86-64-ABI); whatever else turns up is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

ALLOCATED, WRITABLE = 2, 1
PROGBITS, SYMBOLS, RELOCATIONS, EMPTY = 1, 2, 4, 8
PC32, PLT32 = 2, 4
"""Relocations that write symbol + addend - place in 32 bits; the second is for calls."""
ALIGNMENT = 64


class LinkError(Exception):
    """The object needs something from outside, or something that is not understood here."""


@dataclass(frozen=True)
class _Section:
    """The fields of a section header that matter here."""

    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


def link(data: bytes, function: str) -> bytes:
    """Lay out an object file's code and constants, with its references filled in.

    Args:
        data: An ELF object for x86-64 that defines ``function`` at the beginning of its code.
        function: The entry; the result's first byte.

    Returns:
        Bytes that can be called when they are copied to executable memory at a multiple of 64.

    Raises:
        LinkError: It refers to something outside of it, or is nothing that this understands.
    """
    try:
        return _link(data, function)
    except (struct.error, IndexError, ValueError) as error:
        raise LinkError(f"not an object file as expected: {error}") from error


def _link(data: bytes, function: str) -> bytes:
    if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != 62:
        raise LinkError("not a little-endian 64-bit object for x86-64")
    sections = _sections(data)
    image, places = bytearray(), {}
    for index, section in enumerate(sections):
        if section.flags & ALLOCATED and section.size and section.kind in (PROGBITS, EMPTY):
            if section.flags & WRITABLE or section.kind == EMPTY:
                raise LinkError("the code has variables")
            image += bytes(-len(image) % max(section.alignment, ALIGNMENT))
            places[index] = len(image)
            image += data[section.offset : section.offset + section.size]
    symbols = _symbols(data, sections, places)
    if (function, 0) not in symbols:
        raise LinkError(f"{function} does not come first")
    for section in sections:
        if section.kind == RELOCATIONS and section.info in places:
            for at in range(section.offset, section.offset + section.size, 24):
                place, info, addend = struct.unpack_from("<QQq", data, at)
                kind, (name, address) = info & 0xFFFFFFFF, symbols[info >> 32]
                if kind not in (PC32, PLT32) or address is None:
                    raise LinkError(f"{function} needs {name or 'a section'} (relocation {kind})")
                place += places[section.info]
                struct.pack_into("<i", image, place, address + addend - place)
    return bytes(image)


def _sections(data: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    return [
        _Section(kind, flags, offset, length, linked, info, alignment)
        for _, kind, flags, _, offset, length, linked, info, alignment, _ in (
            struct.unpack_from("<IIQQQQIIQQ", data, at) for at in range(table, table + size * count, size)
        )
    ]


def _symbols(data: bytes, sections: list[_Section], places: dict[int, int]) -> list[tuple[str, int | None]]:
    """Name and place in the image of each symbol, in the object's order; None for what is not in the image."""
    found: list[tuple[str, int | None]] = []
    for section in sections:
        if section.kind == SYMBOLS:
            for at in range(section.offset, section.offset + section.size, 24):
                name, _, _, home, value, _ = struct.unpack_from("<IBBHQQ", data, at)
                start = sections[section.link].offset + name
                text = data[start : data.index(b"\0", start)].decode()
                found.append((text, places[home] + value if home in places else None))
    return found
