"""The lowest versions, and the table of what broke."""

from xml.etree import ElementTree

import pytest

from scripts.floors import floors
from scripts.other_versions import ROOT, TESTS, rows_of, table


def test_floors_are_the_minimums_and_for_tools_the_lock():
    project = {
        "name": "tarnn",
        "dependencies": ["torch>=2.10", "starlette>=1.0,<2"],
        "optional-dependencies": {"all": ["tarnn[hf]"], "dev": ["pytest", "psutil>=6.1,<8; sys_platform == 'linux'"]},
    }
    pyproject = {"project": project, "build-system": {"requires": ["scikit-build-core>=1.1"]}}
    expected = ["psutil==6.1", "pytest==9.2.0", "scikit-build-core==1.1", "starlette==1.0", "torch==2.10"]
    assert floors(pyproject, "# made by make lock\npytest==9.2.0\ntorch==2.13.0\n") == expected


def test_a_tool_that_the_lock_lacks_is_named():
    project = {"name": "tarnn", "dependencies": [], "optional-dependencies": {"dev": ["pytest"]}}
    with pytest.raises(KeyError, match="pytest"):
        floors({"project": project, "build-system": {"requires": []}}, "")


XML = """<testsuites><testsuite>
<testcase classname="tests.huggingface.test_linear_families" name="test_gradients[padded-Mamba-2-140]"/>
<testcase classname="tests.huggingface.test_linear_families" name="test_whole[Mamba-2]">
  <failure message="TypeError: no cache&#10;more">trace</failure></testcase>
<testcase classname="tests.huggingface.test_linear_families" name="test_whole[LFM2]"/>
<testcase classname="tests.ops.test_laws" name="test_prefix[linear-3]"/>
<testcase classname="tests.ops.test_laws" name="test_prefix[delta]"><skipped message="no GPU"/></testcase>
<testcase classname="" name="tests.models.test_block"><error message="collection failure">trace</error></testcase>
</testsuite></testsuites>"""


def test_the_table_has_what_broke_by_family():
    rows = rows_of(ElementTree.fromstring(XML), ["Mamba", "Mamba-2", "LFM2"], {"xLSTM": "other arguments"})
    assert {key: (row.tests, row.failed) for key, row in rows.items()} == {
        "Mamba-2": (2, 1),
        "LFM2": (1, 0),
        "tests/ops": (1, 0),
        "tests/models": (1, 1),
        "xLSTM": (0, 0),
    }
    lines = table(rows).splitlines()
    assert "| Mamba-2 | 1 of 2 | TypeError: no cache |" in lines
    assert "| xLSTM | 0 of 0 | not patched: other arguments |" in lines
    assert not any("LFM2" in line for line in lines)


def test_the_tests_that_are_run_exist():
    assert all((ROOT / "tests" / path).exists() for path in TESTS)
