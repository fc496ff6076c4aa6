#!/usr/bin/env bash
# Breaks one line at a time in a temporary copy, and sees the suite fail each time. Nothing here changes the checkout.
#
# A mutation that does not apply, does not build, or that the suite does not notice ends the script with an error.
set -euo pipefail
cd "$(git -C "$(dirname "$0")" rev-parse --show-toplevel)"
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | tar -c --null -T - | tar -x -C "$copy"
cd "$copy"

# A target folder of its own: cargo would take artifacts of another checkout for its own.
export CARGO_TARGET_DIR="$copy/target"
export CARGO_PROFILE_RELEASE_OPT_LEVEL=1 # most of the time goes into building
suite() { cargo test -q --release -p attn-conformance -- --skip wgpu --skip cuda; }

# mutate NAME FILE FROM TO: FROM is literal and must occur exactly once.
mutate() {
    local name=$1 file=$2
    cp "$file" "$copy/.original"
    FROM=$3 TO=$4 perl -0pi -e '
        my ($from, $to) = @ENV{"FROM", "TO"};
        my $n = () = /\Q$from\E/g;
        die "the line occurs $n times\n" unless $n == 1;
        s/\Q$from\E/$to/;
    ' "$file" 2>"$copy/.log" || { echo "$name: does not apply to $file: $(cat "$copy/.log")"; exit 1; }
    if cmp -s "$file" "$copy/.original"; then echo "$name: does not apply to $file: \`$3\` is not there once"; exit 1; fi
    cargo build -q --release -p attn-conformance --tests >"$copy/.log" 2>&1 || { cat "$copy/.log"; echo "$name: does not build"; exit 1; }
    if suite >"$copy/.log" 2>&1; then echo "$name: NOT NOTICED"; exit 1; fi
    printf '%-28s noticed by: %s\n' "$name" "$(grep -oE '^    [a-z_:0-9]+$' "$copy/.log" | sort -u | tr -s ' \n' ' ')"
    cp "$copy/.original" "$file"
}

suite >"$copy/.log" 2>&1 || { cat "$copy/.log"; echo "the suite fails without any mutation"; exit 1; }

mutate "fold order" crates/attn-cpu/src/reference.rs \
    '(segment..kv_len.min(segment + segment_tokens)).step_by(TILE)' \
    '(segment..kv_len.min(segment + segment_tokens)).step_by(TILE).rev()'
mutate "merge order (spans)" crates/attn-core/src/arithmetic.rs \
    'pub const SPAN: usize = 4;' 'pub const SPAN: usize = 8;'
mutate "segment length" crates/attn-core/src/arithmetic.rs \
    '        .max(4)' '        .max(8)'
mutate "rounding of codes" crates/attn-core/src/quant.rs \
    '(f64::from(x) / scale.to_f64())
        .round_ties_even()' \
    '(f64::from(x) / scale.to_f64())
        .round()'
mutate "rounding of weights" crates/attn-cpu/src/reference.rs \
    '(p * (s * exp2i(f))).round_ties_even()' '(p * (s * exp2i(f))).floor()'
mutate "page address of K" crates/attn-core/src/layout.rs \
    'byte: (d / PANEL * page_size + t) * PANEL + d % PANEL,' \
    'byte: (d / PANEL * page_size + t) * PANEL + 15 - d % PANEL,'
mutate "rows of nibbles" crates/attn-core/src/layout.rs \
    '(i / PANEL * 8 + i % 8, if' '(i / PANEL * 8 + 7 - i % 8, if'
mutate "rounding of p14" crates/attn-cpu/src/reference.rs \
    '(weight_units(*p) + 128) >> 8' 'weight_units(*p) >> 8'
mutate "page address of V" crates/attn-core/src/layout.rs \
    'byte: (t / PANEL * head_dim + d) * PANEL + slot(t % PANEL),' \
    'byte: (t / PANEL * head_dim + d) * PANEL + t % PANEL,'
mutate "causal mask" crates/attn-core/src/problem.rs \
    '(position + 1).clamp(0, len)' '(position + 2).clamp(0, len)'
mutate "window" crates/attn-core/src/problem.rs \
    '(position - w as isize).clamp(0, end)' '(position - 1 - w as isize).clamp(0, end)'
mutate "copy of a shared page" crates/attn-core/src/cache.rs \
    'self.owners[page as usize] > 1)' 'self.owners[page as usize] > 2)'
mutate "13 bits of a query" crates/attn-core/src/arithmetic.rs \
    '(x.to_bits() + 0x400)' '(x.to_bits() + 0x200)'
echo "every mutation was noticed"
