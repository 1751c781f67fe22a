#!/bin/sh
# Exports what EXPORTS says (the text of an exports file) from the address NFS_ADDRESS, by NFSv4
# alone: neither rpcbind nor statd is needed. Ends, and takes the exports back, on SIGTERM.
set -eu
: "${EXPORTS:?the text of the exports file}" "${NFS_ADDRESS:?the address to listen on}"

fail() {
    echo "exporter: $*" >&2
    exit 1
}

# Mounting the file system makes the kernel load its module, where it is one; only then is there
# a directory for it below /proc.
mkdir -p /run/nfsd-probe
mount -t nfsd nfsd /run/nfsd-probe 2>/dev/null ||
    fail "this kernel has no NFS server; on the host: sudo modprobe nfsd"
umount /run/nfsd-probe
mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd
if [ "$(cat /proc/fs/nfsd/threads)" != 0 ]; then
    fail "another NFS server runs in this kernel; it is left alone"
fi

printf '%s\n' "$EXPORTS" >/etc/exports
# Where the kernel remembers its clients; without it every restart makes them wait.
mkdir -p /var/lib/nfs/v4recovery

trap 'rpc.nfsd 0; exportfs -au; exit 0' TERM INT

exportfs -ar || fail "exportfs refused the exports"
rpc.nfsd --no-nfs-version 3 --nfs-version 4.2 --tcp --no-udp \
    --grace-time 10 --lease-time 10 --host "$NFS_ADDRESS" 16 ||
    fail "the NFS server did not start"
rpc.mountd --foreground --no-nfs-version 3 &
child=$!
echo "exporter: serving on $NFS_ADDRESS:2049"
wait "$child" || :
rpc.nfsd 0 || :
fail "rpc.mountd has ended"
