#!/usr/bin/env bash
# A Docker engine for the container tests, for machines that have none running: continuous integration, above all.
#
#   tests/docker/engine.sh install             Debian's docker.io, docker-compose and debootstrap, where missing (root),
#                                              and Compose v2, into build/compose-v2
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
COMPOSE_V2=build/compose-v2/docker-compose # tests/support/containers/compose.py looks for it here
COMPOSE_SUITE=trixie                       # the first of Debian's releases with Compose v2
DOWNLOAD_SECONDS=180

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

# Whence apt has Debian's packages; it knows the origin of its mirrors once it has fetched their lists.
debian_mirror() {
    # shellcheck disable=SC2016 # apt-get replaces these
    apt-get indextargets 'Created-By: Packages' --format '$(ORIGIN) $(LABEL) $(COMPONENT) $(REPO_URI)' 2>/dev/null |
        sed -n 's/^Debian Debian main //p' | head -n 1
}

# Compose v2, where there is none. Debian 12 and Ubuntu's oldest have 1.29 alone under that name, which is to be tested,
# too, and must not be replaced; so the package of a later release is unpacked into a folder, and nothing of the system
# is changed. It is one static program, which also works without being found by "docker compose". It comes from
# the mirror that apt is configured with, by a list of its own, and apt checks Debian's signature.
fetch_compose_v2() {
    if docker compose version >/dev/null 2>&1 || "$COMPOSE_V2" version >/dev/null 2>&1; then return; fi
    local without="the tests of containers use docker-compose 1.29 alone" keys=/usr/share/keyrings/debian-archive-keyring.gpg
    local mirror folder
    mirror=$(debian_mirror)
    if [ -z "$mirror" ] && [ "$(id -u)" = 0 ] && apt-get update -qq >/dev/null 2>&1; then mirror=$(debian_mirror); fi
    if [ -z "$mirror" ] || [ ! -r "$keys" ]; then
        say "no Compose v2: apt is not configured with a mirror of Debian's, or $keys is not there; $without"
        return
    fi
    folder=$(mktemp -d /var/tmp/p2ptrain-compose-XXXXXX)
    mkdir -p "$folder"/{lists/partial,cache/archives/partial,parts,unpacked}
    echo "deb [signed-by=$keys] $mirror $COMPOSE_SUITE main" >"$folder/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$folder/sources.list" -o "Dir::Etc::SourceParts=$folder/parts"
        -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Dir::State::status=/dev/null
        -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=1)
    if (cd "$folder" && timeout "$DOWNLOAD_SECONDS" "${apt[@]}" update && timeout "$DOWNLOAD_SECONDS" \
        "${apt[@]}" download docker-compose && dpkg-deb -x docker-compose_*.deb unpacked) >"$folder/log" 2>&1 &&
        "$folder/unpacked/usr/libexec/docker/cli-plugins/docker-compose" version >>"$folder/log" 2>&1; then
        mkdir -p "${COMPOSE_V2%/*}"
        install -m 755 "$folder/unpacked/usr/libexec/docker/cli-plugins/docker-compose" "$COMPOSE_V2"
    else
        say "no Compose v2: $(tail -n 1 "$folder/log"); $without"
    fi
    rm -rf "$folder"
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
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,tini,gcc,libc6-dev bookworm "$folder" \
        >"$folder.log" 2>&1 || { tail -n 5 "$folder.log" >&2; rm -rf "$folder" "$folder.log"; give_up "no base image"; }
    rm -rf "$folder"/var/cache/apt/* "$folder"/var/lib/apt/lists/* "$folder"/usr/share/{doc,man,locale}/*
    tar -C "$folder" --one-file-system -c . | docker import - "$BASE" >/dev/null
    rm -rf "$folder" "$folder.log"
}

case ${1:-} in
    install)
        install_packages
        cd "$(dirname "${BASH_SOURCE[0]}")/../.."
        fetch_compose_v2
        ;;
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
