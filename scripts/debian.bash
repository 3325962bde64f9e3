# What scripts/setup and scripts/install share: a lock, Debian packages, and a Python that can make environments.
# shellcheck shell=bash

tools=(iptables ipset nftables iproute2 iputils-ping conntrack ethtool curl procps kmod ca-certificates)
compiler=(gcc libc6-dev) # python-iptables is built from source
# shellcheck disable=SC2034
debian_python=(python3 python3-venv python3-dev)

fail() {
    echo "scripts/${0##*/}: $*" >&2
    exit 1
}

# Keeps out others that would step on what this does, until it ends: by a file, in a directory that only who runs this
# may write. Nobody else may open that file: whoever can, can keep its lock for as long as he likes.
hold_lock() { # FILE SECONDS
    (umask 077 && : >>"$1") || fail "the lock $1 cannot be opened."
    exec 9<>"$1"
    ! flock --nonblock 9 || return 0
    echo "scripts/${0##*/}: another one is at work, and holds $1. Waiting for its end." >&2
    flock --wait "$2" 9 || fail "another one has held $1 for $2 seconds. Try again when it has ended."
}

fail_packages() {
    fail "the Python packages could not be installed. Look at pip's first lines: where there is no network, its last ones" \
        "speak of versions that are missing."
}

# Whether a Python is new enough, can make environments with pip in them, and has the headers to build against.
usable() {
    "$1" - >/dev/null 2>&1 <<'PYTHON'
import sys, sysconfig, os, venv, ensurepip
sys.exit(sys.version_info < (3, 11) or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
PYTHON
}

# The first of these that is usable.
find_python() {
    local candidate
    for candidate in "$@"; do
        if usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

missing_packages() {
    command -v dpkg-query >/dev/null || fail "this installs Debian packages, and there is no dpkg here." \
        "Install what these Debian packages have by other means: ${tools[*]} ${compiler[*]}; then make .venv by hand:" \
        "python3 -m venv .venv && .venv/bin/pip install --require-hashes -r requirements.lock &&" \
        ".venv/bin/pip install --no-deps -e ."
    local installed package
    installed=" $(dpkg-query --show --showformat '${db:Status-Status}=${Package} ' "$@" 2>/dev/null || true)"
    for package in "$@"; do
        [[ $installed == *" installed=$package "* ]] || echo "$package"
    done
}

install_packages() {
    [[ $(id -u) == 0 ]] || fail "these Debian packages are missing: $*. Run it as root, or install them first:" \
        "apt-get install $*"
    echo "Installing Debian packages: $*" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update --quiet=2 || fail "the package lists could not be fetched (apt-get update)."
    keep_services_down
    apt-get install --quiet=2 --yes --no-install-recommends "$@" >&2 ||
        fail "these Debian packages could not be installed: $*."
    [[ -z ${policy:-} ]] || rm -f "$policy"
}

# Servers come for their programs; none is to listen on this machine because a package of it was installed.
# One that was left by who was killed here is ours still.
keep_services_down() {
    local file=/usr/sbin/policy-rc.d said=$'#!/bin/sh\n# of netlimit, while packages are installed\nexit 101'
    [[ ! -e $file || $(head --bytes=1000 "$file") == "$said" ]] || return 0
    policy=$file
    trap 'rm -f "$policy"' EXIT
    install -m 755 /dev/stdin "$policy" <<<"$said"
}

list_enabled() { find /etc/systemd/system -path '*.wants/*.service' 2>/dev/null || true; }

# Nor from the next boot on: their packages have them enabled. What was so before is another's.
disable_services() { # WHAT WAS ENABLED BEFORE, PACKAGE…, just installed
    local before=$1 package link
    for package in "${@:2}"; do
        while read -r link; do
            [[ $link != */"$package".service ]] || grep -qxF "$link" <<<"$before" || rm -f "$link"
        done < <(list_enabled)
    done
}
