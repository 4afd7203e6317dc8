#!/usr/bin/env bash
# A Docker engine for the container tests, for machines that have none running: continuous integration, above all.
#
#   tests/docker/engine.sh install             Debian's docker.io, docker-compose and debootstrap, where missing (root)
#   tests/docker/engine.sh run COMMAND [ARGS]  run COMMAND with an engine: the one that answers already, else one of its
#                                              own (root), with its own files and socket, which is ended and removed
#
# An engine of its own has no image. The Dockerfile's base is then made of Debian's packages, so no registry is asked.
# Exits with 69 and says why where no engine can run, else with COMMAND's exit code.
set -euo pipefail

BASE=python:3.11-slim-bookworm # as in the Dockerfile
UNAVAILABLE=69
READY_SECONDS=60
END_SECONDS=60

say() { echo "engine.sh: $*" >&2; }

give_up() {
    say "$1"
    exit "$UNAVAILABLE"
}

install_packages() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v docker-compose >/dev/null || missing+=(docker-compose)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    command -v iptables >/dev/null || missing+=(iptables)
    [ ${#missing[@]} = 0 ] && return
    [ "$(id -u)" = 0 ] || give_up "${missing[*]} not found, and only root can install them"
    export DEBIAN_FRONTEND=noninteractive
    # An engine of the package's own, started as it is installed, would not be ours to end.
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' RETURN
    { apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; } >/dev/null ||
        give_up "${missing[*]} could not be installed: see the error above"
}

start_engine() {
    command -v dockerd >/dev/null || give_up "no engine answers and dockerd is not found: apt install docker.io"
    [ "$(id -u)" = 0 ] || give_up "no engine answers, and only root can start one"
    ROOT=$(mktemp -d /var/tmp/p2ptrain-engine-XXXXXX)
    chains_before=$(chains)
    policy_before=$(iptables -S FORWARD 2>/dev/null | sed -n 's/^-P FORWARD //p') # the engine makes it DROP
    forwarding_before=$(cat /proc/sys/net/ipv4/ip_forward)
    trap end_engine EXIT
    trap 'exit 143' TERM
    dockerd --data-root "$ROOT/data" --exec-root "$ROOT/exec" --pidfile "$ROOT/pid" --host "unix://$ROOT/sock" \
        --bridge none --log-level warn >"$ROOT/log" 2>&1 &
    ENGINE=$!
    export DOCKER_HOST="unix://$ROOT/sock"
    local deadline=$((SECONDS + READY_SECONDS))
    until docker version >/dev/null 2>&1; do
        kill -0 "$ENGINE" 2>/dev/null || give_up "dockerd cannot run here: $(tail -n 3 "$ROOT/log")"
        [ "$SECONDS" -lt "$deadline" ] || give_up "dockerd does not answer: $(tail -n 3 "$ROOT/log")"
        sleep 0.3
    done
}

chains() {
    { iptables-save | sed -n 's/^:\(DOCKER[^ ]*\) .*/\1/p' | sort -u; } 2>/dev/null || true
}

end_engine() {
    local code=$? chain table
    trap - EXIT
    if [ -n "${ENGINE:-}" ]; then
        kill "$ENGINE" 2>/dev/null || true
        local deadline=$((SECONDS + END_SECONDS))
        while kill -0 "$ENGINE" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.2; done
        kill -KILL "$ENGINE" 2>/dev/null || true
        wait "$ENGINE" 2>/dev/null || true
    fi
    if [ -z "$chains_before" ]; then # Rules that the engine leaves behind: all of them are its own.
        for table in filter nat raw; do
            iptables-save -t "$table" 2>/dev/null | sed -n 's/^-A \(.*-j DOCKER.*\)/\1/p' | while read -r rule; do
                # shellcheck disable=SC2086 # a rule is several words
                iptables -t "$table" -D $rule 2>/dev/null || true
            done
            for chain in $(iptables-save -t "$table" 2>/dev/null | sed -n 's/^:\(DOCKER[^ ]*\) .*/\1/p'); do
                iptables -t "$table" -F "$chain" 2>/dev/null || true
            done
            for chain in $(iptables-save -t "$table" 2>/dev/null | sed -n 's/^:\(DOCKER[^ ]*\) .*/\1/p'); do
                iptables -t "$table" -X "$chain" 2>/dev/null || true
            done
        done
    fi
    [ -z "$policy_before" ] || iptables -P FORWARD "$policy_before" || true
    echo "$forwarding_before" >/proc/sys/net/ipv4/ip_forward || true
    rm -rf --one-file-system "$ROOT" || say "$ROOT could not be removed: something is still mounted there"
    exit "$code"
}

make_base() {
    docker image inspect "$BASE" >/dev/null 2>&1 && return
    if docker pull -q "$BASE" >/dev/null 2>&1; then return; fi
    command -v debootstrap >/dev/null || give_up "$BASE can neither be pulled nor made: apt install debootstrap"
    say "making $BASE of Debian's packages"
    local folder
    folder=$(mktemp -d /var/tmp/p2ptrain-base-XXXXXX)
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,tini bookworm "$folder" \
        >"$folder.log" 2>&1 || { tail -n 5 "$folder.log" >&2; rm -rf "$folder" "$folder.log"; give_up "no base image"; }
    rm -rf "$folder"/var/cache/apt/* "$folder"/var/lib/apt/lists/* "$folder"/usr/share/{doc,man,locale}/*
    tar -C "$folder" --one-file-system -c . | docker import - "$BASE" >/dev/null
    rm -rf "$folder" "$folder.log"
}

case ${1:-} in
    install) install_packages ;;
    run)
        shift
        docker version >/dev/null 2>&1 || start_engine
        make_base
        "$@"
        ;;
    *)
        sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
