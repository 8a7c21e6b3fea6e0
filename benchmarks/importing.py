"""`bench import`: a checkpoint in Kimi K3's layout, loaded: its peak of memory, and its time beside a plain read.

`python -m benchmarks.importing FOLDER` prints the memory of one import, in a process of its own, as a line of JSON.
"""

from __future__ import annotations

import json as jsonlib
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import machine, report
from benchmarks.peak import ROOT, reset_peak, resident_mib
from benchmarks.synthetic_checkpoint import config_of_size, write
from benchmarks.timing import Contender, race
from kda_jax.weights.files import TensorFiles
from kda_jax.weights.load import load
from kda_jax.weights.skeleton import parameters

ITEMSIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}
BUFFER = bytearray(1 << 20)
NOTES = {
    "checkpoint": "Kimi K3 at a quarter of its widths, three layers, as many experts as the bytes take, random numbers",
    "kept": "bytes of the model's parameters in memory; experts stay packed",
    "peak_over_kept": "highest resident memory during the import, less what was resident before it and less kept; in a "
    "process of its own that had imported everything and run a first program",
    "import": "kda_jax.load, files in the page cache",
    "read": "every file as one bytes object, all of them held until the last is read",
    "stream": "every file through one buffer of 1 MiB: nothing is kept, no memory is asked for",
    "cpu": "seconds of processor time of the fastest call: what a busy machine does not change",
}


def memory(folder: Path) -> dict[str, int]:
    """Loads a checkpoint in this process.

    Returns:
        `kept`, `peak_over_kept` and `left_over_kept` (resident behind the import) in bytes.
    """
    jnp.zeros(1).block_until_ready()
    reset_peak()
    before = resident_mib()
    model = load(folder)
    kept = sum(value.nbytes for value in parameters(model).values())
    peak, left = ((resident_mib(key) - before) * 2**20 - kept for key in ("VmHWM", "VmRSS"))
    return {"kept": kept, "peak_over_kept": round(peak), "left_over_kept": round(left)}


def memory_apart(folder: Path) -> dict[str, int]:
    """`memory` in a new process.

    Raises:
        RuntimeError: the process failed; its last line of errors is the message.
    """
    command = [sys.executable, "-m", "benchmarks.importing", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"measuring the memory of an import failed ({done.returncode}): {last}")
    return jsonlib.loads(done.stdout.strip().splitlines()[-1])


def largest_tensor(folder: Path) -> int:
    """Bytes of the largest tensor in the files."""
    with TensorFiles(folder) as files:
        return max(math.prod(shape) * ITEMSIZES[files.dtypes[name]] for name, shape in files.shapes.items())


def read(files: list[Path]) -> None:
    """Reads all files into memory."""
    held = [file.read_bytes() for file in files]
    del held


def stream(files: list[Path]) -> None:
    """Reads all files through one buffer."""
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(BUFFER):
                pass


def times(folder: Path, rounds: int, log: Callable[[str], None]) -> dict[str, float]:
    """Seconds of `import`, `read` and `stream`, interleaved, and of processor time."""
    files = sorted(folder.glob("*.safetensors"))
    cpu: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], object]) -> Contender:
        def call(_: object) -> None:
            start = time.process_time()
            act()
            cpu.setdefault(name, []).append(time.process_time() - start)

        return Contender(name=name, call=call)

    contenders = [
        timed("import", lambda: jax.block_until_ready(parameters(load(folder)))),
        timed("read", lambda: read(files)),
        timed("stream", lambda: stream(files)),
    ]
    taken = race(contenders, rounds=rounds, budget_s=120.0, on_call=log)
    figures: dict[str, float] = {}
    for name, timing in taken.items():
        figures[f"{name}_s"], figures[f"{name}_median_s"] = timing.min_ms / 1e3, timing.median_ms / 1e3
        figures[f"{name}_cpu_s"] = min(cpu[name])
    return figures


def main(json: Path | None = None, gb: float = 2.0, shards: int = 16, quick: bool = False) -> dict[str, Any]:
    """Writes a checkpoint to a temporary folder, loads it, and removes it.

    Args:
        json: where to write the report; None writes none.
        gb: size of the checkpoint in 10^9 bytes.
        shards: files that it has.
        quick: two rounds, to see whether it runs.

    Returns:
        The report, as written: `checkpoint`, `memory` (bytes) and `time` (seconds and ratios).

    Raises:
        ValueError: `gb` is too little for such a model, or `shards` is not positive.
        RuntimeError: the import failed.
    """
    if shards < 1:
        raise ValueError(f"{shards=} must be positive")
    console, config = report.console(), config_of_size(round(gb * 1e9))
    report.make_folders(json)
    with report.progress(console) as log, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(config, folder, shards, on_shard=lambda file: log(f"writing {file}"))
        files = sorted(folder.glob("*.safetensors"))
        checkpoint = {
            "nbytes": sum(file.stat().st_size for file in files),
            "shards": len(files),
            "experts": config.num_experts,
            "largest_tensor": largest_tensor(folder),
        }
        log("memory of an import")
        held = memory_apart(folder)
        taken = times(folder, 2 if quick else 7, log)
    for act in ("read", "stream"):
        taken[f"ratio_to_{act}"] = taken["import_median_s"] / taken[f"{act}_median_s"]
        taken[f"cpu_ratio_to_{act}"] = taken["import_cpu_s"] / taken[f"{act}_cpu_s"]
    result = {
        "benchmark": "import",
        "machine": machine.describe(),
        "notes": NOTES,
        "checkpoint": checkpoint,
        "memory": held,
        "time": taken,
    }
    show(console, result)
    report.write(json, result)
    return result


def show(console: Any, result: Mapping[str, Any]) -> None:
    """What is kept and what it took."""
    checkpoint, held, taken = result["checkpoint"], result["memory"], result["time"]
    console.print(
        f"{checkpoint['nbytes']:,} bytes in {checkpoint['shards']} files, {checkpoint['experts']} experts a layer, "
        f"largest tensor {checkpoint['largest_tensor']:,} bytes\n"
        f"kept {held['kept']:,} bytes; peak {held['peak_over_kept']:,} bytes above that",
        highlight=False,
        soft_wrap=True,
    )
    rows = [
        (
            act,
            f"{taken[f'{act}_s']:.2f} / {taken[f'{act}_median_s']:.2f}",
            f"{taken[f'{act}_cpu_s']:.2f}",
            *(
                ("-", "-")
                if act == "import"
                else (f"{taken[f'{k}_to_{act}']:.2f}" for k in ("ratio", "cpu_ratio"))
            ),
        )
        for act in ("import", "read", "stream")
    ]
    columns = ("", "s, least / median", "cpu s", "import is x", "of cpu s")
    console.print(report.table("Import, beside reading the same bytes", columns, rows))


if __name__ == "__main__":
    print(jsonlib.dumps(memory(Path(sys.argv[1]))))
