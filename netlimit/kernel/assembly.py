"""Text of an eBPF program with labels; registers are numbers, r10 is where the stack ends (RFC 9669)."""

from __future__ import annotations

import struct

from netlimit.errors import KernelError
from netlimit.kernel.bpf import ins

STACK = 10
_SIZES = {4: 0x00, 2: 0x08, 1: 0x10, 8: 0x18}
_ALU = {"+": 0x07, "&": 0x54, "<<": 0x64, ">>": 0x74}
_JUMPS = {"==": 0x10, ">=": 0x30, "&": 0x40, "!=": 0x50, "<": 0xA0, "<=": 0xB0, "signed <": 0xC0}
_JUMP, _JUMP32, _BY_REGISTER = 0x05, 0x06, 0x08
_MAP_FD = 1


class Assembly:
    """Instructions one after the other. A label may be named before it is placed."""

    def __init__(self) -> None:
        self._code: list[bytes] = []
        self._places: dict[str, int] = {}
        self._jumps: dict[int, str] = {}
        self._labels = 0

    def new_label(self) -> str:
        """A label that no other has."""
        self._labels += 1
        return f"label {self._labels}"

    def place(self, label: str) -> None:
        """What comes next is what `label` leads to."""
        self._places[label] = len(self._code)

    def set(self, register: int, number: int) -> None:
        """Give a register an unsigned number of 32 bits."""
        self._put(0xB4, register, imm=number)

    def copy(self, register: int, source: int) -> None:
        """Copy a register, all 64 bits."""
        self._put(0xBF, register, source)

    def point(self, register: int, offset: int) -> None:
        """Let a register point into the stack."""
        self.copy(register, STACK)
        self.change(register, "+", offset)

    def change(self, register: int, operator: str, number: int) -> None:
        """Calculate: + with 64 bits (for pointers too), &, << and >> with 32."""
        self._put(_ALU[operator], register, imm=number)

    def add(self, register: int, other: int) -> None:
        """Add another register, 64 bits."""
        self._put(0x0F, register, other)

    def mix(self, register: int, source: int) -> None:
        """Exclusive or, 32 bits."""
        self._put(0xAC, register, source)

    def swap(self, register: int) -> None:
        """Turn 16 bits from the order of the network into that of the host, which is little-endian."""
        self._put(0xDC, register, imm=16)

    def load(self, register: int, base: int, offset: int, size: int = 4) -> None:
        """Read `size` bytes from memory."""
        self._put(0x61 | _SIZES[size], register, base, offset)

    def store(self, base: int, offset: int, register: int, size: int = 4) -> None:
        """Write a register to memory."""
        self._put(0x63 | _SIZES[size], base, register, offset)

    def store_number(self, base: int, offset: int, number: int, size: int = 4) -> None:
        """Write a number to memory."""
        self._put(0x62 | _SIZES[size], base, 0, offset, number)

    def count(self, base: int, offset: int, register: int) -> None:
        """Add to 8 bytes of memory that other processors add to as well."""
        self._put(0xDB, base, register, offset)

    def load_map(self, register: int, fd: int) -> None:
        """Give a register a map."""
        self._put(0x18, register, _MAP_FD, imm=fd)
        self._put(0)

    def call(self, function: int) -> None:
        """Call a helper of the kernel: arguments in r1 to r5, the answer in r0."""
        self._put(0x85, imm=function)

    def jump(self, label: str) -> None:
        """Go on at `label`."""
        self._jump(_JUMP, 0, 0, 0, label)

    def jump_if(self, register: int, relation: str, number: int, label: str) -> None:
        """Go on at `label` if 32 bits of the register, unsigned if not said otherwise, stand so to a number."""
        self._jump(_JUMP32 | _JUMPS[relation], register, 0, number, label)

    def jump_if_same(self, register: int, other: int, label: str) -> None:
        """Go on at `label` if two registers have the same 32 bits."""
        self._jump(_JUMP32 | _BY_REGISTER | _JUMPS["=="], register, other, 0, label)

    def jump_if_null(self, register: int, label: str) -> None:
        """Go on at `label` if the register points nowhere."""
        self._jump(_JUMP | _JUMPS["=="], register, 0, 0, label)

    def jump_unless_null(self, register: int, label: str) -> None:
        """Go on at `label` if the register points somewhere."""
        self._jump(_JUMP | _JUMPS["!="], register, 0, 0, label)

    def leave(self, answer: int) -> None:
        """End the program."""
        self.set(0, answer)
        self._put(0x95)

    def finish(self) -> bytes:
        """The instructions with their jumps. Raises KernelError if one is too far."""
        code = list(self._code)
        for index, label in self._jumps.items():
            distance = self._places[label] - index - 1
            if distance >= 1 << 15:
                raise KernelError("write the program for the ingress", "it has too many addresses or lanes")
            code[index] = code[index][:2] + struct.pack("=h", distance) + code[index][4:]
        return b"".join(code)

    def _put(self, op: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> None:
        self._code.append(ins(op, dst, src, off, imm))

    def _jump(self, op: int, dst: int, src: int, imm: int, label: str) -> None:
        self._jumps[len(self._code)] = label
        self._put(op, dst, src, 0, imm)
