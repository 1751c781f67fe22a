"""The memory guard: stops this node's own server before memory runs out, if the server took it.

``core`` decides (pure), ``proc`` reads /proc, ``target`` and ``engine`` know the server, ``run`` is
the loop, ``__main__`` the command. Nothing outside the standard library and this folder is
imported: a node gets it as one file (steps/guard.py).
"""
