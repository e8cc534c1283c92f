"""Time the memory tiers on their own: caches, reads and writes of NVMe, checkpoints.

    python benchmarks/offload/tiers.py                                    everything
    python benchmarks/offload/tiers.py --only policies    needs no disk, times nothing
    python benchmarks/offload/tiers.py --only store --folder /mnt/nvme
        read, write, replace beside fio
    python benchmarks/offload/tiers.py --only checkpoint --total-bytes 8000000000

policies: hit rates of cache policies on routing traces, as the share of uses that need no read;
first uses of a record are not counted. store, checkpoint: see `offload/storage.py`.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import tempfile
from pathlib import Path

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.cache_policies import PHASE_STEPS, policies
from benchmarks.offload.storage import checkpoint, store


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--only", choices=("policies", "store", "checkpoint"))
    parser.add_argument(
        "--folder", type=Path, help="where records are; default: the system's temporary folder"
    )
    parser.add_argument("--total-bytes", type=int, default=1 << 29, help="read per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace-steps", type=int, default=2 * PHASE_STEPS)
    parser.add_argument("--trace-seed", type=int, default=0)
    a = parser.parse_args()
    result: JsonObject = {}
    if a.only in (None, "policies"):
        result["policies"] = policies(a.trace_steps, a.trace_seed)
    for name, measure in (("store", store), ("checkpoint", checkpoint)):
        if a.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="jmoe-tiers-", dir=a.folder) as folder:
                result[name] = measure(Path(folder), a.total_bytes, a.rounds)
    report.finish(result)


if __name__ == "__main__":
    main()
