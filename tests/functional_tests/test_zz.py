import dataclasses
import tests.functional_tests.test_lane_faults as m

m.ZBV = m.ZBV.replace("optim_grads_params", "optim")
G = dataclasses.replace(m.GATHER, flags=m.FSDP, ranks=2)
R = dataclasses.replace(m.REDUCTION, flags=m.FSDP, ranks=2)
test_r = m.test_a_peer_goes_away_in_a_rollback
import pytest


@pytest.mark.parametrize("case", [G, R, m.OUTER_SUM, dataclasses.replace(G, how="stop")], ids=str)
def test_x(tmp_path, case):
    run = m.run_with_fault(tmp_path, case)
    print(run.output[-1500:], run.statuses, m.launch.exit_record(tmp_path / "ck")["reason"])
