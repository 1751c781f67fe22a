"""What the server does about unified memory: gauge lines, page cache, release, workspaces."""
