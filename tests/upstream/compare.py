"""Lists the tests that fail in the second of two JUnit reports and not in the first: `compare.py default.xml injected.xml`."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def outcomes(report: Path) -> dict[str, str]:
    """Return `passed`, `failed`, `error` or `skipped` for every test of a JUnit report."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome.replace("failure", "failed")
    return found


def main() -> int:
    """Print what is worse in the second report; 1 if anything is."""
    default, injected = (outcomes(Path(name)) for name in sys.argv[1:3])
    worse = [
        name
        for name, outcome in sorted(injected.items())
        if outcome in ("failed", "error") and default.get(name) not in ("failed", "error")
    ]
    for title, found in (("without the strategy", default), ("with it", injected)):
        counts = [
            f"{sum(value == kind for value in found.values())} {kind}"
            for kind in ("passed", "failed", "error")
        ]
        print(f"{title}: {len(found)} tests, {', '.join(counts)}")
    print("worse with the strategy:", *(worse or ["none"]), sep="\n  ")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
