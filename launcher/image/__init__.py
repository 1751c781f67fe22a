"""The serving image: its recipe, where it comes from, and the same layers on both nodes."""
