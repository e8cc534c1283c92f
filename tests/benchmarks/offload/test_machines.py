"""The planned fine-tuning of three machines, as docs/offloading.md has it."""

from benchmarks import ROOT
from benchmarks.offload.machines import COMPUTERS, fastest_plan, models, table_lines


def test_the_docs_have_the_table() -> None:
    assert "\n".join(table_lines()) in (ROOT / "docs" / "offloading.md").read_text()


def test_a_larger_model_does_not_fit() -> None:
    """The largest model of a machine is followed by one that lacks memory, wherever there is one."""
    largest = next(iter(models().values()))
    one, eight, small = COMPUTERS
    assert fastest_plan(largest, one, 8) is None and fastest_plan(largest, small, 8) is None
    plan = fastest_plan(largest, eight, 8)
    assert plan is not None and not plan.lacking_bytes
