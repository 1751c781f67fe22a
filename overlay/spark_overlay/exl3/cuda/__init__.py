"""EXL3's CUDA kernels (overlay/csrc/exl3) as torch ops, with the launch tables they run by."""
