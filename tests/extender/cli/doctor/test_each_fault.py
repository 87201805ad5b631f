"""Each fault in an otherwise healthy cluster: the doctor reports it and nothing else."""

from dataclasses import replace

import pytest

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.findings import examine
from tests.extender.cli.doctor.faults import FAULTS, HEALTHY


def test_nothing_is_found_where_all_is_well_and_every_check_has_looked() -> None:
    report = examine(HEALTHY, CHECKS)

    assert report.findings == ()
    assert report.not_run == ()
    assert report.passed == tuple(check.code for check in CHECKS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_with_its_remedy_and_nothing_else_is(name: str) -> None:
    fault = FAULTS[name]

    found = examine(replace(HEALTHY, **fault.changes), CHECKS).findings

    assert [one.code for one in found] == [fault.code], found
    (finding,) = found
    assert fault.remedy in finding.remedy
    assert finding.evidence


def test_every_check_has_its_fault() -> None:
    assert {fault.code for fault in FAULTS.values()} == {check.code for check in CHECKS}
