"""EXL3: the packed weight format, its names in a V4.1 checkpoint, and its references."""
