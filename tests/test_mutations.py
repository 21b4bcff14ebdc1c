"""The planted faults fit the package as it is; `mutations.py` runs them."""

import pytest
from faults import ROOT, Fault
from mutations import FAULTS, is_seen

by_name = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@by_name
def test_a_fault_can_be_planted_and_names_a_test(fault: Fault):
    assert fault.path.read_text().count(fault.right) == 1
    assert fault.right != fault.wrong
    file, name = fault.test.split("::")[0], fault.test.split("::")[-1]
    test = (ROOT / "tests" / file).read_text()
    assert f"def {name.split('[')[0]}(" in test


def test_faults_are_many_and_no_two_are_the_same():
    assert len(FAULTS) >= 25
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.right, fault.wrong) for fault in FAULTS}) == len(
        FAULTS
    )


@pytest.mark.slow
@by_name
def test_a_planted_fault_is_seen(fault: Fault):
    assert is_seen(fault)
