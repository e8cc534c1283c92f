"""train.py with experts packed while it runs: real processes, killed, resumed under another
packing; fake devices.
"""

from pathlib import Path

import pytest

from jmoe.command_line import parse_train
from jmoe.configs import PRESETS
from jmoe.run.planner import training_plan
from tests.train_runs import (
    ENDLESS,
    Start,
    TrainRuns,
    committed,
    losses,
    records,
    resumes,
    run_split,
)

pytestmark = pytest.mark.slow

STEPS = ("--num-steps", 30)
AUTO = ("--comm.packing", "auto", "--machine.host-bytes", 10**13)
# As train.py, with times that make every all-to-all longer than the experts: what is measured is
# not what is tested.
SLOW_NETWORK = """
import sys

if __name__ == "__main__":
    from jmoe.runtime import reexec_with_env
    sys.path[0] = {root!r}
    reexec_with_env()
    import train
    from jmoe.training import expert_packing
    expert_packing.time_exchange_and_experts = lambda trainer: (2.0, 1.0)
    train.main(sys.argv[1:])
"""
SLOW_OFFLOADED = """
    note_step = expert_packing.PackingController.note_step
    def note_slow_step(self, seconds, *, compiled):
        note_step(self, (10 if self.is_offloaded else 1) * seconds, compiled=compiled)
    expert_packing.PackingController.note_step = note_slow_step
"""


class OnASlowNetwork(TrainRuns):
    """The runs of another `TrainRuns`, by the program above."""

    def __init__(self, runs: TrainRuns, program: Path) -> None:
        super().__init__(runs.folder, runs._run_python)
        self.__dict__["shards"] = runs.shards
        program.write_text(SLOW_NETWORK.format(root=str(Path(__file__).resolve().parent.parent)))
        self._program = program

    def make_slow_when_offloaded(self) -> None:
        """Let the controller believe that steps with experts in host memory take ten times as
        long.
        """
        self._program.write_text(
            self._program.read_text().replace("    train.main", SLOW_OFFLOADED + "    train.main")
        )

    def command(
        self, output_dir: Path, *options: object, data: Path | None = None
    ) -> list[str | Path]:
        return [self._program, *super().command(output_dir, *options, data=data)[1:]]


def packings(output_dir: Path) -> list[tuple[int, int]]:
    """(step, experts on a device) of every decision."""
    events = [record for record in records(output_dir) if record.get("event") == "packing"]
    return [(event["step"], event["experts_per_device"]) for event in events]


def test_two_processes_pack_are_killed_and_go_on_under_another_packing(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Each has all experts from step 10 on; then half of them; then `auto` goes on from there."""
    slow, mesh = OnASlowNetwork(runs, tmp_path / "slow_network.py"), ("--mesh.expert-intra", 2)
    reference = tmp_path / "reference"
    output_dir = tmp_path / "run"
    often = ("--checkpoint.every-steps", 6)
    pair = slow.start(start_python, output_dir, 2, *ENDLESS, *mesh, *AUTO, *often)
    pair[0].wait_until(lambda: 12 in committed(output_dir))
    for process in pair:
        process.kill()
    for process in pair:
        process.wait(60)
    assert packings(output_dir)[0] == (10, 8)
    begin = committed(output_dir)[-1]
    end = ("--num-steps", max(30, begin + 8))
    run_split(
        runs, start_python, output_dir, 2, 1, "--num-steps", begin + 4, *mesh, "--comm.packing", 1
    )
    run_split(slow, start_python, output_dir, 2, 1, *end, *mesh, *AUTO)
    assert "comm.packing = auto: 4 experts a device" in (output_dir / "rank-2-0").read_text()
    assert resumes(output_dir) == [begin, begin + 4]
    run_split(runs, start_python, reference, 2, 1, *end, *mesh)
    assert dict(losses(output_dir)) == pytest.approx(dict(losses(reference)), rel=1e-5, abs=0)


def test_fake_devices_of_one_process(runs: TrainRuns, tmp_path: Path) -> None:
    """By the times that are really measured: whatever is decided, the loss is that of a run
    without packing.
    """
    mesh = ("--mesh.expert-inter", 2, "--mesh.expert-intra", 4)
    runs.finish(tmp_path / "alone", *STEPS, *mesh, devices=8)
    screen = runs.finish(tmp_path / "auto", *STEPS, *mesh, *AUTO, devices=8)
    assert "comm.packing = auto: 1 experts a device" in screen
    assert "packing before step 10: all-to-all " in screen
    assert packings(tmp_path / "auto")[0][0] == 10
    expected = dict(losses(tmp_path / "alone"))
    assert dict(losses(tmp_path / "auto")) == pytest.approx(expected, rel=1e-5, abs=0)


# of so few tokens that experts take most of the devices' memory
LARGE_EXPERTS = (
    *("--model.moe-intermediate-size", 512, "--batch-size", 4, "--sequence-length", 16),
    *("--mesh.expert-intra", 2),
)


def device_bytes_for_packing_1(command: list[str | Path], mesh: tuple[object, ...]) -> int:
    """Device memory that holds the experts of packing 1 and not those of packing 2."""
    options = (*mesh, "--mesh.data", 1, "--machine.device-bytes", 10**12)
    config = parse_train([*map(str, command[1:]), *map(str, options)], PRESETS)
    need = [
        training_plan(config.with_packing(packing)).bytes_on_tier("device") for packing in (1, 2)
    ]
    return sum(need) * 5 // 9  # a tenth of a device stays free


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_packed_experts_leave_the_devices_and_survive_a_kill(
    runs: TrainRuns, tmp_path: Path, start_python: Start, tier: str
) -> None:
    """From the devices to host memory, and from NVMe to NVMe, by themselves; resumed there."""
    slow, mesh = OnASlowNetwork(runs, tmp_path / "slow_network.py"), LARGE_EXPERTS
    reference, output_dir = tmp_path / "reference", tmp_path / "run"
    machine = ("--machine.host-bytes", 10**13, "--machine.nvme-bytes", 10**13)
    size = device_bytes_for_packing_1(runs.command(reference), (*mesh, *machine))
    options = (*mesh, *machine, "--machine.device-bytes", size if tier == "device" else 10**12)
    if tier != "device":
        options += ("--tiers.experts", tier, "--tiers.optimizer", tier)
    options += ("--evaluation.no-at-start",)
    auto = (*options, "--comm.packing", "auto", "--checkpoint.every-steps", 6)
    pair = slow.start(start_python, output_dir, 2, *ENDLESS, *auto)
    pair[0].wait_until(lambda: 12 in committed(output_dir), 600)
    for process in pair:
        process.kill()
    for process in pair:
        process.wait(60)
    (event,) = (e for e in records(output_dir) if e.get("event") == "packing" and e["step"] == 10)
    assert (event["experts_per_device"], event["tier"]) == (8, "host" if tier == "device" else tier)
    begin = committed(output_dir)[-1]
    end = ("--num-steps", begin + 8)
    run_split(slow, start_python, output_dir, 2, 1, *end, *auto)
    assert "comm.packing = auto: 8 experts a device" in (output_dir / "rank-2-0").read_text()
    assert resumes(output_dir) == [begin]
    (summary, *_) = (e for e in records(output_dir) if e.get("event") == "tiers")
    assert summary["to_device_bytes"] > 0
    run_split(runs, start_python, reference, 2, 1, *end, *mesh)
    assert dict(losses(output_dir)) == pytest.approx(dict(losses(reference)), rel=1e-5, abs=0)


def test_slower_packed_experts_return_from_host_memory(runs: TrainRuns, tmp_path: Path) -> None:
    """Steps with experts in host memory are made to seem slow: the run goes back to its devices."""
    slow, mesh = OnASlowNetwork(runs, tmp_path / "slow_network.py"), LARGE_EXPERTS
    slow.make_slow_when_offloaded()
    machine = ("--machine.host-bytes", 10**13)
    size = device_bytes_for_packing_1(runs.command(tmp_path), (*mesh, *machine))
    options = (*mesh, *machine, "--machine.device-bytes", size, *STEPS)
    slow.finish(tmp_path / "auto", *options, "--comm.packing", "auto", devices=2)
    runs.finish(tmp_path / "alone", *options, devices=2)
    events = [e for e in records(tmp_path / "auto") if e.get("event") == "packing"]
    assert [(e["step"], e["experts_per_device"], e["tier"]) for e in events] == [
        (10, 8, "host"),
        (14, 4, "device"),
    ]
    expected = dict(losses(tmp_path / "alone"))
    assert dict(losses(tmp_path / "auto")) == pytest.approx(expected, rel=1e-5, abs=0)
