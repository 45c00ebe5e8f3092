#!/usr/bin/env bash
# wasm-toolchain.sh [FOLDER]
#
# Makes, in one private folder, a Rust compiler with a standard library for wasm32-unknown-unknown on a Debian machine
# whose rustup cannot fetch that target, and prints the path of the cargo to use (its only line on standard output).
#
# Debian's rustc-web (rustc 1.85, kept for browsers) is downloaded with apt-get and unpacked with dpkg-deb, not
# installed: rustup, the system's rustc and dpkg's database stay as they are. rust-web-src holds the matching standard
# library with its dependencies; it is compiled once, offline, into the private sysroot. After that an ordinary
# `cargo build --target wasm32-unknown-unknown` works, without -Zbuild-std.
#
# FOLDER defaults to hymo/wasm-toolchain in the user's cache folder. A finished FOLDER is used as it is, a half-made one
# is made again. Needs apt-get, dpkg-deb, tar, cargo >= 1.85 and cc; root only where apt's lists must be fetched first.
set -euo pipefail

# Raise it when this script changes what it makes.
revision=1
target=wasm32-unknown-unknown
folder=${1:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/hymo/wasm-toolchain}
say() { printf 'wasm-toolchain: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
for tool in apt-get apt-cache dpkg-deb dpkg-query tar cargo cc; do
  command -v "$tool" >/dev/null || die "$tool is not on the PATH"
done
mkdir -p "$folder"
folder=$(cd "$folder" && pwd -P)
exec 9>"$folder/.lock"
flock 9 # two builds at once would unpack over each other
stamp=$folder/.complete
cargo_path=$folder/bin/wasm-cargo

if [ "$(cat "$stamp" 2>/dev/null)" = "$revision" ] && "$folder/bin/rustc" -V >&2; then
  echo "$cargo_path"
  exit 0
fi

# ---- which packages
candidate() { apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }'; }
depends() { # the names in the Depends field of PACKAGE=VERSION
  apt-cache show "$1" 2>/dev/null | awk -F': ' '$1 == "Depends" { print $2; exit }' |
    tr ',' '\n' | sed 's/|.*//; s/([^)]*)//; s/:any//; s/[[:space:]]//g'
}
installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
resolve() { # sets llvm (its major version) and packages
  local version std llvm_package llvm_version other
  version=$(candidate rustc-web)
  [ -n "$version" ] || return 1
  std=$(depends "libstd-rust-web-dev=$version" | grep '^libstd-rust-web-[0-9]') || return 1
  llvm_package=$(depends "$std=$version" | grep '^libllvm[0-9]') || return 1
  llvm_version=$(candidate "$llvm_package")
  llvm=${llvm_package#libllvm}
  packages=("rustc-web=$version" "$std=$version" "libstd-rust-web-dev=$version" "rust-web-src=$version"
    "$llvm_package=$llvm_version" "lld-$llvm=$llvm_version")
  # what LLVM itself needs and this machine lacks is unpacked beside it
  for other in $(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances "$llvm_package" | grep '^[a-z0-9]' | sed 's/:.*//' | sort -u); do
    case $other in "$llvm_package" | libc6 | libgcc-s1 | gcc-*-base | libcrypt1) continue ;; esac
    if ! installed "$other" && [ -n "$(candidate "$other")" ]; then packages+=("$other"); fi
  done
}
download() { (cd "$folder/debs" && apt-get -qq -o APT::Sandbox::User=root download "${packages[@]}" >&2); }
refresh() {
  say "apt-get update"
  apt-get update -qq >&2 || say "apt-get update failed; going on with the lists at hand"
}

# ---- download, unpack
rm -rf "$folder"/{usr,lib,bin,debs,build} "$stamp"
mkdir -p "$folder"/{bin,debs,build}
no_package="apt offers no rustc-web; Debian 12 with its security archive has it"
resolve || { refresh && resolve; } || die "$no_package"
say "downloading ${packages[*]}"
# stale lists name files that the archive no longer has
download || { rm -f "$folder"/debs/*; refresh; resolve || die "$no_package"; download; } || die "the download failed"
say "unpacking"
for package in "$folder"/debs/*.deb; do
  case ${package##*/} in
    rust-web-src_*) # 430 MB, of which the standard library needs 70
      dpkg-deb --fsys-tarfile "$package" |
        tar -x -C "$folder" --wildcards './usr/src/rustc-*/library/*' './usr/lib/rustlib/src/*' ;;
    *) dpkg-deb -x "$package" "$folder" ;;
  esac
done
rm -rf "$folder/debs" "$folder/usr/share"
source=$folder/usr/lib/rustlib/src/rust/library
[ -f "$source/std/Cargo.toml" ] || die "no source of the standard library at $source"

# ---- wrappers: each finds the folder from its own path, so that it may be moved
arch=$(basename "$(dirname "$(ls "$folder"/usr/lib/*/librustc_driver-*.so)")")
wrap() { # NAME BODY
  printf '#!/bin/sh\nD=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")\n%s\n' "$2" >"$folder/bin/$1"
  chmod +x "$folder/bin/$1"
}
libraries="export LD_LIBRARY_PATH=\"\$D/usr/lib/$arch:\$D/lib/$arch\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\""
wrap rustc "$libraries"$'\n''exec "$D/usr/bin/rustc" "$@"'
wrap wasm-ld "$libraries"$'\n'"exec \"\$D/usr/lib/llvm-$llvm/bin/wasm-ld\" \"\$@\""
wrap wasm-cargo 'export RUSTC="$D/bin/rustc" CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER="$D/bin/wasm-ld"
unset RUSTUP_TOOLCHAIN RUSTC_WRAPPER RUSTC_WORKSPACE_WRAPPER
exec cargo "$@"'
"$folder/bin/rustc" -V >&2 || die "the unpacked rustc does not run"

# ---- the standard library, once, from the sources it came with
say "building the standard library for $target"
build=$folder/build
mkdir -p "$build/crate/src" "$build/cargo-home"
cat >"$build/crate/Cargo.toml" <<'TOML'
[package]
name = "mkstd"
version = "0.0.0"
edition = "2021"
[workspace]
[profile.release]
opt-level = 3
codegen-units = 1
debug = 0
TOML
: >"$build/crate/src/lib.rs"
offline=()
if [ -d "$source/vendor" ]; then
  offline=(--offline)
  printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "%s"\n' "$source/vendor" \
    >"$build/cargo-home/config.toml"
fi
commit=$("$folder/bin/rustc" -vV | awk '/^commit-hash:/ { print $2 }')
# bitcode lets a crate build with lto = true; the remapping keeps this folder's name out of panic messages
flags="-Cembed-bitcode=yes --remap-path-prefix=$(readlink -f "$source")=/rustc/$commit/library"
flags="$flags --remap-path-prefix=$source=/rustc/$commit/library"
(cd "$build/crate" && env -u CARGO_ENCODED_RUSTFLAGS -u CARGO_BUILD_TARGET -u CARGO_TARGET_DIR \
  CARGO_HOME="$build/cargo-home" RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" \
  "$cargo_path" build -q "${offline[@]}" --release --target "$target" \
  -Zbuild-std=std,panic_abort -Zbuild-std-features= --target-dir "$build/target" >&2) || die "the standard library did not build"
library=$folder/usr/lib/rustlib/$target/lib
mkdir -p "$library"
find "$build/target/$target/release/deps" -name '*.rlib' ! -name 'libmkstd-*' -exec cp {} "$library/" \;
ls "$library"/libstd-*.rlib >/dev/null || die "no libstd in $library"
rm -rf "$build"
echo "$revision" >"$stamp"
say "ready in $folder, $SECONDS s, $(du -sm "$folder" | cut -f1) MB"
echo "$cargo_path"
