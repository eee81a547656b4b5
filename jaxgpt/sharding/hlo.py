"""The collectives of a compiled program, read from its optimized HLO text (CPU and GPU).

    for found in collectives(compiled.as_text()):
        print(found.kind, found.axes(mesh.shape), found.times * found.received, found.source)

What the program does is counted, not what its text says once: loops by their trip count, fused and called
computations where they are used, asynchronous pairs once.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collective:
    """One collective instruction. Bytes are those of one device, each time it runs."""

    kind: str
    """One of KINDS."""
    dtype: str
    """As HLO names it, "bf16"; "bf16+f32" where several arrays of different types are combined."""
    operand: int
    """Bytes that go in."""
    result: int
    """Bytes that come out."""
    groups: Groups
    """Numbers of the devices that talk to each other, in the order of mesh.devices.flat; of a permute, (from, to)."""
    times: int
    """How often it runs: the product of the trip counts of the loops around it."""
    exact: bool
    """False where times is only known for one turn of a loop, or for the case that its branch is taken each time."""
    op_name: str
    """JAX's name scopes."""
    stack: tuple[str, ...]
    """Lines of the program that it comes from, "path.py:12", each called by the next; empty where the text has none."""

    @property
    def source(self) -> str:
        """The innermost line of stack, or nothing."""
        return self.stack[0] if self.stack else ""

    @property
    def size(self) -> int:
        """Devices in a group."""
        return max(map(len, self.groups))

    @property
    def received(self) -> Fraction:
        """Bytes that one device receives from others each time, by the ring algorithms."""
        others = Fraction(self.size - 1, self.size)
        match self.kind:
            case "all-reduce":
                return 2 * others * self.result
            case "reduce-scatter":
                return others * self.operand
            case "all-gather" | "all-to-all":
                return others * self.result
        return Fraction(self.result if self.size > 1 else 0)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh of these sizes along which a group's devices differ.

        Where size is less than the axes' product, each group spans a part of them.
        """
        shape = tuple(sizes.values())
        spanned: set[int] = set()
        for group in self.groups:
            places = np.array(np.unravel_index(group, shape))
            spanned |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
        return tuple(axis for i, axis in enumerate(sizes) if i in spanned)


def collectives(text: str) -> list[Collective]:
    """All collectives of a program, in the order of its text, from the entry computation on."""
    return list(Module(text).collectives())


# Reading the text


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    type: str
    opcode: str
    rest: str
    """Operands and attributes."""


INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)\b.*\{\s*$")
OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
CALLERS = ("call", "call-start", "fusion", "fusion-start", "async-start", "custom-call")
TAKEN = re.compile(r'op_name="[^"]*\b(\d+) of (\d+) turns/cond"')
"""The name scope of jaxprs.share on a conditional: in how many of its loop's turns its branch is taken."""
CALLED = re.compile(
    r"\b(?:calls|to_apply|(?:called|branch)_computations|(?:true|false)_computation)=(\{[^}]*\}|[\w.%\-]+)"
)


@dataclass
class Module:
    """A module's computations and tables of source lines."""

    text: str
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""
    frames: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        partitions, replicas = (re.search(rf"\b{n}=(\d+)", self.text) for n in ("num_partitions", "replica_count"))
        self.devices = int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)
        self.frames = _frames(self.text)
        current: list[Instruction] | None = None
        for line in self.text.splitlines():
            if line.startswith("}"):
                current = None
            elif current is not None and (found := INSTRUCTION.match(line)):
                current.append(_instruction(found[1], found[2]))
            elif not line.startswith((" ", "HloModule")) and (header := COMPUTATION.match(line)):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
        if not self.entry:
            raise ValueError("no ENTRY computation: this is not the text of an HLO module")

    def instructions(
        self, name: str | None = None, times: int = 1, exact: bool = True
    ) -> Iterator[tuple[str, Instruction, int, bool]]:
        """Every instruction of a computation (None: of the program) and of all that it calls, with the computation's
        name, how often it runs, and whether that is known."""
        name = name or self.entry
        for instruction in self.computations[name]:
            kind = instruction.opcode.removesuffix("-start")
            yield name, instruction, times, exact
            if kind == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.rest)
                turns, known = (times * int(trips[1]), exact) if trips else (times, False)
                for part in re.findall(r"\b(?:body|condition)=%?([\w.\-]+)", instruction.rest):
                    yield from self.instructions(part, turns, known)
            elif kind == "conditional":
                named = TAKEN.search(instruction.rest)
                taken = times * int(named[1]) // int(named[2]) if named else times
                for part in _called(instruction.rest):
                    yield from self.instructions(part, taken, exact and named is not None)
            elif instruction.opcode in CALLERS:
                for part in _called(instruction.rest):
                    yield from self.instructions(part, times, exact)

    def collectives(self) -> Iterator[Collective]:
        """The program's collectives."""
        for _, instruction, times, exact in self.instructions():
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                yield self.collective(kind, instruction, times, exact)

    def collective(self, kind: str, instruction: Instruction, times: int, exact: bool) -> Collective:
        arrays = _arrays(_result(kind, instruction))
        groups = _groups(instruction.rest, self.devices)
        result, size = sum(nbytes for _, nbytes in arrays), max(map(len, groups))
        operand = {"all-gather": result // size, "reduce-scatter": result * size}.get(kind, result)
        dtype = "+".join(sorted({dtype for dtype, _ in arrays}))
        op_name = re.search(r'\bop_name="([^"]*)"', instruction.rest)
        name, stack = op_name[1] if op_name else "", self.stack(instruction.rest)
        return Collective(kind, dtype, operand, result, groups, times, exact, name, stack)

    def stack(self, attributes: str) -> tuple[str, ...]:
        """The lines of the program: one written in the metadata, or all by number in the module's tables."""
        file, line = (re.search(rf"\b{n}=\"?([^\"\s}}]+)", attributes) for n in ("source_file", "source_line"))
        if file and line:
            return (f"{file[1]}:{line[1]}",)
        frame = re.search(r"\bstack_frame_id=(\d+)", attributes)
        return self.frames.get(int(frame[1]), ()) if frame else ()


def _instruction(name: str, text: str) -> Instruction:
    """ "f32[8]{0} add(%x, %y), metadata=..." in its parts; a tuple's type has spaces and brackets of its own."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode = OPCODE.match(text, end)
    if opcode is None:
        raise ValueError(f"not an HLO instruction: {text[:200]}")
    return Instruction(name, text[:end], opcode[1], text[opcode.end() :])


def _closing(text: str, start: int) -> int:
    """The position after the bracket that closes the one at start."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"a bracket is not closed: {text[:200]}")


def _called(attributes: str) -> list[str]:
    return [name for found in CALLED.findall(attributes) for name in re.findall(r"[\w.\-]+", found)]


def _frames(text: str) -> dict[int, tuple[str, ...]]:
    """Number of each stack frame -> its lines, innermost first, from the tables before the computations."""

    def rows(table: str, pattern: str) -> list[tuple[str, ...]]:
        return re.findall(pattern, tables.get(table, ""), re.MULTILINE)

    tables = dict(re.findall(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", text, re.MULTILINE))
    files = {row[0]: row[1] for row in rows("FileNames", r'^(\d+) "(.*)"$')}
    places = rows("FileLocations", r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
    lines = {number: f"{files[file]}:{line}" for number, file, line in places}
    found = rows("StackFrames", r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
    frames = [(int(number), lines[place], int(parent or 0)) for number, place, parent in found]
    # XLA writes the parent's number one too large. A parent comes before its child, so this can be told from the table.
    shift = int(any(parent >= number for number, _, parent in frames))
    stacks: dict[int, tuple[str, ...]] = {}
    for number, line, parent in frames:
        outer = stacks.get(parent - shift, ())
        stacks[number] = outer if outer[:1] == (line,) else (line, *outer)
    return stacks


# Types and groups


def _result(kind: str, instruction: Instruction) -> str:
    """The type of what comes out. A "-start" gives (operands, results, ...), but all-reduce-start, unless it is
    written like the others, the results alone."""
    inner = _elements(instruction.type)
    started = instruction.opcode.endswith("-start")
    if started and (kind != "all-reduce" or (len(inner) > 1 and inner[0].startswith("("))):
        return inner[1]
    return instruction.type


def _elements(tuple_type: str) -> list[str]:
    """The types directly inside of a tuple's."""
    found, depth, start = [], 0, 1
    for position, letter in enumerate(tuple_type):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            found.append(tuple_type[start:position].strip())
            start = position + 1
    return found


def _arrays(type_text: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of every array in a type."""
    found = []
    for dtype, dims in re.findall(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([^\]]*)\]", type_text):
        bits = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
        count = int(np.prod([int(d.strip("<= ")) for d in dims.split(",") if d], dtype=np.int64))
        found.append((dtype, -(-count * bits // 8)))
    return found


def _groups(attributes: str, devices: int) -> Groups:
    """The groups that talk, in any of the forms that XLA writes them; {} is all devices together."""
    listed = re.search(r"\b(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if listed and listed[1]:
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return tuple(tuple(int(n) for n in group.split(",")) for group in groups if group)
    iota = re.search(r"\breplica_groups=\[(\d+),(\d+)\]<=(\S+?),? ", attributes + " ")
    if iota:
        return _rows(_iota(iota[3]).reshape(int(iota[1]), int(iota[2])))
    mesh = re.search(r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes)
    if mesh:
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    return (tuple(range(devices)),)


def _iota(text: str) -> np.ndarray:
    """ "[2,4]T(1,0)": 0 to 7 in two rows, transposed, in one line."""
    dims, _, order = text.strip("[)").replace("]", "").partition("T(")
    numbers = np.arange(np.prod(_ints(dims))).reshape(_ints(dims))
    return (numbers.transpose(_ints(order)) if order else numbers).reshape(-1)


def _mesh_groups(axes: str, ids: str | None, grouped: str) -> Groups:
    """ "'a'=2,'b'=8" and "'b':(2)4": groups along b, of which the part that follows the first 2, 4 long."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    taken = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped)
    parts: list[tuple[str, int, bool]] = []
    for name, size in sizes.items():
        cuts = sorted((int(before or 1), int(length or size)) for axis, before, length in taken if axis == name)
        done = 1
        for before, length in cuts:
            parts += [(name, before // done, False), (name, length, True)]
            done = before * length
        parts.append((name, size // done, False))
    devices = np.arange(np.prod(list(sizes.values())))
    if ids:
        devices = _iota(ids) if ids.startswith("[") else np.array(_ints(ids))
    order = sorted(range(len(parts)), key=lambda i: parts[i][2])
    group = int(np.prod([length for _, length, inside in parts if inside]))
    return _rows(devices.reshape([length for _, length, _ in parts]).transpose(order).reshape(-1, group))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())
