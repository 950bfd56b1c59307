"""Check a run that was written down, once more and offline: `python -m bench.witness FOLDER`.

Exits with 0 if no rule is broken, 1 if one is, 2 if there is nothing to read.
"""

import argparse
import sys
from pathlib import Path

from bench.witness.written import Written


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.witness", description=__doc__)
    parser.add_argument("folder", type=Path, help="such as bench/results/faults/replica_killed")
    folder = parser.parse_args().folder
    try:
        verdict = Written(folder).judge()
    except (OSError, ValueError, KeyError, TypeError) as fault:
        print(f"{folder} cannot be read: {fault!r}", file=sys.stderr)
        return 2
    ends = ", ".join(f"{count} {end}" for end, count in verdict.ends.most_common())
    print(f"{verdict.entries} entries; answers that clients were served: {ends or 'none'}")
    for fault in verdict.faults:
        print(fault)
    print(f"{len(verdict.faults)} rules broken")
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
