"""The suite's parts have every test file once."""

import subprocess

from tools import run_tests


def test_every_file_is_in_one_part():
    parts = run_tests.parts()
    assert len(parts) == len(run_tests.LONGEST) + 1
    found = [file for part in parts for path in part for file in run_tests.files_of(path)]
    assert sorted(found) == sorted(run_tests.TESTS.rglob("test_*.py"))


def test_a_failure_fails_and_all_parts_are_counted(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    good.write_text("def test_one(): pass\ndef test_two(): pass\n")
    bad.write_text("def test_three(): assert False\ndef test_four(): pass\n")
    monkeypatch.setattr(run_tests, "parts", lambda: [[good], [bad]])
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    assert run_tests.main([*without, "-k", "not two"]) == 1
    said = capsys.readouterr().out
    assert "def test_three(): assert False" in said
    *_, last = said.splitlines()
    counted = dict(reversed(one.split(" ")) for one in last.partition(" in ")[0].split(", "))
    assert counted == {"passed": "2", "failed": "1", "deselected": "1"}
    passed = subprocess.CompletedProcess([], 0, "2 passed in 0.01s\n")
    monkeypatch.setattr(run_tests, "run", lambda part, options: passed)
    assert run_tests.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 passed in ")
