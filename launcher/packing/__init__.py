"""`./start.sh pack`: both nodes' packed Engram files, written at the same time."""
