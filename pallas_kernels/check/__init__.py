"""Do the kernels compile for GPUs and TPUs, and into what? Asked of the compilers, on a machine with neither."""
