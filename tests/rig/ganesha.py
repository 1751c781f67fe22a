"""nfs-ganesha's configuration of what `launcher.commands.nfs.Export` describes. Pure.

This kernel has no NFS; the same description is served by a program instead, so that what is
exported to whom, and how, is read back over the wire.
"""

from __future__ import annotations

from launcher.commands.nfs import Export

PORT = 20490


def configuration(export: Export, recovery: str) -> str:
    words = export.options.split(",")
    squash = "All_Squash" if "all_squash" in words else "No_Root_Squash"
    if "root_squash" in words:
        squash = "Root_Squash"
    access = "RO" if "ro" in words else "RW"
    blocks = [
        f"NFS_CORE_PARAM {{ NFS_Port = {PORT}; MNT_Port = {PORT + 1}; NLM_Port = {PORT + 2};"
        f" Rquota_Port = {PORT + 3}; Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false;"
        f" Bind_addr = {export.address}; }}",
        "NFSV4 { RecoveryBackend = fs; Lease_Lifetime = 10; Grace_Period = 10; Graceless = true;"
        f' RecoveryRoot = "{recovery}"; }}',
        "LOG { Default_Log_Level = EVENT; }",
    ]
    clients = ", ".join(export.clients)
    for number, name in enumerate(export.directories, 1):
        blocks.append(
            f'EXPORT {{ Export_Id = {number}; Path = "{export.root}/{name}"; Pseudo = "/{name}";'
            f" Access_Type = None; Squash = {squash}; SecType = sys; Protocols = 4;"
            " Transports = TCP; FSAL { Name = VFS; }"
            f" CLIENT {{ Clients = {clients}; Access_Type = {access}; Squash = {squash}; }} }}"
        )
    return "\n".join(blocks) + "\n"
