"""Every table and figure of SE-MoE (arXiv:2205.10034, first version), ours beside it.

Its tables are tables of MoESys, and most of its figures are figures of MoESys, under other numbers.
"""

from dataclasses import replace

from benchmarks.paper.tables import moesys, moesys_words
from benchmarks.paper.tables.row import Row

# SE-MoE's item, and MoESys' of the same content
SAME = {
    "Table 1": "Table 2",
    "Table 2": "Table 6",
    "Table 3": "Table 3",
    "Table 4": "Table 4",
    "Figure 1": "Figure 2",
    "Figure 3": "Figure 3",
    "Figure 4": "Figure 4",
    "Figures 5a and 5b": "Figure 5",
    "Figure 6": "Figure 6",
    "Figure 7": "Figure 7",
    "Figure 8": "Figure 8",
    "Figure 9": "Figure 9",
    "Figure 10": "Figure 12",
    "Figure 11": "Figure 10",
    "section 2.1": "section 3.2.1, Equation 1",
    "section 4.1": "section 5.3, elastic training of language",
    "Algorithm 1": "section 3.2.2, Algorithms 1 and 2",
}
OWN_FIGURES = {
    "Table 4": "8 V100, 8 experts, hidden 2,048, 4,096 and 8,192: 22.4, 24.2 and 26.3 % less "
    "memory, 1.042, 1.112 and 1.156 times the tokens/s"
}


def same_as(item: str, other: str) -> Row:
    """Return the row of MoESys' `other` as SE-MoE's `item`."""
    row = next(row for row in moesys.ROWS if row.item == other)
    paper_has = OWN_FIGURES.get(item, row.paper_has)
    shows = row.shows if item == other else f"{row.shows} (MoESys, {other})"
    return replace(row, item=item, shows=shows, paper_has=paper_has)


FUSION = (
    Row(
        "Figure 2a",
        "slices of parameters joined into one buffer before a collective",
        "a drawing without figures",
        "no figures to compare: steps with fused collectives over steps with one for each "
        "parameter",
        "moesys-fusion",
        moesys_words.fusion_text,
    ),
    Row(
        "Figure 2b",
        "a bucket of gradients, reduced once all of them are there",
        "a drawing without figures",
        "how many collectives a compiled step has by the size of its buckets",
        held_by="tests/training/fused/test_reverse_scan.py",
    ),
)

_SHARED = tuple(same_as(item, other) for item, other in SAME.items())
ROWS = (*_SHARED[:5], *FUSION, *_SHARED[5:])
