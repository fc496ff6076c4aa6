"""Where a decode kernel's warps spend their time in the loop over tiles, from `ncu --page source --csv` (sections SourceCounters): `.ci/gpu profile` makes the file.

The loop is the smallest one (a branch back) with at least four tensor-core instructions. A warp issues each of its instructions in one cycle, which counts as "selected": how often that is sampled says
how many cycles a sample is. Prints the cycles of a warp for one passage by what it waited for, then by stretches of the loop.
"""

import csv
import re
import sys
from collections import Counter

STRETCH = 24  # instructions


def number(text):
    return float(text.replace(",", "") or 0)


def read(path):
    """Address, text, executions and stalls of each instruction."""
    rows = list(csv.reader(open(path, newline="")))
    at = next((i for i, row in enumerate(rows) if "Source" in row), None)
    if at is None:
        sys.exit(f"{path} has no column Source: it is to come from ncu --page source --csv")
    names = rows[at]
    stalls = {name.removeprefix("stall_"): i for i, name in enumerate(names) if name.startswith("stall_") and "Not Issued" not in name}
    address, source, executed = (names.index(name) for name in ("Address", "Source", "Instructions Executed"))
    for row in rows[at + 1 :]:
        if len(row) >= len(names):
            yield int(row[address], 16), row[source].strip(), number(row[executed]), Counter({name: number(row[i]) for name, i in stalls.items()})


def loop_over_tiles(instructions):
    place = {address: i for i, (address, *_) in enumerate(instructions)}
    tensor = [i for i, (_, text, *_) in enumerate(instructions) if re.search(r"\b[IH]G?MMA", text)]
    loops = []
    for i, (_, text, *_) in enumerate(instructions):
        back = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        first = place.get(int(back[1], 16)) if back else None
        if first is not None and first < i and sum(first <= t <= i for t in tensor) >= 4:
            loops.append((i - first, first, i + 1))
    if not loops:
        sys.exit("no loop with four tensor-core instructions")
    _, first, end = min(loops)
    passages = max(instructions[t][2] for t in tensor if first <= t < end)
    return instructions[first:end], passages


def table(head, rows):
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main(path):
    instructions = list(read(path))
    loop, passages = loop_over_tiles(instructions)
    executed = sum(times for _, _, times, _ in loop)
    selected = sum(stalls["selected"] for *_, stalls in loop)
    if not passages or not selected:
        sys.exit("the loop over tiles was not sampled")
    cycles = executed / selected / passages  # of a sample
    total = sum((stalls for *_, stalls in loop), Counter())
    everywhere = sum(sum(stalls.values()) for *_, stalls in instructions)
    in_loop = sum(total.values())
    print(f"{executed / passages:.0f} instructions and {in_loop * cycles:.0f} cycles of a warp for a passage of the loop over tiles, which has {in_loop / everywhere:.0%} of all samples")
    table(["waited for", "cycles"], ([name, f"{count * cycles:.0f}"] for name, count in total.most_common() if count * cycles >= 1))
    stretches = []
    for first in range(0, len(loop), STRETCH):
        part = loop[first : first + STRETCH]
        stalls = sum((stalls for *_, stalls in part), Counter())
        times = sum(times for _, _, times, _ in part) / passages
        most = ", ".join(f"{name} {count * cycles:.0f}" for name, count in stalls.most_common(3) if count * cycles >= 1)
        if times >= 0.5:
            stretches.append([part[0][1].replace("|", "\\|"), f"{times:.0f}", f"{sum(stalls.values()) * cycles:.0f}", most])
    table(["from", "instructions", "cycles", "most of them"], stretches)


main(sys.argv[1])
