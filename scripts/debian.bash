# What scripts/setup and scripts/install share: Debian packages, and a Python that can make environments.
# shellcheck shell=bash

tools=(iptables ipset nftables iproute2 iputils-ping conntrack ethtool curl procps kmod ca-certificates)
compiler=(gcc libc6-dev) # python-iptables is built from source
# shellcheck disable=SC2034
debian_python=(python3 python3-venv python3-dev)

fail() {
    echo "scripts/${0##*/}: $*" >&2
    exit 1
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
keep_services_down() {
    [[ ! -e /usr/sbin/policy-rc.d ]] || return 0
    policy=/usr/sbin/policy-rc.d
    trap 'rm -f "$policy"' EXIT
    install -m 755 /dev/stdin "$policy" <<<$'#!/bin/sh\nexit 101'
}
