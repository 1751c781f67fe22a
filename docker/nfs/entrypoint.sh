#!/bin/sh
# Exports what EXPORTS says (the text of an exports file) from the address NFS_ADDRESS, by NFSv4
# alone: neither rpcbind nor statd is needed. Ends, and takes the exports back, on SIGTERM.
#
# The server is the kernel's: it outlives a container that was killed. /var/lib/nfs is a volume that
# outlives it too, and tells in `boot` that the server of this boot was started here.
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
boot=$(cat /proc/sys/kernel/random/boot_id)
mine=/var/lib/nfs/boot

# Whether the server was left by a container of ours: of this boot, and listening where we do alone.
left() {
    [ "$(cat "$mine" 2>/dev/null)" = "$boot" ] || return 1
    address=$NFS_ADDRESS IFS=.
    # shellcheck disable=SC2086  # the four numbers, as the kernel writes them: last one first
    set -- $address
    unset IFS
    here=$(printf '%02X%02X%02X%02X:0801' "$4" "$3" "$2" "$1")
    while read -r _ at _ state _; do
        case $at,$state in
            "$here",0A) ;;
            *:0801,0A) return 1 ;;
        esac
    done <<EOF
$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
EOF
}

if [ "$(cat /proc/fs/nfsd/threads)" != 0 ]; then
    left || fail "another NFS server runs in this kernel; it is left alone"
    echo "exporter: ends the server that an earlier exporter left"
    rpc.nfsd 0
fi

# Nothing but what was asked for, whatever the image's base brings along.
rm -rf /etc/exports.d
printf '%s\n' "$EXPORTS" >/etc/exports
# Where the kernel remembers its clients; without it every restart makes them wait.
mkdir -p /var/lib/nfs/v4recovery

trap 'rpc.nfsd 0; exportfs -au; exit 0' TERM INT

exportfs -ar || fail "exportfs refused the exports"
rpc.nfsd --no-nfs-version 3 --nfs-version 4.2 --tcp --no-udp \
    --grace-time 10 --lease-time 10 --host "$NFS_ADDRESS" 16 ||
    fail "the NFS server did not start"
echo "$boot" >"$mine"
rpc.mountd --foreground --no-nfs-version 3 &
child=$!
echo "exporter: serving on $NFS_ADDRESS:2049"
wait "$child" || :
rpc.nfsd 0 || :
fail "rpc.mountd has ended"
