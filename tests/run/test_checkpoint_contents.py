"""Who verifies which file of a step."""

import itertools

import pytest

from jmoe.run.checkpoint_contents import split_files_over_readers


def written_by(writers: int) -> dict[str, list[int]]:
    """Three files of every writer, and some that have none."""
    own = {
        f"state/ocdbt.process_{rank}/d/{name}": [100 + rank, 7]
        for rank in range(writers)
        for name in "abc"
    }
    return (
        own
        | {f"state/d/{name}": [size, 7] for name, size in (("x", 40), ("y", 30), ("z", 20))}
        | {"data/a": [1, 7]}
    )


@pytest.mark.parametrize("writers", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 5])
def test_every_file_is_verified_once(writers: int, readers: int) -> None:
    files = written_by(writers)
    parts = split_files_over_readers(files, readers)
    assert len(parts) == readers and sorted(name for part in parts for name in part) == sorted(
        files
    )


@pytest.mark.parametrize(
    ("writers", "readers", "whose"),
    [
        (3, 3, [{0}, {1}, {2}]),
        (4, 2, [{0, 1}, {2, 3}]),
        (2, 4, [{0}, {0}, {1}, {1}]),
        (12, 5, None),
    ],
)
def test_a_process_verifies_what_it_is_to_read(
    writers: int, readers: int, whose: list[set[int]] | None
) -> None:
    """Ranks next to each other hold what is next to each other."""
    seen = []
    for part in split_files_over_readers(written_by(writers), readers):
        seen.append({int(name.split("_")[1].split("/")[0]) for name in part if "process_" in name})
    assert whose is None or seen == whose
    assert all(max(one, default=0) <= min(after) for one, after in itertools.pairwise(seen))


def test_what_nobody_wrote_for_itself_is_divided_by_size() -> None:
    sizes = [
        sum(written_by(0)[name][0] for name in part)
        for part in split_files_over_readers(written_by(0), 2)
    ]
    assert sorted(sizes) == [41, 50]
    assert split_files_over_readers({}, 2) == [[], []]
