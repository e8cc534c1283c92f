"""The expected tokens/s of two models on three machines, as docs/inference.md has them."""

from benchmarks import ROOT
from benchmarks.serve.machines import rows, table_lines


def test_the_docs_have_the_table() -> None:
    planned = list(rows())
    assert "\n".join(table_lines(planned)) in (ROOT / "docs" / "inference.md").read_text()
    fits = [not isinstance(plan, str) for _, _, plan in planned]
    assert fits == [True, True, False, True, True, True]
