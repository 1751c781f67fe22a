"""Steps: the pieces of a boot, each with its own idea of being done."""
