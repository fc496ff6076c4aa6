"""Reads the SASS of a decode kernel (cuobjdump --dump-sass) and prints what `.ci/kernels` judges, in this order:

tensor     tensor-core instructions
spills     accesses of local memory in the loop over tiles: the smallest loop (a branch back) with at least argv[1] tensor-core instructions
shared     registers that are the left operand of float products into different sums of a loop, and are not written in between: queries that live through the loop, and weights
serial     1 if that loop has more than a wait for two products of a warpgroup: ptxas has made products wait for each other
disturbed  instructions that write a register while a product under way reads it or adds to it
steps      instructions of the loop

`--check` holds it to loops of its own.
"""

import re
import sys

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
# They write no register, or none of a thread's.
WITHOUT_RESULT = ("ST", "RED", "BRA", "BAR", "SYNCS", "BSSY", "BSYNC", "NOP", "WARPSYNC", "EXIT", "MEMBAR", "FENCE")


def register(operand):
    found = re.match(r"R(\d+)", operand)
    return int(found[1]) if found else None


def registers(operand, count):
    first = register(operand)
    return set() if first is None else set(range(first, first + count))


def results(op, operands):
    """The registers that an instruction writes."""
    if op.startswith(WITHOUT_RESULT):
        return set()
    written = [o for o in operands if not re.match(r"!?U?P(T|\d)$", o)][:1]
    wide = ".64" in op or ".WIDE" in op or (op.startswith("CS2R") and ".32" not in op)
    matrices = re.search(r"^LDSM\S*\.MT?88\.(\d)", op)
    count = int(matrices[1]) if matrices else 4 if ".128" in op or re.match(r"[HI]MMA", op) else 2 if wide else 1
    return registers(written[0], count) if written else set()


def back_to(at, text):
    """The address that a branch back leads to."""
    found = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
    return int(found[1], 16) if found and int(found[1], 16) < at else None


def disturbed(instructions):
    """Counts instructions that write registers of products under way: groups of products, of which a wait leaves the last few. In the order of addresses, and from each
    branch back, taken once, on until all products that were under way there are done."""
    index = {at: n for n, (at, _) in enumerate(instructions)}
    writes = set()

    def walk(first, groups, turns_back):
        groups, current = list(groups), set()
        for at, text in instructions[first:]:
            op, _, rest = PREDICATE.sub("", text).partition(" ")
            operands = [o.strip() for o in rest.split(",")]
            shape = re.match(r"[HI]GMMA\.\d+x(\d+)x\d+", op)
            if op.startswith("WARPGROUP.DEPBAR"):
                left = int(operands[-1], 16)
                groups = groups[len(groups) - left :] if left else []
            elif shape:
                current |= registers(operands[0], int(shape[1]) // 2) | registers(operands[1], 4)
                if "gsb0" in rest:
                    groups.append(current)
                    current = set()
            elif results(op, operands) & current.union(*groups):
                writes.add(at)
            if turns_back and groups and back_to(at, text) in index:
                walk(index[back_to(at, text)], groups, False)
            if not turns_back and not groups:
                return

    walk(0, [], True)
    return len(writes)


def shared(instructions):
    """Registers of a loop that products into one sum read after those into another, with no write in between; from the loop's end on to its start."""
    events = {}
    for _, text in instructions:
        product = re.search(r"\bHGMMA\S*\s+(R\d+),\s+(R\d+)(?:\.reuse)?,\s+gdesc", text)
        op, _, rest = PREDICATE.sub("", text).partition(" ")
        operands = [o.strip() for o in rest.split(",")]
        if product:
            events.setdefault(register(product[2]), []).append(product[1])
        elif not re.match(r"[HI]GMMA", op):
            for written in results(op, operands):
                events.setdefault(written, []).append(None)
    around = [zip(of, of[1:] + of[:1]) for of in events.values()]
    return sum(any(a and b and a != b for a, b in pairs) for pairs in around)


def judge(lines, least):
    found = [INSTRUCTION.match(line) for line in lines]
    instructions = [(int(line[1], 16), line[2]) for line in found if line]
    tensor = [at for at, text in instructions if re.search(r"\b[IH]G?MMA", text)]
    local = [at for at, text in instructions if re.search(r"\b(LDL|STL)\b", text)]
    waits = [at for at, text in instructions if "WARPGROUP.DEPBAR" in text]
    loops = []
    for at, text in instructions:
        back = back_to(at, text)
        if back is not None and sum(back <= t <= at for t in tensor) >= least:
            loops.append((back, at))
    first, last = min(loops, key=lambda loop: loop[1] - loop[0], default=(0, 1 << 40))
    spills, waits, products, steps = [
        sum(first <= at <= last for at in of) for of in (local, waits, tensor, [at for at, _ in instructions])
    ]
    innermost = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    of_loops = [shared([i for i in instructions if a <= i[0] <= b]) for a, b in innermost]
    return len(tensor), spills, sum(of_loops), int(2 * waits > products), disturbed(instructions), steps


KEYS, MORE_KEYS = "IGMMA.64x64x32.S8.S8 R24, gdesc[UR4], RZ, !UPT", "IGMMA.64x64x32.S8.S8 R24, gdesc[UR4], R24, gsb0"
VALUES, MORE_VALUES = "IGMMA.64x128x32.U8.S8 R64, R152, gdesc[UR4], RZ, !UPT", "IGMMA.64x128x32.U8.S8 R64, R156, gdesc[UR4], R64, gsb0"
WAIT, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
HEALTHY = [KEYS, MORE_KEYS, "LDS.64 R20, [R7+0x80]", WAIT, "I2FP.F32.S32 R24, R24", VALUES, MORE_VALUES, WAIT, "@P0 FADD.FTZ R64, R64, R152"]
# What a loop is made of, and what is found in it: spills, shared registers, products that wait, disturbed products.
LOOPS = [
    (HEALTHY, (0, 0, 0, 0)),
    ([*HEALTHY, "LDL R3, [R1+0x8]"], (1, 0, 0, 0)),
    ([KEYS, WAIT, MORE_KEYS, WAIT, VALUES, WAIT, MORE_VALUES, WAIT], (0, 0, 1, 0)),
    ([KEYS, MORE_KEYS, "LDS.64 R22, [R7+0x80]", VALUES, MORE_VALUES, WAIT], (0, 0, 0, 0)),
    ([KEYS, MORE_KEYS, "LDS.128 R22, [R7+0x80]", VALUES, MORE_VALUES, WAIT], (0, 0, 0, 1)),
    ([KEYS, MORE_KEYS, "LDSM.16.MT88.4 R20, [R7]", "LDSM.16.M88.4 R21, [R7]", VALUES, MORE_VALUES, WAIT], (0, 0, 0, 1)),
    ([KEYS, MORE_KEYS, VALUES, MORE_VALUES, "SHFL.BFLY PT, R159, R3, 0x1, 0x1f", WAIT], (0, 0, 0, 1)),
    ([KEYS, MORE_KEYS, VALUES, MORE_VALUES, WAIT_BUT_ONE, "MOV R55, R3", "MOV R127, R3", WAIT], (0, 0, 0, 1)),
    ([KEYS, MORE_KEYS, VALUES, MORE_VALUES, "STS [R24], R64", "R2UR UR4, R24", WAIT], (0, 0, 0, 0)),
    (["MOV R152, R3", KEYS, MORE_KEYS, WAIT, VALUES, MORE_VALUES], (0, 0, 0, 1)),
    (["MOV R151, R3", KEYS, MORE_KEYS, WAIT, VALUES, MORE_VALUES], (0, 0, 0, 0)),
    (["HGMMA.64x64x16.F32 R24, R8, gdesc[UR4], R24", "HGMMA.64x64x16.F32 R64, R8, gdesc[UR4], R64", KEYS, MORE_KEYS, WAIT], (0, 1, 0, 0)),
    (["HGMMA.64x64x16.F32 R24, R8, gdesc[UR4], R24, gsb0", WAIT, "MOV R8, R3", "HGMMA.64x64x16.F32 R64, R8, gdesc[UR4], R64", KEYS, MORE_KEYS, WAIT], (0, 1, 0, 0)),
    (["MOV R8, R2", "HGMMA.64x64x16.F32 R24, R8, gdesc[UR4], R24, gsb0", WAIT, "MOV R8, R3", "HGMMA.64x64x16.F32 R64, R8, gdesc[UR4], R64", KEYS, MORE_KEYS, WAIT], (0, 0, 0, 0)),
]


def check():
    for loop, expected in LOOPS:
        instructions = ["MOV R2, R3", *loop, "@!P0 BRA 0x10", "EXIT"]
        lines = [f"        /*{16 * at:04x}*/                   {text} ;" for at, text in enumerate(instructions)]
        found = judge(lines, 4)[1:5]
        assert found == expected, f"{loop}: {found}, expected {expected}"


if sys.argv[1] == "--check":
    check()
else:
    print(*judge(sys.stdin, int(sys.argv[1])))
