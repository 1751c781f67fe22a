"""The launcher: from one `.env` to two ranks of vLLM that serve. Imports no torch."""
