"""What ``ds-muon verify`` says of what was found, and keeps of it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_muon.verify import outcome, table
from ds_muon.verify.inject import FAULTS
from ds_muon.verify.outcome import NotShown
from ds_muon.verify.rank import DEFAULT_CONFIG
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult
from tests.unit.support.records import planted, record, result, wrong

# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_has_every_parameter_in_its_worst_step_worst_first() -> None:
    text = table.parameter_table(result(record("a", 1e-6), record("b", 3e-6), record("a", 2e-6, step=2)))
    header, first, second, legend = text.splitlines()
    assert legend == table.LEGEND
    assert re.split(" {2,}", header.strip())[:6] == ["parameter", "shape", "half", "ranks", "owner", "step"]
    assert re.sub(" +", " ", first) == "b 8x4 muon 0,1 0 1 3.0e-06 1.0e-05 1.000000 0 1.0e-06 1.0e-08 -"
    assert re.sub(" +", " ", second).startswith("a 8x4 muon 0,1 0 2 2.0e-06 ")


def test_the_table_leaves_out_right_rows_only() -> None:
    bad = [wrong(f"bad{i}") for i in range(4)]
    good = [record(f"good{i}") for i in range(5)]
    lines = table.parameter_table(result(*good, *bad), rows=3).splitlines()
    assert sum(line.startswith("bad") for line in lines) == 4
    assert sum("<- clipped update: 0.5 times" in line for line in lines) == 4
    assert lines[-2] == "... and 5 more, all right"
    assert "more" not in table.parameter_table(result(*good))


def test_errors_that_are_not_numbers_are_wrong_and_come_first() -> None:
    text = table.parameter_table(result(record("a"), record("b", math.nan, diagnosis="no known fault explains it")))
    assert text.splitlines()[1].startswith("b") and "nan" in text


def test_the_verdict_is_one_line_with_the_largest_error_of_muon() -> None:
    adamw = record("norm", 5e-6, half="adamw", cuts=((0, 32),))
    line = table.verdict(result(record("a", 2e-6), record("b", 3e-6, cuts=((1, 32),)), adamw))
    assert line == (
        "RIGHT: 1 step of 3 parameters on 2 ranks (cpu); largest error of a Muon update 3.0e-06 (tolerance 1.0e-05) "
        "on b in step 1, 0 beside the same dtype; 1 matrix straddles"
    )


def test_the_verdict_names_the_faults_and_their_parameters() -> None:
    records = [wrong(f"w{i}") for i in range(5)] + [wrong("x", "stale rank: 1"), record("y")]
    assert table.verdict(result(*records)) == (
        "WRONG: 6 of 7 parameters on 2 ranks (cpu): clipped update (w0, w1, w2 and 2 more); stale rank (x)"
    )


def test_skipped_steps_are_said() -> None:
    assert "2 steps skipped by the engine" in table.verdict(replace(result(record()), skipped_steps=2))


def test_the_heading_says_what_was_run() -> None:
    built_in = table.heading([result(record())], None, None)
    assert "deepspeed 2" in built_in and json.dumps(DEFAULT_CONFIG) in built_in and "GPT" in built_in
    own = table.heading([result(record())], "c.json", "m:f")
    assert "config: c.json" in own and "model: m:f" in own


def test_a_planted_fault_is_found_by_its_own_diagnosis_only() -> None:
    name = "clipped-update"
    diagnosis = FAULTS[name].diagnosis
    found = planted(name, record("a"), wrong("b", f"{diagnosis}: 0.5 times"), wrong("c", "orthogonalized twice", 9.0))
    line = table.fault_verdict(found)
    assert line.startswith("FOUND: clipped-update") and diagnosis in line
    assert "5.0e-01, 50,000 times the tolerance 1.0e-05, on b" in line
    assert table.fault_verdict(planted(name, wrong("b", "orthogonalized twice"))).startswith("NOT NAMED")
    assert table.fault_verdict(planted(name, record("a"))).startswith("MISSED")


def test_the_table_of_faults_shows_what_is_wrong() -> None:
    gradient = record("g", gradient=Comparison(1.0, 1e-7), diagnosis=FAULTS["not-averaged"].diagnosis)
    stale = record("s", stale_ranks=(1,), diagnosis=FAULTS["stale-rank"].diagnosis)
    outcomes = [planted("not-averaged", gradient), planted("stale-rank", stale), NotShown("slice", "one rank")]
    _, first, second, third = table.fault_table(outcomes).splitlines()
    assert re.split(" {2,}", first)[:6] == ["not-averaged", "gradient", "1.0e+00", "1.0e-07", "10,000,000", "yes"]
    assert re.split(" {2,}", second)[:3] == ["stale-rank", "model", "yes"]
    assert third.endswith("-  not shown here: one rank")
    assert table.faults_verdict(outcomes).startswith("FOUND: 2 of 2 planted faults")
    assert "1 cannot be shown" in table.faults_verdict(outcomes)


# ---- outcomes -------------------------------------------------------------------------------------------------------


def test_exit_codes() -> None:
    right, bad, unshown = result(record()), result(wrong()), NotShown("slice", "why")
    found = planted("clipped-update", wrong("b", FAULTS["clipped-update"].diagnosis))
    missed = planted("clipped-update", record())
    expected = {0: [[right], [found], [found, unshown]], 1: [[bad], [missed], [found, missed]], 2: [[unshown], []]}
    for code, cases in expected.items():
        assert [outcome.exit_code(case) for case in cases] == [code] * len(cases)


@pytest.mark.parametrize("as_list", [True, False])
def test_outcomes_survive_their_file(tmp_path: Path, as_list: bool) -> None:
    outcomes: list[outcome.Outcome] = [planted("clipped-update", wrong(error=math.inf))]
    if as_list:
        outcomes.append(NotShown("slice", "why"))
    path = tmp_path / "new" / "out.json"
    outcome.save(outcomes, path, as_list=as_list)
    assert outcome.load(path) == outcomes
    data = json.loads(path.read_text())
    assert (data[0] if as_list else data)["found"] is True
    assert [entry.name for entry in path.parent.iterdir()] == ["out.json"]


@settings(max_examples=20, deadline=None)
@given(
    st.builds(VerifyResult, config=st.just(DEFAULT_CONFIG), records=st.tuples(st.from_type(UpdateRecord))),
    st.builds(NotShown),
)
def test_any_outcomes_survive_their_file(of_run: VerifyResult, not_shown: NotShown) -> None:
    outcomes = [of_run, not_shown]
    with TemporaryDirectory() as folder:
        outcome.save(outcomes, Path(folder) / "out.json", as_list=True)
        assert repr(outcome.load(Path(folder) / "out.json")) == repr(outcomes)  # a NaN is not equal to itself
