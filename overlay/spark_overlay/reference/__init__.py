"""DeepSeek V4.1 in plain PyTorch, without vLLM: the oracle. Start reading at model.py."""
