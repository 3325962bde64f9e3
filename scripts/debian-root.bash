# What scripts/bare and scripts/vm share: making a minimal Debian root directory, which reaches the same package
# registries as this machine.
# shellcheck shell=bash

# Installs programs that this machine lacks; each is given as PROGRAM:PACKAGE.
need_programs() {
    local each missing=()
    for each in "$@"; do
        command -v "${each%%:*}" >/dev/null || missing+=("${each#*:}")
    done
    ((!${#missing[@]})) || install_packages "${missing[@]}"
}

# Where roots are kept. In /var/tmp anybody may have made a directory of that name before.
make_cache() { # DIRECTORY
    mkdir -p "$1"
    [[ -O $1 && ! -L $1 ]] || fail "$1 is no directory of root's; name another with --cache."
}

# A root directory of a suite with Debian's essential packages and those that are named. Made once; a changed list
# makes it anew.
make_debian_root() { # DIRECTORY SUITE PACKAGE,…
    local root=$1 suite=$2 packages=$3
    [[ $(cat "$root.made" 2>/dev/null) != "$suite $packages" ]] || return 0
    rm -rf --one-file-system "$root" "$root.made"
    mmdebstrap --quiet --variant=minbase --include="$packages" "$suite" "$root"
    reach_registries "$root"
    echo "$suite $packages" >"$root.made"
}

# Certificates that this machine trusts besides Debian's, and where its pip and its apt find packages.
reach_registries() {
    local root=$1 file
    for file in /usr/local/share/ca-certificates/*.crt; do
        [[ ! -e $file ]] || cp "$file" "$root/usr/local/share/ca-certificates/"
    done
    chroot "$root" update-ca-certificates >/dev/null 2>&1
    {
        echo "[global]"
        python3 -m pip config list 2>/dev/null |
            sed -n "s/^global\.\(index-url\|trusted-host\|timeout\)='\(.*\)'\$/\1 = \2/p" || true
        echo "cert = /etc/ssl/certs/ca-certificates.crt"
    } >"$root/etc/pip.conf"
    for file in /etc/apt/apt.conf.d/*; do
        dpkg-query --search "$file" >/dev/null 2>&1 || cp "$file" "$root/etc/apt/apt.conf.d/"
    done
}

# The words of a bare environment, for `env -i`: no HOME, LANG or TERM.
bare_environment=(
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
)
# shellcheck disable=SC2034 # for those who source this
readonly bare_environment
