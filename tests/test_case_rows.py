"""The table of tests/README.md: every row of the list of known faults has tests, and every test of a row is listed."""

from __future__ import annotations

import fnmatch
import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).parent
#: The list itself, where it is kept beside the package.
LIST = HERE.parents[1] / "shared/cases.md"


def table():
    """Row -> patterns of tests, as file::name."""
    rows = re.findall(r"^\| ([A-P]\d+) \| [^|]+ \| ([^|]+) \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return {row: re.findall(r"`([^`]+)`", cell) for row, cell in rows}


def known_tests():
    """All tests, as file::name."""
    return [
        f"{path.name}::{name}"
        for path in sorted(HERE.glob("test_*.py"))
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]


def test_every_test_of_the_table_exists():
    known = known_tests()
    for row, patterns in table().items():
        assert patterns, row
        for pattern in patterns:
            assert fnmatch.filter(known, pattern), f"{row}: no test is {pattern}"


def test_every_test_that_is_named_after_a_row_is_listed():
    rows = table()
    for test in known_tests():
        found = re.search(r"::test_([A-P]\d+)_", test)
        if found:
            assert any(fnmatch.fnmatch(test, pattern) for pattern in rows[found[1]]), test


@pytest.mark.skipif(not LIST.exists(), reason="the list of known faults is not here")
def test_every_row_of_the_list_is_in_the_table():
    listed = re.findall(r"^\| ([A-P]\d+) \|", LIST.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(table())
