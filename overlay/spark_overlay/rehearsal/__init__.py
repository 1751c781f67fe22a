"""The rehearsal checkpoint: DeepSeek V4.1's structure in tiny dimensions, made from a seed."""
