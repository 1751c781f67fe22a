"""mHC on any GPU from SM80 on: Triton kernels beside the reference in ``mhc.reference``."""
