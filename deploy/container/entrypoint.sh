#!/bin/sh
# What a container runs: a p2ptrain command line, or one of the four below, which need no person.
#
#   demo-seed       make a swarm (from P2PTRAIN_SETTINGS, KEY=VALUE …) where there is none yet, and serve it
#   linked-trainer  train in the swarm whose link is in the file; the rest are options of 'p2ptrain peer'
#   linked-stage    host a stage of its model, which is cut into several; the rest as above
#   linked-monitor  its status page; the rest are options of 'p2ptrain monitor'
#
# The link, and nothing else, is passed on in LINK_FILE.
set -eu

LINK_FILE=${P2PTRAIN_LINK_FILE:-/link/link.txt}
LINK_SECONDS=120
METRICS_PORT=9464 # on the container's loopback, for its health check

link() {
    waited=0
    until [ -s "$LINK_FILE" ]; do
        if [ "$waited" -ge "$LINK_SECONDS" ]; then
            echo "p2ptrain-entrypoint: no link in $LINK_FILE after $LINK_SECONDS s: is the bootstrap peer up?" >&2
            exit 75
        fi
        sleep 1
        waited=$((waited + 1))
    done
    cat "$LINK_FILE"
}

# Replicas share a volume, and each needs a folder and a key of its own: the first one that no other holds. The lock is
# this process's, and so the peer's that takes its place, and ends with it, however that ends.
take_slot() {
    slot=1
    while [ "$slot" -le 999 ]; do
        mkdir -p "/data/$1-$slot"
        exec 9>"/data/$1-$slot/slot.lock"
        if flock -n 9; then return; fi
        slot=$((slot + 1))
    done
    echo "p2ptrain-entrypoint: 999 peers hold all folders of /data" >&2
    exit 7
}

command=${1:---help}
[ $# = 0 ] || shift
case $command in
    demo-seed)
        if ! [ -f /data/swarm/run.toml ]; then
            for setting in ${P2PTRAIN_SETTINGS:-}; do set -- "$@" --set "$setting"; done
            p2ptrain init /data/swarm "$@"
        fi
        # A name, because a container that is made again has another address.
        exec p2ptrain seed /data/swarm --run-dir /data/bootstrap --link-file "$LINK_FILE" \
            --announce "/dns4/${P2PTRAIN_HOST:-bootstrap}/tcp/31337" --metrics-port "$METRICS_PORT"
        ;;
    linked-trainer | linked-stage)
        role=${command#linked-}
        link=$(link)
        take_slot "${P2PTRAIN_NAME:-$role}"
        name=${P2PTRAIN_NAME:-$role}-$slot
        echo "this container is $name"
        exec p2ptrain peer "/usr/local/share/p2ptrain/$role.toml" --link "$link" --run-dir "/data/$name" \
            --name "$name" --metrics-port "$METRICS_PORT" "$@"
        ;;
    linked-monitor)
        link=$(link)
        exec p2ptrain monitor "$link" --host 0.0.0.0 --port 8080 "$@"
        ;;
    seed | peer | join)
        exec p2ptrain "$command" --metrics-port "$METRICS_PORT" "$@"
        ;;
    *)
        exec p2ptrain "$command" "$@"
        ;;
esac
