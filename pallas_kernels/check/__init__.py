"""Do the kernels compile for GPUs, and into what? Asked of the compilers themselves, on a machine without a GPU."""
