"""The ledger against ground truth: it refuses a program exactly when some interleaving of it goes wrong, at the same action.

``qeffect_lm.modelcheck`` executes every order that a program's edges allow and knows nothing of the ledger.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qeffect_lm.modelcheck
from qeffect_lm.contract import errors
from qeffect_lm.contract.leases import LeaseTable
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.modelcheck.program import Commit, Launch, Move, Optimizer, Program
from qeffect_lm.modelcheck.verdict import Verdict, judge
from tests.unit.program_driver import Driver, ways
from tests.unit.random_programs import MAX_ACTIONS, minimal, random_program

PACKAGE = Path(qeffect_lm.modelcheck.__file__).parent

PRECEDENCE = (  # every error that a step's actions can meet, in the order in which one action meets them
    "StreamOrderError",
    "LeaseError",
    "NotForwardedError",
    "InputGradTwiceError",
    "WeightGradBeforeInputGradError",
    "WeightGradTwiceError",
    "LeaseRetainedError",
    "LeaseLeakError",
    "StaleHandleError",
    "ScaleOrderError",
    "StaleWeightError",
    "GradSlotError",
)


def names(program: Program, verdict: Verdict) -> set[str]:
    """How the ledger may call the first illegal action, of all that is wrong with it."""
    if verdict.first is None:
        return {""}
    work = getattr(program.ops[verdict.first], "work", None)
    if isinstance(work, Move) and (work.silent or any(read.version is not None for read in work.reads)):
        return set(verdict.reasons)  # eager actions and graphs meet these rules in orders of their own
    ahead = isinstance(work, Commit | Optimizer)  # the host checks these before it launches them
    ranked = [*PRECEDENCE[1:], PRECEDENCE[0]] if ahead else PRECEDENCE
    return {min(verdict.reasons, key=ranked.index)}


def disagreement(program: Program, verdict: Verdict | None = None) -> str | None:
    """How ledger and simulator differ about a program, in every way to execute it; None: they agree."""
    verdict = verdict or judge(program)
    for how in ways(program):
        refused = Driver(program, how).run()
        place, kind = (None, "") if refused is None else (refused[0], type(refused[1]).__name__)
        if place != verdict.first or kind not in names(program, verdict):
            told = "nothing" if refused is None else f"[{place}] {kind}: {refused[1]}"
            seen = [f"{name}: {what[0]}" for name, what in verdict.reasons.items()]
            return f"{how}: the ledger refuses {told};\nthe simulator refuses [{verdict.first}] {'; '.join(seen) or 'nothing'}"
    return None


def check(program: Program) -> Verdict:
    """The verdict that both give."""
    verdict = judge(program)
    if disagreement(program, verdict) is not None:
        small = minimal(program, lambda candidate: disagreement(candidate) is not None)
        pytest.fail(f"{disagreement(small)}\n{small}", pytrace=False)
    return verdict


def check_many(examples: int, per_example: int) -> None:
    """Compare on ``examples * per_example`` random programs, and that they are a mixture worth comparing on."""
    kinds: Counter[str] = Counter()
    programs: list[Program] = []
    verdicts: list[Verdict] = []

    @settings(max_examples=examples, database=None, suppress_health_check=[*HealthCheck])
    @given(st.integers(0, 2**64 - 1))
    def some(seed: int) -> None:
        rng = Random(seed)
        for _ in range(per_example):
            program = random_program(rng)
            verdicts.append(check(program))
            programs.append(program)
            kinds.update(list(verdicts[-1].reasons))

    some()
    sound = sum(verdict.first is None for verdict in verdicts)
    print(f"{len(programs)} programs, {sound} sound, {sum(v.states for v in verdicts)} states; {dict(kinds.most_common())}")
    assert len(programs) >= examples * per_example and len(set(programs)) > 0.98 * len(programs)
    assert 0.3 <= sound / len(programs) <= 0.7
    assert set(kinds) == set(PRECEDENCE) and min(kinds.values()) >= len(programs) / 1000, kinds
    actions = [sum(isinstance(op, Launch) for op in program.ops) for program in programs]
    assert max(actions) == MAX_ACTIONS and statistics.median(actions) >= 6


def test_the_ledger_refuses_exactly_what_can_go_wrong():
    """Neither missed nor invented, at the same first action, by the same name: 2,000 programs."""
    check_many(200, 10)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_ledger_refuses_exactly_what_can_go_wrong_at_length():
    check_many(2000, 10)


# ---- the comparison can fail, and the simulator is its own ---------------------------------------------------


def test_the_simulator_knows_nothing_of_the_contract():
    """Neither imported by name nor brought along by something else."""
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "", *(a.name for a in node.names)] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if "contract" in name], path
            assert not (isinstance(node, ast.ImportFrom) and node.level), path
    code = (
        "import sys, pkgutil, importlib, qeffect_lm.modelcheck as m\n"
        "for one in pkgutil.iter_modules(m.__path__): importlib.import_module(f'{m.__name__}.{one.name}')\n"
        "print([name for name in sys.modules if 'contract' in name or name == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parents[1])
    assert done.stdout.strip() == "[]"


def test_every_kind_is_an_error_of_the_contract():
    assert all(issubclass(getattr(errors, kind), errors.ContractViolation) for kind in PRECEDENCE)


def first_difference(limit: int = 3000) -> str:
    """What the comparison says, on random programs, of a ledger that was broken."""
    rng = Random(0)
    for _ in range(limit):
        program = random_program(rng)
        if disagreement(program) is not None:
            with pytest.raises(pytest.fail.Exception) as caught:
                check(program)
            return str(caught.value)
    pytest.fail("the broken ledger agrees with the simulator")


def test_a_disagreement_is_told_with_a_minimal_program(monkeypatch):
    """A ledger that forgets what a stream waited for, and one whose early events vouch for everything."""
    wait, record = Ledger.wait, Ledger.record
    monkeypatch.setattr(Ledger, "wait", lambda ledger, stream, event: None)
    text = first_difference()
    assert "the ledger refuses [" in text and "StreamOrderError" not in text.partition("the simulator refuses")[2]
    assert sum("launch on" in line for line in text.splitlines()) <= 6
    monkeypatch.setattr(Ledger, "wait", wait)
    monkeypatch.setattr(Ledger, "record", lambda ledger, stream, covers=None: record(ledger, stream))
    text = first_difference()
    assert "StreamOrderError" in text.partition("the simulator refuses")[2] and "covering only" in text
    assert sum("launch on" in line for line in text.splitlines()) <= 6


def test_a_lease_table_that_forgets_a_rule_is_caught(monkeypatch):
    monkeypatch.setattr(LeaseTable, "end_step", LeaseTable.abandon)
    assert "LeaseLeakError" in first_difference()
