"""``./start.sh tune``: a launch table measured on this pair's own GPU, the same on both nodes."""
