"""``./start.sh soak``: one long prompt while both nodes' memory is sampled."""
