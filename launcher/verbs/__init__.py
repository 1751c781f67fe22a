"""What each verb does: a module for those that need the same, of which a launcher loads one.

The rule of imports, here for the whole launcher: most commands are over in a blink, and loading
what they do not use would be most of their time. So what every verb begins with (cli, app,
settings, launcher.state) imports no verb, no step and no runtime at its top, and what speaks to a
daemon, a node, a registry or the hub (``nodes.daemon``, ``nodes.ssh``, ``runtimes.docker``,
``image``, ``weights.fetch``, ``pair.build`` and its like) is imported in the function that first
needs it.
Docker's SDK and paramiko come from ``launcher.libraries`` alone, without what they would load for
nothing. tests/test_imports.py holds all of it.
"""
