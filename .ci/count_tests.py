"""Adds up the tests of several junit files; the last line is the number."""

import sys
import xml.etree.ElementTree as ElementTree

totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
for path in sys.argv[1:]:
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        for key in totals:
            totals[key] += int(suite.get(key, 0))
        print(f"{path.rsplit('/', 1)[-1]}: {suite.get('tests')} tests, {suite.get('skipped')} skipped")
failed = totals["failures"] + totals["errors"]
print(f"{totals['tests'] - failed - totals['skipped']} passed, {failed} failed, {totals['skipped']} skipped")
sys.exit(1 if failed or not totals["tests"] else 0)
