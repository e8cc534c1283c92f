"""The programs that give figures of the papers, their results and their smoke tests."""

from benchmarks.paper.tables.row import Program

STEPS = "sudo NPROC=4 python benchmarks/comm/slow_link.py"
ORDER_FILE = "order_two_nodes_cpu.json"
SMOKE_OF_ORDER = "the smoke test of lina-order runs this program"
TRAINED_MODEL = "needs a trained model in DIR"

PROGRAMS = (
    Program(
        "moesys-table-1",
        "python benchmarks/peers/training.py --deepspeed ENVIRONMENT/bin/python --dtypes bfloat16 "
        "--experts 0",
        "training_peers_cpu.json",
        quick="benchmarks/train/step.py --experts 0 --layers 2 --batch 2 --warmup 1 --steps 3",
    ),
    Program(
        "moesys-table-2",
        "python benchmarks/peers/training.py --deepspeed ENVIRONMENT/bin/python --dtypes bfloat16 "
        "--experts 8 16 32",
        "training_peers_cpu.json",
        quick="benchmarks/train/step.py --layers 2 --batch 2 --warmup 1 --steps 3",
    ),
    Program(
        "paper-estimates",
        "python benchmarks/paper/gpu_estimates.py --write",
        "paper_estimates.json",
        no_quick="compiles for hours; needs JAX's CUDA libraries",
    ),
    Program(
        "moesys-table-3",
        "python benchmarks/paper/moesys_table3.py",
        "moesys_table3_cpu.json",
        quick="benchmarks/paper/moesys_table3.py --quick",
        limit_s=240,
    ),
    Program(
        "elastic-text",
        "python benchmarks/paper/elastic_text.py",
        "moesys_table3_cpu.json",
        quick="benchmarks/paper/elastic_text.py --quick",
        limit_s=240,
    ),
    Program(
        "moesys-table-4",
        "sudo python benchmarks/comm/slow_link.py embedding --rates 1000 --kinds replicated "
        "columns rows",
        "embedding_two_nodes_cpu.json",
        quick="benchmarks/comm/slow_link.py embedding --rates 0 --rounds 1 --vocab-size 4096 "
        "--hidden-sizes 64 --tokens 128",
        limit_s=240,
    ),
    Program(
        "moesys-table-5",
        "sudo python benchmarks/comm/slow_link.py strategies --rates 30 --rounds 5",
        "levels_cpu.json",
        quick="benchmarks/comm/slow_link.py strategies --rates 0 --rounds 1 --variants baseline "
        "embedding_partition",
        limit_s=240,
    ),
    Program(
        "moesys-fusion",
        "sudo python benchmarks/comm/slow_link.py fusion --rates 0 200 --rounds 5",
        "fusion_two_nodes_cpu.json",
        quick="benchmarks/comm/slow_link.py fusion --rates 0 --rounds 1 --shapes experts "
        "--variants one_by_one_flat fused",
        limit_s=240,
    ),
    Program(
        "moesys-table-6",
        "sudo python benchmarks/paper/moesys_table6.py",
        "moesys_table6_cpu.json",
        quick="benchmarks/paper/moesys_table6.py --quick --places 1 2",
        limit_s=300,
    ),
    Program(
        "moesys-table-6-one-device",
        "python benchmarks/peers/transformers_decoding.py --python ENVIRONMENT/bin/python "
        "--models MIXTRAL QWEN3",
        "decoding_cpu.json",
        quick="benchmarks/paper/moesys_table6.py --one-device",
    ),
    Program(
        "moesys-figure-10",
        "sudo python benchmarks/comm/slow_link.py levels --rates 100 --rounds 5 --nodes 4",
        "levels_cpu.json",
        quick="benchmarks/comm/slow_link.py levels --rates 0 --rounds 1 --shapes top-2",
        limit_s=240,
    ),
    Program(
        "moesys-figure-12",
        "python benchmarks/paper/fig12.py --model DIR --batch 8 --prompt 512 --compressed int4",
        "ring_prefill_cpu.json",
        no_quick=TRAINED_MODEL,
    ),
    Program(
        "moesys-alpha",
        "python benchmarks/offload/training.py room --hidden-size 256 --intermediate-size 256 "
        "--experts 64 --top-k 1 --batch-size 1 --sequence-length 64 --rounds 9",
        "training_tiers_cpu.json",
        quick="benchmarks/offload/training.py room --hidden-size 64 --intermediate-size 64 "
        "--layers 2 --top-k 1 --batch-size 1 --sequence-length 16 --rounds 1",
        limit_s=240,
    ),
    Program(
        "moesys-cache",
        "python benchmarks/paper/moesys_cache.py",
        "moesys_cache_cpu.json",
        quick="benchmarks/paper/moesys_cache.py --quick",
        limit_s=420,
    ),
    Program(
        "second-expert",
        "python benchmarks/train/curves.py second_expert",
        "curves_cpu.json",
        quick="benchmarks/train/curves.py second_expert --steps 4 --mean 2",
        limit_s=240,
    ),
    Program(
        "float16",
        "python benchmarks/train/curves.py float16",
        "curves_cpu.json",
        no_quick="the smoke test of second-expert runs this program",
    ),
    Program(
        "moesys-ufo",
        "python benchmarks/paper/ufo.py",
        "ufo_cpu.json",
        quick="benchmarks/paper/ufo.py --quick",
        limit_s=480,
    ),
    Program(
        "moesys-deployment",
        "python benchmarks/paper/deploy_path.py --folder DIR --preset small --steps 300 "
        "--student-steps 120",
        "deploy_path_small_cpu.json",
        no_quick="trains for an hour",
    ),
    Program(
        "moesys-deployment-served",
        "python benchmarks/paper/deploy_path.py --folder DIR --preset small --steps 300 "
        "--student-steps 100 --batch-size 4 --unseen-tokens 17000 --calibration-tokens 32768 "
        "--path-only --plot docs/deploy_path.png",
        "deploy_path_served_small_cpu.json",
        no_quick="trains for an hour",
    ),
    Program(
        "lina-order",
        f"{STEPS} order --rates 50 100 200 --chunk-bytes 1500000 --rounds 9",
        ORDER_FILE,
        quick="benchmarks/comm/slow_link.py order --rates 0 --rounds 1 --variants ready chunks",
        limit_s=420,
    ),
    Program(
        "lina-layer",
        f"{STEPS} order --rates 200 --variants ready none chunks pipelined --rounds 5 "
        "--chunk-bytes 1500000",
        ORDER_FILE,
        no_quick=SMOKE_OF_ORDER,
    ),
    Program(
        "lina-ddp",
        f"{STEPS} ddp --rates 200 --rounds 5 --chunk-bytes 1500000",
        ORDER_FILE,
        quick="benchmarks/comm/slow_link.py ddp --rates 0 --rounds 1 --variants ready chunks",
        limit_s=240,
    ),
    Program(
        "lina-contention",
        f"{STEPS} ddp --rates 50 --rounds 5 --variants fixed ready chunks --chunk-bytes 1500000",
        ORDER_FILE,
        no_quick="the smoke test of lina-ddp runs this program",
    ),
    Program(
        "lina-queue",
        f"{STEPS} order --rates 200 --variants ready chunks pipelined --rounds 3 "
        "--chunk-bytes 1500000",
        ORDER_FILE,
        no_quick=SMOKE_OF_ORDER,
    ),
    Program(
        "lina-partition-size",
        f"{STEPS} order --rates 50 --variants ready chunks --rounds 5 --chunk-bytes 1500000",
        ORDER_FILE,
        no_quick=SMOKE_OF_ORDER,
    ),
    Program(
        "lina-overhead",
        "NPROC=4 python benchmarks/comm/slow_link.py order --rates 0 --variants priority chunks "
        "pipelined --rounds 15 --chunk-bytes 1500000",
        ORDER_FILE,
        no_quick=SMOKE_OF_ORDER,
    ),
    Program(
        "lina-packing",
        "sudo python benchmarks/paper/lina_packing.py",
        "lina_packing_two_nodes_cpu.json",
        quick="benchmarks/paper/lina_packing.py --rates 0 --rounds 1 --shapes 1",
        limit_s=240,
    ),
    Program(
        "lina-inference",
        "sudo python benchmarks/paper/lina_inference.py --folder DIR",
        "lina_inference_two_nodes_cpu.json",
        quick="benchmarks/paper/lina_inference.py --rate 0 --quick",
        limit_s=300,
    ),
    Program(
        "lina-popularity",
        "python -m benchmarks.paper.popularity --model DIR --text FILE --other OTHER",
        "popularity_cpu.json",
        no_quick=TRAINED_MODEL,
    ),
    Program(
        "lina-popular-experts",
        "python -m benchmarks.paper.popularity --model DIR --text FILE --rounds 0 "
        "--profile-tokens 8000",
        "popularity_cpu.json",
        no_quick=TRAINED_MODEL,
    ),
    Program(
        "simulator",
        "python -m benchmarks.paper.simulator",
        "exchange_two_nodes_cpu.json",
        quick="-m benchmarks.paper.simulator",
    ),
    Program(
        "step-simulator",
        "python -m benchmarks.paper.step_simulator",
        "steps_simulated.json",
        quick="-m benchmarks.paper.step_simulator --result ''",
    ),
    Program(
        "communication-simulated",
        "python benchmarks/comm/simulate.py",
        "communication_simulated.json",
        quick="benchmarks/comm/simulate.py --nodes 8 --result '' --plot ''",
    ),
)
