"""The wheel: what it installs, and its console scripts, outside of the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def run(*command: object, cwd: Path) -> str:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "NPROC", "XLA_FLAGS")
    }
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_outside_of_the_checkout(tmp_path: Path) -> None:
    source, wheels, elsewhere = (tmp_path / name for name in ("jmoe", "wheels", "elsewhere"))
    elsewhere.mkdir()
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    bin_ = tmp_path / "venv" / "bin"
    pip = (tmp_path / "venv" / "bin" / "python", "-m", "pip", "--quiet")
    run(*pip, "install", "setuptools>=77", "wheel", cwd=tmp_path)

    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ".", cwd=source)
    (wheel,) = wheels.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        "jmoe",
        "kernels_pallas",
        f"{wheel.name[:10]}.dist-info",
    }
    assert {"jmoe/configs/text.py", "jmoe/commands/train.py", "jmoe/serving/page.html"} <= names

    shutil.rmtree(source / "build")
    run(bin_ / "python", "-c", BUILD_SDIST, tmp_path / "sdist", cwd=source)
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    again = tmp_path / "again"
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        again,
        sdist,
        cwd=elsewhere,
    )
    assert set(zipfile.ZipFile(again / wheel.name).namelist()) == names

    run(*pip, "install", "--no-deps", wheel, cwd=elsewhere)
    site = Path(
        run(
            bin_ / "python",
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'))",
            cwd=elsewhere,
        ).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = "import jmoe; print(jmoe.MoELayer.__name__, jmoe.__file__)"
    assert run(bin_ / "python", "-c", home, cwd=elsewhere).split() == [
        "MoELayer",
        str(site / "jmoe" / "__init__.py"),
    ]
    run(bin_ / "python", source / "examples" / "custom_router.py", cwd=elsewhere)
    options = ("--num-steps", 5, "--evaluation.sample-tokens", 4)
    assert "held-out loss after 5 steps" in run(
        bin_ / "jmoe-train", "tiny", *options, cwd=elsewhere
    )
    assert (elsewhere / "runs" / "tiny" / "checkpoints" / "5").is_dir()
    for command, option in (
        (("jmoe-serve",), "--max-batch"),
        (("jmoe-train", "tiny"), "--num-steps"),
    ):
        shown = run(bin_ / command[0], *command[1:], "--help", cwd=elsewhere)
        assert f"usage: {' '.join(command)} " in shown and option in shown
    assert "jmoe-train PRESET --plan" in run(bin_ / "jmoe-train", "--help", cwd=elsewhere)

    # `make setup` installs the checkout itself. The folder that a clone lies in has a folder `jmoe`
    # without an `__init__.py`, which must not hide the package.
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--editable", source, cwd=elsewhere)
    assert run(bin_ / "python", "-c", home, cwd=tmp_path).split() == [
        "MoELayer",
        str(source / "jmoe" / "__init__.py"),
    ]
