"""The tables of the papers: whole, true to the result files; a smoke test that fails stops nothing."""

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import RESULTS, ROOT
from benchmarks.comm import simulate, steps, trace
from benchmarks.lib.linked_nodes import LinkedNodes
from benchmarks.lib.parts import run_part
from benchmarks.paper import __main__ as command
from benchmarks.paper import moesys_table6, pictures, simulator, step_simulator
from benchmarks.paper.index import BY_NAME, PAPERS, here, rows_of
from benchmarks.paper.tables import moesys_words
from benchmarks.paper.tables.programs import PROGRAMS
from benchmarks.paper.tables.row import Program, Row
from tests.fakes import wait_for

KINDS = {"loop": "while", "dot": "dot", "add": "add", "sum": "all-reduce"}
BESIDE_NO_PAPER = {"eplb"}  # of benchmarks/paper: what shows no table or figure of the three papers


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmarks.paper", *arguments])
    code = command.main()
    return code, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def numbered(kind: str, item: str) -> set[int]:
    """Return the numbers of the tables or figures in an item: {10, 11, 12} in "Figures 10 to 12"."""
    found = set[int]()
    for first, last in re.findall(rf"{kind}s? (\d+)(?: to (\d+))?", item):
        found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize(
    ("paper", "tables", "figures"), [("MoESys", 6, 12), ("SE-MoE", 4, 11), ("Lina", 6, 19)]
)
def test_every_table_and_figure_of_a_paper_has_a_row(paper: str, tables: int, figures: int) -> None:
    items = [row.item for row in PAPERS[paper]]
    assert len(set(items)) == len(items)
    for kind, number in (("Table", tables), ("Figure", figures)):
        found = set[int]().union(*(numbered(kind, item) for item in items))
        assert found == set(range(1, number + 1))


def test_each_row_has_a_figure_or_a_test_of_what_is_drawn() -> None:
    """And its cells are filled; one without a program is refused."""
    for rows in PAPERS.values():
        for row in rows:
            assert all((row.item, row.shows, row.paper_has, row.compared))
            assert row.held_by or any(character.isdigit() for character in here(row))
            assert "not at hand" not in f"{row.paper_has} {row.compared}"
    with pytest.raises(ValueError, match="Figure 9: must have a program with figures, or held_by"):
        Row("Figure 9", "s", "p", "c")
    with pytest.raises(ValueError, match=r"'tests/test_none.py': must be a test file"):
        Row("Figure 9", "s", "p", "c", held_by="tests/test_none.py")


def test_every_benchmark_of_the_papers_gives_a_row() -> None:
    words = " ".join(f"{program.command} {program.quick}" for program in PROGRAMS)
    scripts = {path.stem for path in (ROOT / "benchmarks" / "paper").glob("*.py")} - {
        "__main__",
        "index",
        "pictures",
    }
    assert {name for name in scripts if name not in words} == BESIDE_NO_PAPER
    assert len(BY_NAME) == len(PROGRAMS)
    assert {row.program for rows in PAPERS.values() for row in rows} - {""} == set(BY_NAME)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_exists_and_has_a_smoke_test_or_a_reason(program: Program) -> None:
    assert bool(program.quick) != bool(program.no_quick) and list(rows_of(program))
    assert (RESULTS / program.result).is_file()
    for text in filter(None, (program.command, program.quick)):
        script = next((word for word in shlex.split(text) if word.endswith(".py")), None)
        module = next((word for word in text.split() if word.startswith("benchmarks.paper.")), None)
        assert script or module
        assert (ROOT / (script or f"{str(module).replace('.', '/')}.py")).is_file()


def test_the_ratios_on_one_device_are_those_of_their_figures() -> None:
    """Two models with one sequence and with eight, all above the largest ratio that the paper
    has.
    """
    rows = moesys_table6.one_device()
    assert len({(row["model"], row["sequences"]) for row in rows}) == len(rows) == 4
    for row in rows:
        # medians, each for itself
        assert row["ratio"] == pytest.approx(row["jmoe"] / row["transformers"], rel=0.15)
        assert row["ratio"] > max(moesys_table6.PAPER_RATIOS)


def test_the_simulator_predicts_what_was_measured() -> None:
    """Every exchange over a link within 10 %; and twice the bytes would be noticed."""
    measured = json.loads((RESULTS / "exchange_two_nodes_cpu.json").read_text())
    rows = simulator.check(measured)
    assert len(rows) >= 24 and {row["mbit_per_s"] for row in rows} == {50.0, 100.0, 200.0}
    assert max(abs(row["error"]) for row in rows) < 0.1
    doubled = [row | {"formula_bytes": 2 * row["formula_bytes"]} for row in measured["rows"]]
    assert min(row["error"] for row in simulator.check({"rows": doubled})) > 0.8


def test_what_is_simulated_is_what_the_code_gives() -> None:
    """Both files are what their commands write; rows that nothing was measured for say so."""
    steps = json.loads((RESULTS / "steps_simulated.json").read_text())
    assert steps == json.loads(json.dumps(step_simulator.predict()))
    assert all(
        row["simulated"] and "seconds" not in row and row["nodes"] > 2 for row in steps["simulated"]
    )
    nodes = json.loads((RESULTS / "communication_simulated.json").read_text())
    assert nodes["simulated"] and nodes["rows"] == simulate.simulate(simulate.parse([]))


def test_the_simulated_steps_are_those_that_were_measured() -> None:
    """Four nodes from two, and whole orders from their session's `ready`, within 10 %; no row
    from itself.
    """
    rows = step_simulator.predict()
    assert max(abs(row["error"]) for row in rows["four_nodes"]) < 0.1
    assert all(
        row["predicted_bytes"] == pytest.approx(row["sent_bytes"], rel=0.01)
        for row in rows["four_nodes"]
    )
    ready = [row for row in rows["orders"] if row["compute"] == "ready"]
    fitted = ("rows", 200.0, "chunks"), ("rows", 200.0, "pipelined")
    assert all(
        (row["session"], row["mbit_per_s"], row["variant"]) not in fitted for row in rows["orders"]
    )
    assert all(row["variant"] != "ready" for row in ready)
    assert all(abs(row["error"]) < 0.1 for row in ready if row["shown"] == 1)


def test_a_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks, top-1 of 4 experts: 32 tokens of 256 bytes over 8 Mbit/s, a byte a
    microsecond.
    """
    monkeypatch.setattr(simulator, "LATENCY_S", 0.0)
    assert (
        step_simulator.step_s(2.0, 3.0) == 5.0 and step_simulator.step_s(2.0, 3.0, shown=0.5) == 4.0
    )
    # 32 / 4 x 1.25 = 10 rows for a rank, in eights 16, there and back in both passes, and 4 bytes
    # for the one expert
    block = 4 * 16 * 256 + 4
    row = {
        "variant": "flat",
        "experts": 4,
        "top_k": 1,
        "tokens_per_rank": 32,
        "hidden_size": 128,
        "layers": 3,
    }
    row |= {"mbit_per_s": 8.0, "sent_bytes": 3 * 2 * 2 * block + 6000}
    sent, seconds = step_simulator.traffic(row, 2, on_link=2)
    assert sent == row["sent_bytes"] and seconds == pytest.approx(2e-6 * sent)
    # 8 ranks have an expert each: 5 rows, in eights 8, for 6 ranks of other nodes; of a ring 7/8 in
    # place of 3/4
    sent, seconds = step_simulator.traffic(row, 4, on_link=4)
    assert sent == pytest.approx(3 * 2 * 6 * (4 * 8 * 256 + 4) + 6000 * (7 / 8) / (3 / 4))
    assert seconds == pytest.approx(4e-6 * sent)


def test_idle_is_a_collective_without_computation() -> None:
    """A loop is neither, and what runs side by side counts once."""
    ops = {name: trace.Op(kind, "", [], 4, "main", 0) for name, kind in KINDS.items()}
    spans = [(0, 10, "loop"), (0, 3, "dot"), (1, 4, "add"), (2, 8, "sum"), (9, 10, "dot")]
    assert trace.idle_share([trace.Span(*span) for span in spans], ops) == pytest.approx(0.4)
    assert trace.idle_share([trace.Span(0, 4, "dot")], ops) == 0


SCOPES = {
    "up": "jit(step)/jvp()/while/body/moe/experts/dot_general",
    "loss": "jit(step)/jvp(loss)/while/body/dot_general",
    "back": "jit(step)/transpose(jvp())/while/body/moe/experts/dot_general",
    "adamw": "jit(step)/optimizer/mul",
}


def test_the_parts_of_a_step_add_up() -> None:
    """Each moment counts once, for an all-to-all before anything else; a loop counts as what
    runs inside it.
    """
    ops = {name: trace.Op("fusion", scopes, [], 4, "main", 0) for name, scopes in SCOPES.items()}
    kinds = {"sent": "all-to-all", "sum": "all-reduce", "loop": "while"}
    ops |= {name: trace.Op(kind, "", [], 4, "main", 0) for name, kind in kinds.items()}
    spans = [
        (0, 9, "loop"),
        (0, 2, "up"),
        (1, 4, "sent"),
        (4, 5, "loss"),
        (5, 8, "back"),
        (7, 9, "sum"),
        (10, 12, "adamw"),
    ]
    found = [trace.Span(begin * 1e9, end * 1e9, name) for begin, end, name in spans]
    parts = {
        "all_to_all": 3,
        "optimizer": 2,
        "backward": 3,
        "forward": 2,
        "other_collectives": 1,
        "idle": 1,
    }
    assert trace.parts_s(found, ops) == pytest.approx(parts)
    assert sum(parts.values()) == 12
    # the loss belongs to no layer
    assert trace.layers_s(found, ops) == pytest.approx({"forward": 2, "backward": 3})


def test_how_much_longer_exchanges_take_beside_other_collectives() -> None:
    """Each over the median of the exchange at the same place, in seconds of 1 and 4 alone."""

    def run(*rounds: tuple[float, float]) -> Any:
        step = [[trace.Exchange(0, seconds * 1e9) for seconds in each] for each in rounds]
        return SimpleNamespace(exchanges=step)

    alone = run((1, 4), (1, 4), (1, 5))
    assert steps.slowdown(alone, alone) == {"0.1": 1, "0.5": 1, "0.9": 1.12, "1": 1.25}
    assert steps.slowdown(run((2, 4)), alone) == {"0.1": 1.1, "0.5": 1.5, "0.9": 1.9, "1": 2}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_papers_figures_are_drawn_from_the_results(name: str, tmp_path: Path) -> None:
    assert pictures.draw_picture(name, tmp_path).read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / name).is_file()


@pytest.mark.parametrize("name", [*pictures.PANELS, "lina-packing"])
def test_a_program_draws_its_own_figure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "DRAWN", tmp_path)
    path = command.draw(command.chosen([name])[0])
    assert (path is None) == (name == "lina-packing")
    assert path is None or path.read_bytes().startswith(b"\x89PNG")


def test_a_run_names_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The picture's path comes first, then what the program prints."""
    made = dataclasses.replace(command.chosen(["lina-layer"])[0], command="python -c 'print({})'")
    monkeypatch.setattr(command, "BY_NAME", {"lina-layer": made})
    monkeypatch.setattr(command, "DRAWN", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks.paper", "lina-layer"])
    assert command.main() == 0
    drawn, last = capfd.readouterr().out.splitlines()
    assert drawn.endswith(str(tmp_path / "lina-layer.png")) and last == "{}"


def fusion_row(
    variant: str, experts: int, rate: float, ratio: float, all_to_all: float
) -> dict[str, Any]:
    row = {"variant": variant, "experts": experts, "top_k": 1, "mbit_per_s": rate}
    return row | {"ratio_to_one_by_one_flat": ratio, "parts_s": {"all_to_all": all_to_all}}


def test_fused_and_in_two_levels_crosswise() -> None:
    """Each model and rate beside its own row one by one and flat; dense layers lack a cell and
    have no all-to-alls.
    """
    dense = [
        fusion_row(*cell, 0.0)
        for cell in (("one_by_one_flat", 0, 0.0, 1.0), ("fused", 0, 0.0, 3.0))
    ]
    cells = {
        "one_by_one_flat": 1.0,
        "one_by_one": 1.1,
        "fused_flat": 1.5,
        "fused": 1.7,
        "fused_chunks": 2.0,
    }
    sparse = [fusion_row(name, 8, 200.0, ratio, 0.4 / ratio) for name, ratio in cells.items()]
    assert (
        moesys_words.fusion_text({"rows": dense + sparse})
        == "dense, 0 Mbit/s: fused in two levels 3.00 times; top-1 of 8 experts, 200 Mbit/s: fused"
        " 1.50 times, two levels 1.10 times, fused in two levels 1.70 times, its all-to-alls 41%"
        " shorter"
    )


def test_how_many_nodes_one_machine_makes() -> None:
    with pytest.raises(ValueError, match="number = 5: must be from 2 to 4"):
        LinkedNodes(100, 5)


def test_a_smoke_test_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named with its last lines, and so is one that takes too long; what has no smoke test
    is shown.
    """
    programs = {
        "fails": "import sys; print('half of it'); sys.exit('out of memory')",
        "hangs": "import time; time.sleep(3600)",
        "says_no_json": "print('done')",
        "works": "print('{}')",
    }
    made = []
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
        quick = str(tmp_path / f"{name}.py")
        limit_s = 3 if name == "hangs" else 240
        made.append(Program(name, "python x.py", "levels_cpu.json", quick=quick, limit_s=limit_s))
    programs = (*made, BY_NAME["moesys-figure-12"])
    monkeypatch.setattr(command, "PROGRAMS", programs)
    monkeypatch.setattr(command, "BY_NAME", {program.name: program for program in programs})
    code, result = call(monkeypatch, capsys, "--all", "--quick")
    assert code == 1 and result["failed"] == ["fails", "hangs", "says_no_json"]
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["fails"]["last_lines"] == ["half of it", "out of memory"]
    assert rows["hangs"]["failed"] == "longer than 3 s"
    shown = rows["moesys-figure-12"]
    assert not shown["ran"] and shown["why"] == "needs a trained model in DIR"
    assert "resident" in shown["rows"][0]["here"]
    assert call(monkeypatch, capsys, "works", "--quick")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-9"], "table-9: must be among moesys-table-1"),
        (["--all"], "--all: needs --quick"),
        (["--quick"], "--quick: needs names or --all"),
        (["moesys-figure-12"], "moesys-figure-12: needs what you have"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "DRAWN", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks.paper", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err


def test_the_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.paper"])
    assert command.main() == 0
    shown = capsys.readouterr().out
    for paper, rows in PAPERS.items():
        assert all(f"{paper}, {row.item}: {row.shows}" in shown for row in rows)
    assert "13.9 to 207.2 billion parameters" in shown


def test_a_part_that_was_run(tmp_path: Path) -> None:
    """Its last line is the result; children that it leaves behind have ended."""
    (tmp_path / "part.py").write_text(
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(600)'])\nprint('first')\nprint('{\"child\": %d}' % child.pid)"
    )
    done = run_part([str(tmp_path / "part.py")], 60, {})
    state = Path(f"/proc/{done['result']['child']}/stat")

    def has_ended() -> bool:
        try:
            return state.read_text().split()[2] == "Z"
        except OSError:
            return True

    wait_for(has_ended, "the child is still there")
