#!/bin/bash
# Tries what the README promises on systems that have just been made: git, make and certificates, and nothing else.
#
#   scripts/test-fresh [--only STEPS] [SYSTEM ...]      as root; systems: bookworm jammy trixie noble (all)
#
#   --only train,test,pip   only these of the steps
#   --keep                  keep the systems, in build/fresh
#
# For each system: debootstrap, a clone of the last commit, `make train`, `make test`, `pip install .` in a new virtual
# environment and a program on two ranks with what that installed. Each step's output goes to build/fresh/SYSTEM.STEP.log.
# A table of the times ends it; the exit status is 1 if a step failed.
#
# Needs some 20 GB for a system, which is removed before the next one is made, and a network.
set -u
cd "$(dirname "$0")/.." || exit 1
train_limit_s=720  # on two cores
step_limit_s=5400
steps=train,test,pip
keep=
systems=()
while [ $# -gt 0 ]; do
  case $1 in
    --only) steps=${2:?--only needs a list of steps}; shift ;;
    --keep) keep=1 ;;
    -*) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    *) systems+=("$1") ;;
  esac
  shift
done
[ ${#systems[@]} -gt 0 ] || systems=(bookworm jammy trixie noble)
die() { printf 'test-fresh: error: %s\n' "$*" >&2; exit 2; }
[ "$(id -u)" = 0 ] || die "root is needed, to make the systems and to enter them (sudo make test-fresh)"
command -v debootstrap >/dev/null || die "debootstrap is missing (apt-get install debootstrap)"
unshare --mount true 2>/dev/null || die "no mount namespace may be made here, so a system cannot be entered"
git diff --quiet HEAD || echo "test-fresh: what is not committed is left out"

out=$PWD/build/fresh
mkdir -p "$out"
rows=()
status=0

# make_system NAME ROOT: the smallest system that debootstrap makes, with git, make and certificates.
make_system() {
  local flags=(--variant=minbase --include=git,make,ca-certificates)
  case $1 in
    jammy|noble)
      flags+=(--components=main,universe)
      # Debian 12 has no package with Ubuntu's keys. Nothing of the system leaves its folder.
      [ -e /usr/share/keyrings/ubuntu-archive-keyring.gpg ] || flags+=(--no-check-gpg)
      ;;
  esac
  debootstrap "${flags[@]}" "$1" "$2" &&
    # This host's way to the network, and whom it trusts.
    cp -L /etc/resolv.conf "$2/etc/resolv.conf" && cp -L /etc/ssl/certs/ca-certificates.crt "$2/etc/ssl/certs/ca-certificates.crt"
}

# inside ROOT COMMAND: as a new user of the system, with nothing of this host's environment but the way to the network.
inside() {
  local settings
  mapfile -t settings < <(env | grep -iE '^(https?|no)_proxy=|^PIP_(INDEX_URL|EXTRA_INDEX_URL|DEFAULT_TIMEOUT)=')
  timeout --kill-after=30 $step_limit_s unshare --mount --pid --fork --kill-child bash -c '
    root=$1; shift
    mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev" &&
      mount -t tmpfs tmpfs "$root/dev/shm" && exec chroot "$root" "$@"
  ' -- "$1" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "${settings[@]}" bash -c "$2"
}

# step SYSTEM NAME COMMAND...: runs it, writes its log and its row.
step() {
  local system=$1 name=$2 log=$out/$1.$2.log begin=$SECONDS verdict=passed took
  shift 2
  "$@" >"$log" 2>&1 || verdict=FAILED
  took=$((SECONDS - begin))
  if [ "$verdict $name" = "passed train" ] && [ "$took" -gt $train_limit_s ]; then verdict="TOO SLOW (limit $train_limit_s s)"; fi
  [ "$verdict" = passed ] || status=1
  rows+=("$(printf '%-10s %-8s %6d s  %s  %s' "$system" "$name" "$took" "$verdict" "$(tr '\r' '\n' <"$log" | grep -E 'validation loss|tests ran|ranks agree' | tail -n 1)")")
  echo "${rows[-1]}"
  [ "$verdict" = passed ] || tail -n 15 "$log" | sed 's/^/    /'
  [ "$verdict" != FAILED ]
}

clone() { git clone --quiet --no-hardlinks . "$1/root/trireme"; }

pip_install='
  cd /root/trireme && python3 -m venv /root/user && /root/user/bin/pip install --quiet --disable-pip-version-check . &&
  cd / && cat >/root/check.py <<END
import torch, trireme
model = torch.nn.Linear(4, 1)
engine, *_ = trireme.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                                                     "zero_optimization": {"stage": 3}})
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
assert engine.world_size == 2 and engine.global_steps == 1
if engine.global_rank == 0: print("two ranks agree")
END
  /root/user/bin/trireme launch --num_gpus 2 /root/check.py'

for system in "${systems[@]}"; do
  root=$out/$system
  rm -rf --one-file-system "$root"
  if ! step "$system" system make_system "$system" "$root" || ! step "$system" clone clone "$root"; then continue; fi
  for name in ${steps//,/ }; do
    case $name in
      train|test) command="cd /root/trireme && make $name" ;;
      pip) command=$pip_install ;;
      *) die "--only $name: the steps are train, test and pip" ;;
    esac
    step "$system" "$name" inside "$root" "$command" || break
  done
  [ -n "$keep" ] || rm -rf --one-file-system "$root"
done

printf '\nOn %s cores, commit %s:\n' "$(nproc)" "$(git rev-parse --short HEAD)"
printf '%s\n' "${rows[@]}"
exit $status
