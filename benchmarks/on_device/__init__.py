"""The parts of `benchmarks.device`: what is checked on a GPU, what is timed there, and against whom."""
