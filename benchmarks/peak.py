"""Peak memory of one prefill, in a process of its own: `python -m benchmarks.peak IMPL CHECKPOINT TOKENS`.

Prints one line of JSON, in MiB:
    imported: resident after the imports; loaded: resident after loading the weights.
    first: the peak during the first prefill (whatever compiles, compiles in it); again: during the second.
    above_weights, again_above_weights: those two minus `loaded` (interpreter, libraries and weights).
    again_above_before: `again` minus what was resident just before that call, so that what compiling left
        behind is out as well.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def resident_mib(key: str = "VmRSS") -> float:
    """This process's resident memory in MiB: now (`VmRSS`), or its highest since the last reset (`VmHWM`)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> bool:
    """Free what can be freed and restart `VmHWM` from what is resident now; False where that is refused."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def measure(impl: str, checkpoint: Path, num_tokens: int, vocab_size: int) -> dict[str, Any]:
    """Load a contestant and read a prompt of `num_tokens` twice; see the head of this file for the keys."""
    from benchmarks.model_contestants import CONTESTANTS

    if impl == "transformers":  # What loading would import, so that `imported` is all code and no weights.
        import transformers.models.kimi_linear.modeling_kimi_linear  # noqa: F401
    tokens = np.random.default_rng(1).integers(0, vocab_size, (1, num_tokens), dtype=np.int32)
    reset_peak()
    figures: dict[str, Any] = {"impl": impl, "tokens": num_tokens, "imported": resident_mib()}
    contestant = CONTESTANTS[impl](checkpoint)
    figures["peak_was_reset"] = reset_peak()
    figures["loaded"] = resident_mib()
    for act in ("first", "again"):
        before = resident_mib()
        contestant.prefill(tokens)
        figures[act] = resident_mib("VmHWM")
        figures[f"{act}_above_before"] = figures[act] - before
        reset_peak()
    figures["above_weights"] = figures["first"] - figures["loaded"]
    figures["again_above_weights"] = figures["again"] - figures["loaded"]
    return figures


def run(impl: str, checkpoint: Path, num_tokens: int, vocab_size: int) -> dict[str, Any]:
    """`measure` in a new process, without a compilation cache, so that compiling is part of the first call.

    Raises:
        RuntimeError: the process failed; its last line of errors is the message.
    """
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.peak",
        impl,
        str(checkpoint),
        str(num_tokens),
        str(vocab_size),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"measuring the memory of {impl} failed ({done.returncode}): {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    _, name, path, tokens, vocabulary = sys.argv
    print(json.dumps(measure(name, Path(path), int(tokens), int(vocabulary))))
