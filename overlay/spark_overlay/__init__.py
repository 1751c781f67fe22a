"""EXL3, Engram and DeepSeek V4.1 for stock vLLM. Importing the package imports nothing else."""

__version__ = "0.1.0"
